//! How VTL's eBPF programs are compiled: by this crate's build, and by `vtl graft build`.

/// What clang is told besides the target, debug information and where headers are. Those of the system
/// are none of them: what compiles here must compile on every other distribution.
pub const CLANG: [&str; 7] = [
    "-nostdlibinc",
    "-mcpu=v3",
    "-O2",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
];
