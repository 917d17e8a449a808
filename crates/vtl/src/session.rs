//! An open session: its rings, and access to them without lost wake-ups.

use std::{
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::Epoll;
use vtl_control::{Client, Error::Malformed, Grant, SessionKey};
use vtl_proto::{intf, services::Services};
use vtl_ring::{Closed, Lanes, RxRing, TxRing, egress};

use crate::{
    error::Error,
    message::{Incoming, Outgoing, Part},
    socket::Agreement,
    waiting::{WAIT_MS, Wakeups, patience},
};

/// Minimum batch, packets, after which a reader naps before it requests a wake-up (coalescing): in
/// bulk transfers a wake-up for every few packets costs more than the packets.
const BULK: u64 = 4;
/// Initial nap. Each nap is a timer interrupt, so naps grow while [`MANY`] packets arrive during
/// one, until a quarter of the ring does.
const NAP: Duration = Duration::from_micros(100);
/// Maximum nap.
const LONG_NAP: Duration = Duration::from_micros(300);
/// Increment of the nap.
const LONGER: Duration = Duration::from_micros(25);
/// Minimum of packets per nap for naps to grow: some 3 Gbit/s. Slower streams are better read at
/// once.
const MANY: u64 = 32;
/// Maximum number of packets published at once.
const BURST: usize = 256;

pub(crate) struct Session {
    tx: TxRing,
    /// With partial order only.
    lanes: Option<Lanes>,
    rx: RxRing,
    /// Wakes the daemon.
    kick: OwnedFd,
    /// Socket that runs egress from this thread, without the daemon.
    caller: Option<OwnedFd>,
    wakeups: Wakeups,
    pub(crate) peer: IpAddr,
    /// Maximum length of a message, bytes, if messages may take several packets.
    long_messages: Option<usize>,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Bytes read of the first packet in `rx`.
    read: usize,
    /// Given-up packets read so far.
    given_up: u64,
    /// Packets in the latest read.
    batch: u64,
    /// Duration of the next nap.
    nap: Duration,
    pub(crate) key: SessionKey,
    /// Whether the graft is reliable.
    pub(crate) reliable: bool,
    /// Succeeded by another session: only read, to its end.
    pub(crate) old: bool,
    /// Keep using the session for now, even if the peer has succeeded it.
    pub(crate) stays: bool,
}

/// Why an operation did not complete.
pub(crate) enum Halt {
    Error(Error),
    /// The operation continues in the session that succeeds this one.
    Succeeded,
}

impl<T: Into<Error>> From<T> for Halt {
    fn from(error: T) -> Self {
        Self::Error(error.into())
    }
}

/// State of the receive ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receivable {
    Packets,
    End,
    /// The data continues in the session that succeeds this one, if there is one.
    Succeeded,
    /// Nothing has arrived; a wake-up is requested.
    NotYet,
}

