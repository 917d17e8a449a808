//! Answers about rules.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The rules in force. Answers [`Request::RuleList`](crate::Request::RuleList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// The file of rules.
    pub file: PathBuf,
    /// A page of rules.
    pub rules: Vec<Rule>,
    /// First index of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u32>,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// Conditions on connections that processes of this host open or, with `via`, that it forwards.
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    /// Alternatively: ports of this host, for incoming connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Vec<u16>>,
    /// The rule's action.
    pub action: String,
    /// Its conditions on the path, in the order in which they count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<PathCondition>,
    /// When it stops to match, in UTC (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// Connections matched since it is in force, if counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// Files and cgroups that it names but that do not exist now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<PathBuf>,
    /// Installed by a request ([`Request::RuleInstall`](crate::Request::RuleInstall)); else of the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub installed: bool,
}

/// A rule's condition on the path to a host. A long list of hosts is truncated: its last value tells the number of
/// omitted ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCondition {
    /// The condition, such as `rtt >= 300ms for 200ms`.
    #[serde(rename = "if")]
    pub condition: String,
    /// What connections travel by while it holds, unless an earlier one does.
    pub carrier: String,
    /// Hosts with connections by this rule for which it holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds_for: Vec<String>,
    /// Those of them for which it decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decides_for: Vec<String>,
}

/// Conditions on a connection: of each kind given, one value must match. A long list is truncated:
/// its last value tells the number of omitted ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conditions {
    /// Cgroups that contain the process, directly or in a descendant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cgroup: Vec<String>,
    /// Users that the process runs as.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
    /// Files that the process executes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exe: Vec<String>,
    /// Destination ports, and ranges.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port: Vec<String>,
    /// Destination prefixes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
    /// Profiles of the application.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub profile: Vec<String>,
    /// Whether destinations on the host itself, link-local and multicast ones match, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub local: bool,
    /// Interfaces by which connections leave that this host forwards as a gateway.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub via: Vec<String>,
    /// Source prefixes of such connections.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from: Vec<String>,
    /// Source ports of such connections, and ranges.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from_port: Vec<String>,
}

/// Decision about a connection. Answers [`Request::RuleExplain`](crate::Request::RuleExplain).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Manual hook that decides, before all rules.
    pub hook: Option<u32>,
    /// The rules that do not match, in order.
    pub passed: Vec<PassedRule>,
    /// Name of the deciding rule.
    pub decides: Option<String>,
    /// Its action.
    pub action: Option<String>,
}

/// A rule that does not match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedRule {
    /// Its name.
    pub rule: String,
    /// The reason.
    pub because: String,
}

/// Answers [`Request::RuleCheck`](crate::Request::RuleCheck) and
/// [`Request::RuleReload`](crate::Request::RuleReload).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCount {
    /// Rules in the file; of a reload those in force: not what has expired.
    pub count: usize,
}
