//! The Hooker's event loop: held SYNs, connects to real destinations, accepted connections.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, channel},
    },
    time::{Duration, Instant},
};

use libbpf_rs::RingBuffer;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use vtl_proto::frame::{CONTROL_CONNECTION, FlowName};

use crate::{events::Addresses, network::make_room};

use super::{
    ClientFlow, ServerFlow, Shared,
    abi::vtl_syn,
    bpf::Programs,
    discovery::{self, Attempt, Connected},
    error::{ConnectError, HookerError, lacks_descriptors},
    gateway,
    held::{Forwarded, HeldConnect},
    listeners::Listeners,
    sock, steering,
};
use crate::panics::test_point;

/// Interval of housekeeping: expiry, reaping.
const TICK: Duration = Duration::from_secs(1);

/// Out of file descriptors: pause before the next accept,
const BREATH: Duration = Duration::from_millis(50);
/// and how long connects to the destination bypass vtld.
pub(super) const RELIEF: Duration = Duration::from_secs(10);
/// Maximum wait, when leaving, for accepted connects (injected SYNs) to reach the listener.
const PROMISED: Duration = Duration::from_millis(100);
/// The same at a gateway: handshakes with clients beyond the hop.
const PROMISED_FAR: Duration = Duration::from_secs(1);
/// How long connects to a destination that has stopped speaking VTL are not captured.
const RETURN: Duration = Duration::from_secs(2);
/// Maximum number of destinations remembered to have spoken VTL.
const MAX_SPOKE: usize = 16_384;

/// Tokens of epoll; of several sockets that of the first. There are at most two listeners for captured connects, and two,
/// besides two of a former daemon's, for steered connections and for gateways each.
const WAKE: u64 = 0;
const SYNS: u64 = 1;
const LINKS: u64 = 2;
const CAPTURE: u64 = 3;
const STEER: u64 = 5;
const GATEWAY_SYNS: u64 = 10;
const GATEWAY: u64 = 11;
const ATTEMPTS: u64 = 16;

/// Requests from other threads.
pub(super) enum Command {
    /// Reads what gateways hold, too.
    Gateway(Box<gateway::Input>),
    /// Starts the event loop: the rest of the daemon is ready for connections.
    Begin,
    /// Drains the listeners, and ends the thread.
    Leave(SyncSender<()>),
    Stop,
}

/// The ring buffer of held SYNs.
pub(super) struct Syns {
    ring: RingBuffer<'static>,
    read: Receiver<vtl_syn>,
}

