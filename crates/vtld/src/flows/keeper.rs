//! Opens carriers while there are flows for them: first the control connection, over which the others are requested
//! (ASK, GRANT).

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    future::pending,
    io,
    net::{SocketAddr, TcpStream},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::{JoinSet, spawn_blocking, spawn_local},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use vtl_core::netmon::told;
use vtl_proto::{
    carrier::{Kind, WITH_LAYERS},
    frame::{CONTROL_CONNECTION, CarrierId, FlowName, Frame, Side},
};

use super::{
    Flows,
    carrier::{CLEAR, Granted, ToOpen},
    control::{Control, hello},
    peer::{Peer, Preference},
};
use crate::{hooker::CarrierOptions, option::tcp_rtt, stacks};

/// Timeout of a request over the control connection.
const ANSWER: Duration = Duration::from_secs(5);
/// Idle timeout of an association without flows, opened by this host.
const IDLE: Duration = Duration::from_secs(300);
/// The same of one opened by the peer, without flows and carriers.
const LINGER: Duration = Duration::from_secs(60);
/// Back-off between attempts to open a carrier: doubles with each failure, up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Age, besides three round trips, at which a control connection whose peer has said nothing counts as accepted.
const ACCEPTED: Duration = Duration::from_secs(1);
/// Lifetime of a carrier, from the start of the attempt, after which the back-off starts anew.
const WORTH: Duration = Duration::from_secs(30);
/// Interval of [`Flows::tend`].
const TICK: Duration = Duration::from_secs(1);

/// How a carrier is opened.
struct Plan {
    kind: Kind,
    /// The kind of the carrier itself, which may be below a stack's layers,
    lower: Kind,
    /// and these.
    layers: Option<String>,
    /// Session parameters of the carrier itself, and what the carrier is remembered by.
    options: Option<Arc<CarrierOptions>>,
    wanted: Option<Arc<CarrierOptions>>,
}

impl Plan {
    /// How a carrier of this kind is opened for an association.
    fn of(peer: &Peer, kind: Kind) -> Self {
        let wanted = peer.options(kind);
        let plain = Self {
            kind,
            lower: kind,
            layers: None,
            options: wanted.clone(),
            wanted: wanted.clone(),
        };
        let Some(CarrierOptions::Stack(spec)) = wanted.as_deref() else {
            return plain;
        };
        let Ok(stacks::ToOpen { layers, .. }) = stacks::resolve(spec) else {
            // It is told when it is opened.
            return plain;
        };
        match layers.over_messages() {
            Some(lower) => Self {
                lower,
                options: layers
                    .graft()
                    .map(|graft| CarrierOptions::Graft(graft).into()),
                layers: Some(layers.to_string()),
                ..plain
            },
            None => plain,
        }
    }

    /// The carrier's number in ASK.
    fn number(&self) -> u32 {
        let with = self.layers.as_ref().map_or(0, |_| WITH_LAYERS);
        u32::from(self.lower.number()) | with
    }

    /// What REFUSE may mean.
    fn refused(&self) -> &'static str {
        match (self.kind, &self.layers) {
            (Kind::Stack, None) => {
                "refused by the peer: its stacks.toml has no accept_rate, or it knows no stacks"
            }
            (_, Some(_)) => "refused by the peer: it may know no layers over other carriers",
            _ => "refused by the peer",
        }
    }
}

/// Exponential back-off between attempts.
pub(super) struct Pauses {
    /// The next pause.
    pause: Duration,
    /// Counts events after which an attempt is worth it at once, such as a restart of the peer's daemon.
    signs: fn(&Peer) -> u64,
    /// Start of the last attempt, and the count of events by then.
    last: Option<(Instant, u64)>,
}

impl Pauses {
    pub(super) fn new(signs: fn(&Peer) -> u64) -> Self {
        Self {
            pause: PAUSE,
            signs,
            last: None,
        }
    }

    /// Start of the last attempt, and the pause after it: the minimum if `signs` has changed since.
    fn behind(&self, signs: u64) -> Option<(Instant, Duration)> {
        let (last, seen) = self.last?;
        Some((last, if signs == seen { self.pause } else { PAUSE }))
    }

