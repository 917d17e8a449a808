//! Answers about the choice by the model.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The choice by the model. Answers [`Request::SelectStatus`](crate::Request::SelectStatus).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelectStatus {
    /// Whether it chooses.
    pub on: bool,
    /// A page of the associations of the carrier `auto` that this host has opened, sorted by host and profile.
    pub paths: Vec<SelectedPath>,
    /// First index of the next page, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more: Option<usize>,
}

/// What the model has chosen for the flows to a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelectedPath {
    /// The other host.
    pub peer: IpAddr,
    /// The association, as the two hosts number it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub association: Option<u32>,
    /// The applications' profile, by their bytes, or else by earlier connections or the port; `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The bound that the flows' rule states, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_delay_ms: Option<f64>,
    /// The same, Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_throughput_mbit: Option<f64>,
    /// The bounds that are missed, as rules name them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missed: Vec<String>,
    /// What the flows go by, as rules name it.
    pub carrier: String,
    /// Open flows.
    pub flows: usize,
    /// The direction that counts, as it has more bytes: this host `sends` or `receives`. `None`: unknown yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<String>,
    /// The minimum round-trip time, as the path was last seen in this direction, milliseconds. So are the figures
    /// below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_rtt_ms: Option<f64>,
    /// Packets lost while no queue stood, or at all where one always did, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_pct: Option<f64>,
    /// How many of these are lost in a row, on average.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_burst: Option<f64>,
    /// The bandwidth, payload, Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<f64>,
    /// Whether `rate_mbit` is a lower bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_at_least: Option<bool>,
    /// Number of packets that `loss_pct` is a share of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets: Option<u64>,
    /// Why, in short.
    pub why: String,
    /// What the model has decided last, and its way there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explanation: Option<String>,
    /// Time since the carrier changed last, or the association began, seconds. `None`: the choice is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_s: Option<f64>,
}
