//! The six operations.
pub struct Socket; pub struct Error;
