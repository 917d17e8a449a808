//! What one check of `vtl doctor` reports.

use std::io;

use serde::Serialize;

/// Whether a feature is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Seen to work.
    Present,
    /// Seen not to work.
    Missing,
    /// Could not be tried, for want of privilege.
    Unknown,
}

/// What its absence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Need {
    /// VTL does not run without it.
    Required,
    /// VTL runs without it, in a lesser way.
    Optional,
    /// Only building or testing VTL needs it.
    Development,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    /// Short name, stable for scripts.
    pub(super) name: &'static str,
    /// What VTL uses it for, in one clause.
    pub(super) used_for: &'static str,
    /// What its absence means.
    pub(super) need: Need,
    /// Whether it is there.
    pub(super) state: State,
    /// What was found: a version, a path, the kernel's error.
    pub(super) found: String,
    /// If it is missing: what follows and how to mend it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<&'static str>,
}

/// The fixed part of a check.
#[derive(Clone, Copy)]
pub(super) struct Spec {
    /// See [`Check::name`].
    pub(super) name: &'static str,
    /// See [`Check::used_for`].
    pub(super) used_for: &'static str,
    /// See [`Check::need`].
    pub(super) need: Need,
    /// See [`Check::advice`].
    pub(super) advice: &'static str,
}

impl Spec {
    /// The check with this outcome: `Ok` says what was found. A refusal for want of privilege
    /// counts as unknown, unless root was refused too.
    pub(super) fn outcome(self, outcome: io::Result<String>) -> Check {
        let (state, found) = match outcome {
            Ok(found) => (State::Present, found),
            Err(err) if unprivileged(&err) => (State::Unknown, "needs root to try".to_owned()),
            Err(err) => (State::Missing, plain(&err)),
        };
        Check {
            name: self.name,
            used_for: self.used_for,
            need: self.need,
            state,
            found,
            advice: (state == State::Missing).then_some(self.advice),
        }
    }
}

fn unprivileged(err: &io::Error) -> bool {
    err.kind() == io::ErrorKind::PermissionDenied && !nix::unistd::geteuid().is_root()
}

/// The error's text without the number that `io::Error` appends.
fn plain(err: &io::Error) -> String {
    let text = err.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: Spec = Spec {
        name: "x",
        used_for: "y",
        need: Need::Required,
        advice: "z",
    };

    #[test]
    fn outcome__gives_advice_only_when_missing() {
        let present = SPEC.outcome(Ok("here".into()));
        assert_eq!((present.state, present.advice), (State::Present, None));
        let missing = SPEC.outcome(Err(io::Error::from_raw_os_error(libc::EINVAL)));
        assert_eq!((missing.state, missing.advice), (State::Missing, Some("z")));
        assert_eq!(missing.found, "invalid argument");
    }
}
