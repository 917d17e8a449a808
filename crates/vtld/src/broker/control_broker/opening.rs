//! Session set-up: what both roles share. The initiator is in `initiating`, the responder in `responding`.

use std::{net::IpAddr, sync::Arc, time::Duration};

use vtl_control::What;
use vtl_core::{mtud::SessionPath, session::Lifecycle};
use vtl_proto::{
    carrier::GRAFT_PORT,
    intf,
    nego::{Established, Initiator},
    services::Services,
};
use vtl_ring::Controls;

use crate::{events::emit, identity::handshake::Tags, netmon::Watch};

use super::{
    super::{
        Granted, Owner, Reply,
        direct::DirectSocket,
        event,
        meter::Meter,
        now_ns, random_token, ring_pool,
        session::{self, Aware, Keying, Session},
    },
    ControlBroker,
};

/// Sessions from which on each gets only part of a short path's slots, to bound the total.
const CROWD: usize = 16;
/// Sessions from which on each starts with at most its share of the memory for rings, so that the maximum
/// number of sessions fits.
const MANY: usize = 256;

/// Maximum age of what connections tell of a path while they run.
const RUNNING: Duration = Duration::from_secs(10);

impl ControlBroker {
    /// Slots to use with this peer, at most `max`; `None` if the path is unknown.
    fn slots_for(&self, peer: IpAddr, max: u32) -> Option<u32> {
        let crowd = self.sessions.len() >= CROWD;
        let rtt = self.peers.rtt(peer)?;
        Some(ring_pool::slots_for(rtt, max, crowd))
    }

    /// Size in slots of the rings for a session with this peer.
    pub(super) fn wanted_slots(&self, peer: IpAddr) -> u32 {
        let max = self.config.ring_slots;
        let wanted = self.slots_for(peer, max).unwrap_or(ring_pool::FAR);
        if self.sessions.len() < MANY {
            return wanted;
        }
        let share = self.config.ring_memory / self.config.max_sessions.max(1) as u64;
        wanted.min(ring_pool::slots_within(share))
    }

    /// Slots to use of a session's rings.
    pub(super) fn usable_slots(&self, session: &Session) -> u32 {
        let max = session.rings.slots;
        self.slots_for(session.peer, max).unwrap_or(max)
    }

    /// Whether rings for [`ControlBroker::create`] are in the pool. If not, some are being made, and
    /// [`ControlBroker::resume`] follows.
    pub(super) fn rings_ready(&mut self, peer: IpAddr) -> Result<bool, String> {
        let wanted = self.wanted_slots(peer);
        self.rings.prepare(wanted).map_err(|e| e.to_string())
    }

    /// Creates a session's entry and rings. Ring size follows a known path's need; on an unknown path a small
    /// part of large rings is used. `requested`: index and token, granted if the index is free and the rings hold a
    /// peer's early data. `lifecycle` makes the session's lifecycle from its index, its token and the slots in
    /// use.
    pub(super) fn create(
        &mut self,
        peer: IpAddr,
        local: IpAddr,
        port: u16,
        requested: Option<(u32, u64)>,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Aware, String>,
        lifecycle: impl FnOnce(u32, u64, u32) -> Lifecycle<Box<Initiator>>,
    ) -> Result<(u32, u64), String> {
        if self.sessions.len() >= self.config.max_sessions {
            return Err(format!(
                "this host has {} sessions already: raise vtld --max-sessions",
                self.sessions.len()
            ));
        }
        let wanted = self.wanted_slots(peer);
        let rings = self
            .rings
            .take(wanted, now_ns())
            .ok_or("there are no rings")?;
        let known = self.peers.rtt(peer).is_some();
        let begin = if known { wanted } else { ring_pool::NEAR };
        let mut slots = begin.min(rings.slots);
        let early = rings.slots >= intf::VTL_EARLY_WINDOW;
        let requested = requested.filter(|(sid, _)| early && self.sessions.is_free(*sid));
        if requested.is_some() {
            slots = slots.max(intf::VTL_EARLY_WINDOW);
        }
        let found = requested.or_else(|| Some((self.sessions.next_free()?, random_token())));
        let Some((sid, token)) = found else {
            self.rings.put(rings);
            return Err("all sessions of this host are in use".into());
        };
        let aware = match purpose(&rings) {
            Ok(aware) => aware,
            Err(error) => {
                self.rings.put(rings);
                return Err(error);
            }
        };
        let mut value = session::entry(sid, token, rings.index, slots, local, peer);
        value.shard = self.shards.number_of(sid);
        value.aware = match rings.wake() {
            Some(_) => intf::VTL_EVENTS,
            None => intf::VTL_RELAYED,
        };
        let entry = self.plane.sessions().get(sid).expect("it was found free");
        entry.initialise(value);
        let lifecycle = lifecycle(sid, token, slots);
        if let Err(error) = self.register_with_shard(sid, &aware, !lifecycle.is_initiator()) {
            self.sessions.reserve(sid);
            self.shards.forget(sid);
            self.rings.put(rings);
            return Err(error);
        }
        entry.set_state(intf::VTL_OPENING);
        let caller = self.open_direct(sid);
        let session = Session {
            peer,
            local,
            is_beside: false,
            port,
            token,
            succeeds: None,
            successor: None,
            required: Services::NONE,
            asked: Services::NONE,
            cuts: false,
            cut_by: None,
            preferred: Vec::new(),
            exit: None,
            port_there: intf::VTL_UDP_PORT as u16,
            keying: Keying::Clear,
            tags: None,
            expected: None,
            answered: None,
            lifecycle,
            rings,
            slots,
            long_messages: false,
            tunnel: None,
            path: SessionPath::default(),
            aware,
            caller,
            meter: Meter::new(now_ns()),
            watch: Watch::default(),
            bounds: None,
        };
        self.sessions.insert(sid, session);
        Ok((sid, token))
    }

