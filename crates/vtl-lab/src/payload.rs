//! What transfers carry: pseudo-random bytes, the same every time, so that nothing on the way can
//! compress them and every receiver can check every byte where it stands.
//!
//! The bytes repeat after [`PERIOD`], a prime: data that is shifted by any number of packets, or
//! that lacks one, differs from what is expected. Producing and checking are a copy and a comparison
//! in cache, so that they do not decide how fast a transport is.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::OnceLock;

use vtl_link::Random;

/// Bytes after which the payload repeats.
pub(crate) const PERIOD: usize = 65_521;
/// The most that [`at`] returns.
pub(crate) const CHUNK: usize = 256 * 1024;

/// The period and what follows it, so that a chunk can begin anywhere in the period.
fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut random = Random(0x5641_4c54_5f44_454d);
        let words = std::iter::repeat_with(|| random.bits().to_le_bytes());
        let mut bytes: Vec<u8> = words.take(PERIOD / 8 + 1).flatten().collect();
        bytes.truncate(PERIOD);
        let mut all = Vec::with_capacity(PERIOD + CHUNK);
        while all.len() < PERIOD + CHUNK {
            let max = (PERIOD + CHUNK - all.len()).min(PERIOD);
            all.extend_from_slice(&bytes[..max]);
        }
        all
    })
}

/// The bytes of the payload from `offset` on, at most [`CHUNK`] and at most `max`.
pub(crate) fn at(offset: u64, max: u64) -> &'static [u8] {
    let from = (offset % PERIOD as u64) as usize;
    let length = max.min(CHUNK as u64) as usize;
    &table()[from..from + length]
}

/// Calls `take` with the first `size` bytes of the payload, in order.
///
/// # Errors
/// What `take` returns.
pub(crate) fn each_block(
    size: u64,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut offset = 0;
    while offset < size {
        let block = at(offset, size - offset);
        take(block)?;
        offset += block.len() as u64;
    }
    Ok(())
}

/// Writes the first `size` bytes of the payload into a new file.
///
/// # Errors
/// The file exists, or cannot be written.
pub(crate) fn write(path: &Path, size: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(CHUNK, File::create_new(path)?);
    each_block(size, |block| file.write_all(block))?;
    file.flush()
}

/// Compares what arrives with what should.
#[derive(Clone, Debug, Default)]
pub(crate) struct Checker {
    offset: u64,
    wrong: u64,
}

impl Checker {
    /// Looks at the next bytes.
    pub(crate) fn check(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let want = at(self.offset, data.len() as u64);
            let (now, rest) = data.split_at(want.len());
            if now != want {
                let differ = |(a, b): &(&u8, &u8)| a != b;
                self.wrong += now.iter().zip(want).filter(differ).count() as u64;
            }
            self.offset += now.len() as u64;
            data = rest;
        }
    }

    /// Bytes looked at so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.offset
    }

    /// Bytes that were not what they should be.
    pub(crate) fn wrong(&self) -> u64 {
        self.wrong
    }
}

/// Compares what arrives in order, but perhaps not all of it, with what was sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct GapChecker {
    /// Where in the period the next byte should be from.
    offset: usize,
    /// Bytes behind a gap, too few to tell where they belong.
    unplaced: Vec<u8>,
}

impl GapChecker {
    /// So many bytes occur only once in the period.
    const MARK: usize = 8;

    /// Looks at the next bytes. Returns how many more were not what they should be: after a gap of any
    /// length the next ones tell where it ended.
    pub(crate) fn check(&mut self, data: &[u8]) -> u64 {
        self.unplaced.extend_from_slice(data);
        let mut rest = &self.unplaced[..];
        let mut wrong = 0;
        loop {
            let want = &table()[self.offset..];
            let same = rest.iter().zip(want).take_while(|(a, b)| a == b).count();
            self.offset = (self.offset + same) % PERIOD;
            rest = &rest[same..];
            if rest.len() < Self::MARK {
                break;
            }
            let mark = &rest[..Self::MARK];
            let windows = table()[self.offset..][..PERIOD + Self::MARK].windows(Self::MARK);
            match { windows }.position(|window| window == mark) {
                Some(gap) => self.offset = (self.offset + gap) % PERIOD,
                None => {
                    wrong += 1;
                    rest = &rest[1..];
                }
            }
        }
        self.unplaced = rest.to_vec();
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checker__accepts_the_payload_in_any_pieces() {
        let mut checker = Checker::default();
        let mut offset = 0;
        for length in [1, 7, 1_440, 65_521, 100_000, 262_144] {
            checker.check(at(offset, length));
            offset += length;
        }
        assert_eq!((checker.bytes(), checker.wrong()), (offset, 0));
    }

    #[test]
    fn checker__sees_a_flipped_bit_and_a_missing_packet() {
        let mut data = at(0, 10_000).to_vec();
        data[4_321] ^= 0x10;
        let mut checker = Checker::default();
        checker.check(&data);
        assert_eq!(checker.wrong(), 1);
        let mut checker = Checker::default();
        checker.check(at(0, 1_440));
        checker.check(at(2 * 1_440, 1_440));
        assert!(checker.wrong() > 1_000);
    }

    #[test]
    fn gap_checker__finds_where_a_gap_ends() {
        let mut checker = GapChecker::default();
        assert_eq!(checker.check(at(0, 1_440)), 0);
        for (from, max) in [(2_880, 3), (2_883, 70_000), (90_000, 262_144), (500_000, 9)] {
            assert_eq!(checker.check(at(from, max)), 0, "{from}");
        }
        assert!(checker.unplaced.is_empty());
    }

    #[test]
    fn gap_checker__sees_what_was_never_sent_and_disorder() {
        let mut data = at(0, 10_000).to_vec();
        data[4_321] ^= 0x10;
        assert_eq!(GapChecker::default().check(&data), 1);
        let mut checker = GapChecker::default();
        checker.check(&[7; 100]);
        assert!(checker.check(&[7; 100]) > 50);
    }

    #[test]
    fn write__is_what_the_checker_expects() {
        let path = std::env::temp_dir().join(format!("vtl-payload-{}", std::process::id()));
        write(&path, 600_001).expect("written");
        let bytes = std::fs::read(&path).expect("read");
        std::fs::remove_file(&path).expect("removed");
        let mut checker = Checker::default();
        checker.check(&bytes);
        assert_eq!((checker.bytes(), checker.wrong()), (600_001, 0));
    }
}