    /// Earliest time of the next attempt; `None`: at once.
    fn next(&self, signs: u64) -> Option<Instant> {
        self.behind(signs).map(|(last, pause)| last + pause)
    }

    /// Notes the start of an attempt.
    fn begin(&mut self, now: Instant, signs: u64) {
        if let Some((_, pause)) = self.behind(signs) {
            self.pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.last = Some((now, signs));
    }

    /// Waits for the back-off, and starts the next attempt.
    pub(super) async fn wait(&mut self, peer: &Peer) {
        if self.last.is_some_and(|(last, _)| last.elapsed() >= WORTH) {
            self.pause = PAUSE;
        }
        while let signs = (self.signs)(peer)
            && let Some(at) = self.next(signs)
        {
            tokio::select! {
                () = sleep_until(at) => break,
                () = peer.until(|peer| (self.signs)(peer) != signs) => {}
            }
        }
        self.begin(Instant::now(), (self.signs)(peer));
    }
}

/// Receivers of the peer's answers to ASK, by the kind's number. `None`: refused.
type Answers = RefCell<HashMap<u32, mpsc::Sender<Option<Granted>>>>;

impl Flows {
    /// Keeps carriers to a peer open while this host's flows need them.
    pub(super) async fn keep(self: Rc<Self>, peer: Rc<Peer>) {
        let mut pauses = Pauses::new(Peer::signs);
        let carriers = async {
            loop {
                if peer.is_stuck() {
                    pauses.pause = PAUSE;
                }
                pauses.wait(&peer).await;
                // The latest destination: an earlier port may not be hooked any more.
                if let Some(dest) = peer.dest.get()
                    && let Err(error) = self.open_control(&peer, dest).await
                {
                    tracing::debug!(%error, %dest, "association: no control connection");
                }
            }
        };
        tokio::select! {
            () = carriers => {}
            () = self.open_sessions(&peer) => {}
            () = self.open_stacks(&peer) => {}
            () = peer.idle(IDLE) => {}
        }
        self.end(&peer);
    }

    /// Ends an association that the peer has opened once it is idle for [`LINGER`].
    pub(super) async fn look_after(self: Rc<Self>, peer: Rc<Peer>) {
        loop {
            peer.until(|peer| !peer.has_flows() && !peer.has_carriers())
                .await;
            let used = peer.until(|peer| peer.has_flows() || peer.has_carriers());
            if timeout(LINGER, used).await.is_err() {
                break;
            }
        }
        self.end(&peer);
    }

    fn end(&self, peer: &Peer) {
        peer.has_ended.set(true);
        self.names.set_known(peer.key, false);
        self.forget(peer);
        peer.close_carriers();
    }

    /// Timers and memory accounting of all associations, once every [`TICK`]. Never returns.
    pub(crate) async fn tend(self: Rc<Self>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = Instant::now();
        loop {
            ticks.tick().await;
            let after = last.elapsed();
            last = Instant::now();
            self.pulse.note();
            let peers = self.peers();
            for peer in peers {
                peer.handle_timeout();
                peer.review(|cookie| self.hooker.is_unnamed(cookie));
                peer.look(after);
                peer.count_memory();
                peer.follow_room();
                self.follow_links(&peer);
            }
        }
    }

