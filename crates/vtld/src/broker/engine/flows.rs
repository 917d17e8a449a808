//! Hooked applications' flows: from capture or steering into a session's streams, and back out to
//! plain TCP.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use vtl_proto::{
    intf,
    mux::{MuxError, ResetCode, StreamId},
    services::Services,
};

use super::{
    super::{
        Command, now_ns,
        preamble::{self, GREETING, Preamble},
        session::{Phase, Session, Use, Waiting, Wish},
        set_linger,
        streams::{App, Effect, INTEREST, Streams},
    },
    Arriving, Engine, Parked, Source,
};
use crate::{
    hooker::{ConnectError, HeldConnect, Over, ServerFlow},
    option,
};

/// What a session needs to carry TCP connections.
const FLOWS: Services = Services::TCP;

/// What a session for flows is to be like.
pub(crate) fn wish(over: Option<&Over>) -> Wish {
    let mut wish = Wish::from(FLOWS);
    match over {
        None => {}
        Some(Over::Lossy(name)) => {
            wish = Wish {
                graft: Some(name.clone()),
                ..Wish::default()
            };
        }
        Some(Over::Graft(name)) => wish.graft = Some(name.clone()),
        Some(Over::Services(wanted)) => {
            wish.wanted = *wanted;
            wish.wanted.services = FLOWS | wanted.services;
        }
    }
    wish
}

