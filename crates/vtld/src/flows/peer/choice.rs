//! The carrier that an association's flows go by: the one that the opener's hook or rule desires or, while a condition of
//! the rule holds, that condition's, or the one that the model has chosen. The opener tells the peer (PREFER), which
//! follows.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use vtl_core::{Association, flow::Path, profile::Profile};
use vtl_proto::{
    carrier::{Kind, Scheduler},
    frame::{CarrierId, FlowId, Side},
};

use super::{
    super::{Desired, Target, flow::State, select::Direction},
    Peer, counts,
};
use crate::hooker::CarrierOptions;

/// Reason shown for flows on the preferred carrier,
const BEST: &str = "the best carrier that there is";
/// by a condition of this host's rule,
const CONDITION: &str = "a condition of its rule holds (vtl rule list)";
/// by the model (in its place the reason is shown),
pub(super) const MODEL: &str = "the model has chosen it";
/// and by the peer's.
const PREFERRED: &str = "the peer, which has opened it, prefers this carrier";

/// Minimum time between two moves that the peer asks for, as all its flows are gone through. The next one comes with
/// [`Peer::review`].
const FOLLOWING: Duration = Duration::from_millis(100);
/// Flows of which one confirms for the sake of the round-trip time. Where there are more, others send.
const FEW: usize = 16;
/// Bytes from which on they tell the direction of flows.
const ENOUGH_BYTES: u64 = 16 << 10;

/// What decides which carrier flows go by, beside the desired one.
#[derive(Default)]
pub(super) struct Choice {
    /// What a condition of the rule, or the model, has the flows go by; `None`: neither, so the desired carrier.
    target: RefCell<Option<Target>>,
    /// The parameters of sessions that this host has opened, if they have any.
    options_by_carrier: RefCell<BTreeMap<CarrierId, Arc<CarrierOptions>>>,
    /// The stack that a command has had opened.
    stack: RefCell<Option<Arc<CarrierOptions>>>,
    /// The carrier that served last: flows stay there until another one is up.
    serving: Cell<Option<CarrierId>>,
    /// The carrier that the peer prefers, if it has opened the association, and the one before, for as long as that is
    /// not up.
    preferred: Cell<[Option<CarrierId>; 2]>,
    /// When the flows were moved there last,
    followed: Cell<Option<Instant>>,
    /// and what it has said since.
    due: Cell<Option<Preference>>,
    /// Whether BBR takes over the flows' TCP connections where the path loses packets, and whether the peer wants that, if
    /// it has opened the association.
    bbr: Cell<bool>,
    prefers_bbr: Cell<bool>,
    /// Whether the peer has let BBR take over flows by their names, which says nothing once it has said more,
    lets_bbr: Cell<bool>,
    /// as it has by PREFER on this control connection.
    has_preferred: Cell<bool>,
    /// By which scheduler the peer, if it has opened the association, wants flows to be spread.
    prefers_spread: Cell<Option<Scheduler>>,
    /// Whether the peer has asked for figures of the path.
    asked: Cell<bool>,
    /// Bytes sent and received by flows that have ended, older ones counting half as much with each.
    ended: Cell<[u64; 2]>,
}

/// What to tell the peer (PREFER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Preference {
    /// The carrier; the control connection for the flows' TCP connections.
    pub(in super::super) carrier: CarrierId,
    /// BBR is to take over TCP connections of the flows.
    pub(in super::super) bbr: bool,
    /// This host asks for figures of the path.
    pub(in super::super) asks: bool,
    /// Flows are to be spread over all carriers by this scheduler, and this host asks for addresses.
    pub(in super::super) spread: Option<Scheduler>,
}

fn add([a, b]: [u64; 2], [sent, received]: [u64; 2]) -> [u64; 2] {
    [a.saturating_add(sent), b.saturating_add(received)]
}

impl Peer {
    /// Sets the desired carrier of the flows; the first call decides.
    pub(in super::super) fn set_desired(&self, desired: Desired) {
        let is_first = self.desired.borrow().is_none();
        if is_first {
            self.desired.replace(Some(desired));
            self.follow_spread();
        }
    }

    /// Stops the need for carriers, and returns the flows' desired carrier.
    pub(in super::super) fn forget_desired(&self) -> Option<Desired> {
        self.wanted.borrow_mut().clear();
        self.choice.target.take();
        self.desired.take()
    }