impl Session {
    /// Maps the rings of a session that the daemon grants; its events make `any` readable.
    pub(crate) fn granted(
        grant: Grant,
        descriptors: Vec<OwnedFd>,
        any: &Arc<Epoll>,
        daemon: &Arc<Client>,
    ) -> Result<(Self, Agreement), Error> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || {
            let missing = || Malformed("a session without its descriptors".to_owned());
            descriptors.next().ok_or_else(missing)
        };
        let [transmit, receive, kick, wake] = [next()?, next()?, next()?, next()?];
        let events = grant.events.then(&mut next).transpose()?;
        let caller = descriptors.next();
        let (slots, payload, longest) = (grant.slots, grant.max_payload, grant.max_message);
        let agreement = Agreement {
            graft: grant.graft,
            gid: grant.gid,
            services: grant.services,
            peer: grant.peer,
        };
        let mut tx = TxRing::map(transmit.as_fd(), slots, payload)?;
        let mut rx = RxRing::map(receive.as_fd(), slots)?;
        let lanes = agreement.services.contains(Services::PARTIAL_ORDER)
            && !agreement.services.contains(Services::ORDERED);
        if lanes {
            rx = rx.with_list();
        }
        if let Some(keys) = &grant.keys {
            // Reliable and ordered: a packet's number is its place in the ring.
            let placed = Services::RELIABLE | Services::ORDERED;
            let numbered = !agreement.services.contains(placed);
            tx = tx.with_keys(keys, numbered);
            rx = rx.with_keys(keys, numbered);
        }
        let session = Self {
            tx,
            rx,
            lanes: lanes.then(Lanes::default),
            kick,
            caller,
            wakeups: Wakeups::new(wake, events, any, daemon)?,
            peer: agreement.peer,
            long_messages: (longest > payload.into())
                .then_some(longest.min(intf::VTL_MAX_MESSAGE) as usize),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            read: 0,
            given_up: 0,
            batch: 0,
            nap: NAP,
            key: SessionKey {
                sid: grant.sid,
                key: grant.key,
            },
            reliable: agreement.services.contains(Services::RELIABLE),
            old: false,
            stays: false,
        };
        Ok((session, agreement))
    }

    /// Maximum payload of a packet, bytes.
    pub(crate) fn max_payload(&self) -> usize {
        self.tx.max_payload()
    }

    /// Maximum length of a message, bytes.
    pub(crate) fn max_message(&self) -> usize {
        self.long_messages.unwrap_or(self.max_payload())
    }

    /// Packets queued or in flight: not acknowledged by the peer.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.tx.unacknowledged()
    }

    /// Given-up packets read.
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

    /// Whether a packet failed authentication. Without reliability it counts as given up instead.
    fn is_forged(&self) -> bool {
        self.reliable && self.rx.forged() > 0
    }

    fn check_forged(&self) -> Result<(), Error> {
        match self.is_forged() {
            true => Err(Error::Forged(self.peer)),
            false => Ok(()),
        }
    }
}

/// Sending.
impl Session {
    /// Queues as much as there is room for; waits for room.
    pub(crate) fn send(&mut self, data: &[u8], limit: Option<Instant>) -> Result<usize, Halt> {
        loop {
            if let Some(taken) = self.push(data)? {
                return Ok(taken);
            }
            if !self.wakeups.sleep(patience(limit, WAIT_MS)?)? {
                return Err(self.broken().into());
            }
        }
    }

    /// Queues as much as there is room for; without room, clears the wake-ups and retries once.
    pub(crate) fn try_send(&mut self, data: &[u8]) -> Result<Option<usize>, Halt> {
        let taken = self.push(data)?;
        if taken.is_some() {
            return Ok(taken);
        }
        if !self.wakeups.clear()? {
            return Err(self.broken().into());
        }
        self.push(data)
    }

    /// Queues as much as there is room for; without room, requests a wake-up and returns `None`.
    fn push(&mut self, data: &[u8]) -> Result<Option<usize>, Halt> {
        self.outgoing.between()?;
        if self.is_left() {
            return Err(Halt::Succeeded);
        }
        let room = self.room_or_wait()?;
        Ok(room.map(|room| self.fill(data, room, None)))
    }

    /// Slots that may be filled at once, at least one; without room, requests a wake-up and returns
    /// `None`.
    fn room_or_wait(&mut self) -> Result<Option<usize>, Error> {
        loop {
            self.check_open()?;
            let room = self.tx.room().min(BURST as u64) as usize;
            if room > 0 {
                return Ok(Some(room));
            }
            if self.tx.wait_for_room() {
                return Ok(None);
            }
        }
    }

    /// Queues a whole message; waits for room.
    pub(crate) fn send_message(
        &mut self,
        lane: u32,
        message: &[u8],
        limit: Option<Instant>,
    ) -> Result<(), Halt> {
        while !self.push_message(lane, message)? {
            if !self.wakeups.sleep(patience(limit, WAIT_MS)?)? {
                return Err(self.broken().into());
            }
        }
        Ok(())
    }

