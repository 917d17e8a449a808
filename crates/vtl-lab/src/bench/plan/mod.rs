//! What to measure. The format is described in `bench/README.md`.

mod file;
mod link;
mod many;
mod rule;
mod transport;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use vtl_testbed::{Link, LossModel, Medium, Profile};

pub(crate) use rule::Rule;
pub(crate) use transport::{Setting, Transport};

/// Why a plan was refused: file, line, and what is wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It cannot be read.
    #[error("cannot read the plan {}: {cause}", .path.display())]
    Unreadable {
        /// The plan.
        path: PathBuf,
        /// The system's reason.
        cause: std::io::Error,
    },
    /// Something in it is wrong.
    #[error("{}:{line}: {problem}", .path.display())]
    Wrong {
        /// The plan.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there, and what would be right.
        problem: String,
    },
}

/// What one plan file asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// The file's name without directory and extension.
    pub(crate) name: String,
    /// Every combination of the lists in it.
    pub(crate) cells: Vec<Cell>,
    /// How often each cell is measured; the transports alternate within a run.
    pub(crate) runs: u32,
}

/// One combination of a plan's inputs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cell {
    /// What is compared; for [`Workload::Compete`], what runs at the same time.
    pub(crate) transports: Vec<Transport>,
    /// The profile that the link came from, if any.
    pub(crate) profile: Option<Profile>,
    /// What access to the link's medium adds, if the plan names one.
    pub(crate) medium: Option<Medium>,
    /// The link.
    pub(crate) link: Link,
    /// The link behind it, from a router, where a gateway may be, to the server.
    pub(crate) core: Option<Link>,
    /// Changes of the link while a transfer runs, in order of time.
    pub(crate) timeline: Vec<Change>,
    /// What is transferred.
    pub(crate) workload: Workload,
    /// Whether unmodified nginx and curl do it instead of this program.
    pub(crate) curl: bool,
    /// Whether an untimed small transfer to the same peer comes first.
    pub(crate) known: bool,
    /// When a transfer is cut, seconds.
    pub(crate) time_limit_s: f64,
    /// Processors: 1 puts both hosts on one, 2 gives each its own, none leaves it to the kernel.
    pub(crate) cores: Option<u8>,
    /// How the daemons are started.
    pub(crate) vtl: Vtl,
    /// The plan's rules by name.
    pub(crate) rules: BTreeMap<String, Rule>,
}

/// The link's figures from `at_s` seconds after the start of the transfer on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Change {
    /// When, seconds.
    pub(crate) at_s: f64,
    /// What the link is then.
    pub(crate) link: Link,
}

/// What is transferred.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Workload {
    /// The client asks for bytes, the server sends them; or the other way round.
    File {
        /// How many.
        bytes: u64,
        /// Which way.
        direction: Direction,
    },
    /// The client asks, the server answers, one after the other on one connection.
    RequestResponse {
        /// Bytes of a request.
        request: u32,
        /// Bytes of a response.
        response: u32,
        /// How many.
        count: u32,
    },
    /// The server sends for a time.
    Stream {
        /// At what rate, Mbit/s; 0: as fast as it goes.
        rate_mbit: f64,
        /// How long, seconds.
        seconds: f64,
    },
    /// Files on many connections at the same time.
    Flows {
        /// How many.
        count: u32,
        /// Bytes of each.
        amount: Amount,
    },
    /// Streams of different transports over one bottleneck.
    Compete {
        /// How long, seconds.
        seconds: f64,
        /// When each starts, seconds, in the order of the transports.
        starts: Vec<f64>,
    },
}

/// Which way a file goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the server to the client.
    #[default]
    Down,
    /// From the client to the server.
    Up,
    /// One each way, at the same time, on a connection each.
    Both,
}

impl Direction {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Down, Self::Up, Self::Both];

    /// The name in plans and rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Up => "up",
            Self::Both => "both",
        }
    }
}

impl Workload {
    /// The name in plans and rows.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::RequestResponse { .. } => "request-response",
            Self::Stream { .. } => "stream",
            Self::Flows { .. } => "flows",
            Self::Compete { .. } => "compete",
        }
    }
}

/// How much each of many flows carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Amount {
    /// Bytes.
    Bytes(u64),
    /// As much as comes in so many seconds.
    Seconds(f64),
}