impl Engine {
    /// Whether the sessions of hooked connections can be like this.
    pub(super) fn carries(&mut self, over: &Over) -> Result<(), String> {
        self.read_pool()?;
        let graft = match over {
            Over::Graft(name) => name,
            Over::Services(_) | Over::Lossy(_) => {
                return self.candidates(&wish(Some(over))).map(|_| ());
            }
        };
        let others = || {
            let fits = self.pool.iter().filter(|p| !p.disabled);
            let fits = fits.filter(|p| p.info.provides.contains(FLOWS));
            let names = fits.map(|p| format!("graft:{}", p.info.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let found = self.pool.iter().filter(|p| !p.disabled);
        match found.map(|p| &p.info).find(|g| g.name == *graft) {
            Some(g) if g.provides.contains(FLOWS) => Ok(()),
            Some(g) => Err(format!(
                "graft:{graft} cannot carry TCP connections, it lacks {}: there are {}",
                g.provides.missing(FLOWS),
                others()
            )),
            None => Err(format!(
                "there is no carrier graft:{graft}: there are {}",
                others()
            )),
        }
    }

    pub(super) fn kick(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Use::Aware(aware) = &session.purpose else {
            return;
        };
        self.schedule.now(sid);
        if aware.rx.take_offer()
            && let Some(entry) = self.plane.sessions().get(sid)
        {
            entry.request_ack();
        }
    }

    /// Packets lie in the receive ring.
    pub(super) fn receive(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        session.used_ns = now_ns();
        let entry = self.plane.sessions().get(sid);
        let arrived = |word| entry.as_ref().and_then(|e| e.arrived(word));
        match &mut session.purpose {
            // The kernel wakes an aware application without us.
            Use::Aware(_) | Use::Streams { streams: None, .. } => {}
            Use::Streams {
                streams: Some(streams),
                ..
            } => {
                let mut effects = Vec::new();
                match streams.receive(arrived, &mut effects) {
                    Ok(progress) => {
                        if progress.window
                            && let Some(entry) = self.plane.sessions().get(sid)
                        {
                            entry.request_ack();
                            self.schedule.now(sid);
                        }
                        if progress.more {
                            self.events.borrow_mut().push((sid, intf::VTL_EV_RECV));
                            let _ = self.handle.wake.write(1);
                        }
                    }
                    Err(error) => return self.breaks_rules(sid, &error),
                }
                for effect in effects {
                    self.effect(sid, effect);
                }
                self.transmit(sid);
            }
        }
    }

    /// The peer says what it must not.
    pub(super) fn breaks_rules(&mut self, sid: u32, error: &MuxError) {
        if let Some(session) = self.sessions.get(&sid) {
            tracing::warn!(%error, peer = %session.peer, "the peer breaks the rules");
        }
        self.close(sid, true);
    }

    /// Fills a stream session's transmit ring, and has the pump, or the lifeline, empty it.
    pub(super) fn transmit(&mut self, sid: u32) {
        let published = self.fill(sid);
        if self.sessions.get(&sid).is_some_and(Session::is_off_graft) {
            self.carry_on(sid);
        } else if published {
            self.schedule.now(sid);
        }
        self.say_control(sid);
    }

    /// Fills a stream session's transmit ring. Returns whether packets were published.
    pub(super) fn fill(&mut self, sid: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return false;
        };
        let published = session.streams().is_some_and(Streams::transmit);
        if published {
            session.used_ns = now_ns();
        }
        published
    }

    pub(super) fn effect(&mut self, sid: u32, effect: Effect<HeldConnect>) {
        match effect {
            Effect::Open { id, dest, client } => self.serve(sid, id, dest, client),
            Effect::Plain { app, dest } => self.plain_again(app, dest),
            Effect::Accept { id, held } => {
                let handle = self.handle.clone();
                held.accept(move |app| {
                    handle.send(Command::Accepted {
                        sid,
                        stream: id.0,
                        app,
                    });
                });
            }
            Effect::Refuse { held, code } => match code {
                ResetCode::NotHooked => held.fall_back(),
                ResetCode::Unreachable => held.refuse(ConnectError::HostUnreachable),
                ResetCode::Timeout => held.refuse(ConnectError::TimedOut),
                ResetCode::Rst | ResetCode::Refused => held.refuse(ConnectError::Refused),
            },
        }
    }

    /// The peer wants to reach a local application.
    pub(super) fn serve(&mut self, sid: u32, id: StreamId, dest: SocketAddr, client: SocketAddr) {
        let local = self.sessions.get(&sid).map(|s| (s.local, s.peer));
        let lossy = self.sessions.get(&sid).is_some_and(|s| s.lossy);
        let hooker = self.hooker.clone();
        let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) else {
            return;
        };
        // Only what a TCP connection over the same path could have asked for. The peer may be behind
        // a NAT and not know the address that it has here.
        let (hooker, peer) = match (hooker, local) {
            (Some(hooker), Some((here, peer)))
                if here == dest.ip()
                    && hooker.serves(dest)
                    && (!lossy || hooker.tolerates(dest.port())) =>
            {
                (hooker, peer)
            }
            _ => {
                streams.refuse(id, ResetCode::NotHooked);
                return;
            }
        };
        let client = SocketAddr::new(peer, client.port());
        match hooker.connect_local_app(dest, client) {
            Ok((app, guard)) => {
                streams.serve(id, app, Some(Box::new(guard)));
                self.watch_flow(sid, id);
            }
            Err(error) => {
                tracing::debug!(%error, %dest, "the local application cannot be reached");
                streams.refuse(id, ResetCode::Refused);
            }
        }
    }

    pub(super) fn watch_flow(&mut self, sid: u32, id: StreamId) {
        let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) else {
            return;
        };
        let Some(socket) = streams.socket(id) else {
            return;
        };
        let event = EpollEvent::new(INTEREST, Source::Flow { sid, stream: id.0 }.pack());
        if self.epoll.add(socket, event).is_err() {
            streams.refuse(id, ResetCode::Rst);
        }
    }

    /// A captured connection to a peer that speaks VTL.
    pub(super) fn client(&mut self, flow: Waiting) {
        let peer = flow.dest.ip();
        if let Some(rtt) = tcp_rtt(&flow.peer) {
            self.peers.note_rtt(peer, rtt);
        }
        let sid = match self.stream_session(peer, flow.over.as_deref()) {
            Some(sid) => sid,
            None => {
                if self.peers.is_closed(peer, now_ns()) {
                    self.plain(flow);
                    return;
                }
                if self.rings_ready(peer) == Ok(false) {
                    self.parked.push_back(Parked::Client(flow));
                    return;
                }
                let wish = wish(flow.over.as_deref());
                let purpose = Use::Streams {
                    over: flow.over.clone(),
                    waiting: Vec::new(),
                    streams: None,
                };
                match self.open(peer, 0, &wish, None, |_| Ok(purpose)) {
                    Ok(sid) => sid,
                    Err(error) => {
                        tracing::warn!(%error, %peer, "plain TCP instead of a session");
                        self.plain(flow);
                        return;
                    }
                }
            }
        };
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Use::Streams { waiting, .. } = &mut session.purpose else {
            return;
        };
        waiting.push(flow);
        if session.is_open() {
            self.start_waiting(sid);
        }
    }

