//! Packets that the caller carries to the peer, instead of an interface: the same programs make and
//! take them, one at a time.

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
    pump::{Order, Served, Turn, frame},
    test_run::{self, From},
};

/// TCX_NEXT, and TCX_REDIRECT.
const GO_ON: u32 = u32::MAX;
const SENT_BACK: u32 = 7;
/// An MTU that no packet of VTL reaches.
const MTU: u32 = 4000;

/// What becomes of a packet from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken<'a> {
    /// Nothing more: taken or dropped.
    Done,
    /// This goes back to the peer.
    Answer(&'a [u8]),
    /// The daemon has to handle it.
    Control,
}

/// The root programs, to be run on single packets. Sessions go so while their `ifindex` is
/// `VTL_TUNNEL`.
pub struct Tunnel {
    egress: OwnedFd,
    ingress: OwnedFd,
    order: Arc<Order>,
    mark: u32,
    /// For egress to fill, and one for packets that come.
    empty: Vec<u8>,
    arrived: Vec<u8>,
    out: Vec<u8>,
}

impl Tunnel {
    /// Opens it.
    ///
    /// # Errors
    /// [`Error::System`] if there are no descriptors left.
    pub fn open(plane: &DataPlane) -> Result<Self> {
        let program = |name| {
            let own = plane.program(name).try_clone_to_owned();
            own.map_err(|source| Error::System {
                what: format!("the program {name}"),
                source,
            })
        };
        let (order, mark) = plane.tunnel_order();
        Ok(Self {
            egress: program("vtl_root_out_tc")?,
            ingress: program("vtl_root_in_tc")?,
            order: Arc::clone(order),
            mark,
            empty: frame(MTU),
            arrived: Vec::new(),
            out: Vec::new(),
        })
    }

    /// Has the sessions' egress make packets, each of which `each` gets with its session: from the
    /// common header on (PROTOCOL.md, section 2).
    ///
    /// # Errors
    /// The system call's error.
    ///
    /// # Panics
    /// If there are more turns than `VTL_TURNS`.
    pub fn send(&mut self, turns: &[Turn], mut each: impl FnMut(u32, &[u8])) -> io::Result<Served> {
        self.order.set(turns);
        let frames: u32 = turns.iter().map(|t| t.quota).sum();
        for _ in 0..frames {
            let Some(turn) = turns.get(self.order.served().turns) else {
                break;
            };
            let ran = test_run::run(
                self.egress.as_fd(),
                &self.empty,
                From::Marked(self.mark),
                1,
                &mut self.out,
            )?;
            if ran.verdict == GO_ON
                && let Some(packet) = inside(&self.out)
            {
                each(turn.sid, packet);
            }
        }
        Ok(self.order.served())
    }

    /// Gives the programs a packet from a peer's address to one of this host.
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
        Ok(match ran.verdict {
            GO_ON => Taken::Control,
            SENT_BACK => inside(&self.out).map_or(Taken::Done, Taken::Answer),
            _ => Taken::Done,
        })
    }
}

/// What is behind the IP header of a frame, and behind UDP's if there is one.
fn inside(frame: &[u8]) -> Option<&[u8]> {
    let frame = SlicedPacket::from_ethernet(frame).ok()?;
    match frame.transport {
        Some(TransportSlice::Udp(udp)) => Some(udp.payload()),
        _ => Some(frame.net?.ip_payload_ref()?.payload),
    }
}