impl Syns {
    pub(super) fn new(programs: &Programs) -> Result<Self, HookerError> {
        let (sender, read) = channel();
        let ring = programs.syns(move |syn| {
            // The receiver lives as long as the ring.
            let _ = sender.send(*syn);
        })?;
        Ok(Self { ring, read })
    }
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    epoll: Epoll,
    listeners: Listeners,
    syns: Syns,
    links: OwnedFd,
    /// What is told of this host's addresses.
    addresses: Addresses,
    commands: Receiver<Command>,
    attempts: HashMap<u64, Attempt>,
    last: u64,
    /// Destinations that have spoken VTL.
    spoke: HashSet<SocketAddr>,
    gateway: Option<gateway::Input>,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        syns: Syns,
        listeners: Listeners,
        commands: Receiver<Command>,
    ) -> Result<Self, HookerError> {
        let links = steering::watch_interfaces()?;
        let failed = |source: nix::Error| HookerError::Socket {
            what: "set up epoll",
            source: source.into(),
        };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        let add = |fd: BorrowedFd<'_>, token| {
            epoll
                .add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token))
                .map_err(failed)
        };
        add(shared.wake.as_fd(), WAKE)?;
        add(links.as_fd(), LINKS)?;
        // SAFETY: the ring owns this descriptor and lives as long as the epoll instance.
        let ring = unsafe { BorrowedFd::borrow_raw(syns.ring.epoll_fd()) };
        add(ring, SYNS)?;
        for (token, listener) in (CAPTURE..).zip(&listeners.capture) {
            add(listener.as_fd(), token)?;
        }
        for (token, listener) in (STEER..).zip(&listeners.steer) {
            add(listener.as_fd(), token)?;
        }
        Ok(Self {
            shared,
            epoll,
            listeners,
            syns,
            links,
            addresses: Addresses::read(),
            commands,
            attempts: HashMap::new(),
            last: ATTEMPTS,
            spoke: HashSet::new(),
            gateway: None,
        })
    }

    pub(super) fn run(mut self) {
        // Connections queued in a former daemon's listeners wait until the broker is ready.
        loop {
            match self.commands.recv() {
                Ok(Command::Begin) => break,
                Ok(command) => {
                    if !self.obey(command) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
        let mut events = [EpollEvent::empty(); 64];
        let mut tick = Instant::now() + TICK;
        loop {
            let left = tick.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            let timeout = EpollTimeout::try_from(left).unwrap_or(EpollTimeout::ZERO);
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(nix::Error::EINTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "hooker: epoll failed: no more connects are captured");
                    return;
                }
            };
            for event in &events[..count] {
                match event.data() {
                    WAKE => {
                        if !self.commands() {
                            return;
                        }
                    }
                    SYNS => self.held_syns(),
                    LINKS => {
                        steering::drain(self.links.as_fd());
                        self.addresses.follow();
                        self.shared.hooks().interfaces_changed();
                        self.shared.gateways().interfaces_changed(&self.shared);
                    }
                    token @ CAPTURE..STEER => self.captured((token - CAPTURE) as usize),
                    token @ STEER..GATEWAY_SYNS => self.steered((token - STEER) as usize),
                    GATEWAY_SYNS => self.forwarded_syns(),
                    token @ GATEWAY..ATTEMPTS => self.forwarded((token - GATEWAY) as usize),
                    token => self.attempted(token),
                }
            }
            self.shared.pulse.note();
            test_point();
            let now = Instant::now();
            if now >= tick {
                tick = now + TICK;
                self.housekeeping(now);
            }
        }
    }

    fn commands(&mut self) -> bool {
        let _ = self.shared.wake.read();
        while let Ok(command) = self.commands.try_recv() {
            if !self.obey(command) {
                return false;
            }
        }
        true
    }

    /// Executes a command. False if the thread is to end.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Stop => return false,
            Command::Leave(reply) => {
                self.leave();
                let _ = reply.send(());
                return false;
            }
            Command::Begin => {}
            Command::Gateway(input) => self.watch_gateway(*input),
        }
        true
    }

    /// Drains the listeners, for a handover; pending connects stay unanswered.
    fn leave(&mut self) {
        let began = Instant::now();
        loop {
            (0..self.listeners.capture.len()).for_each(|index| self.captured(index));
            (0..self.listeners.steer.len()).for_each(|index| self.steered(index));
            let forwarded = self
                .gateway
                .as_ref()
                .map_or(0, |input| input.listeners.len());
            (0..forwarded).for_each(|index| self.forwarded(index));
            let forwards = self.gateway.as_ref();
            let has_forwarded = forwards.is_some_and(|gateway| gateway.flows.has_injected());
            let is_near = self.shared.flows.has_injected() && began.elapsed() <= PROMISED;
            let is_far = has_forwarded && began.elapsed() <= PROMISED_FAR;
            if !is_near && !is_far {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for (_, attempt) in self.attempts.drain() {
            // Left to the next daemon.
            drop(attempt.cancel(&self.shared));
        }
    }

    fn housekeeping(&mut self, now: Instant) {
        self.shared.flows.expire(now);
        if let Some(gateway) = &self.gateway {
            gateway.flows.expire(now);
        }
        for ends in self.shared.clients().expire(now) {
            self.shared.maps.hide_client(ends);
        }
        self.shared.hooks().reap();
        // What has come again is read first.
        self.held_syns();
        let given_up =
            |attempt: &Attempt| !attempt.held.is_forwarded() && attempt.held.is_given_up(now);
        for (_, attempt) in self.attempts.extract_if(|_, each| given_up(each)) {
            // If its SYN comes again all the same, it begins anew.
            attempt.cancel(&self.shared).put_off();
        }
        let due = |attempt: &Attempt| attempt.deadline.is_some_and(|deadline| deadline <= now);
        let due: Vec<u64> = self
            .attempts
            .iter()
            .filter(|(_, each)| due(each))
            .map(|(&token, _)| token)
            .collect();
        for token in due {
            if let Some(attempt) = self.attempts.remove(&token) {
                let mut held = attempt.cancel(&self.shared);
                if held.is_onward() {
                    // Nothing has answered, perhaps since the client is not who it seems: forgotten soon.
                    self.note_plain(held.dest(), RETURN);
                    held.leave_plain();
                    self.connect(held, None);
                    continue;
                }
                if held.is_forwarded() {
                    // As after an answer without the option: the path may drop it, or the way back be another.
                    let ttl = match self.spoke.contains(&held.dest()) {
                        true => RELIEF,
                        false => self.shared.config.plain_ttl,
                    };
                    self.pass_by(&mut held, ttl);
                    continue;
                }
                tracing::debug!(dest = %held.dest(), "hooker: no answer to a SYN with VTL's option");
                self.connect_plain(held);
            }
        }
    }

    fn held_syns(&mut self) {
        if let Err(error) = self.syns.ring.consume() {
            tracing::warn!(%error, "hooker: cannot read held SYNs: connects wait for TCP to repeat them");
        }
        while let Ok(syn) = self.syns.read.try_recv() {
            if let Some(held) = self.shared.flows.hold(&self.shared, &syn) {
                self.opened(held);
            }
        }
    }

    /// Starts a connect to the real destination of a new held connect.
    fn opened(&mut self, mut held: HeldConnect) {
        match held.forwarded() {
            None => {}
            Some(Forwarded::Outside(name)) if name.number == CONTROL_CONNECTION => {
                // For this daemon alone.
                return self.accept_outside(held, None);
            }
            Some(Forwarded::Outside(_)) if !held.is_onward() => return self.connect(held, None),
            Some(_) => {
                let name = self.shared.broker.name_flow(&held);
                return self.connect(held, Some(name));
            }
        }
        match discovery::find_source(&mut held) {
            Err(error) => self.fail(held, &error),
            // This host itself: no VTL needed.
            Ok(true) => self.connect(held, None),
            Ok(false) if !discovery::is_inside(&self.shared, &held) => self.connect_plain(held),
            Ok(false) => {
                let name = self.shared.broker.name_flow(&held);
                self.connect(held, Some(name));
            }
        }
    }

    /// Connects without VTL's option; refuses the connect if it requires a carrier.
    fn connect_plain(&mut self, held: HeldConnect) {
        match held.requires_carrier() {
            true => refuse_plain(held),
            false => self.connect(held, None),
        }
    }

    fn connect(&mut self, held: HeldConnect, offer: Option<FlowName>) {
        let attempt = match discovery::start(&self.shared, held, offer) {
            Ok(attempt) => attempt,
            Err((mut held, error)) if held.is_onward() => {
                tracing::debug!(%error, dest = %held.dest(), "gateway: cannot begin the next hop: plain TCP there");
                held.leave_plain();
                return self.connect(held, None);
            }
            Err((held, error)) => return self.fail(held, &error),
        };
        self.last += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLOUT, self.last);
        match self.epoll.add(&attempt.socket, event) {
            Ok(()) => drop(self.attempts.insert(self.last, attempt)),
            Err(errno) => self.fail(attempt.cancel(&self.shared), &errno.into()),
        }
    }

    /// Handles a local failure to start a connect: refuses it, or bypasses vtld if file descriptors are exhausted.
    fn fail(&self, mut held: HeldConnect, error: &io::Error) {
        if held.is_forwarded() {
            tracing::debug!(%error, dest = %held.dest(), "gateway: cannot connect: forwarded");
            return self.pass_by(&mut held, RELIEF);
        }
        if !lacks_descriptors(error) || held.requires_carrier() {
            return held.refuse(ConnectError::from(error));
        }
        tracing::warn!(%error, dest = %held.dest(), "hooker: no file descriptor left: connects to this destination bypass vtld for 10 s; raise LimitNOFILE=");
        let _ = self.shared.maps.leave_plain(held.dest(), RELIEF);
        held.put_off();
    }

    /// Handles the outcome of a connect to a real destination.
    fn attempted(&mut self, token: u64) {
        let Some(attempt) = self.attempts.remove(&token) else {
            return;
        };
        // The socket moves to another thread's epoll.
        let _ = self.epoll.delete(&attempt.socket);
        match attempt.finish(&self.shared) {
            Err((held, error)) => held.refuse(ConnectError::from(&error)),
            Ok(Connected {
                mut held,
                stream,
                understood: None,
            }) if matches!(held.forwarded(), Some(Forwarded::Outside(_))) => {
                if held.is_onward() {
                    self.note_plain(held.dest(), self.shared.config.plain_ttl);
                    held.leave_plain();
                }
                self.accept_outside(held, Some(stream));
            }
            Ok(Connected {
                held,
                stream,
                understood: Some(name),
                ..
            }) => self.hand_on(held, stream, name),
            Ok(Connected {
                held,
                understood: None,
                ..
            }) if held.requires_carrier() && !held.is_own() => refuse_plain(held),
            Ok(Connected {
                held,
                stream,
                understood: None,
                ..
            }) => self.proxy(held, stream),
        }
    }

    /// Gives a connection to a destination with VTL to the broker.
    fn hand_on(&mut self, held: HeldConnect, stream: TcpStream, name: FlowName) {
        let (dest, src) = (held.dest(), held.src());
        if self.spoke.len() >= MAX_SPOKE && !self.spoke.contains(&dest) {
            let spoke: Vec<IpAddr> = self.spoke.iter().map(SocketAddr::ip).collect();
            make_room(spoke.into_iter(), |keep| {
                self.spoke.retain(|dest| keep(dest.ip()));
            });
        }
        self.spoke.insert(dest);
        self.shared.broker.client(ClientFlow {
            forwarded: held.is_forwarded(),
            options: held.options().cloned(),
            kind: held.kind(),
            rule: held.rule().cloned(),
            auto: held.is_auto(),
            bounds: held.bounds(),
            expected: held.expected(),
            exe: held.executable().cloned(),
            tolerant: held.is_tolerant(),
            app: held,
            dest,
            src,
            peer: stream,
            name,
        });
    }

    /// Proxies a connection to a destination without VTL, later connects to which are not captured.
    fn proxy(&self, held: HeldConnect, stream: TcpStream) {
        self.note_plain(held.dest(), self.shared.config.plain_ttl);
        let proxy = self.shared.proxy.clone();
        held.accept(move |app| {
            if let Ok(app) = app {
                proxy.join(app, stream, None);
            }
        });
    }

    /// Notes, for so long, that a destination has not answered VTL's option.
    fn note_plain(&self, dest: SocketAddr, ttl: Duration) {
        tracing::debug!(%dest, "hooker: the destination does not answer VTL's option: plain TCP");
        // Not a plain host if there is an association: it was too busy to answer the option, or the SYN met an
        // earlier connection from the same port in TIME_WAIT and never reached vtld.
        if self.shared.broker.knows(dest.ip()) {
            return;
        }
        // Short if it has spoken VTL: its daemon may be restarting.
        let ttl = match self.spoke.contains(&dest) {
            true => RETURN.min(ttl),
            false => ttl,
        };
        if let Err(error) = self.shared.maps.leave_plain(dest, ttl) {
            tracing::debug!(%error, "hooker: cannot remember a destination without VTL");
        }
    }

    fn captured(&mut self, index: usize) {
        while let Some((stream, app)) = accept(&self.listeners.capture[index]) {
            let tuned = sock::tune_local(&stream).and_then(|()| stream.set_nonblocking(true));
            if let Ok(local) = tuned.and_then(|()| stream.local_addr()) {
                self.shared.flows.accepted([app, local], stream);
            }
        }
    }

    fn steered(&mut self, index: usize) {
        while let Some((stream, client)) = accept(&self.listeners.steer[index]) {
            let taken = sock::tune(&stream)
                .and_then(|()| stream.set_nonblocking(true))
                .and_then(|()| stream.local_addr())
                .and_then(|dest| Ok((dest, steering::client_says(&self.shared, &stream)?)));
            match taken {
                Err(error) => {
                    tracing::debug!(%error, %client, "hooker: a steered connection is gone");
                }
                Ok((dest, Some(name))) => {
                    self.shared.broker.server(ServerFlow {
                        peer: stream,
                        dest,
                        client,
                        name,
                        forwarded: None,
                    });
                }
                // A middlebox stripped the option from our SYN/ACK: the client goes on as with a
                // peer without VTL.
                Ok((dest, None)) => match steering::connect_local_app(&self.shared, dest, client) {
                    Ok((app, guard)) => {
                        self.shared.proxy.join(app, stream, Some(guard));
                    }
                    Err(error) => {
                        tracing::debug!(%error, %dest, "hooker: cannot connect to the local application");
                    }
                },
            }
        }
    }
}

