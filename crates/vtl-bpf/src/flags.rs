//! Compiler flags of VTL's eBPF programs: for this crate's build, and for `vtl graft build`.

/// clang's flags besides target, debug information and include paths. System headers are excluded,
/// so that programs compile alike on every distribution.
pub const CLANG: [&str; 7] = [
    "-nostdlibinc",
    "-mcpu=v3",
    "-O2",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
];
