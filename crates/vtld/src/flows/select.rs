//! The carrier `auto`: the model decides for each association, by the figures of the direction that carries more bytes.
//! Those of what this host sends are the monitor's; those of what it receives the peer tells (FIGURES).

use std::{
    cell::Cell,
    rc::Rc,
    sync::Once,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use vtl_control::{SelectStatus, SelectedPath, What};
use vtl_core::{
    netmon::{Metrics, figures},
    profile::Profile,
    reconfigure::{Bounds, Choice, DEFAULT_DWELL, Decision, ENOUGH_PACKETS, Engine},
    select::{CLASSES, Selector},
};
use vtl_proto::{
    carrier::Kind,
    frame::{Frame, Side},
};

use super::{
    Flows, PAGE, Target,
    control::Control,
    peer::Peer,
    reconfigure::{By, Following, OPENING, STALE},
};
use crate::{events::emit, hooker::CarrierOptions};

/// Maximum age of figures that a peer has told: they come once a second, behind what the path loses.
pub(super) const TOLD_STALE: Duration = Duration::from_secs(5);
/// Age up to which figures of earlier connections count for a new association.
const KNOWN: Duration = Duration::from_secs(300);
/// Interval of telling figures to a peer.
const TELLING: Duration = Duration::from_secs(1);

/// Prefix of those of [`CLASSES`] that are grafts.
const GRAFT: &str = "graft:";
/// Time without new bytes, and three round trips, after which flows pause: TCP delivers nothing while it repairs a loss.
const PAUSE: Duration = Duration::from_secs(1);

/// Has the model be read, which takes 20 ms, beside the thread that moves bytes: before it is first asked.
fn read_model() {
    static READ: Once = Once::new();
    READ.call_once(|| {
        // Without a thread the model is read when it is asked.
        let thread = thread::Builder::new().name("vtl-model".into());
        let _ = thread.spawn(|| {
            Selector::embedded();
        });
    });
}

/// Marks associations whose carrier is chosen; those of different profiles, and of different bounds, are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Auto {
    /// What was expected when the association began, by earlier flows or the port; `None`: nobody knew. What the flows'
    /// bytes show counts more ([`Peer::shown_profile`]).
    pub(crate) profile: Option<Profile>,
    /// What the flows' rule bounds.
    #[serde(default)]
    pub(crate) bounds: Bounds,
    /// The flows explore this place among [`CLASSES`]: what they go by, whatever the model says.
    #[serde(default)]
    pub(crate) explores: Option<u8>,
}

/// What is known of an association that the model decides about, beside its [`Engine`].
#[derive(Default)]
pub(super) struct ByModel {
    /// The direction that carries more bytes, and its latest figures.
    seen: Cell<(Option<Direction>, Option<Metrics>)>,
    /// Bytes that flows had moved, and when that changed last.
    moved: Cell<Option<(u64, Instant)>>,
}

/// A direction of an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Sends,
    Receives,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::Sends => "sends",
            Self::Receives => "receives",
        }
    }
}

impl ByModel {
    /// The class of a choice.
    pub(super) fn class(choice: Choice) -> &'static str {
        choice
            .and_then(|place| CLASSES.get(place))
            .unwrap_or(&CLASSES[0])
    }

    /// What flows go by for a choice.
    pub(super) fn target(choice: Choice) -> Target {
        let graft = Self::class(choice).strip_prefix(GRAFT)?;
        Some((
            Kind::Graft,
            Some(CarrierOptions::Graft(graft.into()).into()),
        ))
    }

    /// Whether BBR takes over the flows' TCP connections where the path loses packets. So also where a graft was chosen:
    /// then they are what is left should it break.
    pub(super) fn may_be_bbr(choice: Choice) -> bool {
        Self::class(choice) != CLASSES[0]
    }

    /// Notes how many bytes flows have moved. Returns whether they move.
    fn is_moving(&self, moved: u64, rtt: Duration) -> bool {
        let now = Instant::now();
        let since = match self.moved.get() {
            Some((before, since)) if before == moved => since,
            _ => now,
        };
        self.moved.set(Some((moved, since)));
        now.duration_since(since) < PAUSE + 3 * rtt
    }

    /// The choice that flows go by already.
    fn choice_of(target: Option<&Target>) -> Choice {
        (1..CLASSES.len()).find(|place| {
            let of = Self::target(Some(*place));
            of.is_some() && Some(&of) == target
        })
    }
}

