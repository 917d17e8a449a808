//! Talking to the daemon: where its socket is, and what to say when it does not answer.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use crate::control::{Client, Error};
use crate::failure::Failure;

/// Where the daemon listens.
#[derive(Clone, Debug, Args)]
pub(crate) struct SocketArgs {
    /// The daemon's control socket
    #[arg(
        long,
        global = true,
        env = "VTL_SOCKET",
        value_name = "PATH",
        default_value = "/run/vtl/vtld.sock",
        hide_env_values = true
    )]
    pub(crate) socket: PathBuf,
}

impl SocketArgs {
    /// One request, one answer.
    pub(crate) fn call(&self, request: &Value) -> anyhow::Result<Value> {
        call(&self.socket, request)
    }
}

fn call(socket: &Path, request: &Value) -> anyhow::Result<Value> {
    Client::connect(socket)
        .and_then(|mut client| client.call(request))
        .map_err(|err| explain(socket, err))
}

/// Turns the absence of a daemon into a sentence with a cure; a refusal is the daemon's own words.
fn explain(socket: &Path, err: Error) -> anyhow::Error {
    use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    let socket = socket.display();
    match err {
        Error::Io(err) if matches!(err.kind(), NotFound | ConnectionRefused) => {
            Failure::unreachable(format!(
                "no vtld answers on {socket}: start it with `sudo vtld`, or name its socket with --socket"
            ))
        }
        Error::Io(err) if err.kind() == PermissionDenied => Failure::permission(format!(
            "you may not use {socket}: join the group that owns it, or use sudo"
        )),
        Error::Io(err) => Failure::unreachable(format!("vtld on {socket} broke off: {err}")),
        refused @ Error::Refused(_) => refused.into(),
    }
}
