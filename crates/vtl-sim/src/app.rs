//! Applications at both ends of a session. They use the rings as the client library does.

use vtl_proto::intf;

use vtl_link::Random;

use crate::host::Host;

/// Length of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All of `max_payload`.
    Full,
    /// From 1 byte up, drawn by the packet's number.
    Random,
}

/// Pace of the receiving application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Reads on every wake-up.
    AtOnce,
    /// Reads `packets` every `every_ns`.
    Steady {
        /// Packets per read.
        packets: u64,
        /// Time between reads.
        every_ns: u64,
    },
    /// Reads everything, with pauses uniform below `pause_ns`.
    Pausing {
        /// Upper bound of pauses.
        pause_ns: u64,
    },
}

/// Reproducible content of a stream's packets.
#[derive(Clone, Debug)]
pub struct Pattern {
    seed: u64,
    lengths: Lengths,
    max: u16,
}

impl Pattern {
    /// The pattern of a stream.
    pub fn new(seed: u64, lengths: Lengths, max: u16) -> Self {
        Self { seed, lengths, max }
    }

    fn rng(&self, seq: u64) -> Random {
        Random::new(self.seed, seq)
    }

    /// Distance back to the previous packet in its lane; 0: there is none.
    pub fn after(seq: u64) -> u64 {
        let lane = |seq: u64| seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        let back = |back: &u64| *back <= seq && lane(seq - back) == lane(seq);
        (1..64).find(back).unwrap_or(0)
    }

    /// Writes the packet into `data` and returns its length.
    pub fn write(&self, seq: u64, data: &mut [u8]) -> usize {
        let mut rng = self.rng(seq);
        let len = match self.lengths {
            Lengths::Full => self.max.into(),
            Lengths::Random => 1 + rng.below(self.max.into()) as usize,
        };
        for part in data[..len].chunks_mut(8) {
            part.copy_from_slice(&rng.bits().to_le_bytes()[..part.len()]);
        }
        len
    }

    /// Whether `data` is packet `seq`.
    pub fn matches(&self, seq: u64, data: &[u8]) -> bool {
        let mut want = [0; intf::VTL_MAX_PAYLOAD as usize];
        let len = self.write(seq, &mut want);
        data == &want[..len]
    }
}

/// Fills a transmit ring.
#[derive(Clone, Debug)]
pub struct Writer {
    pattern: Pattern,
    next: u64,
    end: u64,
}

impl Writer {
    /// An application that sends `packets` packets as fast as the ring permits.
    pub fn new(pattern: Pattern, packets: u64) -> Self {
        Self {
            pattern,
            next: 0,
            end: packets,
        }
    }

    /// Sets the total number of packets.
    pub fn set_end(&mut self, packets: u64) {
        self.end = packets;
    }

    /// Whether all packets have been written.
    pub fn is_done(&self) -> bool {
        self.next == self.end
    }

    /// Writes as much as there is room for. Returns true if vtld must be woken.
    pub fn run(&mut self, host: &mut Host, sid: u32) -> bool {
        let slots = u64::from(host.session(sid).slots);
        let upto = self.end.min(host.tx_ctl(sid).consumer + slots);
        if upto <= self.next {
            return false;
        }
        while self.next < upto {
            let slot = host.tx_slot(sid, self.next);
            slot.len = self.pattern.write(self.next, &mut slot.data) as u32;
            // Meaningful only to grafts with partial order.
            slot.more = (Pattern::after(self.next) as u32) << intf::VTL_LANE_SHIFT;
            self.next += 1;
        }
        let ctl = host.tx_ctl(sid);
        ctl.producer = self.next;
        std::mem::take(&mut ctl.waiting) != 0
    }
}

/// Delivery guarantee of the graft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Every packet once, in order.
    Everything,
    /// Every packet once, in order within its lane.
    Lanes,
    /// In order; a given-up packet leaves an empty slot.
    Gaps,
    /// Some packets, once each, in any order, with their numbers.
    Datagrams,
    /// Some packets, some of them twice.
    Nothing,
}