impl Flows {
    /// Starts to choose for a new association: at once where earlier connections have told of the path; until then BBR may
    /// take over.
    pub(super) fn begin_model(&self, peer: &Rc<Peer>) {
        let Some(auto) = peer.auto().filter(|_| self.limits.selection.is_on()) else {
            return;
        };
        if let Some(explored) = auto.explored() {
            return self.follow_explored(peer, auto, explored);
        }
        let following = self.follow_by_model(peer, auto);
        if let Some(metrics) = self.known(peer) {
            let mut engine = following.engine.borrow_mut();
            let switch = engine.begin(following.now_ns(), &metrics);
            drop(engine);
            if let Some(switch) = switch {
                peer.start_switch(&following, switch, Some(&metrics));
            }
        }
    }

    fn follow_by_model(&self, peer: &Rc<Peer>, auto: Auto) -> Rc<Following> {
        read_model();
        let choice = ByModel::choice_of(peer.settled_target().as_ref());
        let engine = Engine::resume_by_model(auto.profile, DEFAULT_DWELL, choice);
        let engine = engine.with_bounds(auto.bounds);
        let following = Following::new(By::Model(Box::default()), engine);
        peer.follow_anew(&following);
        following
    }

    /// What earlier connections to the host have told of the path, in the direction of which more is known.
    fn known(&self, peer: &Peer) -> Option<Metrics> {
        let host = peer.key.peer;
        let own = self.broker.monitor().recent(host, KNOWN);
        let others = self.peers();
        let others = others.iter().filter(|other| other.key.peer == host);
        let told = others.filter_map(|other| other.told(KNOWN));
        let all = own.into_iter().chain(told);
        all.filter(|metrics| metrics.packets >= ENOUGH_PACKETS)
            .max_by_key(|metrics| metrics.packets)
    }

    /// Takes the state of the path for an association of `auto`; by TCP while the choice is off.
    pub(super) fn follow_model(&self, peer: &Rc<Peer>, auto: Auto) {
        if !self.limits.selection.is_on() {
            if peer.following.take().is_some() || peer.condition_target() != Some(None) {
                peer.set_target(Some(None));
                peer.set_bbr(false);
            }
            return;
        }
        if let Some(explored) = auto.explored() {
            return self.follow_explored(peer, auto, explored);
        }
        let known = peer.following.borrow().clone();
        let following = known.unwrap_or_else(|| self.follow_by_model(peer, auto));
        let By::Model(by) = &following.by else {
            return;
        };
        let direction = peer.direction().or(by.seen.get().0);
        let metrics = match direction {
            Some(Direction::Sends) => self.broker.monitor().recent(peer.key.peer, STALE),
            Some(Direction::Receives) => peer.told(TOLD_STALE),
            None => None,
        };
        let (before, seen) = by.seen.get();
        let seen = seen.filter(|_| before == direction);
        let seen = metrics.or(seen);
        by.seen.set((direction, seen));
        peer.give_up_lost(&following);
        // What a peer has told has the shortest one only.
        let rtt = seen.and_then(|metrics| metrics.rtt.or(metrics.min_rtt));
        let is_moving = by.is_moving(peer.moved(), rtt.unwrap_or_default());
        let mut engine = following.engine.borrow_mut();
        engine.note_moving(is_moving);
        engine.set_profile(peer.shown_profile().or(auto.profile));
        drop(engine);
        self.learn(peer, auto, Some(&*following));
        self.follow_bounds(peer, &following, direction);
        peer.sample(&following, metrics.as_ref());
    }

