//! VTL.
