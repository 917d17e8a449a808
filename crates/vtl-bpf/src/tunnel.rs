//! Packets that the caller carries over TCP, instead of an interface: the same programs make and
//! process them, one at a time.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use etherparse::{SlicedPacket, TransportSlice};
use vtl_proto::ip;

use crate::{
    Error, Result,
    plane::DataPlane,
    pump::{PumpEntry, Served, Turn, frame},
    test_run::{self, From, TC},
};

/// An MTU above any packet of VTL.
const MTU: u32 = 4000;

/// Result for a packet from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken<'a> {
    /// Consumed or dropped.
    Done,
    /// This packet is to be sent to the peer.
    Answer(&'a [u8]),
    /// A control packet, for the daemon.
    Control,
}

/// Runs the root programs on single packets, for sessions whose `ifindex` is `VTL_TUNNEL`.
pub struct Tunnel {
    egress: OwnedFd,
    ingress: OwnedFd,
    entry: Arc<PumpEntry>,
    mark: u32,
    /// Frame for egress to fill; `arrived`: for incoming packets.
    empty: Vec<u8>,
    arrived: Vec<u8>,
    out: Vec<u8>,
}

impl Tunnel {
    /// Opens the tunnel.
    ///
    /// # Errors
    /// [`Error::System`] if descriptors run out.
    pub fn open(plane: &DataPlane) -> Result<Self> {
        let program = |name| {
            let own = plane.program(name).try_clone_to_owned();
            own.map_err(|source| Error::System {
                what: format!("the program {name}"),
                source,
            })
        };
        let (entry, mark) = plane.tunnel_entry();
        Ok(Self {
            egress: program("vtl_root_out_tc")?,
            ingress: program("vtl_root_in_tc")?,
            entry: Arc::clone(entry),
            mark,
            empty: frame(MTU),
            arrived: Vec::new(),
            out: Vec::new(),
        })
    }

    /// Runs the sessions' egress; calls `each` with every packet and its session. A packet starts
    /// with the common header (PROTOCOL.md, section 2).
    ///
    /// # Errors
    /// The system call's error.
    ///
    /// # Panics
    /// If there are more turns than `VTL_TURNS`.
    pub fn send(&mut self, turns: &[Turn], mut each: impl FnMut(u32, &[u8])) -> io::Result<Served> {
        self.entry.set(turns);
        let frames: u32 = turns.iter().map(|t| t.quota).sum();
        for _ in 0..frames {
            let Some(turn) = turns.get(self.entry.served().turns) else {
                break;
            };
            let ran = test_run::run(
                self.egress.as_fd(),
                &self.empty,
                From::Marked(self.mark),
                1,
                &mut self.out,
            )?;
            if ran.verdict == TC.send
                && let Some(packet) = inside(&self.out)
            {
                each(turn.sid, packet);
            }
        }
        Ok(self.entry.served())
    }

    /// Passes a packet, from a peer's address to one of this host, to the programs.
    ///
    /// # Errors
    /// The system call's error.
    pub fn receive(&mut self, from: IpAddr, to: IpAddr, packet: &[u8]) -> io::Result<Taken<'_>> {
        ip::enclose(packet, from, to, &mut self.arrived);
        let ran = test_run::run(
            self.ingress.as_fd(),
            &self.arrived,
            From::Loopback,
            1,
            &mut self.out,
        )?;
        Ok(if ran.verdict == TC.pass {
            Taken::Control
        } else if ran.verdict == TC.answer {
            inside(&self.out).map_or(Taken::Done, Taken::Answer)
        } else {
            Taken::Done
        })
    }
}

/// The payload behind the IP header of a frame, and behind UDP's if there is one.
fn inside(frame: &[u8]) -> Option<&[u8]> {
    let frame = SlicedPacket::from_ethernet(frame).ok()?;
    match frame.transport {
        Some(TransportSlice::Udp(udp)) => Some(udp.payload()),
        _ => Some(frame.net?.ip_payload_ref()?.payload),
    }
}