    /// Registers a new session with its shard. `report`: the first packet is reported, from now on, since early
    /// data may arrive before the session is complete.
    fn register_with_shard(&self, sid: u32, aware: &Aware, report: bool) -> Result<(), String> {
        if let (Some(kick), Some(wake)) = (&aware.kick, &aware.wake) {
            let opened = (self.shards).open(sid, &aware.controls, kick, wake, report);
            opened.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Opens the socket for egress without the pump, if supported.
    fn open_direct(&self, sid: u32) -> Option<DirectSocket> {
        let socket = self.plane.has_direct().then(DirectSocket::open)?;
        let registered = socket.and_then(|socket| {
            socket.register(&self.callers, sid)?;
            Ok(socket)
        });
        registered
            .inspect_err(|error| tracing::debug!(%error, sid, "session: no direct egress: all packets go by the pump"))
            .ok()
    }

    /// The minimum round-trip time of a session's path, as connections that run know it.
    pub(super) fn known_rtt(&self, session: &Session) -> Option<Duration> {
        let metrics = self.monitor.recent(session.peer, RUNNING)?;
        metrics.min_rtt.filter(|_| !session.is_beside)
    }

    /// Opens the session for the kernel's programs.
    pub(super) fn establish(&mut self, sid: u32, established: &Established) -> Result<(), String> {
        let session = self.sessions.get(sid).ok_or("the session has gone")?;
        if let Some(rtt) = established.rtt.filter(|_| !session.is_beside) {
            self.peers.note_rtt(session.peer, rtt);
        }
        let known = self.known_rtt(session);
        let slots = self.usable_slots(session);
        let session = self.sessions.get_mut(sid).expect("still there");
        if session.lifecycle.is_initiator() {
            session.slots = session.slots.max(slots);
        }
        session.long_messages = established.long_messages;
        let entry = self.plane.sessions().get(sid).expect("it has an entry");
        let slots = session.slots;
        entry.complete(|s| {
            session::fill(s, established);
            s.slots = slots;
        });
        if let Some(known) = known {
            entry.suppose_min_rtt(known);
        }
        entry.set_state(intf::VTL_OPEN);
        self.begin_path(sid, established.gid, established.max_payload);
        self.shards.due(sid);
        Ok(())
    }

    /// Replaces the token in a session's headers by tags from now on.
    pub(super) fn use_tags(&mut self, sid: u32, tags: &Tags) {
        if let Some(session) = self.sessions.get_mut(sid) {
            session.tags = Some(tags.clone());
        }
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.complete(|s| {
                (s.tag_out, s.tag_in) = ((&tags.send).into(), (&tags.receive).into());
                s.keyed = 1;
            });
        }
    }

    /// Links a session with its predecessor `of`.
    pub(super) fn succeed(&mut self, sid: u32, of: Option<u32>) {
        let Some(before) = of.and_then(|of| self.sessions.get_mut(of)) else {
            return;
        };
        before.successor = Some(sid);
        if let Some(session) = self.sessions.get_mut(sid) {
            session.succeeds = of;
        }
    }

    /// Grants a session to its application, once; closes the daemon's copies of the descriptors.
    pub(super) fn grant(&mut self, sid: u32) -> Result<Granted, String> {
        let entry = self
            .plane
            .sessions()
            .get(sid)
            .ok_or("the session has gone")?
            .snapshot();
        let session = self.sessions.get_mut(sid).ok_or("the session has gone")?;
        if session.awaits_keys() {
            return Err("the session has no keys yet".into());
        }
        let graft = self.plane.grafts().find(|g| g.gid == entry.gid);
        let (graft, services) =
            graft.map_or_else(Default::default, |g| (g.name.clone(), g.services));
        let granted = session::grant(sid, session, &entry, graft, services)
            .ok_or_else(|| "out of file descriptors".to_owned())?;
        session.rings.release();
        session.caller.iter_mut().for_each(DirectSocket::release);
        let aware = &mut session.aware;
        aware.granted = true;
        (aware.kick, aware.wake) = (None, None);
        if session.port != GRAFT_PORT {
            emit(What::SessionUp {
                sid,
                peer: session.peer,
                port: session.port,
                graft: granted.grant.graft.clone().into(),
            });
        }
        self.shards.granted(sid);
        Ok(granted)
    }
}

/// Creates the daemon's side of an aware application's session.
pub(super) fn aware(
    owner: Owner,
    rings: &vtl_bpf::rings::RingSet,
    reply: Option<Reply<Granted>>,
) -> Result<Aware, String> {
    let event = || event().map_err(|e| format!("an eventfd: {e}"));
    let map = |e: std::io::Error| format!("mapping a ring: {e}");
    Ok(Aware {
        owner,
        reply,
        kick: Some(event()?),
        wake: Some(Arc::new(event()?)),
        granted: false,
        controls: Arc::new(Controls::map(rings.transmit(), rings.receive()).map_err(map)?),
    })
}
