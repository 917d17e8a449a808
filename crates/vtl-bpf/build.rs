//! Compiles the eBPF programs under `bpf/` with clang-19 into `OUT_DIR`.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use libbpf_cargo::SkeletonBuilder;

#[allow(unreachable_pub)] // the library offers them too
#[path = "src/flags.rs"]
mod flags;

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
    for (stem, source) in sources(&bpf) {
        compile(&clang, &bpf, &source, &out.join(format!("{stem}.bpf.o")));
    }
    for (folder, prefix) in [("grafts", ""), ("tcp", "tcp-")] {
        let mut table = String::from("&[");
        for (name, source) in sources(&bpf.join(folder)) {
            let object = out.join(format!("{prefix}{name}.bpf.o"));
            compile(&clang, &bpf, &source, &object);
            let _ = write!(table, "({name:?}, include_bytes!({object:?})), ");
        }
        fs::write(out.join(format!("{folder}.rs")), table + "]").unwrap();
    }
    fs::write(out.join("headers.rs"), embedded(&headers(&bpf))).unwrap();
    fs::write(
        out.join("sources.rs"),
        embedded(&sources(&bpf.join("grafts"))),
    )
    .unwrap();
}

/// Headers for compiling a graft outside of this tree, by include name.
fn headers(bpf: &Path) -> Vec<(String, PathBuf)> {
    let native = bpf.join("../crates/vtl-sim/native");
    println!("cargo::rerun-if-changed={}", native.display());
    let mut found = vec![("vmlinux.h".to_owned(), bpf.join("include/vmlinux.h"))];
    for (prefix, folder) in [
        ("vtl", bpf.join("include/vtl")),
        ("tf", bpf.join("tf")),
        ("native", native.clone()),
        ("native/vtl", native.join("vtl")),
    ] {
        for entry in fs::read_dir(&folder).expect("part of the source tree") {
            let path = entry.unwrap().path();
            if path.is_file() {
                let name = path.file_name().unwrap().to_string_lossy();
                found.push((format!("{prefix}/{name}"), path.clone()));
            }
        }
    }
    found.sort();
    found
}

/// A table of names and texts.
fn embedded(files: &[(String, PathBuf)]) -> String {
    let mut table = String::from("&[");
    for (name, path) in files {
        let path = path.canonicalize().unwrap();
        let _ = write!(table, "({name:?}, include_str!({path:?})), ");
    }
    table + "]"
}

/// The programs' sources in a folder, by name.
fn sources(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut found: Vec<_> = fs::read_dir(folder)
        .expect("bpf/ is part of the source tree")
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let stem = path.file_name()?.to_str()?.strip_suffix(".bpf.c")?;
            Some((stem.to_owned(), path.clone()))
        })
        .collect();
    found.sort();
    found
}

fn compile(clang: &str, bpf: &Path, source: &Path, object: &Path) {
    // `make lint`: clippy and `cargo build` do not share what a build script made, and nothing runs what clippy looks at.
    if env::var_os("VTL_EMPTY_OBJECTS").is_some() {
        return fs::write(object, []).expect("OUT_DIR is writable");
    }
    let include = [bpf, &bpf.join("include")].map(|path| format!("-I{}", path.display()));
    let result = SkeletonBuilder::new()
        .source(source)
        .obj(object)
        .clang(clang)
        .clang_args(flags::CLANG.map(str::to_owned).into_iter().chain(include))
        .build();
    if let Err(error) = result {
        panic!("{} does not compile:\n{error:#}", source.display());
    }
}