    /// Opens the control connection and serves it until it ends.
    async fn open_control(self: &Rc<Self>, peer: &Rc<Peer>, dest: SocketAddr) -> io::Result<()> {
        let name = FlowName {
            tag: peer.key.tag,
            number: CONTROL_CONNECTION,
        };
        let forwards = peer.gateway.forwards.get();
        let from = peer.key.local;
        let socket = self.hooker.connect_control(from, dest, name, forwards)?;
        let control = Control::new(socket)?;
        let connected = async {
            control.connected().await?;
            Ok::<_, io::Error>(self.hooker.speaks_vtl(control.tcp()))
        };
        let in_time = timeout(ANSWER, connected).await;
        if !in_time.map_err(|_| io::ErrorKind::TimedOut)?? {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let greeting = |frame: Frame<'_>| match frame {
            Frame::Hello { tls, gateways, .. } => Some((tls, gateways)),
            _ => None,
        };
        let Ok(greeted) = timeout(ANSWER, control.next(greeting)).await else {
            // A middlebox drops segments with the option, which delays each flow by a second: treat as plain; not where that
            // was no matter before.
            if peer.successions() == 0
                && let Err(error) = self.hooker.leave_plain(dest)
            {
                tracing::debug!(%error, "association: cannot remember a destination without VTL");
            }
            return Err(io::ErrorKind::TimedOut.into());
        };
        let Some((has_tls, gateways)) = greeted? else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.identify(peer, &control, has_tls).await?;
        let id = peer.next_carrier();
        let said = control.say(hello(id, peer.key.tag, 0, false)).await;
        said.map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.tell_gateway(peer, &control, gateways).await;
        self.control(peer, id, control).await;
        Ok(())
    }

    /// Mutual authentication on a control connection: TLS if the peer supports it, then certificates.
    ///
    /// # Errors
    /// The peer is refused: none of its carriers serve; or the handshake fails or times out.
    async fn identify(&self, peer: &Peer, control: &Control, has_tls: bool) -> io::Result<()> {
        let opener = peer.key.opener;
        let identity = Arc::clone(&self.limits.identity);
        let (mut shown, mut certificate) = (None, None);
        if has_tls {
            let secured = control.secure(identity.tls(opener)?);
            let in_time = timeout(ANSWER, secured).await;
            shown = Some(in_time.map_err(|_| io::ErrorKind::TimedOut)??);
        }
        if control.certifies() {
            let exchanged = timeout(ANSWER, self.certify(opener, control)).await;
            certificate = exchanged.map_err(|_| io::ErrorKind::TimedOut)??;
        }
        let address = peer.key.peer;
        // Off the event loop: it reads files.
        let judging =
            spawn_blocking(move || identity.judge(opener, address, shown, certificate.as_deref()));
        let judged = timeout(ANSWER, judging).await;
        let judged = judged.map_err(|_| io::ErrorKind::TimedOut)?;
        peer.note_identity(shown, judged.map_err(io::Error::other)?)
    }

    /// Sends this host's certificate on a control connection, and receives the peer's. `None`: not waited for, since
    /// this host needs none.
    async fn certify(&self, opener: Side, control: &Control) -> io::Result<Option<Vec<u8>>> {
        let identity = Arc::clone(&self.limits.identity);
        // Off the event loop: it reads a file.
        let own = spawn_blocking(move || identity.certificate()).await;
        let bytes = &own.map_err(io::Error::other)?[..];
        let said = control.say(Frame::Certificate { bytes }).await;
        said.map_err(|_| io::ErrorKind::BrokenPipe)?;
        if opener == Side::Local && !self.limits.identity.needs_certificates() {
            // Ignored when it arrives: waiting would take a round trip.
            return Ok(None);
        }
        let taken = control.next(|frame| match frame {
            Frame::Certificate { bytes } => Some(bytes.to_vec()),
            _ => None,
        });
        taken
            .await?
            .map(Some)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Serves a control connection opened by this host until it ends.
    async fn control(self: &Rc<Self>, peer: &Rc<Peer>, id: CarrierId, control: Rc<Control>) {
        peer.control.replace(Some((id, Rc::clone(&control))));
        // Attempts that failed without a daemon there may succeed now; not where it closes what it does not accept.
        let is_accepted = Cell::new(false);
        let accepted = || {
            if !is_accepted.replace(true) {
                peer.note_succession();
            }
        };
        let answers = Answers::default();
        let answer = |kind: u32, granted| {
            let kind = match kind & WITH_LAYERS {
                0 => kind,
                _ => Kind::Stack.number().into(),
            };
            if let Some(answer) = answers.borrow().get(&kind) {
                // An answer that nobody waits for is dropped.
                let _ = answer.try_send(granted);
            }
        };
        let receiving = async {
            let each = |frame: Frame<'_>| match frame {
                Frame::Grant {
                    kind,
                    port,
                    token,
                    crypto,
                } => {
                    let to = SocketAddr::new(peer.host(), port);
                    let granted = Granted {
                        to,
                        token,
                        crypto: crypto.into(),
                    };
                    answer(kind, Some(granted));
                }
                Frame::Refuse { kind } => {
                    answer(kind, None);
                }
                Frame::Figures(figures) => peer.note_figures(told(&figures)),
                Frame::Addresses(addresses) if control.has_tls() => peer.note_addresses(addresses),
                Frame::Gateway { address } => self.note_gateway(peer, &control, address.into()),
                frame => peer.frame(id, frame),
            };
            // It comes before the peer has judged.
            let is_word = |frame: Frame<'_>| {
                let is_word = !matches!(frame, Frame::Certificate { .. });
                each(frame);
                is_word
            };
            while let Ok(is_word) = control.next(is_word).await {
                if is_word {
                    accepted();
                }
            }
        };
        let lasting = async {
            sleep(ACCEPTED + 3 * tcp_rtt(control.tcp()).unwrap_or_default()).await;
            accepted();
            pending::<()>().await;
        };
        self.names.set_known(peer.key, true);
        tokio::select! {
            _ = peer.run(id, control.clone(), receiving) => {}
            () = self.open_carriers(peer, &control, &answers) => {}
            () = tell_preferred(peer, id, &control) => {}
            () = lasting => {}
        }
        self.names.set_known(peer.key, false);
        peer.lost_control(&control);
    }

