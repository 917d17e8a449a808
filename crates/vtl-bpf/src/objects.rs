//! The eBPF objects that this build compiled, as ELF images.

/// Connect rewriting, SYN hold, discovery and steering for unmodified applications.
pub static HOOKER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hooker.bpf.o"));

/// The root programs and all maps of the data plane.
pub static ROOT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/root.bpf.o"));

/// The grafts that come with VTL, by name.
pub static GRAFTS: &[(&str, &[u8])] = &[(
    "stream",
    include_bytes!(concat!(env!("OUT_DIR"), "/stream.bpf.o")),
)];
