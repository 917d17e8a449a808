//! Compiles the eBPF programs under `bpf/` with clang-19 into `OUT_DIR`.

use std::{env, ffi::OsStr, fs, path::Path, path::PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let bpf = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    println!("cargo::rerun-if-changed={}", bpf.display());
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang-19".into());
    if std::process::Command::new(&clang)
        .arg("--version")
        .output()
        .is_err()
    {
        panic!("{clang} was not found; VTL's eBPF programs need it: run `make setup`");
    }
    for folder in [bpf.clone(), bpf.join("grafts")] {
        for entry in fs::read_dir(&folder).expect("bpf/ is part of the source tree") {
            let source = entry.unwrap().path();
            let name = source
                .file_name()
                .and_then(OsStr::to_str)
                .unwrap_or_default();
            let Some(stem) = name.strip_suffix(".bpf.c") else {
                continue;
            };
            compile(&clang, &bpf, &source, &out.join(format!("{stem}.bpf.o")));
        }
    }
}

fn compile(clang: &str, bpf: &Path, source: &Path, object: &Path) {
    // The kernel's <asm/types.h> lies in an architecture's own folder on Debian and Ubuntu.
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let result = SkeletonBuilder::new()
        .source(source)
        .obj(object)
        .clang(clang)
        .clang_args([
            "-mcpu=v3".into(),
            "-O2".into(),
            "-fno-strict-aliasing".into(),
            "-Wall".into(),
            "-Wextra".into(),
            "-Werror".into(),
            format!("-I{}", bpf.join("include").display()),
            format!("-I/usr/include/{arch}-linux-gnu"),
        ])
        .build();
    if let Err(error) = result {
        panic!("{} does not compile:\n{error:#}", source.display());
    }
}
