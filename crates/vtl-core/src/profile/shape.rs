//! The shape of a flow's first packets: who sends how much, when.

use super::{PACKETS, Profile};

/// Calls in one direction this close together, ns, belong to one packet…
const TOGETHER: u64 = 1_000_000;
/// …up to so many bytes, what a TCP segment of Ethernet has.
const SEGMENT: u64 = 1448;
/// Lengths of TCP segments that are full, of Ethernet and of most tunnels. Seven packets of MPEG, which are paced, are
/// shorter.
const FULL: [u64; 2] = [1328, 1460];
/// Bytes in one direction that count as bulk.
const BULK: u64 = 8 * 1024;
/// Bounds of the mean gap between packets of a paced flow, ns: 500 to 5 packets a second.
const PACED: [u64; 2] = [2_000_000, 200_000_000];

#[derive(Clone, Copy, Debug, Default)]
struct Packet {
    opener: bool,
    /// Of its first byte, ns.
    at: u64,
    len: u64,
}

/// The first packets.
#[derive(Debug, Default)]
pub(super) struct Shape {
    packets: [Packet; PACKETS],
    count: usize,
    /// Of the latest byte, ns.
    latest: u64,
}

impl Shape {
    /// Counts bytes, not 0.
    pub(super) fn add(&mut self, now: u64, opener: bool, len: usize) {
        let (len, latest) = (len as u64, self.latest);
        self.latest = now;
        if let Some(last) = self
            .count
            .checked_sub(1)
            .map(|last| &mut self.packets[last])
            && last.opener == opener
            && now.saturating_sub(latest) < TOGETHER
            && last.len.saturating_add(len) <= SEGMENT
        {
            last.len += len;
        } else if self.count < PACKETS {
            self.packets[self.count] = Packet {
                opener,
                at: now,
                len,
            };
            self.count += 1;
        }
    }

    pub(super) fn packets(&self) -> usize {
        self.count
    }

    /// The packets to which nothing can be added any more: all but the last one, if that is the tenth.
    fn whole(&self) -> &[Packet] {
        &self.packets[..self.count.min(PACKETS - 1)]
    }

    /// What the shape tells where it is plain: paced, or bulk.
    pub(super) fn plain(&self) -> Option<(Profile, String)> {
        self.paced().or_else(|| self.bulk())
    }

    /// Packets of one size at equal distances, in one direction or both, without anybody waiting for an answer.
    fn paced(&self) -> Option<(Profile, String)> {
        let whole = self.whole();
        let count = |opener| {
            whole
                .iter()
                .filter(|packet| packet.opener == opener)
                .count()
        };
        let opener = count(true) >= count(false);
        // What they agreed on before is no part of it, nor is where it begins.
        let paced: Vec<_> = whole
            .iter()
            .filter(|packet| packet.opener == opener)
            .collect();
        let paced = &paced[paced.len().saturating_sub(6)..];
        let first = whole
            .iter()
            .position(|packet| packet.at == paced.first().map_or(0, |p| p.at))?;
        let others = whole[first..]
            .iter()
            .filter(|packet| packet.opener != opener)
            .count();
        // Those that send in turn may wait for each other, at whatever pace.
        if paced.len() < 6 || others > 2 {
            return None;
        }
        let gaps: Vec<_> = paced
            .windows(2)
            .map(|two| two[1].at.saturating_sub(two[0].at))
            .collect();
        // Saturating, as `total` below: times are an argument, and any may come.
        let sum = gaps.iter().fold(0_u64, |sum, gap| sum.saturating_add(*gap));
        let mean = sum / gaps.len() as u64;
        let even = gaps.iter().all(|gap| gap.abs_diff(mean) <= mean / 5 * 2);
        let sizes = paced.iter().map(|packet| packet.len);
        let (min, max) = (sizes.clone().min()?, sizes.max()?);
        let alike = max <= min.saturating_mul(4);
        // As the slowest link of the path lets them through, not as somebody sends them.
        let full = (FULL[0]..=FULL[1]).contains(&min)
            && paced.iter().all(|packet| packet.len.is_multiple_of(min));
        if !even || !alike || full || !(PACED[0]..=PACED[1]).contains(&mean) {
            return None;
        }
        let evidence = format!("paced: {min} to {max} bytes every {} ms", mean / 1_000_000);
        Some((Profile::TimeSensitive, evidence))
    }