    /// Opens carriers of every kind that flows need.
    async fn open_carriers(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        control: &Rc<Control>,
        answers: &Answers,
    ) {
        let mut tasks = JoinSet::new();
        loop {
            let next = |peer: &Peer| {
                // The desired kind first: the peer takes it for the association's.
                let mut kinds = peer.kind().into_iter().chain(Kind::ALL);
                kinds.find(|kind| {
                    let is_asked = answers.borrow().contains_key(&kind.number().into());
                    *kind != Kind::Graft && peer.needs(*kind) && !is_asked
                })
            };
            peer.until(|peer| next(peer).is_some()).await;
            if let Some(kind) = next(peer) {
                let (answer, answered) = mpsc::channel(1);
                answers.borrow_mut().insert(kind.number().into(), answer);
                let (flows, peer, control) = (Rc::clone(self), Rc::clone(peer), Rc::clone(control));
                tasks.spawn_local(async move {
                    flows.open_kind(&peer, &control, kind, answered).await;
                });
            }
        }
    }

    /// Keeps a session over a graft open while it is needed; sessions need no grant.
    async fn open_sessions(self: &Rc<Self>, peer: &Rc<Peer>) {
        let mut pauses = Pauses::new(Peer::signs);
        loop {
            peer.until(|peer| peer.needs(Kind::Graft)).await;
            pauses.wait(peer).await;
            if !peer.needs(Kind::Graft) {
                continue;
            }
            let (host, was_told) = (peer.host(), peer.gateway.host.get().is_some());
            let plan = Plan::of(peer, Kind::Graft);
            let opening = self.open_carrier(peer, plan, Granted::freely(host), None);
            tokio::select! {
                opened = opening => if let Err(error) = opened {
                    tracing::info!(%error, peer = %peer.key.peer, carrier = %Kind::Graft, "carrier: cannot open: plain TCP until the next attempt");
                    peer.tell_failed(Kind::Graft.name(), error.to_string());
                },
                // The peer is a gateway: at once there. If it tells another address later, after the pause that is due.
                () = peer.until(|peer| peer.host() != host) => if !was_told {
                    pauses = Pauses::new(Peer::signs);
                },
            }
        }
    }

