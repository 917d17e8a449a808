//! Generates `vtl_proto::intf` from `bpf/include/vtl/intf.h`: C and Rust share one definition.

use std::{env, panic, path::Path};

fn main() {
    let include = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf/include");
    let out = Path::new(&env::var("OUT_DIR").unwrap()).join("intf.rs");
    for header in ["wire.h", "intf.h", "hooker.h", "gateway.h", "timers.h"] {
        println!(
            "cargo::rerun-if-changed={}",
            include.join("vtl").join(header).display()
        );
    }
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    find_libclang();

    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let bindings = bindgen::Builder::default()
        .header(include.join("vtl/intf.h").display().to_string())
        .clang_args([
            format!("-I{}", include.display()),
            format!("-I/usr/include/{arch}-linux-gnu"),
        ])
        .allowlist_file(".*/vtl/(wire|intf|hooker|gateway|timers)\\.h")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .derive_eq(true)
        .layout_tests(false)
        .use_core()
        .generate();
    match bindings {
        Ok(bindings) => bindings.write_to_file(&out).expect("OUT_DIR is writable"),
        Err(error) => panic!("bpf/include/vtl/intf.h does not compile: {error}"),
    }
}

/// bindgen loads libclang at run time (from `LIBCLANG_PATH`, or where distributions put it, which
/// includes `/usr/lib/llvm-19/lib`), and its own panic does not say how to get it.
fn find_libclang() {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let version = panic::catch_unwind(bindgen::clang_version);
    panic::set_hook(hook);
    if version.is_err() {
        panic!("libclang was not found; VTL's bindings need it: run `make setup`");
    }
}
