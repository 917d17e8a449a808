//! A session between two hosts, with an application at each end: one writes packets in order, the other reads what there
//! is. Whoever owns it moves the frames.

use std::fmt;

use vtl_link::Nanos;
use vtl_proto::intf;

use crate::{
    app::{Lengths, Pace, Pattern, Promise, Reader, Writer},
    ffi,
    host::{FrameBuffer, Host, SessionConfig, UPTIME},
    sim::HONEST,
};

/// Calls of egress at the same time, without a packet, after which it spins.
const MAX_IDLE: u32 = 100;

/// A session, from host 0 to host 1.
pub struct Pair {
    hosts: [Host; 2],
    writer: Writer,
    reader: Reader,
    /// Times at which each host's egress is called next.
    wake: [Nanos; 2],
    buffer: FrameBuffer,
}

/// What a graft must not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This packet was delivered with another content than was written.
    Content(u64),
    /// Egress asks to be called at once without end.
    Spins,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Content(number) => write!(f, "packet {number} arrived with wrong content"),
            Self::Spins => f.write_str("egress asks to be called at once without end"),
        }
    }
}

impl Pair {
    /// An open session whose sender is called at `start` first. `seed`: of the content.
    pub fn new(config: &SessionConfig, start: Nanos, seed: u64) -> Self {
        let host = |side| {
            let mut host = Host::new();
            host.open(HONEST, side, config);
            host
        };
        let pattern = || Pattern::new(seed, Lengths::Full, config.max_payload);
        Self {
            hosts: [host(0), host(1)],
            writer: Writer::new(pattern(), 0),
            reader: Reader::new(pattern(), Pace::AtOnce, Promise::Everything, seed),
            wake: [start, Nanos::MAX],
            buffer: [0; ffi::VTL_NATIVE_FRAME as usize],
        }
    }

    /// The state of the session's sender.
    pub fn sender(&self) -> &intf::vtl_tx {
        &self.hosts[0].session(HONEST).tx
    }

    /// Packets that the receiving application has read, in order.
    pub fn read(&self) -> u64 {
        self.reader.packets()
    }

    /// A frame arrives at a host; its answer.
    pub fn arrive(&mut self, at: usize, frame: &[u8], now: Nanos) -> Option<Vec<u8>> {
        let length = self.hosts[at].ingress(UPTIME + now, frame, &mut self.buffer)?;
        Some(self.buffer[..length].to_vec())
    }

    /// Lets both applications and both hosts do what is due; `written`: how many packets there are to send by now.
    /// `send` gets the frames, each with the host that sends it. Returns the time of the next call, unless a frame arrives
    /// first.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn run(
        &mut self,
        written: u64,
        now: Nanos,
        mut send: impl FnMut(usize, Vec<u8>),
    ) -> Result<Nanos, Fault> {
        let [sender, receiver] = &mut self.hosts;
        if sender.events(HONEST) & intf::VTL_EV_SEND != 0 {
            self.wake[0] = now;
        }
        if receiver.events(HONEST) & intf::VTL_EV_RECV != 0 {
            self.reader.wake(now);
        }
        self.writer.set_end(written);
        if self.writer.run(sender, HONEST) {
            self.wake[0] = now;
        }
        if self.reader.due <= now
            && self
                .reader
                .run(receiver, HONEST, now)
                .map_err(Fault::Content)?
        {
            receiver.session_mut(HONEST).rx.ack_now = 1;
            self.wake[1] = now;
        }
        for (side, host) in self.hosts.iter_mut().enumerate() {
            let mut idle = 0;
            while self.wake[side] <= now {
                if let Some(length) = host.egress(HONEST, UPTIME + now, &mut self.buffer) {
                    send(side, self.buffer[..length].to_vec());
                    continue;
                }
                self.wake[side] = host.wake(HONEST);
                idle += 1;
                if idle == MAX_IDLE {
                    return Err(Fault::Spins);
                }
            }
        }
        Ok(self.wake[0].min(self.wake[1]).min(self.reader.due))
    }
}