    /// Keeps a carrier of a kind open while it is needed, until the control connection ends.
    async fn open_kind(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        control: &Control,
        kind: Kind,
        mut answers: mpsc::Receiver<Option<Granted>>,
    ) {
        let mut pauses = Pauses::new(Peer::successions);
        loop {
            // A carrier that has outlived an earlier control connection will do.
            peer.until(|peer| peer.needs(kind)).await;
            pauses.wait(peer).await;
            if !peer.needs(kind) {
                continue;
            }
            let plan = Plan::of(peer, kind);
            if plan.lower == Kind::Graft {
                let granted = Granted::freely(peer.host());
                self.try_to_open(peer, plan, granted, tcp_rtt(control.tcp()))
                    .await;
                continue;
            }
            // A late answer to a request that timed out.
            let _ = answers.try_recv();
            let asked = Frame::Ask {
                kind: plan.number(),
                // The grant's secret must be encrypted in transit.
                seals: (self.limits.seals || peer.requires_encryption()) && control.has_tls(),
            };
            if control.say(asked).await.is_err() {
                return;
            }
            match timeout(ANSWER, answers.recv()).await {
                Ok(Some(Some(granted))) => {
                    let rtt = tcp_rtt(control.tcp());
                    self.try_to_open(peer, plan, granted, rtt).await;
                }
                Ok(Some(None)) => {
                    let why = plan.refused();
                    tracing::info!(peer = %peer.key.peer, carrier = %kind, "carrier: {why}");
                    peer.tell_failed(kind.name(), why);
                }
                Ok(None) => return,
                Err(_) => {}
            }
        }
    }

    /// The same as [`Flows::open_carrier`]; says why it cannot be opened.
    async fn try_to_open(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        plan: Plan,
        granted: Granted,
        rtt: Option<Duration>,
    ) {
        let kind = plan.kind;
        if let Err(error) = self.open_carrier(peer, plan, granted, rtt).await {
            tracing::info!(%error, peer = %peer.key.peer, carrier = %kind, "carrier: cannot open: plain TCP until the next attempt");
            peer.tell_failed(kind.name(), error.to_string());
        }
    }

    /// Opens a carrier and serves it until it breaks or is not needed any more.
    async fn open_carrier(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        plan: Plan,
        granted: Granted,
        rtt: Option<Duration>,
    ) -> io::Result<()> {
        let Plan {
            kind,
            lower,
            layers,
            options,
            wanted,
        } = plan;
        let endpoint = self.endpoint(lower)?;
        let is_clear = *granted.crypto.as_bytes() == CLEAR && lower != Kind::Graft;
        if is_clear && peer.requires_encryption() {
            return Err(io::Error::other("the peer does not encrypt it"));
        }
        let opening = ToOpen {
            granted,
            local: self.own_address(peer),
            rtt,
            options,
            encrypted: peer.requires_encryption(),
            path: 0,
        };
        let link = endpoint.connect(opening).await?;
        let number = peer.next_carrier();
        peer.note_options(number, wanted);
        // It outlives this control connection.
        let layers = self.layers(layers);
        let serving = spawn_local(link.serve(Rc::clone(peer), Some(number), layers));
        tokio::select! {
            _ = serving => peer.forget_options(number),
            () = peer.until(|peer| !peer.needs(kind)) => {}
        }
        Ok(())
    }

