//! Events: what the daemon tells of changes, as they happen.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

use crate::GivenUp;

/// A word or a sentence of an event.
pub type Text = Cow<'static, str>;

/// Events. Answers [`Request::Events`](crate::Request::Events).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// In the order in which they happened; none if the time to wait is over.
    pub events: Vec<Event>,
    /// `since` of the request that asks for what follows.
    pub last: u64,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Ascending, also from one daemon to the next, with gaps.
    pub id: u64,
    /// When it happened, in UTC (RFC 3339).
    pub time: String,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// An association, in an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssociationEvent {
    /// The association.
    pub association: u32,
    /// This host's address.
    pub local: IpAddr,
    /// The other host's.
    pub peer: IpAddr,
    /// `client` or `server`.
    pub role: Text,
}

/// A further path of flows that are spread over several stacks, in an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathEvent {
    /// The association.
    pub association: u32,
    /// The other host, as flows address it.
    pub peer: IpAddr,
    /// This host's address on the path.
    pub local: IpAddr,
    /// The other host's.
    pub to: IpAddr,
}

/// A rule in force, in an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleEvent {
    /// Its name.
    pub rule: Text,
    /// Its action.
    pub action: Text,
    /// When it stops to match, in UTC (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Text>,
    /// Installed by a request; else of the file.
    #[serde(default, skip_serializing_if = "is_false")]
    pub installed: bool,
}

/// A change for a rule's condition on the path, in an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionEvent {
    /// The rule.
    pub rule: Text,
    /// The other host.
    pub peer: IpAddr,
    /// The association.
    pub association: u32,
    /// The carrier before.
    pub from: Text,
    /// The carrier now.
    pub to: Text,
    /// The condition, and the figures that meet it or do not any more.
    pub why: Text,
}

/// A bound that an application or a rule has stated, in an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundEvent {
    /// The other host.
    pub peer: IpAddr,
    /// The association whose flows have it,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub association: Option<u32>,
    /// or the session of an application that uses VTL's library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sid: Option<u32>,
    /// What they go by.
    pub carrier: Text,
    /// `max_delay` or `min_throughput`.
    pub bound: Text,
    /// The bound, and the figures that miss or keep it.
    pub why: Text,
}