    /// Tells a peer that has asked for it what this host knows of the direction in which it sends, while that is new.
    /// Returns when the connection fails.
    pub(super) async fn tell_figures(&self, peer: &Peer, control: &Control) {
        let mut told = None;
        loop {
            peer.until(Peer::is_asked).await;
            sleep(TELLING).await;
            if !self.limits.selection.is_on() {
                continue;
            }
            let recent = self.broker.monitor().recent(peer.key.peer, STALE);
            let Some(figures) = recent.map(|metrics| figures(&metrics)) else {
                continue;
            };
            if told.replace(figures) != Some(figures)
                && control.say(Frame::Figures(figures)).await.is_err()
            {
                return;
            }
        }
    }

    /// What the model has chosen, by association: a page from an index on.
    pub(crate) fn select_status(&self, from: usize) -> SelectStatus {
        let on = self.limits.selection.is_on();
        let peers = self.peers();
        let mut paths: Vec<_> = peers.iter().filter_map(|peer| peer.selected(on)).collect();
        paths.sort_by(|a, b| (a.peer, &a.profile).cmp(&(b.peer, &b.profile)));
        let end = from.saturating_add(PAGE);
        let more = (paths.len() > end).then_some(end);
        let paths = paths.into_iter().skip(from).take(PAGE).collect();
        SelectStatus { on, paths, more }
    }
}

impl Peer {
    /// Has the flows go by TCP where what the model has chosen has worked, and then was not to be had for too long.
    fn give_up_lost(&self, following: &Following) {
        if self.has_target() || following.is_switching() {
            following.missing.set(None);
            return;
        }
        let since = following.missing.get().unwrap_or_else(Instant::now);
        following.missing.set(Some(since));
        if since.elapsed() > OPENING {
            following.missing.set(None);
            let mut engine = following.engine.borrow_mut();
            let from = ByModel::class(engine.current());
            engine.lost(following.now_ns());
            drop(engine);
            following.since.set(Instant::now());
            self.set_bbr(true);
            self.set_target(Some(None));
            tracing::warn!(peer = %self.key.peer, from, "select: the carrier does not come back: flows go by TCP");
            emit(What::SelectionChanged {
                peer: self.key.peer,
                association: self.key.tag,
                from: from.into(),
                to: "tcp".into(),
                why: "the carrier does not come back".into(),
            });
        }
    }

    /// The mark of `auto`, if this host has opened the association for it.
    pub(super) fn auto(&self) -> Option<Auto> {
        self.with_desired(|desired| desired.auto).flatten()
    }

    fn by_model<T>(&self, of: impl FnOnce(&Following, &ByModel) -> T) -> Option<T> {
        let following = self.following.borrow();
        let following = following.as_deref()?;
        match &following.by {
            By::Model(by) => Some(of(following, by)),
            By::Rule(..) => None,
        }
    }

    /// Why the model has the flows go by what they do, in short.
    pub(super) fn model_reason(&self) -> String {
        let reason = self.by_model(|following, _| {
            let engine = following.engine.borrow();
            let current = ByModel::class(engine.made());
            match engine.decision() {
                None => format!("auto: {current}, too little is known of the path yet"),
                Some(decision) if engine.follows_learnt() => {
                    let model = decision.explanation.class;
                    format!("auto: {current}, as flows have taught (vtl select learn list); the model says {model}")
                }
                Some(decision) => match engine.passed_over(following.now_ns()) {
                    Some(over) => {
                        let bounds = engine.bounds();
                        format!("auto: {current}, as {over} does not keep {bounds}")
                    }
                    None => short(decision, current),
                },
            }
        });
        let explored = self.auto().and_then(|auto| auto.explored());
        let explores = explored.filter(|of| self.condition_target() == Some(ByModel::target(*of)));
        reason.unwrap_or_else(|| match explores {
            Some(of) => format!("auto: {}, which a few flows explore", ByModel::class(of)),
            None => "auto: vtl select is off".to_owned(),
        })
    }

