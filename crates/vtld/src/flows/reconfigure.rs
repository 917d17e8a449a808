//! Moves the flows of rules that have conditions on the path, and of the carrier `auto`: `vtl-core` decides, by what the
//! monitor of paths knows. Such flows have associations of their own, so what is decided holds for all flows of one.

use std::{
    cell::{Cell, RefCell},
    net::IpAddr,
    rc::Rc,
    sync::Arc,
    time::Duration,
    time::Instant,
};

use tokio::{task::spawn_local, time::timeout};
use vtl_control::{ConditionEvent, Text, What};
use vtl_core::{
    netmon::Metrics,
    reconfigure::{Choice, Engine, Switch},
};

use super::{Flows, Target, now_ns, peer::Peer, select::ByModel};
use crate::{
    events::emit,
    hooker::{Carrier, rules::When},
    netmon::NetMonitor,
};

/// Maximum age of figures, twice the interval in which TCP connections are read; older ones say nothing.
pub(super) const STALE: Duration = Duration::from_secs(2);
/// Timeout of opening a carrier: enough for three attempts over a satellite link.
pub(super) const OPENING: Duration = Duration::from_secs(10);

/// What decides.
pub(super) enum By {
    /// The conditions of a rule.
    Rule(Arc<str>, Arc<When>),
    /// The model.
    Model(Box<ByModel>),
}

/// What decides about one association, followed.
pub(super) struct Following {
    pub(super) by: By,
    pub(super) engine: RefCell<Engine>,
    began: Instant,
    /// When what decides changed last.
    pub(super) since: Cell<Instant>,
    /// While a switch is being made: what the flows go by if that fails.
    former: RefCell<Option<Option<Target>>>,
    /// Since when what decides is not there, although it was.
    pub(super) missing: Cell<Option<Instant>>,
}

/// What the conditions of a rule say about one host.
pub(crate) struct RuleState {
    pub(crate) rule: Arc<str>,
    pub(crate) peer: IpAddr,
    pub(crate) when: Arc<When>,
    /// The conditions that hold.
    pub(crate) holds: Vec<usize>,
    pub(crate) decides: Choice,
}

impl Following {
    pub(super) fn new(by: By, engine: Engine) -> Rc<Self> {
        let now = Instant::now();
        Rc::new(Self {
            by,
            engine: RefCell::new(engine),
            began: now,
            since: Cell::new(now),
            former: RefCell::default(),
            missing: Cell::default(),
        })
    }

    /// Begins with the choice that the flows go by already, if there still is one like it.
    fn by_rule(rule: &Arc<str>, when: &Arc<When>, target: Option<&Target>) -> Rc<Self> {
        let is_it = |carrier: &Carrier| Some(&carrier.of_flows()) == target;
        let choice = when.carriers.iter().position(is_it);
        let engine = Engine::resume(when.plan.clone(), choice);
        Self::new(By::Rule(Arc::clone(rule), Arc::clone(when)), engine)
    }

    /// Whether a switch is being made.
    pub(super) fn is_switching(&self) -> bool {
        self.former.borrow().is_some()
    }

    pub(super) fn now_ns(&self) -> u64 {
        now_ns(self.began)
    }

    fn target(&self, choice: Choice) -> Option<Target> {
        match &self.by {
            By::Rule(_, when) => Some(when.carriers.get(choice?)?.of_flows()),
            By::Model(_) => Some(ByModel::target(choice)),
        }
    }

    fn carrier(&self, choice: Choice) -> String {
        match &self.by {
            By::Rule(_, when) => {
                let carrier = choice.and_then(|i| when.carriers.get(i));
                carrier.unwrap_or(&when.own).to_string()
            }
            By::Model(_) => ByModel::class(choice).to_owned(),
        }
    }

    /// The figures for which a switch is made, and the condition that they meet, or meet no longer; or the model's reason.
    fn reason(&self, switch: Switch, metrics: Option<&Metrics>) -> String {
        let By::Rule(_, when) = &self.by else {
            let engine = self.engine.borrow();
            let decision = engine.decision();
            return decision.map_or_else(String::new, |d| d.explanation.to_string());
        };
        let condition = switch.to.or(switch.from);
        let Some(condition) = condition.and_then(|i| when.plan.conditions.get(i)) else {
            return String::new();
        };
        let figures = condition.figures(&metrics.copied().unwrap_or_default());
        let verdict = if switch.to.is_some() {
            "holds"
        } else {
            "has ended"
        };
        format!("{figures}: \"{condition}\" {verdict}")
    }
}

impl Flows {
    /// Follows the conditions of rules, and the model, after the paths have been read.
    pub(super) fn follow_paths(&self, peers: &[Rc<Peer>]) {
        let plans = self.hooker.plans();
        for peer in peers {
            if let Some(rule) = peer.rule() {
                peer.follow_rule(&rule, plans.get(&rule), self.broker.monitor());
            } else if let Some(auto) = peer.auto() {
                self.follow_model(peer, auto);
                self.names.set_lets_bbr(peer.key, peer.lets_bbr());
            } else {
                self.follow_preferred_control(peer);
            }
        }
    }

    /// Has BBR take over as the association's opener wants it, unless this host's operator has turned the choice off.
    pub(super) fn follow_preferred_control(&self, peer: &Peer) {
        peer.set_bbr(peer.prefers_bbr() && self.limits.selection.is_on());
    }

    /// What the conditions of rules say, by association.
    pub(crate) fn rule_states(&self) -> Vec<RuleState> {
        let peers = self.peers();
        peers.iter().filter_map(|peer| peer.rule_state()).collect()
    }
}

