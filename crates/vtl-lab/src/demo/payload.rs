//! The payload's digest, for the report.

use sha2::{Digest, Sha256};
use vtl_cli::output::hex;

use crate::payload;

/// The SHA-256 of the first `size` bytes of the payload.
pub(super) fn sha256(size: u64) -> String {
    let mut hash = Sha256::new();
    // The closure cannot fail.
    let _ = payload::each_block(size, |block| {
        hash.update(block);
        Ok(())
    });
    hex(&hash.finalize())
}
