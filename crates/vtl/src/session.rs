//! An open session: its rings, and how to get at them without missing anything.

use std::{
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::Epoll;
use serde_json::Value;
use vtl_proto::{intf, services::Services};

use crate::{
    control::{self, Client},
    error::Error,
    ring::{Closed, RxRing, TxRing},
    socket::Agreement,
    waiting::{WAIT_MS, Wakeups, patience},
};

/// A reader that got this many packets at once naps before it asks to be woken: in bulk transfers a
/// wake-up for every few packets costs more than the packets.
const BULK: u64 = 4;
/// How long at first. Each nap is a timer's interrupt, so naps grow while many packets arrive during
/// one, until a quarter of the ring does.
const NAP: Duration = Duration::from_micros(100);
/// At most.
const LONG_NAP: Duration = Duration::from_micros(300);
/// By how much at a time.
const LONGER: Duration = Duration::from_micros(25);
/// What is many: some 3 Gbit/s. Slower streams are better read at once.
const MANY: u64 = 32;
/// The most packets that are published at once.
const BURST: usize = 256;

pub(crate) struct Session {
    tx: TxRing,
    rx: RxRing,
    /// Towards the daemon.
    kick: OwnedFd,
    /// Sending here runs egress, without the daemon.
    caller: Option<OwnedFd>,
    wakeups: Wakeups,
    pub(crate) peer: IpAddr,
    /// Bytes of the first packet in `rx` that were read.
    read: usize,
    /// Packets without content so far.
    given_up: u64,
    /// Packets read at a time last.
    batch: u64,
    /// How long the next nap is.
    nap: Duration,
}

/// What a reader finds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receivable {
    Packets,
    End,
    /// Nothing, and the reader will be woken.
    NotYet,
}

impl Session {
    /// The session that the daemon grants with this answer; `any` becomes readable for it.
    pub(crate) fn granted(
        answer: &Value,
        descriptors: Vec<OwnedFd>,
        any: &Arc<Epoll>,
        daemon: &Arc<Client>,
    ) -> Result<(Self, Agreement), Error> {
        let malformed = || control::Error::Malformed(answer.to_string());
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(malformed);
        let [transmit, receive, kick, wake, events] = [next()?, next()?, next()?, next()?, next()?];
        let caller = descriptors.next();
        let number = |key: &str| answer[key].as_u64().and_then(|n| u32::try_from(n).ok());
        let small = |key: &str| number(key).and_then(|n| u16::try_from(n).ok());
        let slots = number("slots").ok_or_else(malformed)?;
        let payload = small("max_payload").ok_or_else(malformed)?;
        let agreement = Agreement {
            graft: answer["graft"].as_str().unwrap_or_default().to_owned(),
            gid: small("gid").ok_or_else(malformed)?,
            services: Services::from_bits(small("services").ok_or_else(malformed)?),
            peer: answer["peer"]
                .as_str()
                .and_then(|p| p.parse().ok())
                .ok_or_else(malformed)?,
        };
        let session = Self {
            tx: TxRing::map(transmit.as_fd(), slots, payload)?,
            rx: RxRing::map(receive.as_fd(), slots)?,
            kick,
            caller,
            wakeups: Wakeups::new(wake, events, any, daemon)?,
            peer: agreement.peer,
            read: 0,
            given_up: 0,
            batch: 0,
            nap: NAP,
        };
        Ok((session, agreement))
    }

    /// Bytes per packet.
    pub(crate) fn max_payload(&self) -> usize {
        self.tx.max_payload()
    }

    /// Packets that the peer has not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.tx.unacknowledged()
    }

    /// Packets read that the sender had given up.
    pub(crate) fn given_up(&self) -> u64 {
        self.given_up
    }

    /// As [`Wakeups::took`].
    pub(crate) fn took_wakeups(&mut self) -> bool {
        self.wakeups.took()
    }

    fn broken(&self) -> Error {
        Error::Broken(self.peer)
    }
}

/// Sending.
impl Session {
    /// Hands over what there is room for; waits for some.
    pub(crate) fn send(&mut self, data: &[u8], limit: Option<Instant>) -> Result<usize, Error> {
        loop {
            if let Some(taken) = self.push(data)? {
                return Ok(taken);
            }
            if !self.wakeups.sleep(patience(limit, WAIT_MS)?)? {
                return Err(self.broken());
            }
        }
    }