/// What happened; `event` names the variant. Carriers have the names that [`CarrierStatus`](crate::CarrierStatus)
/// has, or `tcp`, a flow's own connection; `tls`, the daemons' connection; `none`. Associations have the numbers that
/// [`FlowStatus`](crate::FlowStatus) has, roles likewise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// A flow began.
    FlowOpened {
        /// Its id.
        flow: u64,
        /// This host's end of its TCP connection.
        local: SocketAddr,
        /// The other end.
        peer: SocketAddr,
        /// `client` or `server`.
        role: Text,
        /// Its association.
        association: u32,
        /// It was taken over from a former daemon.
        #[serde(default, skip_serializing_if = "is_false")]
        resumed: bool,
    },
    /// What this host sends of a flow goes by another carrier.
    FlowMoved {
        /// Its id.
        flow: u64,
        /// This host's end of its TCP connection.
        local: SocketAddr,
        /// The other end.
        peer: SocketAddr,
        /// The carrier before.
        from: Text,
        /// The carrier now.
        to: Text,
        /// The reason.
        why: Text,
    },
    /// A flow ended.
    FlowEnded {
        /// Its id.
        flow: u64,
        /// This host's end of its TCP connection.
        local: SocketAddr,
        /// The other end.
        peer: SocketAddr,
        /// Bytes of application data to the peer.
        bytes_sent: u64,
        /// Bytes of application data received in order from the peer.
        bytes_received: u64,
        /// `closed`, both directions in order, or `reset`.
        how: Text,
        /// Why it was reset.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<Text>,
    },
    /// The control connection of an association is up.
    AssociationUp(AssociationEvent),
    /// It is not any more.
    AssociationLost(AssociationEvent),
    /// A carrier for flows is up.
    CarrierUp {
        /// Its association.
        association: u32,
        /// The other host.
        peer: IpAddr,
        /// Its kind.
        carrier: Text,
        /// Its number, among those that the host with this role has opened for the association.
        number: u32,
        /// `client` if this host opened it, or `server`.
        role: Text,
    },
    /// A carrier broke, or was closed.
    CarrierDown {
        /// Its association.
        association: u32,
        /// The other host.
        peer: IpAddr,
        /// Its kind.
        carrier: Text,
        /// Its number.
        number: u32,
        /// `client` or `server`.
        role: Text,
        /// Bytes to the peer, control frames included.
        bytes_sent: u64,
        /// Bytes of application data from the peer.
        bytes_received: u64,
    },
    /// A carrier could not be opened.
    CarrierFailed {
        /// The association.
        association: u32,
        /// The other host.
        peer: IpAddr,
        /// Its kind.
        carrier: Text,
        /// The reason.
        why: Text,
    },
    /// A session of an application that uses VTL's library began.
    SessionUp {
        /// Its index.
        sid: u32,
        /// The other host.
        peer: IpAddr,
        /// VTL port at which it was opened.
        port: u16,
        /// The graft.
        graft: Text,
    },
    /// Such a session ended.
    SessionDown {
        /// Its index.
        sid: u32,
        /// The other host.
        peer: IpAddr,
        /// VTL port at which it was opened.
        port: u16,
    },
    /// A stateless switch ended such a session at once: its successor goes on.
    SessionCut {
        /// Its index.
        sid: u32,
        /// The successor's.
        by: u32,
        /// The other host.
        peer: IpAddr,
        /// VTL port at which it was opened.
        port: u16,
        /// What this host had written in it, and the peer had not acknowledged.
        #[serde(flatten)]
        given_up: GivenUp,
    },
    /// Flows that are spread over several stacks have a further path.
    PathUp(PathEvent),
    /// They do not have it any more.
    PathDown(PathEvent),
    /// This host has an address on an interface that is up.
    AddressAdded {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: Text,
    },
    /// It has it no longer, or the interface is down.
    AddressRemoved {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: Text,
    },
    /// The key of a peer was learned at the first contact.
    PeerLearned {
        /// The peer.
        peer: IpAddr,
        /// Its public key, in hexadecimal.
        key: Text,
    },
    /// A peer showed another key than before, and is refused.
    PeerChanged {
        /// The peer.
        peer: IpAddr,
        /// The reason, with both keys.
        why: Text,
    },
    /// A peer is refused for another reason: its connections are plain TCP.
    PeerRefused {
        /// The peer.
        peer: IpAddr,
        /// The reason.
        why: Text,
    },
    /// A peer's key was trusted by command.
    PeerTrusted {
        /// The peer's name.
        name: Text,
        /// Its public key, in hexadecimal.
        key: Text,
    },
    /// A learned peer was forgotten by command.
    PeerForgotten {
        /// The peer's name.
        name: Text,
    },
    /// A graft is in the kernel.
    GraftDeployed {
        /// Its name.
        graft: Text,
        /// Its number in packets.
        gid: u16,
        /// Instructions of its programs.
        instructions: u64,
    },
    /// It is not any more.
    GraftRemoved {
        /// Its name.
        graft: Text,
    },
    /// This host carries what it forwards over an interface.
    GatewayAdded {
        /// The interface.
        interface: Text,
        /// The carrier.
        carrier: Text,
    },
    /// It does not any more.
    GatewayRemoved {
        /// The interface.
        interface: Text,
    },
    /// A rule is in force.
    RuleAdded(RuleEvent),
    /// A rule in force says something else than before.
    RuleChanged(RuleEvent),
    /// A rule was taken out.
    RuleRemoved {
        /// Its name.
        rule: Text,
    },
    /// The time of a rule is over: it matches nothing any more.
    RuleExpired {
        /// Its name.
        rule: Text,
    },
    /// A condition of a rule on the path is met, and flows have changed their carrier for it.
    ConditionMet(ConditionEvent),
    /// It is not met any more, and flows have returned.
    ConditionLeft(ConditionEvent),
    /// The model has chosen another carrier for the flows of the carrier `auto` to a host.
    SelectionChanged {
        /// The other host.
        peer: IpAddr,
        /// The association.
        association: u32,
        /// The carrier before.
        from: Text,
        /// The carrier now.
        to: Text,
        /// The model's reason.
        why: Text,
    },
    /// Flows, or a session, do not get what was bounded for them.
    BoundMissed(BoundEvent),
    /// They do again.
    BoundKept(BoundEvent),
    /// The choice by the model was switched on or off.
    SelectionSwitched {
        /// Whether it chooses.
        on: bool,
    },
    /// Events are not here any more, as they were asked for too late: read the state again.
    Missed {
        /// How many, of all kinds; `None`: unknown, those of a former daemon.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        events: Option<u64>,
    },
    /// An event that this version does not know.
    #[serde(other)]
    Unknown,
}