    /// Queues as much of a message as there is room for; false if a rest remains: then the same
    /// message must be given again. Without room, clears the wake-ups and retries once.
    pub(crate) fn try_send_message(&mut self, lane: u32, message: &[u8]) -> Result<bool, Halt> {
        if self.push_message(lane, message)? {
            return Ok(true);
        }
        if !self.wakeups.clear()? {
            return Err(self.broken().into());
        }
        self.push_message(lane, message)
    }

    /// Queues a message until it is whole or there is no room; then requests a wake-up and returns
    /// false.
    fn push_message(&mut self, lane: u32, message: &[u8]) -> Result<bool, Halt> {
        let mut sent = self.outgoing.start(message)?;
        if sent == 0 && self.is_left() {
            return Err(Halt::Succeeded);
        }
        while sent < message.len() {
            let Some(room) = self.room_or_wait()? else {
                self.outgoing.stop(message, sent);
                return Ok(false);
            };
            sent += self.fill(&message[sent..], room, Some(lane));
        }
        self.outgoing.finish();
        Ok(true)
    }

    /// Checks that no message is sent in part.
    pub(crate) fn between_messages(&self) -> Result<(), Error> {
        self.outgoing.between()
    }

    /// Copies as much of `data` as fits into `room` slots, and publishes it: as bytes, or as the
    /// rest of a message in a lane.
    fn fill(&mut self, data: &[u8], room: usize, message: Option<u32>) -> usize {
        // A message of one packet stays one packet, even if the path MTU has shrunk since it was
        // checked.
        let each = match self.long_messages {
            None if message.is_some() => data.len(),
            _ => self.tx.max_payload(),
        };
        let mut lengths = [0_u32; BURST];
        let mut count = 0;
        let mut taken = 0;
        for chunk in data.chunks(each).take(room) {
            self.tx.slot(count as u64)[..chunk.len()].copy_from_slice(chunk);
            lengths[count] = chunk.len() as u32;
            count += 1;
            taken += chunk.len();
        }
        let lengths = &lengths[..count];
        let kick = match (&mut self.lanes, message) {
            (Some(lanes), lane) => self.tx.publish_in_lane(lengths, lane.unwrap_or(0), lanes),
            (None, Some(_)) => self.tx.publish_message(lengths, taken < data.len()),
            (None, None) => self.tx.publish(lengths),
        };
        if kick && !(count == 1 && self.call_egress(lengths[0])) {
            self.kick();
        }
        taken
    }

    /// Runs egress for one packet of `length` bytes. False if that is impossible here or now.
    fn call_egress(&self, length: u32) -> bool {
        self.caller
            .as_ref()
            .is_some_and(|caller| egress::run(caller, self.tx.sealed_len(length)))
    }

    /// Whether to move on to the session by which the peer has succeeded this one.
    pub(crate) fn is_left(&self) -> bool {
        let may_leave = !self.old && !self.stays;
        may_leave && self.tx.is_succeeded() && self.between_messages().is_ok()
    }

    /// Publishes the last packet of this session. False if there is no room yet; the descriptor
    /// then becomes readable when there is.
    pub(crate) fn try_end_sending(&mut self) -> bool {
        if self.tx.closed().is_some() {
            return true;
        }
        while self.tx.room() == 0 {
            if self.tx.wait_for_room() {
                return false;
            }
            if self.tx.closed().is_some() {
                return true;
            }
        }
        if self.tx.publish_last() {
            self.kick();
        }
        true
    }

    /// Consumes pending wake-ups. False if the daemon has gone.
    pub(crate) fn clear_wakeups(&mut self) -> Result<bool, Error> {
        Ok(self.wakeups.clear()?)
    }

    /// Whether no data sent is worth waiting for any more.
    pub(crate) fn is_sent(&self) -> bool {
        self.tx.unacknowledged() == 0
            || match self.tx.closed() {
                None => false,
                Some(Closed::ByPeer) => true,
                // Missing data is reported when the socket is closed.
                Some(Closed::Broken | Closed::Local) => !self.reliable,
            }
    }