    /// The stream session with a peer that is open or being opened, and like the hook or rule says,
    /// if it says so.
    ///
    /// One that the peer opened counts once the peer has shown itself: a stranger may ask in its
    /// name, and connects would wait there for nobody.
    pub(super) fn stream_session(&self, peer: IpAddr, over: Option<&Over>) -> Option<u32> {
        let shown = |sid: u32| {
            self.plane
                .sessions()
                .get(sid)
                .is_some_and(|e| e.ifindex() != 0)
        };
        let fits = |sid: u32, s: &Session| {
            s.peer == peer
                && matches!(&s.purpose, Use::Streams { over: of, .. } if of.as_deref() == over)
                && match s.phase {
                    Phase::Opening(_) => true,
                    // Without its lifeline nobody would hear of a flow.
                    Phase::Open if s.lossy => s.lifeline.is_some(),
                    Phase::Open => s.initiator || shown(sid),
                    Phase::Closing { .. } | Phase::Ended => false,
                }
        };
        self.sessions
            .iter()
            .find(|(sid, s)| fits(**sid, s))
            .map(|(sid, _)| *sid)
    }

    /// Flows that waited for the session start in it.
    pub(super) fn start_waiting(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Some(entry) = self.plane.sessions().get(sid) else {
            return;
        };
        let Use::Streams {
            waiting,
            streams: Some(streams),
            ..
        } = &mut session.purpose
        else {
            return;
        };
        let mut opened = Vec::new();
        let mut rejected = Vec::new();
        let mut tied = None;
        for Waiting {
            app,
            dest,
            src,
            peer,
            over,
        } in std::mem::take(waiting)
        {
            match streams.open(App::Socket(app), dest, src) {
                Ok(id) => opened.push(id),
                Err(App::Socket(app)) => {
                    rejected.push(Waiting {
                        app,
                        dest,
                        src,
                        peer,
                        over,
                    });
                    continue;
                }
                Err(_) => continue,
            }
            if session.lifeline.is_none() && tied.is_none() && session.initiator {
                let token = entry.snapshot().peer_token;
                tied = Some((peer, Preamble::Lifeline { token }.emit()));
            } else {
                // Without a preamble the peer lets it go.
                set_linger(&peer, false);
            }
        }
        if let Some((peer, preamble)) = tied {
            self.tie(sid, peer, Some(preamble));
        }
        if self.sessions.get(&sid).is_some_and(Session::is_mute) {
            self.close(sid, true);
        }
        for id in opened {
            self.watch_flow(sid, id);
        }
        for flow in rejected {
            self.plain(flow);
        }
        self.transmit(sid);
    }

    /// Carries a flow over its discovery connection.
    pub(super) fn plain(&mut self, flow: Waiting) {
        let Waiting {
            app, dest, peer, ..
        } = flow;
        self.handle.flows.plain(app, dest, peer);
    }

    /// Carries a flow that its session does not, and of which nothing was read, over another
    /// connection: its discovery connection has ended, or serves another purpose.
    fn plain_again(&mut self, app: TcpStream, dest: SocketAddr) {
        let _ = self.epoll.delete(&app);
        let Some(hooker) = &self.hooker else { return };
        match hooker.connect_plain(dest) {
            Ok(peer) => hooker.carry(app, peer, None),
            Err(error) => tracing::debug!(%error, %dest, "no second connection"),
        }
    }

