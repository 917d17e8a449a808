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

/// What flows of the carrier `auto` have taught. Answers [`Request::SelectLessons`](crate::Request::SelectLessons).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lessons {
    /// Whether it learns, and chooses by it.
    pub on: bool,
    /// A page, sorted by host and profile.
    pub lessons: Vec<Lesson>,
    /// First index of the next page, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more: Option<usize>,
}

/// What flows to a host have taught.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lesson {
    /// The other host.
    pub peer: IpAddr,
    /// The profile that the applications were expected to have; `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// What the model chooses.
    pub model: String,
    /// What is chosen instead; `None`: nothing was learnt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learnt: Option<String>,
    /// By carrier and size of the flows.
    pub outcomes: Vec<LessonOutcome>,
}

/// What flows of some size have reached by a carrier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LessonOutcome {
    /// The carrier.
    pub carrier: String,
    /// The least bytes of such flows; the most are four times as many, where there are larger ones.
    pub bytes_from: u64,
    /// Their rate while bytes moved, a mean in which later ones count more, Mbit/s.
    pub rate_mbit: f64,
    /// How many.
    pub flows: u64,
    /// The age of the latest, seconds.
    pub age_s: f64,
}
