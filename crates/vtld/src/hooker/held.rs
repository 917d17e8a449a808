//! Held connects: connects that wait for an answer, captured ones of applications, and at a gateway forwarded ones.
//!
//! The table of their SYNs is keyed by both ends: the application's address and vtld's listener on the loopback; at a
//! gateway, client and server. Accepting injects the SYN to vtld's listener; refusing answers it in the destination's
//! name.

use std::{
    collections::{HashMap, hash_map},
    fmt, io, mem,
    net::{SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Shared,
    abi::{self, vtl_syn},
    carrier::{CarrierOptions, CarrierPolicy},
    error::ConnectError,
    executable::Executable,
    gateway,
    packet::SynPacket,
    sock,
};
use crate::{network::Network, panics};
use vtl_core::{profile::Profile, reconfigure::Bounds};
use vtl_proto::{
    carrier::Kind,
    frame::{CONTROL_CONNECTION, FlowName},
};

/// Timeout from the injected SYN to the accepted socket. On the loopback it takes microseconds,
/// unless the application has closed its socket.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long SYN retransmissions of a timed-out connect are swallowed: longer than TCP's default
/// retries.
const SILENCE: Duration = Duration::from_secs(130);
/// The same after a connect that succeeded: a SYN retransmission may be in the ring still when the
/// listener has the connection.
const STRAGGLING: Duration = Duration::from_secs(1);
/// At a gateway, of connects from beyond the hop: maximum number from one network, by hosts without an association,
const MAX_OF_NETWORK: usize = 128;
/// and by hosts with one,
const MAX_OF_KNOWN_NETWORK: usize = 768;
/// and of control connections. SYNs beyond are lost, and come again.
const MAX_CONTROLS: usize = 128;
/// Age of a connect that the gateway's programs hold and vtld does not know: a former daemon's, or a lost message.
const STALE: Duration = Duration::from_secs(60);

/// Callback of an accepted connect. Runs on the Hooker's thread: must not block.
pub(super) type Accepted = Box<dyn FnOnce(io::Result<TcpStream>) + Send>;

enum State {
    /// Unanswered: its [`HeldConnect`] is alive.
    Open,
    /// Accepted: the SYN was injected to the listener.
    Injected {
        accepted: Accepted,
        deadline: Instant,
    },
    /// Done, answered or timed out. SYN retransmissions are swallowed.
    Over { until: Instant },
}

/// Ends of a held connect: those of its SYN.
type Ends = [SocketAddr; 2];

struct Entry {
    id: u64,
    cookie: u64,
    syn: SynPacket,
    forwarded: Option<Forwarded>,
    state: State,
    /// When the latest SYN came, and the longest time between two.
    heard: Instant,
    gap: Duration,
}

impl Entry {
    /// Notes that the SYN has come again.
    fn note_repeated(&mut self, now: Instant) {
        self.gap = self.gap.max(now.saturating_duration_since(self.heard));
        self.heard = now;
    }

    /// Whether its SYN would have come again by now: TCP repeats it after a second, and then after twice as long at most
    /// (RFC 6298, section 5.5).
    fn is_given_up(&self, now: Instant) -> bool {
        let longest = 2 * self.gap.max(Duration::from_secs(1)) + Duration::from_secs(1);
        matches!(self.state, State::Open) && now.saturating_duration_since(self.heard) > longest
    }

    fn is_pending(&self) -> bool {
        !matches!(self.state, State::Over { .. })
    }

    /// The name of a connect that waits, and comes from beyond a gateway's hop.
    fn waits_outside(&self) -> Option<FlowName> {
        match self.forwarded {
            Some(Forwarded::Outside(name)) if self.is_pending() => Some(name),
            _ => None,
        }
    }
}

/// Held connects by their ends, and how many wait that come from beyond a gateway's hop.
#[derive(Default)]
struct Table {
    entries: HashMap<Ends, Entry>,
    last_id: u64,
    /// Of each network; none is 0.
    of_network: HashMap<Network, usize>,
    controls: usize,
}

impl Table {
    /// Enters a new connect. Returns its id, and what stood in its place.
    fn insert(&mut self, ends: Ends, mut entry: Entry) -> (u64, Option<Entry>) {
        self.last_id += 1;
        entry.id = self.last_id;
        let former = self.remove(&ends);
        if let Some(name) = entry.waits_outside() {
            let network = Network::of(ends[0].ip());
            *self.of_network.entry(network).or_default() += 1;
            self.controls += usize::from(name.number == CONTROL_CONNECTION);
        }
        self.entries.insert(ends, entry);
        (self.last_id, former)
    }

    fn remove(&mut self, ends: &Ends) -> Option<Entry> {
        let entry = self.entries.remove(ends)?;
        self.left(ends, entry.waits_outside());
        Some(entry)
    }

    /// Marks a connect as done. Returns its former state.
    fn end(&mut self, ends: &Ends, swallows: Duration) -> Option<State> {
        let entry = self.entries.get_mut(ends)?;
        let waited = entry.waits_outside();
        let until = Instant::now() + swallows;
        let former = mem::replace(&mut entry.state, State::Over { until });
        self.left(ends, waited);
        Some(former)
    }

    /// Counts a connect no more that waited.
    fn left(&mut self, ends: &Ends, waited: Option<FlowName>) {
        let Some(name) = waited else {
            return;
        };
        self.controls -= usize::from(name.number == CONTROL_CONNECTION);
        if let hash_map::Entry::Occupied(mut count) =
            self.of_network.entry(Network::of(ends[0].ip()))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Whether another connect between these ends may wait at a gateway. `is_known`: of a host with an association; all
    /// the same its address may be anybody's.
    fn admits(&self, ends: &Ends, forwarded: Forwarded, is_known: bool) -> bool {
        let Forwarded::Outside(name) = forwarded else {
            return true;
        };
        let waits = |entry: &Entry| entry.waits_outside().is_some();
        if self.entries.get(ends).is_some_and(waits) {
            return true;
        }
        let max = match is_known {
            true => MAX_OF_KNOWN_NETWORK,
            false => MAX_OF_NETWORK,
        };
        let of_network = self.of_network.get(&Network::of(ends[0].ip()));
        of_network.is_none_or(|count| *count < max)
            && (name.number != CONTROL_CONNECTION || self.controls < MAX_CONTROLS)
    }
}

/// Raw sockets that send whole packets, of both families.
pub(super) struct Raw {
    v4: OwnedFd,
    /// `None`: the host has no IPv6.
    v6: Option<OwnedFd>,
}

impl Raw {
    /// Opens them, with this SO_MARK.
    pub(super) fn open(mark: u32) -> io::Result<Self> {
        Ok(Self {
            v4: sock::raw(true, mark)?,
            v6: sock::raw(false, mark).ok(),
        })
    }

    pub(super) fn v4(&self) -> &OwnedFd {
        &self.v4
    }

    pub(super) fn has_v6(&self) -> bool {
        self.v6.is_some()
    }

    fn send(&self, packet: &[u8], to: SocketAddr) {
        let raw = if to.is_ipv4() {
            Some(&self.v4)
        } else {
            self.v6.as_ref()
        };
        // A lost packet is made up for by a SYN retransmission.
        if let Some(Err(error)) = raw.map(|raw| sock::send_to(raw, packet, to.ip())) {
            tracing::debug!(%error, %to, "hooker: cannot send a held SYN or its answer");
        }
    }
}

/// All held connects, and the raw sockets to answer them.
pub(super) struct Flows {
    /// For SYNs to vtld's listeners.
    inject: Raw,
    /// For answers to who connects; `None`: by `inject`.
    answer: Option<Raw>,
    /// What the gateway's programs hold.
    programs: Option<gateway::Table>,
    table: Mutex<Table>,
    /// Handing over: another daemon will answer the open connects.
    is_leaving: AtomicBool,
}

impl Flows {
    /// For captured connects, on the loopback.
    pub(super) fn captured(raw: Raw) -> Self {
        Self::new(raw, None, None)
    }

    /// For forwarded connects.
    pub(super) fn forwarded(inject: Raw, answer: Raw, programs: gateway::Table) -> Self {
        Self::new(inject, Some(answer), Some(programs))
    }

    fn new(inject: Raw, answer: Option<Raw>, programs: Option<gateway::Table>) -> Self {
        Self {
            inject,
            answer,
            programs,
            table: Mutex::default(),
            is_leaving: AtomicBool::new(false),
        }
    }

    /// Leaves open connects to another daemon, which gets their SYN retransmissions.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether an accepted connect has not reached the listener yet.
    pub(super) fn has_injected(&self) -> bool {
        let injected = |entry: &Entry| matches!(entry.state, State::Injected { .. });
        self.table().entries.values().any(injected)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, packet: &[u8], to: SocketAddr) {
        self.answer
            .as_ref()
            .unwrap_or(&self.inject)
            .send(packet, to);
    }

    /// Has a gateway's programs forget a connect.
    pub(super) fn release(&self, ends: Ends) {
        if let Some(programs) = &self.programs {
            programs.release(ends);
        }
    }

    /// Handles a SYN of a captured connect, from the ring. `Some` for a new connect; retransmissions are handled here.
    pub(super) fn hold(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        event: &vtl_syn,
    ) -> Option<HeldConnect> {
        let len = (event.len as usize).min(event.packet.len());
        let syn = SynPacket::parse(&event.packet[..len])?;
        let (app, dest) = (syn.source(), abi::socket_addr(&event.dest));
        if dest.port() == 0 {
            // Not a captured connect: the port is closed.
            if let Some(reset) = syn.refusal(ConnectError::Refused) {
                self.answer(&reset, app);
            }
            return None;
        }
        let policy = match event.policy {
            0 => CarrierPolicy::default(),
            policy => shared.hooks().policy(policy),
        };
        let ends = [app, syn.target()];
        let id = self.enter(syn, event.cookie, None)?;
        let exe = Executable::of(&event.exe);
        let expected = shared.expect(&policy, dest, exe.as_ref());
        Some(HeldConnect(Box::new(Held {
            shared: Arc::clone(shared),
            flows: Arc::clone(self),
            ends,
            id,
            cookie: event.cookie,
            mark: event.mark,
            dest,
            src: app,
            policy,
            exe,
            expected,
            forwarded: None,
            via: None,
            answered: false,
        })))
    }

    /// Handles a SYN of a forwarded connect. `Some` for a new connect; retransmissions are handled here.
    pub(super) fn hold_forwarded(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        syn: SynPacket,
        via: gateway::Via,
        forwarded: Forwarded,
    ) -> Option<HeldConnect> {
        let ends @ [src, dest] = [syn.source(), syn.target()];
        let is_known = shared.broker.serves(src.ip()) || shared.broker.knows(src.ip());
        if !self.table().admits(&ends, forwarded, is_known) {
            self.release(ends);
            return None;
        }
        let id = self.enter(syn, 0, Some(forwarded))?;
        if let Some(programs) = &self.programs {
            // Whatever was released while its SYN was on the way here: without, its injected SYN finds no listener, and
            // the kernel refuses it.
            programs.hold(ends, forwarded);
        }
        Some(HeldConnect(Box::new(Held {
            shared: Arc::clone(shared),
            flows: Arc::clone(self),
            ends,
            id,
            cookie: 0,
            mark: 0,
            dest,
            src,
            policy: via.policy.clone(),
            exe: None,
            expected: shared.expect(&via.policy, dest, None),
            forwarded: Some(forwarded),
            via: Some(via),
            answered: false,
        })))
    }

    /// Enters a SYN; its id if it is a new one.
    fn enter(&self, syn: SynPacket, cookie: u64, forwarded: Option<Forwarded>) -> Option<u64> {
        let ends = [syn.source(), syn.target()];
        let mut table = self.table();
        let mut former = table.entries.get_mut(&ends);
        if let Some(entry) = &mut former
            && entry.cookie == cookie
            && entry.syn.sequence() == syn.sequence()
        {
            match entry.state {
                State::Open => entry.note_repeated(Instant::now()),
                State::Injected { .. } => self.inject.send(syn.bytes(), syn.target()),
                // A late copy, which the programs hold once more.
                State::Over { .. } => self.release(ends),
            }
            return None;
        }
        // Only one connect at a time between the same ends: anybody can send more SYNs, with other sequence numbers.
        if forwarded.is_some() && former.is_some_and(|entry| entry.is_pending()) {
            return None;
        }
        let entry = Entry {
            id: 0,
            cookie,
            syn,
            forwarded,
            state: State::Open,
            heard: Instant::now(),
            gap: Duration::ZERO,
        };
        let (id, former) = table.insert(ends, entry);
        drop(table);
        if let Some(Entry {
            state: State::Injected { accepted, .. },
            ..
        }) = former
        {
            accepted(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Some(id)
    }

    /// Completes an accepted connect: the listener got the connection with these ends.
    pub(super) fn accepted(&self, ends: Ends, stream: TcpStream) {
        let former = {
            let mut table = self.table();
            let injected = |entry: &Entry| matches!(entry.state, State::Injected { .. });
            let is_injected = table.entries.get(&ends).is_some_and(injected);
            is_injected.then(|| table.end(&ends, STRAGGLING)).flatten()
        };
        self.release(ends);
        // Without an entry the stream is dropped, which resets it.
        if let Some(State::Injected { accepted, .. }) = former {
            accepted(Ok(stream));
        }
    }

    /// Removes entries that have timed out. Call about once a second.
    pub(super) fn expire(&self, now: Instant) {
        let expired: Vec<(Ends, Entry)> = {
            let mut table = self.table();
            let old = |entry: &Entry| match &entry.state {
                State::Open => false,
                State::Injected {
                    deadline: until, ..
                }
                | State::Over { until } => *until <= now,
            };
            let all = table.entries.iter().filter(|(_, entry)| old(entry));
            let ends: Vec<Ends> = all.map(|(ends, _)| *ends).collect();
            let remove = |ends| Some((ends, table.remove(&ends)?));
            ends.into_iter().filter_map(remove).collect()
        };
        if let Some(programs) = &self.programs {
            for ends in programs.stale(STALE) {
                if !self.table().entries.contains_key(&ends) {
                    programs.release(ends);
                }
            }
        }
        for (ends, entry) in expired {
            if let State::Injected { accepted, .. } = entry.state {
                self.release(ends);
                accepted(Err(io::ErrorKind::TimedOut.into()));
            }
        }
    }
}

/// What is special of a connect that is forwarded by this host, which is a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forwarded {
    /// To a host beyond the hop, without VTL's option.
    Inside,
    /// From beyond the hop, with this name in VTL's option.
    Outside(FlowName),
}

/// An application's connect that waits for its outcome. Dropping it refuses the connect; a forwarded one is left to its
/// next SYN.
pub struct HeldConnect(Box<Held>);

struct Held {
    shared: Arc<Shared>,
    flows: Arc<Flows>,
    ends: Ends,
    id: u64,
    cookie: u64,
    mark: u32,
    dest: SocketAddr,
    src: SocketAddr,
    policy: CarrierPolicy,
    exe: Option<Executable>,
    expected: (Option<Profile>, Option<u8>),
    forwarded: Option<Forwarded>,
    via: Option<gateway::Via>,
    answered: bool,
}

impl fmt::Debug for HeldConnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldConnect")
            .field("dest", &self.0.dest)
            .field("src", &self.0.src)
            .finish()
    }
}

impl HeldConnect {
    /// The destination of the application's connect.
    pub fn dest(&self) -> SocketAddr {
        self.0.dest
    }

    /// The address that the application's getsockname shows: this host's end of the connection to the destination.
    /// The port is the application's own, if it is free there; an explicitly bound port is shown in any case.
    pub fn src(&self) -> SocketAddr {
        self.0.src
    }

    /// Session parameters from the application's hook or rule, if any.
    pub fn options(&self) -> Option<&Arc<CarrierOptions>> {
        self.0.policy.options.as_ref()
    }

    /// The rule that decided, if it has conditions on the path.
    pub fn rule(&self) -> Option<&Arc<str>> {
        self.0.policy.rule.as_ref()
    }

    /// Whether its hook or rule marks the connection loss-tolerant.
    pub fn is_tolerant(&self) -> bool {
        self.0.policy.tolerant
    }

    /// Whether the carrier is chosen by path and application.
    pub fn is_auto(&self) -> bool {
        self.0.policy.auto
    }

    /// What the choice is to keep.
    pub fn bounds(&self) -> Bounds {
        self.0.policy.bounds
    }

    /// The profile of the application to choose by, as far as it was known when the connect came, and the carrier that it
    /// explores.
    pub fn expected(&self) -> (Option<Profile>, Option<u8>) {
        self.0.expected
    }

    /// What the application executes, if that is known.
    pub fn executable(&self) -> Option<&Executable> {
        self.0.exe.as_ref()
    }

    /// The desired kind of carrier.
    pub fn kind(&self) -> Kind {
        self.0.policy.kind.unwrap_or(Kind::Graft)
    }

    /// Whether a carrier is required: no fallback to a TCP connection with the destination.
    pub fn requires_carrier(&self) -> bool {
        self.0.policy.required
    }

    /// Whether the carrier must be encrypted, too.
    pub fn requires_encryption(&self) -> bool {
        self.0.policy.encrypted
    }

    /// Whether the destination is this host, as far as the local address is known.
    pub(super) fn is_own(&self) -> bool {
        self.0.src.ip() == self.0.dest.ip()
    }

    /// SO_MARK of the application's socket.
    pub(super) fn mark(&self) -> u32 {
        self.0.mark
    }

    /// The address that the application bound its socket to before the connect.
    pub(super) fn bound(&self) -> Option<SocketAddr> {
        let [app, _] = self.0.ends;
        (!app.ip().is_loopback()).then_some(app)
    }

    /// What is special of it if this host forwards it.
    pub(super) fn forwarded(&self) -> Option<Forwarded> {
        self.0.forwarded
    }

    /// Whether this host forwards it, as a gateway: the source is not an address of this host.
    pub fn is_forwarded(&self) -> bool {
        self.0.forwarded.is_some()
    }

    /// Whether it comes from beyond one hop of this gateway, and leaves by another that is to carry it, too.
    pub(super) fn is_onward(&self) -> bool {
        self.0.via.as_ref().is_some_and(|via| via.is_onward)
    }

    /// Has it leave by plain TCP.
    pub(super) fn leave_plain(&mut self) {
        if let Some(via) = &mut self.0.via {
            via.is_onward = false;
        }
    }

    /// The interface that its SYN would have left by, if this host forwards it.
    pub(super) fn exit(&self) -> Option<u32> {
        self.0.via.as_ref().map(|via| via.exit)
    }

    /// Sets the address that getsockname shows.
    pub fn set_src(&mut self, src: SocketAddr) {
        self.0.src = src;
        if self.0.cookie == 0 {
            return;
        }
        // On failure getsockname shows the loopback address, as before.
        let _ = self.0.shared.maps.show_local(self.0.cookie, src);
    }

    /// Accepts the connect. `accepted` is called on the Hooker's thread, must not block, and gets
    /// the application's connection, non-blocking, or an error if the application has gone. Drop
    /// of the stream resets the connection (SO_LINGER 0): turn that off right before the shutdown
    /// that closes it in order. Between two hops it gets a connection with the first one's flow.
    pub fn accept(mut self, accepted: impl FnOnce(io::Result<TcpStream>) + Send + 'static) {
        let is_onward = self.is_onward();
        let via = self.0.via.take();
        let mut accepted: Accepted = Box::new(move |app| {
            if let (Ok(_), Some(via)) = (&app, via) {
                for carried in via.carried {
                    carried.fetch_add(1, Ordering::Relaxed);
                }
            }
            accepted(app);
        });
        if let Some(Forwarded::Outside(name)) = self.0.forwarded.filter(|_| is_onward) {
            let joint = match gateway::Joint::open(&self.0.shared) {
                Ok(joint) => joint,
                Err(error) => {
                    let dest = self.dest();
                    tracing::warn!(%error, %dest, "gateway: no connection for the middle of a chain: the next hop is plain TCP for 10 s");
                    let _ = self.0.shared.maps.leave_plain(dest, super::worker::RELIEF);
                    self.put_off();
                    return accepted(Err(error));
                }
            };
            let shared = Arc::clone(&self.0.shared);
            accepted = gateway::join(shared, self.0.ends, name, joint, accepted);
        }
        self.0.answered = true;
        let flows = &self.0.flows;
        let mut guard = flows.table();
        match guard.entries.get_mut(&self.0.ends) {
            Some(entry) if entry.id == self.0.id => {
                let deadline = Instant::now() + ACCEPT_TIMEOUT;
                entry.state = State::Injected { accepted, deadline };
                flows.inject.send(entry.syn.bytes(), entry.syn.target());
            }
            _ => {
                drop(guard);
                accepted(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
    }

    /// Fails the connect.
    pub fn refuse(mut self, error: ConnectError) {
        self.answer(error);
    }

    /// Whether the application seems to have closed its socket.
    pub(super) fn is_given_up(&self, now: Instant) -> bool {
        let table = self.0.flows.table();
        let entry = table.entries.get(&self.0.ends);
        entry.is_some_and(|entry| entry.id == self.0.id && entry.is_given_up(now))
    }

    /// Leaves the connect unanswered and drops its entry: the SYN retransmission starts anew.
    pub(super) fn put_off(&mut self) {
        self.0.answered = true;
        let Held {
            flows, ends, id, ..
        } = &*self.0;
        let mut guard = flows.table();
        if guard.entries.get(ends).is_some_and(|entry| entry.id == *id) {
            guard.remove(ends);
            drop(guard);
            flows.release(*ends);
        }
    }

    fn answer(&mut self, error: ConnectError) {
        self.0.answered = true;
        let Held {
            flows, ends, id, ..
        } = &*self.0;
        let mut guard = flows.table();
        let Some(entry) = guard.entries.get(ends).filter(|entry| entry.id == *id) else {
            return;
        };
        if let Some(packet) = entry.syn.refusal(error) {
            flows.answer(&packet, ends[0]);
            // TCP ignores ICMP while a system call owns the socket: its SYN retransmission is to be held anew.
            guard.remove(ends);
        } else if self.0.forwarded.is_some() {
            // Whoever still waits sends its SYN again.
            guard.remove(ends);
        } else {
            guard.end(ends, SILENCE);
        }
        drop(guard);
        flows.release(*ends);
    }
}

impl Drop for HeldConnect {
    fn drop(&mut self) {
        if self.0.answered {
            return;
        }
        let is_leaving = self.0.flows.is_leaving.load(Ordering::Relaxed);
        // Also after a panic: the next daemon answers. A gateway refuses only what the far end has refused.
        match is_leaving || self.is_forwarded() || panics::happened() {
            true => self.put_off(),
            false => self.answer(ConnectError::Refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connect from this host of 192.0.2.0/24, by its last number, and its port.
    fn entry(host: u8, port: u16, forwarded: Forwarded) -> (Ends, Entry) {
        let mut packet = [0; 44];
        packet[0] = 0x45;
        packet[8..10].copy_from_slice(&[64, 6]);
        packet[12..16].copy_from_slice(&[192, 0, 2, host]);
        packet[16..20].copy_from_slice(&[198, 51, 100, 1]);
        packet[20..22].copy_from_slice(&port.to_be_bytes());
        packet[23] = 80;
        packet[32..34].copy_from_slice(&[0x60, 2]);
        packet[40..44].copy_from_slice(&[2, 4, 5, 0xb4]);
        let syn = SynPacket::parse(&packet).expect("a SYN");
        let ends = [syn.source(), syn.target()];
        let entry = Entry {
            id: 0,
            cookie: 0,
            syn,
            forwarded: Some(forwarded),
            state: State::Open,
            heard: Instant::now(),
            gap: Duration::ZERO,
        };
        (ends, entry)
    }

    fn outside(number: u32) -> Forwarded {
        Forwarded::Outside(FlowName { tag: 7, number })
    }

    #[test]
    fn is_given_up__once_no_syn_comes_again() {
        let (_, mut entry) = entry(1, 1, outside(9));
        let mut at = entry.heard;
        // Linux: five times after a second, then after twice as long each time.
        for s in [1, 1, 1, 1, 1, 2, 4, 8, 16, 32] {
            let next = at + Duration::from_secs(s);
            assert!(!entry.is_given_up(next), "{s} s");
            entry.note_repeated(next);
            at = next;
        }
        assert!(!entry.is_given_up(at + Duration::from_secs(64)));
        assert!(entry.is_given_up(at + Duration::from_secs(66)));
        entry.state = State::Over { until: at };
        assert!(!entry.is_given_up(at + Duration::from_secs(66)));
    }

    #[test]
    fn table__bounds_what_waits_of_a_network() {
        let mut table = Table::default();
        let admits = |table: &Table, host, port, forwarded, is_known| {
            table.admits(&entry(host, port, forwarded).0, forwarded, is_known)
        };
        let of_network = MAX_OF_NETWORK as u16;
        for port in 1..=of_network {
            assert!(admits(&table, 1, port, outside(9), false), "port {port}");
            let (ends, entry) = entry(1, port, outside(9));
            table.insert(ends, entry);
        }
        assert!(!admits(&table, 1, 9999, outside(9), false));
        assert!(admits(&table, 1, 1, outside(9), false), "its next SYN");
        assert!(admits(&table, 1, 9999, outside(9), true));
        assert!(admits(&table, 1, 9999, Forwarded::Inside, false));
        assert!(admits(&table, 2, 9999, outside(9), false));
        // One in the place of another counts once, and what is done or gone no more.
        let (ends, again) = entry(1, 1, outside(9));
        assert!(table.insert(ends, again).1.is_some());
        assert!(table.end(&ends, SILENCE).is_some());
        assert!(admits(&table, 1, 9999, outside(9), false));
        assert!(table.end(&ends, SILENCE).is_some());
        assert!(table.remove(&ends).is_some());
        let (ends, _) = entry(1, 2, outside(9));
        assert!(table.remove(&ends).is_some() && table.remove(&ends).is_none());
        assert_eq!(table.of_network.len(), 1);
        for port in 3..=of_network {
            table.remove(&entry(1, port, outside(9)).0);
        }
        assert!(table.of_network.is_empty() && table.entries.is_empty());
    }

    #[test]
    fn table__bounds_control_connections() {
        let mut table = Table::default();
        let control = outside(CONTROL_CONNECTION);
        for host in 1..=MAX_CONTROLS as u8 {
            let (ends, entry) = entry(host, 1, control);
            assert!(table.admits(&ends, control, false));
            table.insert(ends, entry);
        }
        assert!(!table.admits(&entry(200, 1, control).0, control, true));
        assert!(table.admits(&entry(200, 1, outside(9)).0, outside(9), false));
        table.end(&entry(1, 1, control).0, STRAGGLING);
        assert!(table.admits(&entry(200, 1, control).0, control, false));
    }
}
