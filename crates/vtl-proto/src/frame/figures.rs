//! The body of FIGURES: what a host knows of the path in the direction in which it sends.
//!
//! Big-endian; 0 is unknown, but for the loss, of which all ones are:
//! ```text
//! +---------------------------------------------------------------+
//! |                    rate, bit/s (64 bits)                      |
//! +-------------------------------+-------------------------------+
//! |  minimum round-trip time, us  |     loss, millionths          |
//! +-------------------------------+-------------------------------+
//! |  burst, thousandths of a      |     packets counted           |
//! |  packet                       |                               |
//! +-------------------------------+-------------------------------+
//! ```

/// Length of the body, bytes.
pub(super) const LEN: usize = 24;
/// Loss of everything.
const ALL: u32 = 1_000_000;
/// An unknown loss.
const UNKNOWN: u32 = u32::MAX;

/// Figures of a path. Anything is possible in those from a peer, but a loss of more than all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// The bandwidth that the path has for the sender, payload, bit/s; 0: unknown.
    pub rate: u64,
    /// Whether the rate is a lower bound.
    pub at_least: bool,
    /// Minimum round-trip time lately, microseconds; 0: unknown.
    pub min_rtt_us: u32,
    /// Share of packets lost while no queue stood on the path, millionths; `None`: unknown.
    pub loss_ppm: Option<u32>,
    /// Packets lost in a row on average, thousandths of a packet; 0: unknown.
    pub burst_milli: u32,
    /// Packets counted.
    pub packets: u32,
}

impl Figures {
    /// Reads the body, [`LEN`] bytes. A loss of more than all is unknown.
    pub(super) fn parse(body: &[u8], at_least: bool) -> Self {
        let word = |place: usize| {
            let bytes = body.get(place..).and_then(<[u8]>::first_chunk);
            u32::from_be_bytes(bytes.copied().unwrap_or_default())
        };
        Self {
            rate: u64::from(word(0)) << 32 | u64::from(word(4)),
            at_least,
            min_rtt_us: word(8),
            loss_ppm: Some(word(12)).filter(|loss| *loss <= ALL),
            burst_milli: word(16),
            packets: word(20),
        }
    }

    /// Writes the body, [`LEN`] bytes.
    pub(super) fn write(&self, body: &mut [u8]) {
        let [high, low] = [self.rate >> 32, self.rate & u64::from(u32::MAX)];
        // Both fit.
        let words = [
            high as u32,
            low as u32,
            self.min_rtt_us,
            self.loss_ppm.unwrap_or(UNKNOWN),
            self.burst_milli,
            self.packets,
        ];
        for (to, word) in body.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_be_bytes());
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::{CarrierId, Frame, FrameError, HEADER, Side};
    use super::*;

    const FIGURES: Figures = Figures {
        rate: 0x1_0000_0002,
        at_least: true,
        min_rtt_us: 600_000,
        loss_ppm: Some(20_000),
        burst_milli: 1020,
        packets: 4096,
    };

    fn emitted(frame: &Frame<'_>) -> Vec<u8> {
        let mut bytes = vec![0; frame.wire_len()];
        assert_eq!(frame.emit(&mut bytes), Some(bytes.len()));
        bytes
    }

    #[test]
    fn figures__have_this_form() {
        let bytes = emitted(&Frame::Figures(FIGURES));
        let wanted = [
            0, 0, 0, 0, 0, 24, 22, 17, 0, 0, 0, 0, 0, 0, 0, 0, // header
            0, 0, 0, 1, 0, 0, 0, 2, // rate
            0, 9, 39, 192, 0, 0, 78, 32, // round-trip time, loss
            0, 0, 3, 252, 0, 0, 16, 0, // burst, packets
        ];
        assert_eq!(bytes, wanted);
        assert_eq!(Frame::take(&mut &bytes[..]), Ok(Frame::Figures(FIGURES)));
    }

    #[test]
    fn figures__more_loss_than_all_is_unknown() {
        let unknown = Figures {
            loss_ppm: None,
            ..FIGURES
        };
        let mut bytes = emitted(&Frame::Figures(unknown));
        assert_eq!(bytes[HEADER + 12..HEADER + 16], [255; 4]);
        for (loss, wanted) in [(ALL, Some(ALL)), (ALL + 1, None), (UNKNOWN - 1, None)] {
            bytes[HEADER + 12..HEADER + 16].copy_from_slice(&loss.to_be_bytes());
            let taken = Frame::take(&mut &bytes[..]);
            let wanted = Figures {
                loss_ppm: wanted,
                ..FIGURES
            };
            assert_eq!(taken, Ok(Frame::Figures(wanted)));
        }
    }

    #[test]
    fn figures__of_another_length_are_refused() {
        for len in [0, 23, 25] {
            let mut bytes = emitted(&Frame::Figures(FIGURES));
            bytes[5] = len;
            bytes.push(0);
            let wanted = FrameError::BodyLength {
                kind: 22,
                len: len.into(),
            };
            assert_eq!(Frame::take(&mut &bytes[..]), Err(wanted));
        }
    }

    /// A host that knows neither flag reads the same PREFER, and one that does not know PREFER a HELLO.
    #[test]
    fn prefer__has_this_form() {
        let carrier = CarrierId {
            opener: Side::Local,
            number: 3,
        };
        for (bbr, asks, flags) in [
            (false, false, 2),
            (true, false, 6),
            (false, true, 10),
            (true, true, 14),
        ] {
            let bytes = emitted(&Frame::Prefer {
                carrier,
                tag: 0x0102_0304,
                bbr,
                asks,
                spread: None,
            });
            let wanted = [
                0, 0, 0, 3, 0, 4, 17, 1, 0, 0, flags, 0, 1, 2, 3, 4, 86, 84, 76, 50,
            ];
            assert_eq!(bytes, wanted);
        }
    }
}