    /// Nearly all bytes in one direction, and many of them.
    fn bulk(&self) -> Option<(Profile, String)> {
        let whole = self.whole();
        let total = |opener| {
            let packets = whole.iter().filter(|packet| packet.opener == opener);
            packets.fold(0_u64, |sum, packet| sum.saturating_add(packet.len))
        };
        let (one, other) = (total(true).max(total(false)), total(true).min(total(false)));
        // One question and its long answer is a page as well as a file: the flow must go on in the same direction.
        let behind = whole
            .iter()
            .rev()
            .take_while(|p| p.opener == whole[whole.len() - 1].opener);
        let plain = one >= BULK && one / 8 >= other && behind.count() >= 5;
        plain.then(|| {
            (
                Profile::LossSensitive,
                format!("bulk: {one} bytes one way, {other} the other"),
            )
        })
    }

    /// What is left: small messages that answer each other.
    pub(super) fn exchange(&self) -> Option<(Profile, String)> {
        let whole = self.whole();
        let turns = whole
            .windows(2)
            .filter(|two| two[0].opener != two[1].opener)
            .count();
        let small = whole.iter().all(|packet| packet.len <= BULK);
        (turns >= 4 && small).then(|| {
            let evidence = format!(
                "request and response: {turns} turns in {} packets",
                whole.len()
            );
            (Profile::TimeAndLossSensitive, evidence)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Of packets by who sends (`>`: the opener), when (ms) and how much.
    fn shape(packets: impl IntoIterator<Item = (char, u64, usize)>) -> Option<Profile> {
        let mut shape = Shape::default();
        for (by, at, len) in packets {
            shape.add(at * MS, by == '>', len);
        }
        shape
            .plain()
            .or_else(|| shape.exchange())
            .map(|(profile, _)| profile)
    }

    #[test]
    fn shape__table() {
        let paced = Some(Profile::TimeSensitive);
        let bulk = Some(Profile::LossSensitive);
        let exchange = Some(Profile::TimeAndLossSensitive);
        assert_eq!(shape((0..10).map(|i| ('>', i * 20, 172))), paced);
        assert_eq!(shape((0..10).map(|i| ('<', i * 20 + i % 3, 172))), paced);
        assert_eq!(shape((0..10).map(|i| ('<', i * 3, 1316))), paced);
        // As fast as it goes, also over 4 Mbit/s; small or not at a pace.
        assert_eq!(shape((0..10).map(|i| ('>', i, 1448))), bulk);
        let segments = |i| 1428 * (1 + i as usize % 2);
        assert_eq!(shape((0..10).map(|i| ('<', i * 3, 1448))), bulk);
        assert_eq!(shape((0..10).map(|i| ('<', i * 3, segments(i)))), bulk);
        assert_eq!(shape((0..10).map(|i| ('>', i * i * 20, 172))), None);
        assert_eq!(
            shape((0..10).map(|i| ('>', i * 20, 1448 * (i as usize * i as usize + 1)))),
            bulk
        );
        // An answer to each, at whatever pace.
        assert_eq!(
            shape((0..10).map(|i| (['>', '<'][i as usize % 2], i * 20, 100))),
            exchange
        );
        // One question, one answer of any length, and nothing.
        assert_eq!(shape([('>', 0, 100), ('<', 20, 60_000)]), None);
        assert_eq!(shape([]), None);
        // A time that goes back, and lengths without bounds.
        assert_eq!(
            shape([
                ('>', 9, 1),
                ('<', 3, usize::MAX),
                ('<', 3, usize::MAX),
                ('>', 0, 1)
            ]),
            None
        );
    }

    #[test]
    fn add__joins_what_comes_together() {
        let mut shape = Shape::default();
        (0..1448).for_each(|_| shape.add(5, true, 1));
        assert_eq!(shape.packets(), 1);
        shape.add(5, true, 1);
        assert_eq!(shape.packets(), 2);
        shape.add(5, false, 1);
        assert_eq!(shape.packets(), 3);
        shape.add(5 + TOGETHER, false, 1);
        assert_eq!(shape.packets(), 4);
        (0..100).for_each(|_| shape.add(9, true, 1448));
        assert_eq!(shape.packets(), PACKETS);
    }
}
