//! What the demo compares.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One way to carry the download.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
pub(super) enum Transport {
    /// The kernel's TCP with cubic.
    #[serde(rename = "tcp-cubic")]
    #[value(name = "tcp-cubic")]
    Cubic,
    /// The kernel's TCP with BBR.
    #[serde(rename = "tcp-bbr")]
    #[value(name = "tcp-bbr")]
    Bbr,
    /// VTL, with the TCP connections of curl and of the web server captured.
    #[serde(rename = "vtl")]
    #[value(name = "vtl")]
    Vtl,
}

impl Transport {
    /// Its name in tables, files and on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cubic => "tcp-cubic",
            Self::Bbr => "tcp-bbr",
            Self::Vtl => "vtl",
        }
    }

    /// The congestion control that TCP must use, if this is TCP.
    pub(super) fn congestion_control(self) -> Option<&'static str> {
        match self {
            Self::Cubic => Some("cubic"),
            Self::Bbr => Some("bbr"),
            Self::Vtl => None,
        }
    }
}
