//! The only user of libbpf: loads, attaches and swaps VTL's eBPF programs, and maps their rings.

pub mod objects;
