//! Compiles the transport functions for this machine, and generates the interface to them.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

fn main() {
    let manifest = env::var("CARGO_MANIFEST_DIR").unwrap();
    let native = Path::new(&manifest).join("native");
    let bpf = Path::new(&manifest).join("../../bpf");
    println!("cargo::rerun-if-changed={}", native.display());
    println!("cargo::rerun-if-changed={}", bpf.display());

    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    let mut build = cc::Build::new();
    for source in grafts(&bpf, &out) {
        build.file(source);
    }
    if env::var_os("CC").is_none() {
        build.compiler("clang-19");
    }
    // With AddressSanitizer where the Rust side has it, whose runtime both share: `make sanitize`.
    let sanitizers = env::var("CARGO_CFG_SANITIZE").unwrap_or_default();
    if sanitizers.split(',').any(|name| name == "address") {
        build.flag("-fsanitize=address");
    }
    build
        .file(native.join("native.c"))
        .file(native.join("functions.c"))
        // Before the kernel's: its vtl/graft.h takes the place of theirs.
        .include(&native)
        .include(&bpf)
        .include(bpf.join("include"))
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
            format!("-I{}", bpf.display()),
            format!("-I{}", bpf.join("include").display()),
            format!("-I/usr/include/{arch}-linux-gnu"),
        ])
        .allowlist_function("vtl_native_.*")
        .allowlist_var("VTL_NATIVE_.*")
        .allowlist_type("vtl_(out|in|ackd|verdict|bbr|bbr_mode|bbr_phase|cc|tfrc|reverse)")
        .allowlist_var("VTL_(NEXT|SEND|STOP)")
        .derive_default(true)
        // These are vtl_proto::intf's already.
        .blocklist_type("vtl_(session|slot|sent|ring_ctl|data_hdr|ack_hdr|graft_info|param_info)")
        .raw_line("use vtl_proto::intf::*;")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .layout_tests(false)
        .generate()
        .expect("native.h compiles");
    bindings
        .write_to_file(out.join("native.rs"))
        .expect("OUT_DIR is writable");
}

/// Writes one source for each graft, which gives its composition a name of its own, and the table
/// of them.
fn grafts(bpf: &Path, out: &Path) -> Vec<PathBuf> {
    let folder = bpf.join("grafts");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("bpf/grafts is part of the source tree")
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            Some(name.strip_suffix(".bpf.c")?.to_owned())
        })
        .collect();
    names.sort();
    let ops = |name: &String| format!("vtl_native_ops_{}", name.replace('-', "_"));
    let mut sources = Vec::new();
    let mut declared = String::new();
    let mut listed = String::new();
    for name in &names {
        let ops = ops(name);
        let _ = writeln!(declared, "extern const struct vtl_native_ops {ops};");
        let _ = write!(listed, "&{ops}, ");
        let text = format!(
            "#define VTL_NATIVE_OPS {ops}\n#define vtl_description {ops}_info\n#include \"{}\"\n",
            folder.join(format!("{name}.bpf.c")).display()
        );
        sources.push((format!("graft-{name}.c"), text));
    }
    let table = format!(
        "#include \"ops.h\"\n{declared}\
         const struct vtl_native_ops *const vtl_native_grafts[] = {{{listed}0}};\n"
    );
    sources.push(("grafts.c".to_owned(), table));
    let write = |(name, text): (String, String)| {
        let path = out.join(name);
        fs::write(&path, text).expect("OUT_DIR is writable");
        path
    };
    sources.into_iter().map(write).collect()
}