impl Peer {
    /// Takes the state of the path. `when`: the rule's conditions; `None`: it has none any more, so the flows go on as they
    /// are.
    fn follow_rule(
        self: &Rc<Self>,
        rule: &Arc<str>,
        when: Option<&Arc<When>>,
        monitor: &NetMonitor,
    ) {
        let Some(when) = when else {
            if self.following.borrow().is_some() {
                let target = self.settled_target();
                self.following.take();
                self.set_target(target);
            }
            return;
        };
        let following = self.following.borrow().clone();
        let is_same = |known: &Rc<Following>| matches!(&known.by, By::Rule(_, of) if of == when);
        let following = following.filter(is_same).unwrap_or_else(|| {
            let target = self.settled_target();
            let following = Following::by_rule(rule, when, target.as_ref());
            self.follow_anew(&following);
            following
        });
        self.confirm_one();
        let mut metrics = monitor.recent(self.key.peer, STALE);
        if when.plan.is_about_link() {
            // Known without traffic, too.
            let metrics = metrics.get_or_insert_default();
            metrics.link = monitor.link_between(self.key.local, self.key.peer);
        }
        self.sample(&following, metrics.as_ref());
    }

    /// Takes the figures of the path, and makes the switch that follows from them.
    pub(super) fn sample(self: &Rc<Self>, following: &Rc<Following>, metrics: Option<&Metrics>) {
        let mut engine = following.engine.borrow_mut();
        let switch = engine.sample(following.now_ns(), metrics);
        drop(engine);
        if let Some(switch) = switch {
            self.start_switch(following, switch, metrics);
        }
    }

    /// Has a switch made.
    pub(super) fn start_switch(
        self: &Rc<Self>,
        following: &Rc<Following>,
        switch: Switch,
        metrics: Option<&Metrics>,
    ) {
        let reason = following.reason(switch, metrics);
        let (peer, following) = (Rc::clone(self), Rc::clone(following));
        spawn_local(async move { peer.switch(&following, switch, &reason).await });
    }

    /// Follows something else than before.
    pub(super) fn follow_anew(&self, following: &Rc<Following>) {
        self.following.replace(Some(Rc::clone(following)));
        let choice = following.engine.borrow().current();
        if let By::Model(_) = following.by {
            self.set_bbr(ByModel::may_be_bbr(choice));
        }
        self.set_target(following.target(choice));
    }

    /// Makes a switch: has a carrier opened if there is none, and moves the flows. Where that fails they stay.
    async fn switch(&self, following: &Rc<Following>, switch: Switch, reason: &str) {
        let former = self.condition_target();
        following.former.replace(Some(former.clone()));
        self.set_target(following.target(switch.to));
        let is_up = timeout(OPENING, self.until(Self::has_target)).await.is_ok();
        following.former.take();
        let current = self.following.borrow().clone();
        if !current.is_some_and(|current| Rc::ptr_eq(&current, following)) {
            return; // something else decides now
        }
        let [from, to] =
            [switch.from, switch.to].map(|choice| Text::from(following.carrier(choice)));
        let (association, peer) = (self.key.tag, self.key.peer);
        if is_up {
            following.engine.borrow_mut().succeeded();
            following.since.set(Instant::now());
            match &following.by {
                By::Rule(rule, _) => {
                    tracing::info!(%rule, %peer, %from, %to, reason, "rule: flows change their carrier");
                    let event = ConditionEvent {
                        rule: rule.to_string().into(),
                        peer,
                        association,
                        from,
                        to,
                        why: reason.to_owned().into(),
                    };
                    emit(match switch.to {
                        Some(_) => What::ConditionMet(event),
                        None => What::ConditionLeft(event),
                    });
                }
                By::Model(_) => {
                    self.set_bbr(ByModel::may_be_bbr(switch.to));
                    tracing::info!(%peer, %from, %to, reason, "select: flows change their carrier");
                    emit(What::SelectionChanged {
                        peer,
                        association,
                        from,
                        to,
                        why: reason.to_owned().into(),
                    });
                }
            }
            return;
        }
        let is_new = following.engine.borrow_mut().failed(following.now_ns());
        self.set_target(former);
        if !is_new {
            return;
        }
        match &following.by {
            By::Rule(rule, _) => tracing::warn!(
                %rule, %peer, %from, %to, reason,
                "rule: the carrier cannot be opened, so flows stay where they are; tried again in silence"
            ),
            By::Model(_) => tracing::warn!(
                %peer, %from, %to, reason,
                "select: the carrier cannot be opened: the next best; tried again in silence"
            ),
        }
    }

    /// What a condition, or the model, has the flows go by, but for a switch that is still being made: it may fail.
    pub(super) fn settled_target(&self) -> Option<Target> {
        let following = self.following.borrow();
        let former = following.as_ref().and_then(|of| of.former.borrow().clone());
        former.unwrap_or_else(|| self.condition_target())
    }

    fn rule_state(&self) -> Option<RuleState> {
        let following = self.following.borrow().clone()?;
        let By::Rule(rule, when) = &following.by else {
            return None;
        };
        let engine = following.engine.borrow();
        let all = 0..when.carriers.len();
        Some(RuleState {
            rule: Arc::clone(rule),
            peer: self.key.peer,
            when: Arc::clone(when),
            holds: all.filter(|i| engine.holds(*i)).collect(),
            decides: engine.current(),
        })
    }
}