/// How the daemons are started.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Vtl {
    /// `--driver`.
    pub(crate) driver: Option<String>,
    /// `--ingress`.
    pub(crate) ingress: Option<String>,
    /// `--ring-slots`.
    pub(crate) ring_slots: Option<u32>,
    /// Whether daemons run beside transports that do not use them.
    pub(crate) attached: bool,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// [`Error`]: unknown keys and values that make no sense are refused.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|cause| Error::Unreadable {
            path: path.to_owned(),
            cause,
        })?;
        Self::parse(path, &text)
    }

    /// Parses the text of a plan; `path` is for its name and for errors.
    ///
    /// # Errors
    /// [`Error::Wrong`].
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, Error> {
        file::parse(path, text)
    }

    /// How many transfers, or groups of competing ones, it asks for.
    pub(crate) fn transfers(&self) -> usize {
        let each = self.cells.iter().map(|cell| cell.legs().len());
        each.sum::<usize>() * self.runs as usize
    }
}

impl Cell {
    /// What runs at a time: the transports one by one, or all of them if they compete.
    pub(crate) fn legs(&self) -> Vec<&[Transport]> {
        match self.workload {
            Workload::Compete { .. } => vec![&self.transports],
            _ => self.transports.chunks(1).collect(),
        }
    }

    /// The round-trip propagation delay from end to end, ms.
    pub(crate) fn rtt_ms(&self) -> f64 {
        self.link.rtt_ms + self.core.as_ref().map_or(0.0, |core| core.rtt_ms)
    }

    /// The name of the link's loss model.
    pub(crate) fn loss_model(&self) -> &'static str {
        match self.link.loss_model {
            LossModel::Uniform => "uniform",
            LossModel::GilbertElliott { .. } => "gilbert-elliott",
        }
    }

    /// The name of the profile, or `custom`.
    pub(crate) fn profile_name(&self) -> &'static str {
        self.profile.map_or("custom", Profile::name)
    }

    /// The most seconds that the transfer itself can take.
    pub(crate) fn longest_s(&self) -> f64 {
        match &self.workload {
            Workload::Stream { seconds, .. }
            | Workload::Flows {
                amount: Amount::Seconds(seconds),
                ..
            } => *seconds,
            Workload::Compete { seconds, starts } => {
                seconds + starts.iter().copied().fold(0.0, f64::max)
            }
            _ => self.time_limit_s,
        }
    }
}

/// For progress: the cell in a few words.
impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.profile {
            Some(profile) => write!(f, "{profile}")?,
            None => write!(f, "{} Mbit/s {} ms", self.link.rate_mbit, self.link.rtt_ms)?,
        }
        if let Some(medium) = self.medium {
            write!(f, " {medium}")?;
        }
        if self.link.loss_pct > 0.0 {
            write!(f, " {} %", self.link.loss_pct)?;
            if self.link.loss_model != LossModel::Uniform {
                f.write_str(" in bursts")?;
            }
        }
        match &self.workload {
            Workload::File { bytes, direction } => {
                write!(f, ", {}", size(*bytes))?;
                if *direction != Direction::Down {
                    write!(f, " {}", direction.name())?;
                }
            }
            Workload::RequestResponse {
                request, response, ..
            } => write!(f, ", {request}/{response} B")?,
            Workload::Stream { rate_mbit, seconds } => {
                write!(f, ", {seconds} s")?;
                if *rate_mbit > 0.0 {
                    write!(f, " at {rate_mbit} Mbit/s")?;
                }
            }
            Workload::Flows { count, .. } => write!(f, ", {count} flows")?,
            Workload::Compete { seconds, .. } => write!(f, ", competing {seconds} s")?,
        }
        if let Some(ingress) = &self.vtl.ingress {
            write!(f, ", {ingress}")?;
        }
        if let Some(driver) = &self.vtl.driver {
            write!(f, ", {driver}")?;
        }
        match self.cores {
            Some(1) => f.write_str(", one core")?,
            Some(_) => f.write_str(", two cores")?,
            None => {}
        }
        if self.known {
            f.write_str(", known peer")?;
        }
        Ok(())
    }
}

/// Bytes for people: in KiB and MiB if that is exact, else in 10^6 bytes.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if (1 << 10..1 << 20).contains(&b) && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b if b >= 100_000 => format!("{:.1} MB", b as f64 / 1e6),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests;