    pub(in super::super) fn with_desired<T>(&self, of: impl FnOnce(&Desired) -> T) -> Option<T> {
        self.desired.borrow().as_ref().map(of)
    }

    /// The rule that hooked the flows, if it has conditions.
    pub(in super::super) fn rule(&self) -> Option<Arc<str>> {
        self.with_desired(|desired| desired.rule.clone()).flatten()
    }

    /// Whether something decides about the carrier while flows run: a rule's conditions, or the model.
    fn is_decided(&self) -> bool {
        let decides = |desired: &Desired| desired.rule.is_some() || desired.auto.is_some();
        self.with_desired(decides) == Some(true)
    }

    /// What a condition, or the model, has the flows go by; `None`: neither has.
    pub(in super::super) fn condition_target(&self) -> Option<Target> {
        self.choice.target.borrow().clone()
    }

    /// Has the flows go by this as soon as it is up; `None`: by the desired carrier.
    pub(in super::super) fn set_target(&self, target: Option<Target>) {
        if self.desired.borrow().is_none() {
            return; // handed over, or not the opener
        }
        self.choice.target.replace(target);
        self.follow_spread();
        self.prefer_best();
        self.changed.notify_waiters();
        self.turn();
    }

    /// Whether what the flows are to go by is up.
    pub(in super::super) fn has_target(&self) -> bool {
        match self.target() {
            Some(Some((kind, options))) => self.latest_of(kind, options.as_ref()).is_some(),
            Some(None) => true,
            None => false,
        }
    }

    /// The scheduler by which flows are spread over the association's carriers.
    pub(in super::super) fn scheduler(&self) -> Option<Scheduler> {
        if self.key.opener == Side::Peer {
            return self.choice.prefers_spread.get();
        }
        let (_, options) = self.target()??;
        match options.as_deref() {
            Some(CarrierOptions::Spread(scheduler)) => Some(*scheduler),
            _ => None,
        }
    }

    /// What the flows are to go by.
    fn target(&self) -> Option<Target> {
        self.condition_target().or_else(|| self.desired_target())
    }

    fn desired_target(&self) -> Option<Target> {
        self.with_desired(|desired| match desired.auto {
            Some(_) => None,
            None => Some((desired.kind, desired.options.clone())),
        })
    }

    /// Session parameters for a carrier of this kind that is to be opened.
    pub(in super::super) fn options(&self, kind: Kind) -> Option<Arc<CarrierOptions>> {
        let targets = [self.target(), self.desired_target()];
        let mut of_kind = targets.into_iter().flatten().flatten();
        match of_kind.find(|(of, _)| *of == kind) {
            Some((_, options)) => options,
            None if kind == Kind::Stack => self.choice.stack.borrow().clone(),
            None => None,
        }
    }

    /// Has a stack opened for a command, unless the association's flows go by another one.
    ///
    /// # Errors
    /// They do.
    pub(super) fn want_stack(&self, options: Arc<CarrierOptions>) -> Result<(), String> {
        match self.options(Kind::Stack) {
            Some(other) if other != options => {
                Err("the association has another stack already, and one only".into())
            }
            _ => {
                self.choice.stack.replace(Some(options));
                Ok(())
            }
        }
    }

    /// Notes the session parameters of a carrier that this host has opened.
    pub(in super::super) fn note_options(
        &self,
        carrier: CarrierId,
        options: Option<Arc<CarrierOptions>>,
    ) {
        if let Some(options) = options {
            self.choice
                .options_by_carrier
                .borrow_mut()
                .insert(carrier, options);
        }
    }

    /// Forgets the session parameters of a carrier that has ended.
    pub(in super::super) fn forget_options(&self, carrier: CarrierId) {
        self.choice.options_by_carrier.borrow_mut().remove(&carrier);
    }

    /// Kind of carrier that the flows are to go by.
    pub(in super::super) fn kind(&self) -> Option<Kind> {
        self.target()?.map(|(kind, _)| kind)
    }

