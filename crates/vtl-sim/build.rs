//! Compiles the transport functions for this machine, and generates the interface to them.

use std::{env, path::Path};

fn main() {
    let manifest = env::var("CARGO_MANIFEST_DIR").unwrap();
    let native = Path::new(&manifest).join("native");
    let bpf = Path::new(&manifest).join("../../bpf");
    println!("cargo::rerun-if-changed={}", native.display());
    println!("cargo::rerun-if-changed={}", bpf.display());

    let mut build = cc::Build::new();
    if env::var_os("CC").is_none() {
        build.compiler("clang-19");
    }
    build
        .file(native.join("native.c"))
        .include(&bpf)
        .include(bpf.join("include"))
        .include(&native)
        // As in the kernel's objects, whatever the profile of the Rust side.
        .opt_level(2)
        .flag("-fno-strict-aliasing")
        .flag("-Wextra")
        .warnings_into_errors(true)
        // Undefined behaviour ends the test. tf_checksum stores unaligned words on purpose.
        .flag("-fsanitize=undefined")
        .flag("-fno-sanitize=alignment")
        .flag("-fsanitize-trap=undefined")
        .compile("vtl_native");

    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let bindings = bindgen::Builder::default()
        .header(native.join("native.h").display().to_string())
        .clang_args([
            format!("-I{}", bpf.join("include").display()),
            format!("-I/usr/include/{arch}-linux-gnu"),
        ])
        .allowlist_function("vtl_native_.*")
        .allowlist_var("VTL_NATIVE_.*")
        .allowlist_type("vtl_(out|in|ackd|verdict)")
        .allowlist_var("VTL_(NEXT|SEND|STOP)")
        // These are vtl_proto::intf's already.
        .blocklist_type("vtl_(session|slot|sent|ring_ctl|data_hdr|ack_hdr)")
        .raw_line("use vtl_proto::intf::*;")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .layout_tests(false)
        .generate()
        .expect("native.h compiles");
    let out = Path::new(&env::var("OUT_DIR").unwrap()).join("native.rs");
    bindings.write_to_file(out).expect("OUT_DIR is writable");
}