    /// Whether data has arrived and was not read.
    pub(crate) fn is_unread(&mut self) -> bool {
        if self.reliable && self.rx.available() > 0 {
            self.rx.take_last();
        }
        self.rx.available() > 0 || !self.incoming.kept().is_empty()
    }

    /// Whether everything was read and nothing more will arrive.
    pub(crate) fn is_read(&mut self) -> bool {
        // What arrived before the end was published before it.
        let over = matches!(self.rx.closed(), Some(Closed::ByPeer | Closed::Local));
        !self.is_unread() && (over || self.rx.is_at_end())
    }

    fn check_open(&self) -> Result<(), Error> {
        self.check_forged()?;
        match self.tx.closed() {
            None => Ok(()),
            Some(Closed::ByPeer) => Err(Error::ClosedByPeer(self.peer)),
            Some(Closed::Broken | Closed::Local) => Err(self.broken()),
        }
    }

    /// Whether the peer has acknowledged everything.
    ///
    /// # Errors
    /// The session broke, or received forged data: no orderly end then.
    pub(crate) fn delivered(&self) -> Result<bool, Error> {
        self.check_forged()?;
        if self.tx.unacknowledged() == 0 {
            return Ok(true);
        }
        self.check_open()?;
        // Without the daemon, acknowledgements stop, and nothing else detects that.
        if !self.wakeups.daemon_lives()? {
            return Err(self.broken());
        }
        Ok(false)
    }
}

/// Receiving.
impl Session {
    /// Reads bytes; waits for the first. 0 at the end.
    pub(crate) fn recv_data(
        &mut self,
        limit: Option<Instant>,
        buffer: &mut [u8],
    ) -> Result<usize, Halt> {
        match self.incoming.take(buffer) {
            0 => self.recv(limit, |session| session.read(buffer)),
            kept => Ok(kept),
        }
    }

