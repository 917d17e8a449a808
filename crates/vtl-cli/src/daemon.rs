//! Talking to the daemon: where its socket is, and what to say when it does not answer.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::de::DeserializeOwned;
use vtl_control::{Client, DEFAULT_SOCKET, Error, Request};

use crate::failure::Failure;

/// Where the daemon listens.
#[derive(Clone, Debug, Args)]
pub struct SocketArgs {
    /// The daemon's control socket
    #[arg(
        long,
        global = true,
        env = "VTL_SOCKET",
        value_name = "PATH",
        default_value = DEFAULT_SOCKET,
        hide_env_values = true
    )]
    pub socket: PathBuf,
}

impl SocketArgs {
    /// One request, one answer.
    pub(crate) fn call<T: DeserializeOwned>(&self, request: &Request) -> anyhow::Result<T> {
        ask(&self.socket, |daemon| daemon.call(request))
    }
}

/// Asks the daemon at `socket`.
///
/// # Errors
/// It does not answer, or refuses: with the exit status for that.
pub fn ask<T>(socket: &Path, what: impl FnOnce(&Client) -> Result<T, Error>) -> anyhow::Result<T> {
    Client::connect(socket)
        .and_then(|daemon| what(&daemon))
        .map_err(explain)
}

/// Gives the daemon's absence, and its refusal to talk to this user, their exit statuses.
pub(crate) fn explain(err: Error) -> anyhow::Error {
    match err {
        Error::Unreachable { .. } | Error::Closed | Error::Silent(_) => {
            Failure::unreachable(err.to_string())
        }
        Error::Denied(_) | Error::Forbidden(_) => Failure::permission(err.to_string()),
        err => err.into(),
    }
}
