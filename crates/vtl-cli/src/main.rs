//! VTL.
fn main() {}
