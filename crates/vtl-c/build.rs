//! Generates `abi` from `include/vtl.h`: C and Rust share one definition.

use std::{env, path::Path};

fn main() {
    let header = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../include/vtl.h");
    println!("cargo::rerun-if-changed={}", header.display());
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    let bindings = bindgen::Builder::default()
        .header(header.display().to_string())
        .allowlist_file(".*/vtl\\.h")
        .blocklist_type("s?size_t")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .layout_tests(false)
        .use_core()
        .generate()
        .expect("include/vtl.h compiles");
    let out = Path::new(&env::var("OUT_DIR").unwrap()).join("abi.rs");
    bindings.write_to_file(out).expect("OUT_DIR is writable");
}
