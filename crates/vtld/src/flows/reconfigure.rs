//! Moves the flows of rules that have conditions on the path: `vtl-core` decides, by what the monitor of paths knows.
//! Such a rule has associations of its own, so what is decided holds for all flows of one.

use std::{cell::RefCell, net::IpAddr, rc::Rc, sync::Arc, time::Duration, time::Instant};

use tokio::{task::spawn_local, time::timeout};
use vtl_core::{
    netmon::Metrics,
    reconfigure::{Choice, Engine, Switch},
};

use super::{Flows, Target, now_ns, peer::Peer};
use crate::{
    hooker::{Carrier, rules::When},
    netmon::NetMonitor,
};

/// Maximum age of figures, twice the interval in which TCP connections are read; older ones say nothing.
const STALE: Duration = Duration::from_secs(2);
/// Timeout of opening a carrier: enough for three attempts over a satellite link.
const OPENING: Duration = Duration::from_secs(10);

/// The conditions of a rule, followed for one association.
pub(super) struct Following {
    when: Arc<When>,
    engine: RefCell<Engine>,
    began: Instant,
    /// While a switch is being made: what the flows go by if that fails.
    former: RefCell<Option<Option<Target>>>,
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
    /// Begins with the choice that the flows go by already, if there still is one like it.
    fn new(when: &Arc<When>, target: Option<&Target>) -> Self {
        let is_it = |carrier: &Carrier| Some(&carrier.of_flows()) == target;
        let choice = when.carriers.iter().position(is_it);
        Self {
            when: Arc::clone(when),
            engine: RefCell::new(Engine::resume(when.plan.clone(), choice)),
            began: Instant::now(),
            former: RefCell::default(),
        }
    }

    fn now_ns(&self) -> u64 {
        now_ns(self.began)
    }

    fn target(&self, choice: Choice) -> Option<Target> {
        Some(self.when.carriers.get(choice?)?.of_flows())
    }

    fn carrier(&self, choice: Choice) -> &Carrier {
        let carrier = choice.and_then(|i| self.when.carriers.get(i));
        carrier.unwrap_or(&self.when.own)
    }

    /// The figures for which a switch is made, and the condition that they meet, or meet no longer.
    fn reason(&self, switch: Switch, metrics: Option<&Metrics>) -> String {
        let condition = switch.to.or(switch.from);
        let Some(condition) = condition.and_then(|i| self.when.plan.conditions.get(i)) else {
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
    /// Follows the conditions of rules, after the paths have been read.
    pub(super) fn follow_paths(&self, peers: &[Rc<Peer>]) {
        let plans = self.hooker.plans();
        for peer in peers {
            if let Some(rule) = peer.rule() {
                peer.follow(&rule, plans.get(&rule), self.broker.monitor());
            }
        }
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
    fn follow(self: &Rc<Self>, rule: &Arc<str>, when: Option<&Arc<When>>, monitor: &NetMonitor) {
        let Some(when) = when else {
            if self.following.borrow().is_some() {
                let target = self.settled_target();
                self.following.take();
                self.set_target(target);
            }
            return;
        };
        let following = self.following.borrow().clone();
        let known = following.filter(|following| following.when == *when);
        let following = known.unwrap_or_else(|| self.follow_anew(when));
        let metrics = monitor.recent(self.key.peer, STALE);
        let mut engine = following.engine.borrow_mut();
        let switch = engine.sample(following.now_ns(), metrics.as_ref());
        drop(engine);
        if let Some(switch) = switch {
            let reason = following.reason(switch, metrics.as_ref());
            let (peer, rule) = (Rc::clone(self), Arc::clone(rule));
            spawn_local(async move { peer.switch(&rule, &following, switch, &reason).await });
        }
    }

    /// Follows other conditions than before.
    fn follow_anew(&self, when: &Arc<When>) -> Rc<Following> {
        let target = self.settled_target();
        let following = Rc::new(Following::new(when, target.as_ref()));
        self.following.replace(Some(Rc::clone(&following)));
        let choice = following.engine.borrow().current();
        self.set_target(following.target(choice));
        following
    }

    /// Makes a switch: has a carrier opened if there is none, and moves the flows. Where that fails they stay.
    async fn switch(&self, rule: &str, following: &Rc<Following>, switch: Switch, reason: &str) {
        let former = self.condition_target();
        following.former.replace(Some(former.clone()));
        self.set_target(following.target(switch.to));
        let is_up = timeout(OPENING, self.until(Self::has_target)).await.is_ok();
        following.former.take();
        let current = self.following.borrow().clone();
        if !current.is_some_and(|current| Rc::ptr_eq(&current, following)) {
            return; // other conditions decide now
        }
        let [from, to] = [switch.from, switch.to].map(|choice| following.carrier(choice));
        let peer = self.key.peer;
        if is_up {
            following.engine.borrow_mut().succeeded();
            tracing::info!(rule, %peer, %from, %to, reason, "rule: flows change their carrier");
            return;
        }
        let is_new = following.engine.borrow_mut().failed(following.now_ns());
        self.set_target(former);
        if is_new {
            tracing::warn!(
                rule, %peer, %from, %to, reason,
                "rule: the carrier cannot be opened, so flows stay where they are; tried again in silence"
            );
        }
    }

    /// What a condition has the flows go by, but for a switch that is still being made: it may fail.
    pub(super) fn settled_target(&self) -> Option<Target> {
        let following = self.following.borrow();
        let former = following.as_ref().and_then(|of| of.former.borrow().clone());
        former.unwrap_or_else(|| self.condition_target())
    }

    fn rule_state(&self) -> Option<RuleState> {
        let following = self.following.borrow().clone()?;
        let engine = following.engine.borrow();
        let all = 0..following.when.carriers.len();
        Some(RuleState {
            rule: self.rule()?,
            peer: self.key.peer,
            when: Arc::clone(&following.when),
            holds: all.filter(|i| engine.holds(*i)).collect(),
            decides: engine.current(),
        })
    }
}