/// Missing and duplicate packets; see [`Promise`].
#[derive(Clone, Debug, Default)]
pub struct Losses {
    /// Numbers of given-up packets, in order.
    pub gaps: Vec<u64>,
    /// Whether each packet has arrived, by number.
    pub seen: Vec<bool>,
    /// Packets that arrived twice.
    pub repeated: u64,
}

/// Empties a receive ring.
#[derive(Clone, Debug)]
pub struct Reader {
    pattern: Pattern,
    pace: Pace,
    promise: Promise,
    losses: Losses,
    rng: Random,
    next: u64,
    told: u64,
    bytes: u64,
    /// Time of the next read; `u64::MAX`: sleeps until a wake-up.
    pub due: u64,
}

impl Losses {
    /// Records a packet. False if it violates the guarantee.
    fn note(&mut self, promise: Promise, number: u64) -> bool {
        if matches!(promise, Promise::Everything | Promise::Gaps) {
            return true;
        }
        let number = number as usize;
        if self.seen.len() <= number {
            self.seen.resize(number + 1, false);
        }
        let again = std::mem::replace(&mut self.seen[number], true);
        self.repeated += u64::from(again);
        match promise {
            Promise::Nothing => true,
            Promise::Lanes => {
                let after = Pattern::after(number as u64) as usize;
                !again && self.seen[number - after]
            }
            _ => !again,
        }
    }
}

impl Reader {
    /// An application that expects this stream, under this guarantee.
    pub fn new(pattern: Pattern, pace: Pace, promise: Promise, seed: u64) -> Self {
        Self {
            pattern,
            pace,
            promise,
            losses: Losses::default(),
            rng: Random::new(seed, 77),
            next: 0,
            told: 0,
            bytes: 0,
            due: 0,
        }
    }

    /// Missing and duplicate packets.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Slots read so far, with verified content.
    pub fn packets(&self) -> u64 {
        self.next
    }

    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Wakes the reader: there is data.
    pub fn wake(&mut self, now: u64) {
        if self.due == u64::MAX {
            self.due = match self.pace {
                Pace::AtOnce => now,
                Pace::Steady { every_ns, .. } => now + every_ns,
                Pace::Pausing { pause_ns } => now + self.rng.below(pause_ns),
            };
        }
    }

    /// Reads. `Ok(true)`: vtld must send a window update, by the client library's rule.
    ///
    /// # Errors
    /// The number of a packet with wrong content.
    pub fn run(&mut self, host: &mut Host, sid: u32, now: u64) -> Result<bool, u64> {
        let slots = u64::from(host.session(sid).slots);
        let backlog = host.rx_ctl(sid).producer - self.next;
        let count = match self.pace {
            Pace::Steady { packets, .. } => backlog.min(packets),
            Pace::AtOnce | Pace::Pausing { .. } => backlog,
        };
        for _ in 0..count {
            let mut slot = host.rx_slot(sid, self.next);
            let stamp = slot.stamp;
            if self.promise == Promise::Lanes {
                slot = host.rx_slot(sid, stamp);
            }
            let data = &slot.data[..(slot.len as usize).min(intf::VTL_MAX_PAYLOAD as usize)];
            let number = match self.promise {
                Promise::Everything | Promise::Gaps => self.next,
                Promise::Lanes | Promise::Datagrams | Promise::Nothing => stamp,
            };
            if self.promise == Promise::Gaps && data.is_empty() {
                self.losses.gaps.push(number);
            } else {
                if !self.pattern.matches(number, data) || !self.losses.note(self.promise, number) {
                    return Err(number);
                }
                self.bytes += data.len() as u64;
            }
            self.next += 1;
        }
        let ctl = host.rx_ctl(sid);
        ctl.consumer = self.next;
        self.due = u64::MAX;
        if ctl.producer == self.next {
            ctl.waiting = 1;
        } else {
            self.wake(now);
        }
        let freed = self.next - self.told;
        let kick = freed >= slots / 2 && backlog >= slots / 2;
        if kick || backlog < slots / 4 {
            self.told = self.next;
        }
        Ok(kick)
    }
}