    /// Whether a carrier of the kind is needed and none is up.
    pub(in super::super) fn needs(&self, kind: Kind) -> bool {
        let lacks = |target: &Option<Target>| match target {
            Some(Some((of, options))) if *of == kind => {
                self.latest_of(kind, options.as_ref()).is_none()
            }
            _ => false,
        };
        let target = self.target();
        // Where a condition's carrier has ended, and the one before: the desired one.
        let falls_back = target != Some(None) && !self.has_target() && self.serving().is_none();
        let lacks_target = lacks(&target) || falls_back && lacks(&self.desired_target());
        let is_wanted = self.wanted.borrow().contains(&kind.number());
        let lacks_target = lacks_target && !(kind == Kind::Graft && self.lacks_own());
        let is_missing = lacks_target || is_wanted && self.latest(kind).is_none();
        is_missing && self.admitted.get() && self.has_room()
    }

    /// The latest carrier of the kind.
    pub(super) fn latest(&self, kind: Kind) -> Option<CarrierId> {
        self.latest_that(|_, of| of == Some(kind))
    }

    /// The latest carrier of the kind with these session parameters. Those of the peer's are unknown.
    fn latest_of(&self, kind: Kind, options: Option<&Arc<CarrierOptions>>) -> Option<CarrierId> {
        let options_by_carrier = self.choice.options_by_carrier.borrow();
        self.latest_that(|id, of| of == Some(kind) && options_by_carrier.get(&id) == options)
    }

    fn latest_that(&self, is_it: impl Fn(CarrierId, Option<Kind>) -> bool) -> Option<CarrierId> {
        let carriers = self.carriers.borrow();
        let mut found = carriers
            .iter()
            .filter(|(id, c)| is_it(**id, c.carrier.kind()));
        found.next_back().map(|(id, _)| *id)
    }

    /// The preferred carrier of flows, or an encrypted control connection.
    pub(super) fn best(&self) -> Option<CarrierId> {
        match self.best_path()? {
            Path::Carrier(id) => Some(id),
            Path::Tcp => None,
        }
    }

    /// The preferred path of flows; `None`: none is preferred to what they have.
    pub(super) fn best_path(&self) -> Option<Path> {
        if let Some(path) = self.preferred_path() {
            return Some(path);
        }
        let latest = |target: Option<Target>| {
            let (kind, options) = target??;
            self.latest_of(kind, options.as_ref())
        };
        let target = self.target();
        if target == Some(None) {
            return Some(Path::Tcp);
        }
        latest(target)
            .or_else(|| self.serving())
            .or_else(|| latest(self.desired_target()))
            .or_else(|| self.first_stack())
            .or_else(|| self.encrypted.get().then(|| self.latest_control())?)
            .map(Path::Carrier)
            .or_else(|| self.auto().is_some().then_some(Path::Tcp))
    }

    /// The carrier that served last, if it is up.
    fn serving(&self) -> Option<CarrierId> {
        let serving = self.choice.serving.get();
        serving.filter(|id| self.carriers.borrow().contains_key(id))
    }

    /// What the peer prefers, if it is there.
    fn preferred_path(&self) -> Option<Path> {
        let [latest, former] = self.choice.preferred.get();
        let path = |id: Option<CarrierId>| self.path_of(id?);
        path(latest).or_else(|| path(former))
    }

    /// The path that a carrier stands for in PREFER, if it is up.
    fn path_of(&self, id: CarrierId) -> Option<Path> {
        let carriers = self.carriers.borrow();
        let carrier = &carriers.get(&id)?.carrier;
        match carrier.kind() {
            Some(_) => Some(Path::Carrier(id)),
            None => (!self.encrypted.get()).then_some(Path::Tcp),
        }
    }

    /// The latest encrypted control connection.
    fn latest_control(&self) -> Option<CarrierId> {
        let carriers = self.carriers.borrow();
        let mut controls = carriers
            .iter()
            .filter(|(_, c)| c.carrier.kind().is_none() && c.carrier.is_encrypted());
        controls.next_back().map(|(id, _)| *id)
    }

    /// Whether flows can be carried: a carrier and a control connection are up. The latter proves that the peer has
    /// seen VTL's option, which a middlebox may strip on the way there.
    pub(in super::super) fn is_ready(&self) -> bool {
        self.best().is_some() && self.control.borrow().is_some()
    }

    /// Has a flow that receives confirm what has come since its last CONFIRM. A host to which bytes go sends little else, and
    /// only by what it sends does it see the round-trip time: with a CONFIRM for each 64 KiB it would need twenty seconds of a
    /// slow path to see that this has become longer.
    pub(in super::super) fn confirm_one(&self) {
        let flows: Vec<FlowId> = self.flows.borrow().keys().take(FEW).copied().collect();
        let mut flows = flows.into_iter();
        let _ = flows.find(|id| self.with(*id, |flow| flow.receive.confirm_now()) == Some(true));
    }