/// Whether a flag is not set.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// What `kinds` of [`Request::Events`](crate::Request::Events) may name: subjects, and events.
pub const KINDS: [&str; 47] = [
    "flow",
    "flow_opened",
    "flow_moved",
    "flow_ended",
    "association",
    "association_up",
    "association_lost",
    "carrier",
    "carrier_up",
    "carrier_down",
    "carrier_failed",
    "session",
    "session_up",
    "session_down",
    "session_cut",
    "path",
    "path_up",
    "path_down",
    "address",
    "address_added",
    "address_removed",
    "peer",
    "peer_learned",
    "peer_changed",
    "peer_refused",
    "peer_trusted",
    "peer_forgotten",
    "graft",
    "graft_deployed",
    "graft_removed",
    "gateway",
    "gateway_added",
    "gateway_removed",
    "rule",
    "rule_added",
    "rule_changed",
    "rule_removed",
    "rule_expired",
    "condition",
    "condition_met",
    "condition_left",
    "bound",
    "bound_missed",
    "bound_kept",
    "selection",
    "selection_changed",
    "selection_switched",
];

impl What {
    /// Its name, as in `event`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::FlowOpened { .. } => "flow_opened",
            Self::FlowMoved { .. } => "flow_moved",
            Self::FlowEnded { .. } => "flow_ended",
            Self::AssociationUp(_) => "association_up",
            Self::AssociationLost(_) => "association_lost",
            Self::CarrierUp { .. } => "carrier_up",
            Self::CarrierDown { .. } => "carrier_down",
            Self::CarrierFailed { .. } => "carrier_failed",
            Self::SessionUp { .. } => "session_up",
            Self::SessionDown { .. } => "session_down",
            Self::SessionCut { .. } => "session_cut",
            Self::PathUp(_) => "path_up",
            Self::PathDown(_) => "path_down",
            Self::AddressAdded { .. } => "address_added",
            Self::AddressRemoved { .. } => "address_removed",
            Self::PeerLearned { .. } => "peer_learned",
            Self::PeerChanged { .. } => "peer_changed",
            Self::PeerRefused { .. } => "peer_refused",
            Self::PeerTrusted { .. } => "peer_trusted",
            Self::PeerForgotten { .. } => "peer_forgotten",
            Self::GraftDeployed { .. } => "graft_deployed",
            Self::GraftRemoved { .. } => "graft_removed",
            Self::GatewayAdded { .. } => "gateway_added",
            Self::GatewayRemoved { .. } => "gateway_removed",
            Self::RuleAdded(_) => "rule_added",
            Self::RuleChanged(_) => "rule_changed",
            Self::RuleRemoved { .. } => "rule_removed",
            Self::RuleExpired { .. } => "rule_expired",
            Self::ConditionMet(_) => "condition_met",
            Self::ConditionLeft(_) => "condition_left",
            Self::BoundMissed(_) => "bound_missed",
            Self::BoundKept(_) => "bound_kept",
            Self::SelectionChanged { .. } => "selection_changed",
            Self::SelectionSwitched { .. } => "selection_switched",
            Self::Missed { .. } => "missed",
            Self::Unknown => "unknown",
        }
    }

    /// Whether a kind names it: by its name, or by its subject, the first word of that.
    pub fn is_of(&self, kind: &str) -> bool {
        let name = self.name();
        let subject = name.split_once('_').map_or(name, |(subject, _)| subject);
        kind == name || kind == subject
    }
}

#[cfg(test)]
mod tests;