    fn selected(&self, on: bool) -> Option<SelectedPath> {
        let auto = self.auto()?;
        let row = SelectedPath {
            peer: self.key.peer,
            association: Some(self.key.tag),
            profile: auto.profile.map(|profile| profile.to_string()),
            max_delay_ms: (auto.bounds.max_delay).map(|max| max.as_secs_f64() * 1e3),
            min_throughput_mbit: (auto.bounds.min_throughput).map(|min| min as f64 / 1e6),
            missed: Vec::new(),
            carrier: ByModel::class(auto.explored().filter(|_| on).flatten()).to_owned(),
            flows: self.count_flows(),
            direction: None,
            min_rtt_ms: None,
            loss_pct: None,
            loss_burst: None,
            rate_mbit: None,
            rate_at_least: None,
            packets: None,
            why: self.model_reason(),
            explanation: None,
            since_s: None,
        };
        let chosen = self.by_model(|following, by| {
            let engine = following.engine.borrow();
            let (direction, metrics) = by.seen.get();
            let metrics = metrics.unwrap_or_default();
            let decision = engine.decision();
            SelectedPath {
                profile: engine.profile().map(|profile| profile.to_string()),
                missed: engine.missed().map(|bound| bound.to_string()).collect(),
                carrier: ByModel::class(engine.made()).to_owned(),
                direction: direction.map(|direction| direction.name().to_owned()),
                min_rtt_ms: metrics.min_rtt.map(|rtt| rtt.as_secs_f64() * 1e3),
                loss_pct: (metrics.clear_loss.or(metrics.loss)).map(|loss| loss * 100.0),
                loss_burst: metrics.loss_burst,
                rate_mbit: metrics.bandwidth.map(|of| of.rate as f64 / 1e6),
                rate_at_least: metrics.bandwidth.map(|of| of.at_least),
                packets: (metrics.packets > 0).then_some(metrics.packets),
                explanation: decision.map(|decision| decision.explanation.to_string()),
                since_s: Some(following.since.get().elapsed().as_secs_f64()),
                ..row.clone()
            }
        });
        Some(chosen.filter(|_| on).unwrap_or(row))
    }

    /// The figures that the peer has told, of at most this age.
    pub(super) fn told(&self, age: Duration) -> Option<Metrics> {
        let (at, metrics) = self.told.get()?;
        (at.elapsed() <= age).then_some(metrics)
    }

    /// Notes figures of the direction in which the peer sends, if this host has asked for them.
    pub(super) fn note_figures(&self, metrics: Metrics) {
        if self.key.opener == Side::Local && self.auto().is_some() {
            self.told.set(Some((Instant::now(), metrics)));
        }
    }
}

/// What was decided, and by what, in one line. `current`: the class that flows go by.
fn short(decision: &Decision, current: &str) -> String {
    let features = &decision.features;
    let chosen = &decision.explanation;
    if decision.is_unsure {
        return format!(
            "auto: {current}, as {} is not surely better where so few packets fit onto the path",
            chosen.class
        );
    }
    let meanwhile = match current == chosen.class {
        true => String::new(),
        false => format!("; {current} until bytes pause and that can be had"),
    };
    if let Some(why) = &chosen.default_because {
        return format!("auto: {}, the default: {why}{meanwhile}", chosen.class);
    }
    let figures = [
        features.rtt_ms.map(|ms| format!("rtt {ms:.0} ms")),
        features.loss_percent.map(|pct| format!("loss {pct:.1} %")),
        features
            .rate_mbit
            .map(|mbit| format!("rate {mbit:.1} Mbit/s")),
        features.profile.map(|profile| profile.to_string()),
    ];
    let figures: Vec<_> = figures.into_iter().flatten().collect();
    let share = chosen.shares.iter().find(|(of, _)| *of == chosen.class);
    let share = share.map_or(0.0, |(_, share)| share * 100.0);
    format!(
        "auto: {} for {} ({share:.0} % of what was won){meanwhile}",
        chosen.class,
        figures.join(", ")
    )
}