    /// As [`Session::recv_data`], but does not block: `None` if nothing has arrived.
    pub(crate) fn try_recv_data(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Halt> {
        match self.incoming.take(buffer) {
            0 => self.try_recv(|session| session.read(buffer)),
            kept => Ok(Some(kept)),
        }
    }

    /// Reads a message; waits until it is whole. 0 at the end.
    pub(crate) fn recv_message(
        &mut self,
        limit: Option<Instant>,
        buffer: &mut [u8],
    ) -> Result<usize, Halt> {
        let len = self.recv(limit, |session| session.read_message(buffer))?;
        self.check_end(len)?;
        Ok(len)
    }

    /// As [`Session::recv_message`], but does not block: `None` if it is not whole yet.
    pub(crate) fn try_recv_message(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Halt> {
        let len = self.try_recv(|session| session.read_message(buffer))?;
        self.check_end(len.unwrap_or(1))?;
        Ok(len)
    }

    /// Reads the part of a message that has arrived, up to its end; waits for some. Empty at the
    /// end of the session.
    pub(crate) fn recv_part(
        &mut self,
        limit: Option<Instant>,
        buffer: &mut [u8],
    ) -> Result<Part, Halt> {
        let mut len = self.incoming.take(buffer);
        if len == 0 {
            len = self.recv(limit, |session| session.read_part(buffer))?;
            self.check_end(len)?;
        }
        Ok(self.part(len))
    }

    /// As [`Session::recv_part`], but does not block: `None` if nothing has arrived.
    pub(crate) fn try_recv_part(&mut self, buffer: &mut [u8]) -> Result<Option<Part>, Halt> {
        let mut len = match self.incoming.take(buffer) {
            0 => None,
            kept => Some(kept),
        };
        if len.is_none() {
            len = self.try_recv(|session| session.read_part(buffer))?;
            self.check_end(len.unwrap_or(1))?;
        }
        Ok(len.map(|len| self.part(len)))
    }

    fn part(&self, len: usize) -> Part {
        Part {
            len,
            more: self.read > 0 || self.incoming.inside,
        }
    }

    /// Checks that the end of the session (`received` is 0) is not in the middle of a message.
    fn check_end(&self, received: usize) -> Result<(), Error> {
        if received == 0 && self.incoming.inside {
            return Err(Error::Cut(self.peer));
        }
        Ok(())
    }

    /// Waits for packets, and calls `read` until it returns data. 0 at the end. `read` returns 0 if
    /// the packets are not enough, or were given up.
    fn recv(
        &mut self,
        limit: Option<Instant>,
        mut read: impl FnMut(&mut Self) -> Result<usize, Error>,
    ) -> Result<usize, Halt> {
        while self.wait(limit)? {
            match read(self)? {
                0 => {}
                got => return Ok(got),
            }
        }
        Ok(0)
    }

    /// As [`Session::recv`], but does not block: `None` if nothing has arrived.
    fn try_recv(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<usize, Error>,
    ) -> Result<Option<usize>, Halt> {
        loop {
            match self.look()? {
                Receivable::NotYet => return Ok(None),
                Receivable::End => return Ok(Some(0)),
                Receivable::Succeeded => return Err(Halt::Succeeded),
                Receivable::Packets => match read(self)? {
                    0 => {}
                    got => return Ok(Some(got)),
                },
            }
        }
    }

    /// Waits for packets. False at the end.
    pub(crate) fn wait(&mut self, limit: Option<Instant>) -> Result<bool, Halt> {
        if self.naps() {
            self.rest();
        }
        let mut daemon_lives = true;
        loop {
            match self.receivable()? {
                Receivable::Packets => return Ok(true),
                Receivable::End => return Ok(false),
                Receivable::Succeeded => return Err(Halt::Succeeded),
                Receivable::NotYet if !daemon_lives => return Err(self.broken().into()),
                Receivable::NotYet => {
                    daemon_lives = self.wakeups.sleep(patience(limit, WAIT_MS)?)?;
                }
            }
        }
    }

    /// Checks for packets; without any, clears the wake-ups and checks again.
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
        self.check_forged()?;
        loop {
            if self.rx.available() > 0 {
                if self.reliable && self.rx.take_last() {
                    continue;
                }
                return Ok(Receivable::Packets);
            }
            if self.old && self.rx.is_at_end() || self.is_left() {
                return Ok(Receivable::Succeeded);
            }
            match self.rx.closed() {
                // What arrived before the end was published before it.
                Some(_) if self.rx.available() > 0 => {}
                Some(Closed::ByPeer) if self.old => return Ok(Receivable::Succeeded),
                Some(Closed::ByPeer) => return Ok(Receivable::End),
                Some(Closed::Broken | Closed::Local) => return Err(self.broken()),
                None => {}
            }
            if self.rx.prepare_wait() {
                return Ok(Receivable::NotYet);
            }
        }
    }

    /// How long a reader should sleep before it checks and waits for a wake-up.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        self.naps().then_some(NAP)
    }

    /// Whether this is a bulk transfer without pending packets.
    fn naps(&mut self) -> bool {
        self.batch >= BULK && self.rx.available() == 0
    }

    /// Naps, and adapts the duration.
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

