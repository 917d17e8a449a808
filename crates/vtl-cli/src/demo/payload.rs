//! The file that the demo downloads: pseudo-random, so that nothing on the way can compress it, and
//! the same every time.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::output::hex;

/// Bytes generated at a time.
const BLOCK: usize = 64 * 1024;

/// Writes the first `size` bytes of the payload into a new file.
pub(super) fn write(path: &Path, size: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(BLOCK, File::create_new(path)?);
    each_block(size, |block| file.write_all(block))?;
    file.flush()
}

/// The SHA-256 of the first `size` bytes of the payload.
pub(super) fn sha256(size: u64) -> String {
    let mut hash = Sha256::new();
    // The closure cannot fail.
    let _ = each_block(size, |block| {
        hash.update(block);
        Ok(())
    });
    hex(&hash.finalize())
}

fn each_block(size: u64, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut state = 0x5641_4c54_5f44_454d_u64;
    let mut block = [0u8; BLOCK];
    let mut left = size;
    while left > 0 {
        for word in block.chunks_exact_mut(8) {
            word.copy_from_slice(&split_mix(&mut state).to_le_bytes());
        }
        let n = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
        take(&block[..n])?;
        left -= n as u64;
    }
    Ok(())
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256__is_that_of_the_file_at_any_size() {
        let dir = std::env::temp_dir().join(format!("vtl-payload-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("temporary directory");
        for size in [0, 1, 65_536, 200_003] {
            let path = dir.join(size.to_string());
            write(&path, size).expect("written");
            let bytes = std::fs::read(&path).expect("read");
            assert_eq!(bytes.len() as u64, size);
            assert_eq!(hex(&Sha256::digest(&bytes)), sha256(size));
        }
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