    /// Hands over what there is room for; without room, empties the descriptor and looks again.
    pub(crate) fn try_send(&mut self, data: &[u8]) -> Result<Option<usize>, Error> {
        let taken = self.push(data)?;
        if taken.is_some() {
            return Ok(taken);
        }
        if !self.wakeups.clear()? {
            return Err(self.broken());
        }
        self.push(data)
    }

    /// Hands over what there is room for; without room, asks to be woken and returns `None`.
    fn push(&mut self, data: &[u8]) -> Result<Option<usize>, Error> {
        loop {
            self.check_open()?;
            let room = self.tx.room().min(BURST as u64) as usize;
            if room > 0 {
                return Ok(Some(self.fill(data, room)));
            }
            if self.tx.wait_for_room() {
                return Ok(None);
            }
        }
    }

    /// Copies as much of `data` as fits into `room` slots, and publishes them.
    fn fill(&mut self, data: &[u8], room: usize) -> usize {
        let each = self.tx.max_payload();
        let mut lengths = [0_u32; BURST];
        let mut count = 0;
        let mut taken = 0;
        for chunk in data.chunks(each).take(room) {
            self.tx.slot(count as u64)[..chunk.len()].copy_from_slice(chunk);
            lengths[count] = chunk.len() as u32;
            count += 1;
            taken += chunk.len();
        }
        if self.tx.publish(&lengths[..count]) && !(count == 1 && self.call_egress(lengths[0])) {
            signal(&self.kick, 1);
        }
        taken
    }

    /// Runs egress for one packet of `length` bytes. False if that is not possible here or now.
    fn call_egress(&self, length: u32) -> bool {
        /// What precedes the payload, less what precedes that of a UDP packet: then the kernel
        /// need not change the packet's length.
        const HEADERS: usize = size_of::<intf::vtl_data_hdr>() - 8;
        /// What is sent is replaced.
        static NOTHING: [u8; HEADERS + intf::VTL_MAX_PAYLOAD as usize] =
            [0; HEADERS + intf::VTL_MAX_PAYLOAD as usize];
        let least = intf::VTL_MIN_PACKET as usize - 8;
        let length = (HEADERS + length as usize).clamp(least, NOTHING.len());
        self.caller
            .as_ref()
            .is_some_and(|caller| nix::unistd::write(caller, &NOTHING[..length]).is_ok())
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.tx.closed() {
            None => Ok(()),
            Some(Closed::ByPeer) => Err(Error::ClosedByPeer(self.peer)),
            Some(Closed::Broken | Closed::Local) => Err(self.broken()),
        }
    }

    /// Whether the peer has everything.
    ///
    /// # Errors
    /// It will never have.
    pub(crate) fn delivered(&self) -> Result<bool, Error> {
        if self.tx.unacknowledged() == 0 {
            return Ok(true);
        }
        self.check_open()?;
        // Nobody else would notice: acknowledgements come no more.
        if !self.wakeups.daemon_lives()? {
            return Err(self.broken());
        }
        Ok(false)
    }
}

/// Receiving.
impl Session {
    /// Waits for packets, and reads until `read` has got something. 0 at the end; `read` returns 0
    /// if there were only places of packets that the sender gave up.
    pub(crate) fn recv(
        &mut self,
        limit: Option<Instant>,
        mut read: impl FnMut(&mut Self) -> Result<usize, Error>,
    ) -> Result<usize, Error> {
        while self.wait(limit)? {
            match read(self)? {
                0 => {}
                got => return Ok(got),
            }
        }
        Ok(0)
    }

    /// As [`Session::recv`], but never waits: `None` if nothing has arrived.
    pub(crate) fn try_recv(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<usize, Error>,
    ) -> Result<Option<usize>, Error> {
        loop {
            match self.look()? {
                Receivable::NotYet => return Ok(None),
                Receivable::End => return Ok(Some(0)),
                Receivable::Packets => match read(self)? {
                    0 => {}
                    got => return Ok(Some(got)),
                },
            }
        }
    }

