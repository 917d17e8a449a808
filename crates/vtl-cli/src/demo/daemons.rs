//! The two daemons of the VTL leg: one in the client's namespace, one in the server's.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::daemon;
use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::{Value, json};
use vtl_testbed::{Host, Testbed};

use super::child::Background;
use super::server::{PORT, Scratch};
use crate::interrupt::Interrupt;

/// How long a daemon may take to answer.
const START: Duration = Duration::from_secs(15);

/// Two running daemons, with the web server's port hooked.
#[derive(Debug)]
pub(super) struct Daemons {
    client_socket: PathBuf,
    server_socket: PathBuf,
    _client: Background,
    _server: Background,
}

impl Daemons {
    /// Starts both and waits until they answer. What they say goes into files below `logs`.
    pub(super) fn start(
        testbed: &Testbed,
        scratch: &Scratch,
        logs: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let client_socket = scratch.path().join("client.sock");
        let server_socket = scratch.path().join("server.sock");
        let mut server = spawn(testbed, Host::Server, &server_socket, logs)?;
        let mut client = spawn(testbed, Host::Client, &client_socket, logs)?;
        wait(&mut server, &server_socket, interrupt)
            .with_context(|| complaint(logs, Host::Server))?;
        wait(&mut client, &client_socket, interrupt)
            .with_context(|| complaint(logs, Host::Client))?;
        daemon::call(&server_socket, &json!({ "op": "hook_add", "port": PORT }))?;
        Ok(Self {
            client_socket,
            server_socket,
            _client: client,
            _server: server,
        })
    }

    /// A command in the client's namespace whose TCP connections are captured, as a user would
    /// start it.
    pub(super) fn client_command(
        &self,
        testbed: &Testbed,
        program: &str,
    ) -> anyhow::Result<Command> {
        let vtl = env::current_exe().context("cannot find this program's own file")?;
        let mut command = testbed.command(Host::Client, vtl)?;
        command
            .arg("--socket")
            .arg(&self.client_socket)
            .args(["run", "--", program]);
        Ok(command)
    }

    /// What both say they are carrying.
    pub(super) fn statuses(&self) -> anyhow::Result<Statuses> {
        let status = |socket| daemon::call(socket, &json!({ "op": "status" }));
        Ok(Statuses {
            client: status(&self.client_socket)?,
            server: status(&self.server_socket)?,
        })
    }
}

/// What the daemons answer to `status`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Statuses {
    client: Value,
    server: Value,
}

impl Statuses {
    /// Bytes of applications that reached the client over VTL.
    pub(super) fn carried(&self) -> u64 {
        let sessions = self.client["sessions"].as_array();
        let bytes = |session: &Value| session["bytes_received"].as_u64().unwrap_or(0);
        sessions.into_iter().flatten().map(bytes).sum()
    }
}

/// Starts a daemon; its log names its host.
fn spawn(testbed: &Testbed, host: Host, socket: &Path, logs: &Path) -> anyhow::Result<Background> {
    let program = vtld()?;
    let log = std::fs::File::create(log_of(logs, host))?;
    let mut command = testbed.command(host, program)?;
    command
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    Background::start("vtld", &mut command)
}

/// The daemon's binary, which lies beside this one.
pub(super) fn vtld() -> anyhow::Result<PathBuf> {
    let path = env::current_exe()
        .context("cannot find this program's own file")?
        .with_file_name("vtld");
    if !path.exists() {
        bail!("{} is missing: run `make build`", path.display());
    }
    Ok(path)
}

fn wait(vtld: &mut Background, socket: &Path, interrupt: &Interrupt) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        if daemon::call(socket, &json!({ "op": "status" })).is_ok() {
            return Ok(());
        }
        interrupt.check()?;
        if let Some(status) = vtld.ended()? {
            bail!("{} ended ({status})", vtld.name());
        }
        if started.elapsed() > START {
            bail!("{} does not answer", vtld.name());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn log_of(logs: &Path, host: Host) -> PathBuf {
    logs.join(format!("vtld-{}.log", host.name()))
}

/// The last line the daemon wrote.
fn complaint(logs: &Path, host: Host) -> String {
    let text = std::fs::read_to_string(log_of(logs, host)).unwrap_or_default();
    let words = text.lines().next_back().unwrap_or("it gave no reason");
    format!("the {}'s daemon: {words}", host.name())
}
