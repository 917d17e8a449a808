//! A tunnel's packets: from the interface into the session, and back.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::anyhow;
use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice};
use ipnet::IpNet;
use vtl::{Agreement, Shared};

use super::FIRST_PAUSE;
use super::cut::{Cutter, Cutters};
use super::device::{Device, MAX_PACKET, MIN_MTU, Pieces};

/// Maximum number of packets that are received before they are written to the interface.
const TOGETHER: u64 = 64;

/// An interface, and the session that carries its packets while there is one.
pub(super) struct Tunnel {
    device: Device,
    /// Prefixes that the peer's packets may come from.
    sources: Vec<IpNet>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    session: Option<Arc<Shared>>,
    /// What was said last.
    said: String,
}

impl Tunnel {
    pub(super) fn new(device: Device, sources: Vec<IpNet>) -> Self {
        Self {
            device,
            sources,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the user, unless it was said last.
    pub(super) fn say(&self, words: &str) {
        let mut state = self.state();
        if state.said == words {
            return;
        }
        words.clone_into(&mut state.said);
        drop(state); // whoever reads may be slow
        eprintln!("{}: {words}", self.device.name());
    }

    /// Sends what is routed into the interface, until that is gone. Without a session it is lost.
    pub(super) fn send(&self) -> anyhow::Error {
        let mut pieces = Pieces::new();
        let mut long = vec![0; MAX_PACKET];
        loop {
            if let Err(error) = self.device.read(&mut pieces) {
                return anyhow!("the interface {} is gone: {error}", self.device.name());
            }
            let session = self.state().session.clone();
            let Some(session) = session else {
                continue;
            };
            send_all(&session, &mut pieces, &mut long);
            self.fit_mtu(&session);
        }
    }

    /// Sets the interface's MTU to what the session carries, and returns it.
    fn fit_mtu(&self, session: &Shared) -> usize {
        // At least IPv6's minimum, even if such packets then go as messages of two.
        let min = usize::from(MIN_MTU).min(session.max_message());
        let max = session.max_packet().max(min);
        let Some(mtu) = u16::try_from(max).ok().filter(|mtu| *mtu > 0) else {
            return max; // it has ended
        };
        match self.device.set_mtu(mtu) {
            Ok(true) if mtu < MIN_MTU => {
                self.say(&format!(
                    "packets carry {mtu} bytes: too few for IPv6 (--graft stream)"
                ));
            }
            Ok(_) => {}
            Err(error) => self.say(&format!("cannot set the MTU to {mtu}: {error:#}")),
        }
        max
    }

    /// Has a session carry the packets instead of the one before.
    pub(super) fn install(&self, session: &Arc<Shared>, agreement: &Agreement) {
        let mtu = self.fit_mtu(session);
        self.say(&format!(
            "carried to {} by {}, MTU {mtu}",
            agreement.peer, agreement.graft
        ));
        let former = self.state().session.replace(Arc::clone(session));
        if let Some(former) = former {
            former.abort();
        }
    }

    /// Receives the packets of a session that is installed, until it ends.
    ///
    /// # Errors
    /// Why it ended, but for another one that takes its place. `pause` is reset by the first packet.
    pub(super) fn receive(
        &self,
        session: &Arc<Shared>,
        peer: IpAddr,
        pause: &mut Duration,
    ) -> Result<(), vtl::Error> {
        let error = self.receive_from(session, peer, pause);
        // Nobody reads from it any more, so nobody may wait to send by it.
        session.abort();
        let current = |of: &mut Arc<Shared>| Arc::ptr_eq(of, session);
        match self.state().session.take_if(current) {
            Some(_) => Err(error),
            None => Ok(()),
        }
    }

    fn receive_from(&self, session: &Shared, peer: IpAddr, pause: &mut Duration) -> vtl::Error {
        let mut packets = self.device.joiner();
        let mut long = vec![0; MAX_PACKET];
        loop {
            let received = session.recv_messages(&mut long, TOGETHER, None, |packet| {
                if self.is_allowed(packet) {
                    packets.push(packet);
                }
            });
            match received {
                Ok(0) => return vtl::Error::ClosedByPeer(peer),
                Ok(_) => *pause = FIRST_PAUSE,
                Err(error) => return error,
            }
            self.device.write(&mut packets);
        }
    }

    /// Whether the peer may send a packet with this source.
    fn is_allowed(&self, packet: &[u8]) -> bool {
        let source = source(packet);
        source.is_some_and(|source| self.sources.iter().any(|of| of.contains(&source)))
    }
}

/// Sends packets as messages. The receiver reports the end of the session; after a packet that is too long the MTU is
/// set.
fn send_all(session: &Shared, pieces: &mut Pieces, long: &mut [u8]) {
    // What cannot be cut is lost.
    let cutters = pieces
        .iter_mut()
        .filter_map(|piece| Cutter::new(piece).ok());
    let mut packets = Cutters::new(cutters);
    while packets.next_len() > 0 {
        match session.send_packets(None, |room| packets.next_into(room)) {
            // Longer than one packet of the session.
            Ok(0) => {
                let length = packets.next_into(long);
                let _ = session.send_message(&long[..length], None);
            }
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// Source address of an IP packet; `None` if the bytes are no IP packet.
fn source(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(
            Ipv4HeaderSlice::from_slice(packet)
                .ok()?
                .source_addr()
                .into(),
        ),
        6 => Some(
            Ipv6HeaderSlice::from_slice(packet)
                .ok()?
                .source_addr()
                .into(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source__is_found_in_whole_headers_only() {
        let mut v4 = [0; 20];
        v4[0] = 0x45;
        v4[12..16].copy_from_slice(&[10, 9, 0, 2]);
        assert_eq!(source(&v4), Some([10, 9, 0, 2].into()));
        let mut v6 = [0; 40];
        v6[0] = 0x60;
        v6[8..24].copy_from_slice(&[0xfd; 16]);
        assert_eq!(source(&v6), Some([0xfd; 16].into()));
        for bad in [&v4[..19], &v6[..39], &[], &[0x50; 60], &[0x41; 60]] {
            assert_eq!(source(bad), None, "{bad:?}");
        }
    }
}
