//! Receiving: reads packets of the receive ring, and waits for them.

use std::time::{Duration, Instant};

use vtl_ring::Closed;

use super::{Halt, Receivable, Session};
use crate::{
    error::Error,
    message::Part,
    waiting::{WAIT_MS, patience},
};

/// Minimum batch, packets, after which a reader naps before it requests a wake-up (coalescing): in
/// bulk transfers a wake-up for every few packets costs more than the packets.
const BULK: u64 = 4;
/// Initial nap. Each nap is a timer interrupt, so naps grow while [`MANY`] packets arrive during
/// one, until a quarter of the ring does.
pub(super) const NAP: Duration = Duration::from_micros(100);
/// Maximum nap.
const LONG_NAP: Duration = Duration::from_micros(300);
/// Increment of the nap.
const LONGER: Duration = Duration::from_micros(25);
/// Minimum of packets per nap for naps to grow: some 3 Gbit/s. Slower streams are better read at
/// once.
const MANY: u64 = 32;

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

    /// Passes whole messages that have arrived to `take`, at most `max`: those of one packet in
    /// place, others put together in `buffer`. Returns their number: 0 at the end; `None` if none
    /// is whole yet.
    pub(crate) fn try_recv_messages(
        &mut self,
        buffer: &mut [u8],
        max: u64,
        take: &mut impl FnMut(&[u8]),
    ) -> Result<Option<u64>, Halt> {
        let count = self.try_recv(|session| {
            let count = session.read_whole(max, take)?;
            if count > 0 {
                return Ok(count as usize);
            }
            // Given up, or longer than a packet.
            let length = session.read_message(buffer)?;
            if length > 0 {
                take(&buffer[..length]);
            }
            Ok(length.min(1))
        })?;
        self.check_end(count.unwrap_or(1))?;
        Ok(count.map(|count| count as u64))
    }

    /// Passes messages of one packet to `take`, up to one that has more, was given up, or is
    /// forged. Returns their number.
    fn read_whole(&mut self, max: u64, take: &mut impl FnMut(&[u8])) -> Result<u64, Error> {
        if self.read > 0 || self.incoming.inside || self.has_kept() {
            return Ok(0);
        }
        let available = self.rx.available().min(max);
        let mut count = 0;
        while count < available && !self.goes_on(count) && (count == 0 || !self.is_last(count)) {
            let packet = self.rx.packet(count);
            if packet.is_empty() {
                break;
            }
            take(packet);
            count += 1;
        }
        self.consume(count);
        if count == 0 {
            self.check_forged()?;
        }
        Ok(count)
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

    /// Checks, once, that a stateless switch has not cut off the rest of a message of which a reader has a part.
    fn check_cut(&mut self) -> Result<(), Error> {
        let is_begun = self.incoming.is_begun();
        let kept = self.incoming.kept().len();
        self.incoming.forget(kept);
        self.incoming.note(false);
        match is_begun {
            true => Err(Error::Cut(self.peer)),
            false => Ok(()),
        }
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
                Some(Closed::Cut) if self.old => {
                    self.check_cut()?;
                    return Ok(Receivable::Succeeded);
                }
                Some(Closed::Cut) if !self.lost => return Ok(Receivable::NotYet),
                Some(Closed::ByPeer) => return Ok(Receivable::End),
                Some(Closed::Broken | Closed::Local | Closed::Cut) => return Err(self.broken()),
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

    /// Passes up to `max` packets to `take`, given-up ones as empty. Returns their number.
    ///
    /// # Errors
    /// The first packet is forged.
    pub(crate) fn read_in_place(
        &mut self,
        max: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<u64, Error> {
        let mut count = self.rx.available().min(max);
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
            let inside = self.goes_on(packets - 1);
            self.incoming.note(inside);
        }
        if packets > 0 && self.rx.consume(packets) {
            self.rx.offer_room();
            self.kick();
        }
    }
}