    /// Waits for packets. False at the end.
    pub(crate) fn wait(&mut self, limit: Option<Instant>) -> Result<bool, Error> {
        if self.naps() {
            self.rest();
        }
        let mut daemon_lives = true;
        loop {
            match self.receivable()? {
                Receivable::Packets => return Ok(true),
                Receivable::End => return Ok(false),
                Receivable::NotYet if !daemon_lives => return Err(self.broken()),
                Receivable::NotYet => {
                    daemon_lives = self.wakeups.sleep(patience(limit, WAIT_MS)?)?;
                }
            }
        }
    }

    /// Looks whether something has arrived; if not, empties the descriptor and looks again.
    pub(crate) fn look(&mut self) -> Result<Receivable, Error> {
        let state = self.receivable()?;
        if state != Receivable::NotYet {
            return Ok(state);
        }
        let daemon_lives = self.wakeups.clear()?;
        match self.receivable()? {
            Receivable::NotYet if !daemon_lives => Err(self.broken()),
            state => Ok(state),
        }
    }

    fn receivable(&mut self) -> Result<Receivable, Error> {
        loop {
            if self.rx.available() > 0 {
                return Ok(Receivable::Packets);
            }
            match self.rx.closed() {
                // What arrived before the end was published before it.
                Some(_) if self.rx.available() > 0 => return Ok(Receivable::Packets),
                Some(Closed::ByPeer) => return Ok(Receivable::End),
                Some(Closed::Broken | Closed::Local) => return Err(self.broken()),
                None => {}
            }
            if self.rx.prepare_wait() {
                return Ok(Receivable::NotYet);
            }
        }
    }

    /// How long a reader should nap before it looks and asks to be woken.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        self.naps().then_some(NAP)
    }

    /// Is this a bulk transfer, of which nothing is here?
    fn naps(&mut self) -> bool {
        self.batch >= BULK && self.rx.available() == 0
    }

    /// Naps, and learns how long.
    fn rest(&mut self) {
        std::thread::sleep(self.nap);
        let (arrived, slots) = (self.rx.available(), self.rx.slots());
        if arrived > slots / 2 {
            self.nap = (self.nap / 2).max(NAP);
        } else if arrived < slots / 4 {
            self.nap = if arrived < MANY {
                NAP
            } else {
                (self.nap + LONGER).min(LONG_NAP)
            };
        }
    }

    /// Copies what has arrived. 0 if those were only places of packets that the sender gave up.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        let mut packets = 0;
        let available = self.rx.available();
        while packets < available && filled < buffer.len() {
            let packet = self.rx.packet(packets);
            self.given_up += u64::from(packet.is_empty());
            let rest = &packet[self.read..];
            let n = rest.len().min(buffer.len() - filled);
            buffer[filled..filled + n].copy_from_slice(&rest[..n]);
            filled += n;
            if n < rest.len() {
                self.read += n;
                break;
            }
            self.read = 0;
            packets += 1;
        }
        self.consume(packets);
        filled
    }

    /// Copies what is left of the first packet. 0 if the sender gave it up.
    pub(crate) fn read_message(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let message = &self.rx.packet(0)[self.read..];
        let len = message.len();
        let place = buffer.get_mut(..len).ok_or(Error::BufferTooSmall(len))?;
        place.copy_from_slice(message);
        self.read = 0;
        self.given_up += u64::from(len == 0);
        self.consume(1);
        Ok(len)
    }

    /// Shows up to `most` packets, those that the sender gave up as empty ones. Returns how many.
    pub(crate) fn read_in_place(&mut self, most: u64, mut take: impl FnMut(&[u8])) -> u64 {
        let count = self.rx.available().min(most);
        for i in 0..count {
            let packet = self.rx.packet(i);
            self.given_up += u64::from(packet.is_empty());
            take(&packet[self.read..]);
            self.read = 0;
        }
        self.consume(count);
        count
    }

    fn consume(&mut self, packets: u64) {
        self.batch = packets;
        if packets > 0 && self.rx.consume(packets) {
            signal(&self.kick, 1 << 32);
        }
    }
}

/// Adds to an eventfd.
fn signal(event: &OwnedFd, value: u64) {
    // Fails only if the counter is full, and then the daemon has been told already.
    let _ = nix::unistd::write(event, &value.to_ne_bytes());
}
