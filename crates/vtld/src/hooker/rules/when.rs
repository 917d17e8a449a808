//! A rule's conditions on the path.

use std::{collections::BTreeMap, sync::Arc};

use vtl_core::reconfigure::Plan;

use super::Rule;
use crate::hooker::Carrier;

/// Conditions on the path, and what connections travel by while they hold.
#[derive(Clone, Debug, PartialEq)]
pub struct When {
    /// The conditions.
    pub plan: Plan,
    /// The carrier of each: one of flows, or [`Carrier::Plain`].
    pub carriers: Vec<Carrier>,
    /// The rule's own carrier.
    pub own: Carrier,
    /// The connections are marked loss-tolerant; otherwise none of the carriers loses anything.
    pub tolerant: bool,
}

/// The conditions of the rules in force, by the rules' names.
pub type Plans = BTreeMap<Arc<str>, Arc<When>>;

/// The conditions of rules.
pub(in super::super) fn plans(rules: &[Rule]) -> Plans {
    let named = |rule: &Rule| Some((rule.name.as_str().into(), Arc::clone(rule.when.as_ref()?)));
    rules.iter().filter_map(named).collect()
}