    /// Moves the flows to the best path.
    pub(super) fn prefer_best(&self) {
        if let Some(best) = self.best_path() {
            let began = Instant::now();
            let mut moved = 0;
            let mut core = self.core.borrow_mut();
            for (flow, state) in &*self.flows.borrow() {
                let path = |core: &Association| core.flow(*flow).map(|flow| flow.send.path());
                let before = path(&core);
                self.prefer(&mut core, *flow, state, best);
                moved += u32::from(path(&core) != before);
            }
            drop(core);
            if moved > 0 {
                let took_us = began.elapsed().as_micros() as u64;
                tracing::debug!(peer = %self.key.peer, flows = moved, took_us, "flows: moved to another path");
            }
            self.choice.serving.set(match best {
                Path::Carrier(id) if self.is_decided() => Some(id),
                _ => None,
            });
        }
    }

    /// Moves a flow to a path, unless it is pinned to its own, or may not use the other.
    pub(super) fn prefer(&self, core: &mut Association, id: FlowId, state: &State, path: Path) {
        if state.stays.get() || path == Path::Tcp && id.requires_carrier() {
            return;
        }
        state.why.set(if self.preferred_path().is_some() {
            PREFERRED
        } else if self.auto().is_some() {
            MODEL
        } else if self.choice.target.borrow().is_some() {
            CONDITION
        } else {
            BEST
        });
        core.move_flow(id, path);
    }

    /// Whether a flow that is moved by hand to this path is pinned there: to the best one it need not be, unless that may
    /// change.
    pub(super) fn pins(&self, path: Path) -> bool {
        let may_change = self.is_decided()
            || self.choice.preferred.get()[0].is_some()
            || self.scheduler().is_some();
        may_change || self.best().map(Path::Carrier) != Some(path)
    }

    /// What to tell the peer on this control connection: the carrier that this host prefers, and the connection itself for
    /// the flows' TCP connections. `None`: nothing, as nothing decides while flows run, or nothing is up.
    pub(in super::super) fn prefers(&self, control: CarrierId) -> Option<Preference> {
        let spread = self.scheduler();
        let tells = self.is_decided() || spread.is_some();
        let path = tells.then(|| self.best_path())?;
        Some(Preference {
            carrier: match path? {
                Path::Carrier(id) => id,
                Path::Tcp => control,
            },
            bbr: self.choice.bbr.get(),
            asks: self.auto().is_some(),
            spread,
        })
    }

    /// Notes what the peer prefers, which has opened the association. The carrier may be on its way still. Returns whether
    /// flows follow at once.
    pub(in super::super) fn note_preferred(&self, preference: Preference) -> bool {
        if (self.key.opener, preference.carrier.opener) != (Side::Peer, Side::Peer) {
            return false;
        }
        if self.choice.asked.replace(preference.asks) != preference.asks {
            self.changed.notify_waiters();
        }
        self.choice.has_preferred.set(true);
        self.choice.due.set(Some(preference));
        let is_early = |at: Instant| at.elapsed() < FOLLOWING;
        !self.choice.followed.get().is_some_and(is_early) && self.follow_preferred()
    }

    /// Moves the flows to what the peer prefers, if that has changed. Returns whether it has.
    pub(super) fn follow_preferred(&self) -> bool {
        let Some(preference) = self.choice.due.take() else {
            return false;
        };
        let Preference {
            carrier,
            bbr,
            spread,
            ..
        } = preference;
        let choice = &self.choice;
        let [latest, former] = choice.preferred.get();
        let is_same = latest == Some(carrier)
            && choice.prefers_bbr.get() == bbr
            && choice.prefers_spread.get() == spread;
        if is_same {
            return false;
        }
        choice.followed.set(Some(Instant::now()));
        choice.prefers_bbr.set(bbr);
        choice.prefers_spread.set(spread);
        if latest != Some(carrier) {
            let is_up = |id: &CarrierId| self.path_of(*id).is_some();
            let former = latest.filter(is_up).or(former);
            choice.preferred.set([Some(carrier), former]);
        }
        self.follow_spread();
        self.prefer_best();
        self.changed.notify_waiters();
        self.turn();
        true
    }

