//! State of one session in user space.

use std::{
    net::IpAddr,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use nix::sys::eventfd::EventFd;
use vtl_bpf::{rings::RingSet, sessions};
use vtl_control::Grant;
use vtl_core::{
    mtud::SessionPath,
    session::{Lifecycle, Observation},
};
use vtl_pool::{key::PublicKey, object::Parameter};
use vtl_proto::{
    intf::{self, vtl_session, vtl_tx},
    ip,
    nego::{Established, Initiator},
    seal::overhead,
    services::{Requirements, Services},
    wire,
};
use vtl_ring::Controls;

use super::{
    Granted, Owner, Reply, bounds::SessionBounds, direct::DirectSocket, meter::Meter, peers::Exit,
};
use crate::{
    identity::handshake::{self, Agreed, Tags},
    netmon::Watch,
};

/// The session's application, which may be this daemon's own thread of flows.
pub(super) struct Aware {
    pub(super) owner: Owner,
    /// Initiator: where to send the session once open.
    pub(super) reply: Option<Reply<Granted>>,
    /// Eventfd from the application; dropped once granted: epoll watches the application's copy.
    pub(super) kick: Option<EventFd>,
    /// Eventfd to the application; dropped once granted.
    pub(super) wake: Option<Arc<EventFd>>,
    /// The session has been handed to the application.
    pub(super) granted: bool,
    pub(super) controls: Arc<Controls>,
}

/// The responder's answer to NEGO.
#[derive(Clone, Copy)]
pub(super) struct Answered {
    pub(super) at_ns: u64,
    /// The peer may have sent early data, so its first packet gives no round-trip sample.
    pub(super) early: bool,
}

/// State of a session's crypto handshake.
#[derive(Default)]
pub(super) enum Keying {
    /// No keys.
    #[default]
    Clear,
    /// No keys: the peer has not answered the handshake that this host asked for.
    Refused,
    /// Initiator: awaiting the answer.
    Asked(Box<handshake::Initiator>),
    /// Responder: awaiting the last flight; the application does not have the session yet.
    Answered(Box<handshake::Responder>),
    /// Finished: keys, and the peer's identity.
    Agreed(Box<Agreed>),
}

pub(super) struct Session {
    pub(super) peer: IpAddr,
    pub(super) local: IpAddr,
    /// Initiator: from an address that was asked for, whatever routes say: another path than other connections have.
    pub(super) is_beside: bool,
    pub(super) port: u16,
    pub(super) token: u64,
    /// The session's predecessor, and its successor, also while that is being opened.
    pub(super) succeeds: Option<u32>,
    pub(super) successor: Option<u32>,
    /// Services that the local application requires: a successor opened by the peer must provide them.
    pub(super) required: Services,
    /// Services that the initiator has required, as NEGO says.
    pub(super) asked: Services,
    /// The succession that this session is the end of is stateless: the predecessor is cut.
    pub(super) cuts: bool,
    /// The successor by which a stateless switch has ended the session.
    pub(super) cut_by: Option<u32>,
    /// Initiator: the gids to offer, in order of preference.
    pub(super) preferred: Vec<u16>,
    /// Link-layer header, interface and port for early data.
    pub(super) exit: Option<Exit>,
    /// Initiator: destination UDP port of NEGO.
    pub(super) port_there: u16,
    pub(super) keying: Keying,
    /// Keys of the tags in packets' headers, which replace the token.
    pub(super) tags: Option<Tags>,
    /// The key that the peer must have: that of the predecessor's peer.
    pub(super) expected: Option<PublicKey>,
    /// Responder: until the peer's first packet, for a round-trip sample.
    pub(super) answered: Option<Answered>,
    pub(super) lifecycle: Lifecycle<Box<Initiator>>,
    pub(super) rings: RingSet,
    /// Slots in use in each ring, as many as the path needs.
    pub(super) slots: u32,
    /// Whether the peer supports messages of several packets, and fragments of packets.
    pub(super) long_messages: bool,
    /// The TCP connection of its packets during a detour.
    pub(super) tunnel: Option<u32>,
    pub(super) path: SessionPath,
    pub(super) aware: Aware,
    /// The socket through which the application runs egress for single packets.
    pub(super) caller: Option<DirectSocket>,
    /// Recent measurements of the path.
    pub(super) meter: Meter,
    /// What the monitor of paths has read of it.
    pub(super) watch: Watch,
    /// Initiator: the bounds that its application has stated.
    pub(super) bounds: Option<Box<SessionBounds>>,
}

impl Session {
    pub(super) fn is_open(&self) -> bool {
        self.lifecycle.is_open()
    }

    /// Whether the session may not be used before the last flight of the crypto handshake has authenticated the
    /// peer.
    pub(super) fn awaits_keys(&self) -> bool {
        matches!(self.keying, Keying::Answered(_))
    }

    /// Checks a packet, or its header alone, by its tag or its token; replaces a valid tag by the token.
    pub(super) fn is_from_peer(&self, packet: &mut [u8]) -> bool {
        match &self.tags {
            Some(tags) => tags.receive.take(packet, self.token),
            None => wire::token(packet) == Some(self.token),
        }
    }

    /// Whether a peer with that key may have the session: a successor keeps its peer.
    pub(super) fn expects(&self, key: PublicKey) -> bool {
        self.expected.is_none_or(|expected| expected == key)
    }

    /// The keys and the peer's identity, once the crypto handshake has finished.
    pub(super) fn agreed(&self) -> Option<&Agreed> {
        match &self.keying {
            Keying::Agreed(agreed) => Some(agreed),
            _ => None,
        }
    }

    /// The lifecycle's view of the session's entry in the kernel.
    pub(super) fn observe(&self, entry: &sessions::Session<'_>) -> Observation {
        Observation {
            heard: entry.heard(),
            timeouts: entry.timeouts(),
            unacknowledged: entry.unacknowledged(),
            located: entry.ifindex() != 0 && !self.awaits_keys(),
            rerouted: self.path.is_rerouted(entry.encapsulation()),
        }
    }

    /// Number of packets ever written to the transmit ring.
    pub(super) fn published(&self) -> u64 {
        self.aware.controls.published()
    }

    /// Sets the payload that the path takes, for writers of packets.
    pub(super) fn set_path(&self, max: u16) {
        self.aware.controls.set_path(max);
    }
}

/// A new session's entry for the kernel, without the peer's parameters.
pub(super) fn entry(
    sid: u32,
    token: u64,
    ring: u32,
    slots: u32,
    local: IpAddr,
    peer: IpAddr,
) -> vtl_session {
    vtl_session {
        sid,
        token,
        ring,
        slots,
        ip_version: match (local, peer) {
            (IpAddr::V4(_), IpAddr::V4(_)) => 4,
            _ => 6,
        },
        headers: ip::template(local, peer),
        tx: sender(),
        ..Default::default()
    }
}

/// Initial state of a session's sender.
pub(super) fn sender() -> vtl_tx {
    vtl_tx {
        // A window for readers before egress sets the initial one.
        cwnd: 32,
        reorder: intf::VTL_REORDER,
        xid: 1,
        ..Default::default()
    }
}

/// An initiator's request for a session.
#[derive(Clone, Debug, Default)]
pub struct SessionSpec {
    /// Services that the graft must or should provide, and bounds.
    pub wanted: Requirements,
    /// Name of the only graft to offer.
    pub graft: Option<String>,
    /// Parameters of that graft, for both directions; defaults for the others.
    pub params: Vec<(String, u32)>,
    /// Of a successor: the session before may be cut.
    pub stateless: bool,
    /// The local address; `None`: the route's.
    pub(crate) from: Option<IpAddr>,
}

impl From<Services> for SessionSpec {
    fn from(services: Services) -> Self {
        let wanted = Requirements {
            services,
            ..Default::default()
        };
        Self {
            wanted,
            ..Default::default()
        }
    }
}

impl SessionSpec {
    /// Parameters of a graft as requested, by name or derived from the bounds: index and value. `rtt`: to the
    /// peer, if known.
    pub(super) fn asked(&self, known: &[Parameter], rtt: Option<Duration>) -> Vec<(u8, u32)> {
        let qos = &self.wanted.qos;
        let rtt_ms = rtt.unwrap_or(INITIAL_RTT).as_secs_f64() * 1e3;
        let bound = |p: &Parameter| match p.name.as_str() {
            // Rounded down, so that the bound holds.
            "max-loss" => qos.max_loss_pct.map(|pct| pct * 10.0),
            // A retransmission at that age takes half a round trip.
            "lifetime" => {
                let age = |ms| (f64::from(ms) - rtt_ms / 2.0).max(1.0);
                qos.max_delay_ms.map(age)
            }
            // Twice the bandwidth-delay product: a lost packet keeps its place for another round trip.
            "window" => {
                let packets = |mbit| 2.0 * mbit * 1e3 / 8.0 * rtt_ms / f64::from(MIN_PAYLOAD);
                let window = |mbit| f64::max(packets(mbit) + 1.0, p.default.into());
                qos.min_throughput_mbit.map(window)
            }
            _ => None,
        };
        let asked = known.iter().map(|p| {
            let named = self.params.iter().find(|(name, _)| *name == p.name);
            let named = named.map(|(_, value)| *value);
            named.or_else(|| Some((bound(p)? as u32).clamp(p.min, p.max)))
        });
        (0..)
            .zip(asked)
            .filter_map(|(i, v)| Some((i, v?)))
            .collect()
    }

    /// Checks that the graft has these parameters, and their ranges.
    pub(super) fn check(&self, known: &[Parameter]) -> Result<(), String> {
        for (name, value) in &self.params {
            let p = known.iter().find(|p| p.name == *name);
            let p = p.ok_or_else(|| format!("the graft has no parameter \"{name}\""))?;
            if !(p.min..=p.max).contains(value) {
                return Err(format!(
                    "{name} {value} is out of range: {} to {} {}",
                    p.min, p.max, p.unit
                ));
            }
        }
        Ok(())
    }
}

/// The round trip assumed before it is known.
pub(super) const INITIAL_RTT: Duration = Duration::from_millis(100);
/// Minimum payload of a packet on nearly all paths, bytes.
const MIN_PAYLOAD: u32 = 1200;

/// Fills in the result of the negotiation.
pub(super) fn fill(s: &mut vtl_session, e: &Established) {
    s.peer_sid = e.peer_sid;
    s.peer_token = e.peer_token;
    s.gid = e.gid;
    s.param = e.params;
    s.max_payload = e.max_payload;
    s.path = e.max_payload;
    s.tx.limit = e.peer_slots.into();
    if let Some(rtt) = e.rtt {
        (s.tx.srtt_us, s.tx.rttvar_us) = sessions::supposed_rtt(rtt);
    }
}

/// Services that messages of several packets need.
pub(crate) const WHOLE: Services = Services::RELIABLE.union(Services::ORDERED);

/// Maximum message length, bytes: messages span packets only if none is missing or out of order.
pub(super) fn max_message(long_messages: bool, max_payload: u16, services: Services) -> u32 {
    if long_messages && services.contains(WHOLE) {
        intf::VTL_MAX_MESSAGE
    } else {
        max_payload.into()
    }
}

/// Assembles an aware application's grant and descriptors.
pub(super) fn grant(
    sid: u32,
    session: &Session,
    s: &vtl_session,
    graft: String,
    services: Services,
) -> Option<Granted> {
    let aware = &session.aware;
    let agreed = session.agreed();
    let sealing = match agreed {
        Some(_) => overhead(!services.contains(WHOLE)) as u16,
        None => 0,
    };
    let payload = s.max_payload - sealing;
    let services = match agreed {
        Some(_) => services | Services::ENCRYPTION,
        None => services,
    };
    let (Some(kick), Some(wake)) = (&aware.kick, &aware.wake) else {
        return None;
    };
    let own = |fd: BorrowedFd<'_>| -> Option<OwnedFd> { fd.try_clone_to_owned().ok() };
    use std::os::fd::AsFd;
    Some(Granted {
        grant: Grant {
            sid,
            key: session.token,
            slots: session.slots,
            max_payload: s.max_payload,
            max_message: max_message(session.long_messages, payload, services),
            graft,
            gid: s.gid,
            services,
            peer: session.peer,
            events: session.rings.wake().is_some(),
            keys: agreed.map(|agreed| agreed.keys.clone()),
        },
        local: session.local,
        rings: [
            own(session.rings.transmit())?,
            own(session.rings.receive())?,
            own(kick.as_fd())?,
            own(wake.as_fd())?,
        ],
        events: match session.rings.wake() {
            Some(events) => Some(own(events)?),
            None => None,
        },
        caller: session.caller.as_ref().and_then(DirectSocket::descriptor),
        shown: agreed.map(|agreed| agreed.peer),
        is_clear: matches!(session.keying, Keying::Refused),
    })
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn asked__bounds_become_parameters() {
        let parameter = |name: &str, default, min, max| Parameter {
            name: name.into(),
            unit: String::new(),
            default,
            min,
            max,
        };
        let known = [
            parameter("window", 16, 1, 4000),
            parameter("max-loss", 100, 0, 1000),
            parameter("loss-window", 100, 1, 10_000),
            parameter("lifetime", 0, 0, 60_000),
        ];
        let near = Some(Duration::from_millis(20));
        let mut request = SessionSpec::default();
        assert_eq!(request.asked(&known, near), []);
        request.wanted.qos.max_loss_pct = Some(2.59);
        assert_eq!(request.asked(&known, near), [(1, 25)]);
        request.wanted.qos.max_delay_ms = Some(150);
        assert_eq!(request.asked(&known, near), [(1, 25), (3, 140)]);
        assert_eq!(request.asked(&known, None), [(1, 25), (3, 100)]);
        request.wanted.qos.max_delay_ms = Some(3);
        assert_eq!(request.asked(&known, near)[1], (3, 1), "sent once, then");
        // 10 Mbit/s of 20 ms are 21 packets of 1,200 bytes.
        request.wanted.qos.min_throughput_mbit = Some(10.0);
        assert_eq!(request.asked(&known, near)[0], (0, 42));
        request.wanted.qos.min_throughput_mbit = Some(0.1);
        assert_eq!(
            request.asked(&known, near)[0],
            (0, 16),
            "never less than usual"
        );
        request.wanted.qos.min_throughput_mbit = Some(1e9);
        assert_eq!(request.asked(&known, near)[0], (0, 4000));
        request.params = vec![("window".into(), 7)];
        assert_eq!(request.asked(&known, near)[0], (0, 7), "by name");
    }
}
