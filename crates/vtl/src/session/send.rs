//! Sending: stages packets in the transmit ring and runs egress.

use std::time::Instant;

use vtl_ring::{Closed, egress};

use super::{Halt, Session};
use crate::{
    error::Error,
    waiting::{WAIT_MS, patience},
};

/// Maximum number of packets published at once.
const BURST: usize = 256;

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
    fn room_or_wait(&mut self) -> Result<Option<usize>, Halt> {
        loop {
            if !self.check_open()? {
                return match self.is_left() {
                    true => Err(Halt::Succeeded),
                    // The daemon's answer is on its way, or earlier sessions have to be read.
                    false => Ok(None),
                };
            }
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

    /// Has `fill` write messages of one packet each: it gets a packet's room and returns the
    /// message's length, 0 after the last. They are published together. Returns their number, at
    /// most [`BURST`]; without room, clears the wake-ups and retries once.
    pub(crate) fn try_send_packets(
        &mut self,
        fill: &mut impl FnMut(&mut [u8]) -> usize,
    ) -> Result<Option<usize>, Halt> {
        let sent = self.push_packets(fill)?;
        if sent.is_some() {
            return Ok(sent);
        }
        if !self.wakeups.clear()? {
            return Err(self.broken().into());
        }
        self.push_packets(fill)
    }

    /// As [`Session::try_send_packets`]; without room, requests a wake-up and returns `None`.
    fn push_packets(
        &mut self,
        fill: &mut impl FnMut(&mut [u8]) -> usize,
    ) -> Result<Option<usize>, Halt> {
        self.outgoing.between()?;
        if self.is_left() {
            return Err(Halt::Succeeded);
        }
        let Some(room) = self.room_or_wait()? else {
            return Ok(None);
        };
        let max = self.tx.max_payload();
        let (mut count, mut last, mut kick) = (0, 0, false);
        while count < room {
            let place = &mut self.tx.slot(0)[..max];
            last = match fill(place) {
                0 => break,
                length => length.min(max) as u32,
            };
            // Sealed at once, while its bytes are in the cache.
            match &mut self.lanes {
                Some(lanes) => kick |= self.tx.publish_in_lane(&[last], 0, lanes),
                None => self.tx.stage(&[last]),
            }
            count += 1;
        }
        kick |= self.tx.publish_staged();
        if kick && !(count == 1 && self.call_egress(last)) {
            self.kick();
        }
        Ok(Some(count))
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
        // A message that was cut in its middle goes by the successor, from its beginning.
        let between = self.is_cut() || self.between_messages().is_ok();
        may_leave && self.tx.is_succeeded() && between
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
                Some(Closed::ByPeer | Closed::Cut) => true,
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

    /// Whether everything that arrived before a stateless switch was read. The part of a message of which the rest was
    /// cut off is dropped, unless a reader has a part already, who has to be told.
    pub(crate) fn is_cut_read(&mut self) -> bool {
        self.rx.available() == 0 && !self.incoming.is_begun()
    }

    /// False if a stateless switch has ended the session, and its successor decides. The state is read once: the daemon
    /// changes it at any time.
    ///
    /// # Errors
    /// The session has ended otherwise, or received forged data.
    fn check_open(&self) -> Result<bool, Error> {
        self.check_forged()?;
        match self.tx.closed() {
            None => Ok(true),
            Some(Closed::Cut) if !self.lost => Ok(false),
            Some(Closed::ByPeer) => Err(Error::ClosedByPeer(self.peer)),
            Some(Closed::Broken | Closed::Local | Closed::Cut) => Err(self.broken()),
        }
    }

    /// Whether the peer has acknowledged everything.
    ///
    /// # Errors
    /// The session broke, or received forged data: no orderly end then.
    pub(crate) fn delivered(&self) -> Result<bool, Error> {
        self.check_forged()?;
        let open = self.check_open();
        if matches!(open, Ok(false)) {
            return Ok(false);
        }
        if self.tx.unacknowledged() == 0 {
            return Ok(true);
        }
        open?;
        // Without the daemon, acknowledgements stop, and nothing else detects that.
        if !self.wakeups.daemon_lives()? {
            return Err(self.broken());
        }
        Ok(false)
    }
}