    /// Forgets what the peer wants besides a carrier: over another control connection it may be one that knows nothing of it.
    pub(in super::super) fn forget_wants(&self) {
        self.choice.asked.set(false);
        self.choice.due.set(None);
        self.choice.has_preferred.set(false);
        self.choice.prefers_bbr.set(self.choice.lets_bbr.get());
        self.choice.prefers_spread.set(None);
        self.follow_spread();
    }

    /// Notes that the peer lets BBR take over flows, by the name of one, unless it has said something of it already.
    pub(in super::super) fn note_lets_bbr(&self) {
        if !self.choice.lets_bbr.replace(true) && !self.choice.has_preferred.get() {
            self.choice.prefers_bbr.set(true);
        }
    }

    /// Whether the peer, which has opened the association, wants the flows' TCP connections to be under BBR.
    pub(in super::super) fn prefers_bbr(&self) -> bool {
        self.choice.prefers_bbr.get()
    }

    /// Whether the peer, which has opened the association, has asked for figures of the path.
    pub(in super::super) fn is_asked(&self) -> bool {
        self.choice.asked.get()
    }

    /// Has BBR, or what is like it, take over the flows' TCP connections once the path loses packets, those of later flows,
    /// too; or has them sent as before.
    pub(in super::super) fn set_bbr(&self, bbr: bool) {
        if self.choice.bbr.replace(bbr) == bbr {
            return;
        }
        for state in self.flows.borrow().values() {
            state.allow_bbr(bbr);
        }
        self.changed.notify_waiters();
    }

    /// Whether BBR takes over the flows' TCP connections once the path loses packets.
    pub(in super::super) fn lets_bbr(&self) -> bool {
        self.choice.bbr.get()
    }

    /// Has a new flow's TCP connection sent as the others.
    pub(super) fn control_new(&self, state: &State) {
        if self.choice.bbr.get() {
            state.allow_bbr(true);
        }
    }

    /// The direction in which flows that run have carried more bytes, or those that have ended where these are too few;
    /// `None`: all are.
    pub(in super::super) fn direction(&self) -> Option<Direction> {
        let core = self.core.borrow();
        let flows = self.flows.borrow();
        let all = flows.keys().filter_map(|id| core.flow(*id));
        let running = all.map(counts).fold([0; 2], add);
        let direction = |[sent, received]: [u64; 2]| match sent >= received {
            true => Direction::Sends,
            false => Direction::Receives,
        };
        let mut both = [running, self.choice.ended.get()].into_iter();
        let enough = both.find(|[sent, received]| sent.saturating_add(*received) >= ENOUGH_BYTES);
        enough.map(direction)
    }

    /// The profile that flows which run have shown by their bytes; of several that of those that have carried most. `None`:
    /// none has shown one.
    pub(in super::super) fn shown_profile(&self) -> Option<Profile> {
        let core = self.core.borrow();
        let mut carried = [None; Profile::ALL.len()];
        for (id, state) in &*self.flows.borrow() {
            let Some(profile) = state.profile.profile() else {
                continue;
            };
            let bytes = core.flow(*id).map_or([0; 2], counts);
            let of = Profile::ALL.iter().position(|known| *known == profile);
            if let Some(of) = of.and_then(|place| carried.get_mut(place)) {
                let before = of.unwrap_or([0; 2]);
                *of = Some(add(before, bytes));
            }
        }
        let all = Profile::ALL.into_iter().zip(carried);
        let shown = all.filter_map(|(profile, bytes)| Some((profile, bytes?)));
        let fullest = shown.max_by_key(|(_, [sent, received])| sent.saturating_add(*received));
        fullest.map(|(profile, _)| profile)
    }

    /// Notes the bytes that a flow has sent and received by its end.
    pub(super) fn note_ended(&self, moved: [u64; 2]) {
        let before = self.choice.ended.get().map(|bytes| bytes / 2);
        self.choice.ended.set(add(before, moved));
    }

    /// Bytes that flows that run have sent and received.
    pub(in super::super) fn moved(&self) -> u64 {
        let core = self.core.borrow();
        let flows = self.flows.borrow();
        let all = flows.keys().filter_map(|id| core.flow(*id));
        all.flat_map(counts).fold(0, u64::wrapping_add)
    }

    /// How many flows there are.
    pub(in super::super) fn count_flows(&self) -> usize {
        self.flows.borrow().len()
    }
}
