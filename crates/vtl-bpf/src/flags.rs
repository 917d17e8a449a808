//! How VTL's eBPF programs are compiled: by this crate's build, and by `vtl graft build`.

/// What clang is told besides the target, debug information and where headers are.
pub const CLANG: [&str; 6] = [
    "-mcpu=v3",
    "-O2",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
];

/// Where Debian and Ubuntu keep the kernel's `<asm/types.h>` for an architecture, as Rust calls it.
pub fn system_include(arch: &str) -> String {
    format!("-I/usr/include/{arch}-linux-gnu")
}
