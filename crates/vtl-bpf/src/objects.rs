//! The eBPF objects that this build compiled, as ELF images.

/// Connect rewriting, SYN hold, discovery and steering for unmodified applications.
pub static HOOKER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hooker.bpf.o"));

/// Rules: match connections by their process and destination.
pub static RULES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rules.bpf.o"));

/// Gateways: hold SYNs of forwarded connections, and take the packets of those that end here.
pub static GATEWAY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/gateway.bpf.o"));

/// For hooks with a named carrier: policies, and TCP congestion controls.
pub static CARRIER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/carrier.bpf.o"));

/// The TCP congestion controls that VTL brings, by name: struct_ops objects.
pub static TCP: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/tcp.rs"));

/// The root programs and all maps of the data plane.
pub static ROOT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/root.bpf.o"));

/// The grafts that come with VTL, by name.
pub static GRAFTS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/grafts.rs"));

/// The object of a graft that comes with VTL.
pub fn graft(name: &str) -> Option<&'static [u8]> {
    let found = GRAFTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, image)| *image)
}

/// Headers for compiling a graft, by include name: `vtl/` and `tf/` for the kernel; also `native/`
/// for simulations on this machine.
pub static HEADERS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// The sources of the grafts that come with VTL, by name.
pub static SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// Restricts VTL's sockets to the interfaces of `vtld --interface`.
pub static FENCE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fence.bpf.o"));

/// The transport functions of `stream`, in programs of their own, for timing.
pub(crate) static MICRO: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/micro.bpf.o"));