/// Gateways.
impl Worker {
    fn watch_gateway(&mut self, input: gateway::Input) {
        // SAFETY: the ring owns this descriptor and lives as long as the epoll instance.
        let ring = unsafe { BorrowedFd::borrow_raw(input.ring.epoll_fd()) };
        let listeners = input.listeners.iter().map(AsFd::as_fd);
        let all = [(GATEWAY_SYNS, ring)]
            .into_iter()
            .chain((GATEWAY..ATTEMPTS).zip(listeners));
        for (token, fd) in all {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, token);
            if let Err(error) = self.epoll.add(fd, event) {
                tracing::error!(%error, "gateway: cannot watch held connects");
            }
        }
        self.gateway = Some(input);
    }

    fn forwarded_syns(&mut self) {
        let Some(input) = &mut self.gateway else {
            return;
        };
        if let Err(error) = input.ring.consume() {
            tracing::warn!(%error, "gateway: cannot read held SYNs");
        }
        let flows = Arc::clone(&input.flows);
        let mut held = Vec::new();
        while let Ok(syn) = input.read.try_recv() {
            held.extend(gateway::hold(&self.shared, &flows, &syn));
        }
        held.into_iter().for_each(|held| self.opened(held));
    }

    /// Takes the connections of clients whose connects were accepted.
    fn forwarded(&mut self, index: usize) {
        let Some(input) = &self.gateway else { return };
        while let Some((stream, client)) = accept(&input.listeners[index]) {
            let taken = sock::tune(&stream)
                .and_then(|()| stream.set_nonblocking(true))
                .and_then(|()| stream.local_addr());
            if let Ok(dest) = taken {
                input.flows.accepted([client, dest], stream);
            }
        }
    }

    /// Leaves a forwarded connect to the kernel: its next SYN is forwarded, and others to its destination for this time.
    fn pass_by(&self, held: &mut HeldConnect, ttl: Duration) {
        if held.forwarded() == Some(Forwarded::Inside) {
            let _ = self.shared.maps.leave_plain(held.dest(), ttl);
        }
        held.put_off();
    }

    /// Accepts a connect of a VTL host beyond the hop. `app`: the connection to the host behind this one; `None`: the
    /// connect is a control connection's.
    fn accept_outside(&self, held: HeldConnect, app: Option<TcpStream>) {
        let (shared, dest, client) = (Arc::clone(&self.shared), held.dest(), held.src());
        let forwarded = held.forwarded();
        held.accept(move |outer| {
            let Ok(outer) = outer else { return };
            match (steering::client_says(&shared, &outer), app) {
                // Its SYN, too, decided on what was done: both must say the same.
                (Ok(Some(name)), app) if forwarded == Some(Forwarded::Outside(name)) => {
                    shared.broker.server(ServerFlow {
                        peer: outer,
                        dest,
                        client,
                        name,
                        forwarded: Some(app),
                    });
                }
                // A middlebox stripped the option from our SYN/ACK.
                (Ok(None), Some(app)) => shared.proxy.join(app, outer, None),
                (_, _) => {}
            }
        });
    }
}

/// Refuses a connect that requires a carrier and could only be plain TCP.
fn refuse_plain(held: HeldConnect) {
    tracing::info!(dest = %held.dest(), "hooker: connect refused: it requires a carrier, and the destination has no VTL");
    held.refuse(ConnectError::HostUnreachable);
}

/// Accepts the next queued connection, if any.
fn accept(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
    let accepted = listener.accept();
    if accepted.as_ref().is_err_and(lacks_descriptors) {
        // The listener stays readable: avoid a busy loop.
        std::thread::sleep(BREATH);
    }
    accepted.ok()
}