    /// Accepts a control connection from a peer: greeting, authentication, and service until it ends.
    pub(super) async fn serve_control(self: Rc<Self>, peer: Rc<Peer>, stream: TcpStream) {
        let control = match Control::new(stream) {
            Ok(control) => control,
            Err(error) => return tracing::debug!(%error, "association: no control connection"),
        };
        if control.say(greeting(&peer)).await.is_err() {
            return;
        }
        let Ok(Ok(has_tls)) = timeout(ANSWER, control.is_tls()).await else {
            return;
        };
        if let Err(error) = self.identify(&peer, &control, has_tls).await {
            return tracing::debug!(%error, peer = %peer.key.peer, "association: no control connection");
        }
        let numbered = |frame: Frame<'_>| match frame {
            Frame::Hello {
                carrier,
                tag,
                gateways,
                ..
            } if tag == peer.key.tag && carrier.opener == Side::Peer => Some((carrier, gateways)),
            _ => None,
        };
        if let Ok(Ok(Some((id, gateways)))) = timeout(ANSWER, control.next(numbered)).await {
            self.tell_gateway(&peer, &control, gateways).await;
            self.serve_controlled(peer, id, control).await;
        }
    }

    /// Serves an accepted control connection after the peer's HELLO, until it ends.
    async fn serve_controlled(self: Rc<Self>, peer: Rc<Peer>, id: CarrierId, control: Rc<Control>) {
        peer.control.replace(Some((id, Rc::clone(&control))));
        self.names.set_known(peer.key, true);
        peer.forget_wants();
        let receiving = async {
            let each = |frame: Frame<'_>| match frame {
                Frame::Ask { kind, seals } => Some((kind, seals)),
                Frame::Prefer {
                    carrier,
                    tag,
                    bbr,
                    asks,
                    spread,
                } if tag == peer.key.tag => {
                    let preference = Preference {
                        carrier,
                        bbr,
                        asks,
                        spread,
                    };
                    if peer.note_preferred(preference) {
                        self.follow_preferred_control(&peer);
                    }
                    None
                }
                Frame::Gateway { address } => {
                    self.note_gateway(&peer, &control, address.into());
                    None
                }
                frame => {
                    peer.frame(id, frame);
                    None
                }
            };
            while let Ok(asked) = control.next(each).await {
                if let Some((kind, seals)) = asked {
                    let seals = seals && control.has_tls();
                    let answer = self.grant(&peer, kind, seals, tcp_rtt(control.tcp()));
                    if control.say(answer).await.is_err() {
                        return;
                    }
                }
            }
        };
        tokio::select! {
            // Returns at once if its id is in use.
            _ = peer.run(id, control.clone(), receiving) => {}
            () = self.tell_figures(&peer, &control) => {}
            () = self.tell_addresses(&peer, &control) => {}
        }
        peer.lost_control(&control);
        // There may be another one already.
        let has_control = peer.control.borrow().is_some();
        self.names.set_known(peer.key, has_control);
    }
}

/// Tells the peer which carrier this host prefers, whenever that changes. Returns when the connection fails.
async fn tell_preferred(peer: &Peer, id: CarrierId, control: &Control) {
    let mut told = None;
    loop {
        let next = |peer: &Peer| peer.prefers(id).filter(|next| told != Some(*next));
        peer.until(|peer| next(peer).is_some()).await;
        let Some(next) = next(peer) else { continue };
        let prefer = Frame::Prefer {
            carrier: next.carrier,
            tag: peer.key.tag,
            bbr: next.bbr,
            asks: next.asks,
            spread: next.spread,
        };
        if control.say(prefer).await.is_err() {
            return;
        }
        told = Some(next);
    }
}

/// The server's HELLO on a control connection; carrier number 0, since the opener assigns the number.
fn greeting(peer: &Peer) -> Frame<'static> {
    let unnumbered = CarrierId {
        opener: Side::Peer,
        number: 0,
    };
    Frame::Hello {
        carrier: unnumbered,
        tag: peer.key.tag,
        tls: true,
        path: 0,
        gateways: true,
        layers: false,
    }
}

impl Peer {
    /// Completes when the association has had no flow for `idle`.
    async fn idle(&self, idle: Duration) {
        loop {
            self.until(|peer| !peer.has_flows()).await;
            if timeout(idle, self.until(Self::has_flows)).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses__grow_until_there_is_a_sign() {
        let mut pauses = Pauses::new(Peer::signs);
        let now = Instant::now();
        assert_eq!(pauses.next(3), None, "the first attempt waits for nothing");
        pauses.begin(now, 3);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let at = pauses.next(3);
            assert_eq!(at, Some(now + Duration::from_secs(seconds)));
            pauses.begin(now, 3);
        }
        assert_eq!(pauses.next(4), Some(now + PAUSE), "one since the last");
        pauses.begin(now, 4);
        assert_eq!(pauses.next(4), Some(now + 2 * PAUSE));
    }
}
