//! The eBPF objects that this build compiled, as ELF images.

/// Connect rewriting, SYN hold, discovery and steering for unmodified applications.
pub static HOOKER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hooker.bpf.o"));