    /// A connect to a host with a live session.
    pub(super) fn held(&mut self, held: HeldConnect) {
        let (dest, port) = (held.dest(), held.src().port());
        let session = self
            .stream_session(dest.ip(), held.over().map(|over| &**over))
            .and_then(|sid| Some((sid, self.sessions.get_mut(&sid)?)));
        let Some((sid, session)) = session else {
            held.fall_back();
            return;
        };
        let src = SocketAddr::new(session.local, port);
        let Some(streams) = session.streams() else {
            held.fall_back();
            return;
        };
        let mut held = held;
        held.set_src(src);
        if let Err(App::Held(held)) = streams.open(App::Held(held), dest, src) {
            held.fall_back();
        }
        self.transmit(sid);
    }

    /// A steered connection.
    pub(super) fn arrive(&mut self, mut flow: ServerFlow) {
        // A fresh connection takes 16 bytes.
        if !matches!(flow.peer.write(&GREETING), Ok(preamble::LENGTH)) {
            return;
        }
        if let Some(rtt) = tcp_rtt(&flow.peer) {
            self.peers.note_rtt(flow.client.ip(), rtt);
        }
        self.await_preamble(flow);
    }

    fn await_preamble(&mut self, flow: ServerFlow) {
        let id = self.next_arriving;
        self.next_arriving = self.next_arriving.wrapping_add(1);
        let event = EpollEvent::new(
            EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
            Source::Preamble { id }.pack(),
        );
        if self.epoll.add(&flow.peer, event).is_ok() {
            self.arriving.insert(
                id,
                Arriving {
                    flow,
                    bytes: Vec::new(),
                    since_ns: now_ns(),
                },
            );
        }
    }

    /// A steered connection says what it is for.
    pub(super) fn preamble(&mut self, id: u32) {
        let Some(arriving) = self.arriving.get_mut(&id) else {
            return;
        };
        let mut buffer = [0; preamble::LENGTH];
        let rest = &mut buffer[arriving.bytes.len()..];
        match arriving.flow.peer.read(rest) {
            Ok(0) => {
                self.arriving.remove(&id);
                return;
            }
            Ok(n) => {
                let bytes = rest[..n].to_vec();
                arriving.bytes.extend(bytes);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(_) => {
                self.arriving.remove(&id);
                return;
            }
        }
        let Ok(bytes) = <[u8; preamble::LENGTH]>::try_from(arriving.bytes.as_slice()) else {
            return;
        };
        let Some(Arriving { flow, .. }) = self.arriving.remove(&id) else {
            return;
        };
        let _ = self.epoll.delete(&flow.peer);
        match Preamble::parse(&bytes) {
            Some(Preamble::Plain) => {
                let Some(hooker) = &self.hooker else { return };
                match hooker.connect_local_app(flow.dest, flow.client) {
                    Ok((app, guard)) => hooker.carry(flow.peer, app, Some(guard)),
                    Err(error) => {
                        tracing::debug!(%error, dest = %flow.dest, "the local application cannot be reached");
                    }
                }
            }
            Some(Preamble::Lifeline { token }) => {
                let meant = |s: &Session| {
                    s.token == token
                        && s.peer == flow.client.ip()
                        && !s.initiator
                        && s.lifeline.is_none()
                };
                let found = self.sessions.iter_mut().find(|(_, s)| meant(s));
                let Some((sid, answered)) = found.map(|(sid, s)| (*sid, s.answered.take())) else {
                    return;
                };
                self.tie(sid, flow.peer, None);
                // The token proves the peer as its first packet would, which may have got lost with
                // all others.
                if let Some(answered) = answered {
                    self.validated(sid, answered);
                }
            }
            Some(Preamble::Tunnel) => {
                // A release that has carriers goes on as plain TCP here.
                let mut flow = flow;
                if matches!(flow.peer.write(&preamble::REFUSED), Ok(preamble::LENGTH)) {
                    self.await_preamble(flow);
                }
            }
            None => {
                // No vtld of this kind: not a byte of it may be lost, and none can be given back.
                tracing::warn!(client = %flow.client, "a discovery connection without preamble");
            }
        }
    }
}

/// The round-trip time that TCP measured while it connected.
pub(crate) fn tcp_rtt(socket: &TcpStream) -> Option<Duration> {
    let info: libc::tcp_info = option::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO).ok()?;
    (info.tcpi_rtt > 0).then(|| Duration::from_micros(info.tcpi_rtt.into()))
}
