//! VTL's daemon as a library: what the binary `vtld` is made of.

pub mod hooker;