    /// Copies the data that has arrived. 0 if all packets were given up.
    ///
    /// # Errors
    /// The first packet is forged.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.read_until(buffer, |_, _| false)
    }

    /// As [`Session::read`], up to the end of the message.
    fn read_part(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.read_until(buffer, |session, packet| !session.goes_on(packet))
    }

    /// As [`Session::read`], up to the first packet for which `last` is true.
    fn read_until(
        &mut self,
        buffer: &mut [u8],
        last: impl Fn(&Self, u64) -> bool,
    ) -> Result<usize, Error> {
        let mut filled = 0;
        let mut packets = 0;
        let available = self.rx.available();
        while packets < available && filled < buffer.len() {
            if packets > 0 && self.is_last(packets) {
                break;
            }
            let packet = self.rx.packet(packets);
            if self.is_forged() {
                break;
            }
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
            if last(self, packets - 1) {
                break;
            }
        }
        self.consume(packets);
        if filled == 0 {
            self.check_forged()?;
        }
        Ok(filled)
    }

    /// Copies a message if it has arrived whole. 0 if it has not: then its packets are kept; or if
    /// it was given up.
    fn read_message(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let (packets, new, whole) = self.survey();
        self.check_forged()?;
        let kept = self.incoming.kept().len();
        let len = kept + new;
        if len > buffer.len() {
            return Err(Error::BufferTooSmall(len));
        }
        if whole {
            let place = &mut buffer[..len];
            self.incoming.take(place);
            self.copy_packets(packets, |at, piece| {
                place[kept + at..][..piece.len()].copy_from_slice(piece);
            });
            self.given_up += u64::from(len == 0);
        } else {
            let mut incoming = std::mem::take(&mut self.incoming);
            let room = incoming.reserve(new, buffer.len());
            if room.is_ok() {
                self.copy_packets(packets, |_, piece| incoming.keep(piece));
            }
            self.incoming = incoming;
            room?;
        }
        self.consume(packets);
        Ok(if whole { len } else { 0 })
    }

    /// Packets and bytes that have arrived of the message being read, and whether that is all of
    /// it.
    fn survey(&mut self) -> (u64, usize, bool) {
        let available = self.rx.available();
        let mut len = 0;
        for i in 0..available {
            // The last packet stands alone: it is part of no message.
            len += self.rx.packet(i).len();
            if !self.goes_on(i) {
                return (i + 1, len - self.read, true);
            }
        }
        (available, len - self.read, false)
    }

    /// Passes `packets` packets to `take`, each with its offset from the first.
    fn copy_packets(&mut self, packets: u64, mut take: impl FnMut(usize, &[u8])) {
        let mut at = 0;
        for i in 0..packets {
            let piece = &self.rx.packet(i)[self.read..];
            take(at, piece);
            at += piece.len();
            self.read = 0;
        }
    }

    /// Whether the message of the `ahead`-th packet continues in the next one.
    fn goes_on(&self, ahead: u64) -> bool {
        self.long_messages.is_some() && self.rx.goes_on(ahead)
    }

    /// Whether the `ahead`-th packet is the marker of the session's end instead of data.
    fn is_last(&self, ahead: u64) -> bool {
        self.reliable && self.rx.is_last(ahead)
    }

    /// Whether [`Session::read_message`] has kept part of a message.
    pub(crate) fn has_kept(&self) -> bool {
        !self.incoming.kept().is_empty()
    }

    /// Passes to `take` the part of a message that [`Session::read_message`] has kept; it counts as
    /// a packet.
    pub(crate) fn read_kept(&mut self, take: &mut impl FnMut(&[u8])) -> bool {
        let kept = self.incoming.kept();
        let len = kept.len();
        if len > 0 {
            take(kept);
            self.incoming.forget(len);
        }
        len > 0
    }

    /// Passes up to `most` packets to `take`, given-up ones as empty. Returns their number.
    ///
    /// # Errors
    /// The first packet is forged.
    pub(crate) fn read_in_place(
        &mut self,
        most: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<u64, Error> {
        let mut count = self.rx.available().min(most);
        for i in 0..count {
            if i > 0 && self.is_last(i) {
                count = i;
                break;
            }
            let packet = self.rx.packet(i);
            if self.is_forged() {
                count = i;
                break;
            }
            self.given_up += u64::from(packet.is_empty());
            take(&packet[self.read..]);
            self.read = 0;
        }
        self.consume(count);
        if count == 0 {
            self.check_forged()?;
        }
        Ok(count)
    }

    fn consume(&mut self, packets: u64) {
        self.batch = packets;
        if packets > 0 {
            self.incoming.inside = self.goes_on(packets - 1);
        }
        if packets > 0 && self.rx.consume(packets) {
            self.rx.offer_room();
            self.kick();
        }
    }

    /// Wakes the daemon for this session.
    fn kick(&self) {
        // Fails only if the counter overflows, in thousands of years: the daemon does not read it,
        // each write is an event.
        let _ = nix::unistd::write(&self.kick, &1_u64.to_ne_bytes());
    }
}
