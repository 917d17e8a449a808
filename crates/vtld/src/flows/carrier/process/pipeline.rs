//! The process's end of layers over a carrier of vtld's: frames and packets come from vtld, and go back there, through a
//! pipeline of layers.
//!
//! The carrier loses nothing, and layers over it drop nothing either. So whatever they refuse is what no honest peer sends, or
//! lost: the layers end, and flows repeat by TCP what was not confirmed.

use std::{collections::VecDeque, io, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, sleep_until};
use vtl_core::layers::{MAX_PACKET, Pipeline};
use vtl_proto::layers::Message;

use super::{
    filter::CREDIT,
    message::Channel,
    wire::{BATCH, Figures, Tag, emit},
};

/// Packets of layers' own that may wait for the carrier: more come from none that keeps its contract.
const MAX_BACKLOG: usize = 4096;

/// Packets by which what layers keep must have changed before vtld is told.
const MANY: usize = 128;

/// Why layers have ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("closed")]
    Closed(#[from] io::Error),
    #[error("{0} packets that make no sense, or for which there is no room")]
    Refused(u64),
    #[error("a layer sends more than the carrier takes")]
    Backlog,
}

/// Layers, and what waits in front of them.
struct FilterTask {
    pipeline: Pipeline,
    began: Instant,
    control: VecDeque<Bytes>,
    chunks: VecDeque<Bytes>,
    /// Bytes of packets that vtld takes; the last one may go beyond.
    credit: i64,
    /// Bytes taken from vtld that it has not been told of.
    taken: usize,
    /// Packets that layers keep, as it was told.
    held: usize,
}

impl FilterTask {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Takes a message of vtld's.
    fn take(&mut self, (tag, body): (Tag, Bytes), out: &mut BytesMut) -> Result<(), Ended> {
        match tag {
            Tag::Control => self.control.push_back(body),
            Tag::Chunk => self.chunks.push_back(body),
            Tag::Packet => {
                let now = self.now();
                self.pipeline.receive(now, &body);
                self.deliver(now, out);
            }
            Tag::Taken => {
                let taken = body.first_chunk().map(|taken| u32::from_le_bytes(*taken));
                self.credit += i64::from(taken.unwrap_or(0));
            }
            _ => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
        }
        Ok(())
    }

    /// Passes on what has come up.
    fn deliver(&mut self, now: u64, out: &mut BytesMut) {
        while let Some(packet) = self.pipeline.poll_deliver(now) {
            emit(out, Tag::Frame, packet.bytes());
        }
    }

    /// Passes frames down and packets on, as far as there is room. Returns whether there is more to do.
    fn turn(&mut self, out: &mut BytesMut) -> Result<bool, Ended> {
        let now = self.now();
        let mut is_idle = false;
        while !is_idle && out.len() < BATCH {
            is_idle = true;
            self.pipeline.handle_timeout(now);
            self.deliver(now, out);
            while self.pipeline.is_ready()
                && let Some(frames) = self.next()
            {
                self.taken += frames.len();
                is_idle = false;
                // vtld cuts them so.
                if frames.len() <= self.pipeline.capacity() {
                    self.pipeline.send(now, &frames);
                }
            }
            while self.credit > 0
                && let Some(mut packet) = self.pipeline.poll_transmit(now)
            {
                packet.push(&[Message::PACKET]);
                self.credit -= packet.len() as i64;
                is_idle = false;
                emit(out, Tag::Packet, packet.bytes());
            }
        }
        if self.pipeline.refused() > 0 {
            return Err(Ended::Refused(self.pipeline.refused()));
        }
        match self.pipeline.backlog() > MAX_BACKLOG {
            true => Err(Ended::Backlog),
            false => Ok(!is_idle),
        }
    }

    /// Tells vtld what was taken, and how much layers keep.
    fn tell(&mut self, out: &mut BytesMut) {
        if self.taken > 0 {
            emit(out, Tag::Taken, &(self.taken as u32).to_le_bytes());
            self.taken = 0;
        }
        let held = self.pipeline.held();
        if held.abs_diff(self.held) >= MANY {
            self.held = held;
            let memory = (held * MAX_PACKET) as u64;
            let mut body = Vec::new();
            // Writing to memory cannot fail.
            let _ = ciborium::into_writer(&Figures { path: None, memory }, &mut body);
            emit(out, Tag::Figures, &body);
        }
    }

    /// The next message for the layers, control frames first.
    fn next(&mut self) -> Option<Bytes> {
        let control = self.control.pop_front();
        control.or_else(|| self.chunks.pop_front())
    }

    /// When [`FilterTask::turn`] is due, if nothing happens before.
    fn due(&self) -> Option<Instant> {
        // What waits for credit is due with that.
        if self.credit <= 0 && self.pipeline.backlog() > 0 {
            return None;
        }
        let at = self.pipeline.next_timeout()?;
        self.began.checked_add(Duration::from_nanos(at))
    }
}

/// Runs layers until vtld closes their channel, or they end.
pub(super) async fn run(channel: Channel, pipeline: Pipeline) {
    let mut first = BytesMut::new();
    let frame = pipeline.capacity() as u32;
    emit(&mut first, Tag::Opened, &frame.to_le_bytes());
    let layers = FilterTask {
        pipeline,
        began: Instant::now(),
        control: VecDeque::new(),
        chunks: VecDeque::new(),
        // The longest packet is within what vtld takes.
        credit: (CREDIT - 2 * MAX_PACKET) as i64,
        taken: 0,
        held: 0,
    };
    if channel.write(&first).await.is_ok()
        && let Err(ended) = moved(&channel, layers).await
    {
        match ended {
            Ended::Closed(_) => tracing::debug!("layers: closed"),
            ended => tracing::warn!(%ended, "layers: ended: their flows go on by TCP"),
        }
    }
}

async fn moved(channel: &Channel, mut layers: FilterTask) -> Result<(), Ended> {
    loop {
        let due = layers.due();
        let mut out = BytesMut::new();
        tokio::select! {
            message = channel.next() => layers.take(message?, &mut out)?,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        while out.len() < BATCH
            && let Some(message) = channel.buffered()?
        {
            layers.take(message, &mut out)?;
        }
        let mut has_more = true;
        while has_more {
            has_more = layers.turn(&mut out)?;
            layers.tell(&mut out);
            channel.write(&out).await?;
            out.clear();
        }
    }
}
