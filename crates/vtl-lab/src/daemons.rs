//! A daemon in the client's namespace and one in the server's.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde::Serialize;
use vtl_control::{CarrierSpec, Client, Deployed, Done, HookAdded, HookTarget, Request, Status};
use vtl_proto::carrier::Kind;
use vtl_testbed::{Host, Testbed};

use crate::bench::effort::Effort;
use crate::child::{Background, peak_kb, pin, resident_kb};
use crate::interrupt::Interrupt;
use crate::programs::Programs;

/// How long a daemon may take to answer.
const START: Duration = Duration::from_secs(15);
/// How long they get to themselves before they are used.
const SETTLE: Duration = Duration::from_millis(700);

/// How the daemons are started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Arguments of `vtld` besides the socket.
    pub(crate) arguments: Vec<String>,
    /// Further ones of the client's.
    pub(crate) of_client: Vec<String>,
    /// The core that each runs on, client's and server's; none: any.
    pub(crate) cores: Option<[usize; 2]>,
}

/// Two running daemons: that of the client, and that of the server or of a gateway before it.
#[derive(Debug)]
pub(crate) struct Daemons {
    client_socket: PathBuf,
    server_socket: PathBuf,
    client: Background,
    server: Background,
}

impl Daemons {
    /// Starts both and waits until they answer. Their sockets lie in `scratch`; what they say goes
    /// into files below `logs`.
    ///
    /// # Errors
    /// One of them does not start: then with its last words.
    pub(crate) fn start(
        testbed: &Testbed,
        programs: &Programs,
        options: &Options,
        scratch: &Path,
        logs: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        Self::start_apart(
            [testbed, testbed],
            programs,
            options,
            scratch,
            logs,
            interrupt,
        )
    }

    /// As [`start`](Self::start), the client in one testbed and the server in another one.
    ///
    /// # Errors
    /// One of them does not start: then with its last words.
    pub(crate) fn start_apart(
        [of_client, of_server]: [&Testbed; 2],
        programs: &Programs,
        options: &Options,
        scratch: &Path,
        logs: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let spawn = |host: Host, socket: &Path| -> anyhow::Result<Background> {
            let log = std::fs::File::create(log_of(logs, host))?;
            let testbed = match host {
                Host::Client => of_client,
                Host::Server | Host::Router => of_server,
            };
            let mut command = testbed.command(host, &programs.vtld)?;
            command
                .arg("--socket")
                .arg(socket)
                .args(&options.arguments)
                .args(
                    (host == Host::Client)
                        .then_some(&options.of_client)
                        .into_iter()
                        .flatten(),
                )
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log);
            if let Some(cores) = options.cores {
                pin(&mut command, cores[usize::from(host == Host::Server)]);
            }
            Background::start("vtld", &mut command)
        };
        let client_socket = scratch.join("client.sock");
        let server_socket = scratch.join("server.sock");
        let mut server = spawn(Host::Server, &server_socket)?;
        let mut client = spawn(Host::Client, &client_socket)?;
        for (host, daemon, socket) in [
            (Host::Server, &mut server, &server_socket),
            (Host::Client, &mut client, &client_socket),
        ] {
            wait(daemon, socket, interrupt).map_err(|error| {
                if error.is::<crate::interrupt::Interrupted>() {
                    error
                } else {
                    error.context(complaint(logs, host))
                }
            })?;
        }
        // A host's daemon has been up for long: its ring pool is not still being filled.
        thread::sleep(SETTLE);
        Ok(Self {
            client_socket,
            server_socket,
            client,
            server,
        })
    }

    /// Has the server's daemon carry the clients of a port: by this carrier, or by those that they
    /// ask for, also ones that may lose bytes.
    ///
    /// # Errors
    /// The daemon's.
    pub(crate) fn hook(
        &self,
        port: u16,
        carrier: Option<String>,
        loss_tolerant: bool,
    ) -> Result<(), vtl_control::Error> {
        let hook = Request::HookAdd {
            target: HookTarget::Port(port),
            carrier: CarrierSpec {
                carrier,
                loss_tolerant,
                ..CarrierSpec::default()
            },
        };
        let _: HookAdded = Client::connect(&self.server_socket)?.call(&hook)?;
        Ok(())
    }

    /// Has the other daemon be a gateway: it carries the connections that come from the client over this interface.
    ///
    /// # Errors
    /// The daemon's.
    pub(crate) fn gateway(
        &self,
        interface: &str,
        carrier: Option<String>,
    ) -> Result<(), vtl_control::Error> {
        let add = Request::GatewayAdd {
            interface: interface.to_owned(),
            to: Vec::new(),
            ports: Vec::new(),
            carrier,
        };
        let _: Done = Client::connect(&self.server_socket)?.call(&add)?;
        Ok(())
    }

    /// Puts a graft of the pool into both kernels, where vtld would otherwise load it for the first
    /// session that asks for it.
    ///
    /// # Errors
    /// A daemon's.
    pub(crate) fn deploy(&self, graft: &str) -> Result<(), vtl_control::Error> {
        for socket in [&self.client_socket, &self.server_socket] {
            let name = Some(graft.to_owned());
            let _: Deployed = Client::connect(socket)?.call(&Request::GraftDeploy { name })?;
        }
        Ok(())
    }

    /// A command in the client's namespace whose TCP connections are captured and travel by this
    /// carrier, or the best if none is named, as a user would start it. `loss_tolerant`: the carrier
    /// may lose bytes.
    ///
    /// # Errors
    /// The namespace is gone.
    pub(crate) fn captured(
        &self,
        testbed: &Testbed,
        programs: &Programs,
        carrier: Option<&str>,
        loss_tolerant: bool,
        program: &Path,
    ) -> anyhow::Result<Command> {
        let mut command = testbed.command(Host::Client, &programs.vtl)?;
        command
            .arg("--socket")
            .arg(&self.client_socket)
            .arg("run")
            .args(carrier.map(|name| format!("--carrier={name}")))
            .args(loss_tolerant.then_some("--loss-tolerant"))
            .arg("--")
            .arg(program);
        Ok(command)
    }

    /// Where a host's daemon listens.
    pub(crate) fn socket(&self, host: Host) -> &Path {
        match host {
            Host::Client => &self.client_socket,
            Host::Server | Host::Router => &self.server_socket,
        }
    }

    /// What both say they are carrying.
    ///
    /// # Errors
    /// One of them does not answer.
    pub(crate) fn statuses(&self) -> Result<Statuses, vtl_control::Error> {
        Ok(Statuses {
            client: status(&self.client_socket)?,
            server: status(&self.server_socket)?,
        })
    }

    /// What each has done so far: the client's, and the other.
    pub(crate) fn efforts(&self) -> [Effort; 2] {
        [&self.client, &self.server].map(|daemon| Effort::of(daemon.pid()))
    }

    /// The most memory that both together had resident, KiB.
    pub(crate) fn peak_kb(&self) -> u64 {
        peak_kb(self.client.pid()) + peak_kb(self.server.pid())
    }

    /// The memory that both together have resident now, KiB.
    pub(crate) fn resident_kb(&self) -> u64 {
        resident_kb(self.client.pid()) + resident_kb(self.server.pid())
    }
}

fn status(socket: &Path) -> Result<Status, vtl_control::Error> {
    Client::connect(socket)?.status()
}

/// What the daemons answer to `status`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Statuses {
    client: Status,
    server: Status,
}

impl Statuses {
    /// Bytes of applications that reached or left the client over VTL.
    pub(crate) fn carried(&self) -> u64 {
        let carriers = self.client.carriers.iter();
        carriers.map(|c| c.bytes_received + c.bytes_sent).sum()
    }

    /// Bytes of applications of the client that its flows have skipped as lost.
    pub(crate) fn skipped(&self) -> u64 {
        let carriers = self.client.carriers.iter();
        carriers.filter_map(|c| c.skipped_bytes).max().unwrap_or(0)
    }

    /// Whether some have reached the client by a carrier that may lose bytes.
    pub(crate) fn has_lossy(&self) -> bool {
        let mut carriers = self.client.carriers.iter();
        carriers.any(|c| c.skipped_bytes.is_some() && c.bytes_received > 0)
    }

    /// Packets of the server that were sent again (of carriers: lost), per cent of all it sent; none
    /// if it has sent nothing.
    pub(crate) fn retransmitted_pct(&self) -> Option<f64> {
        let sessions = self.server.sessions.iter();
        // Of a graft there is a session, too.
        let graft = Kind::Graft.name();
        let carriers = self.server.carriers.iter().filter(|t| t.carrier != graft);
        let carriers = carriers.filter_map(|t| t.path);
        let (sent, again) = sessions
            .map(|s| (s.sent, s.retransmitted))
            .chain(carriers.map(|path| (path.sent, path.lost)))
            .fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        (sent > 0).then(|| again as f64 / sent as f64 * 100.0)
    }

    /// The egress driver of the server's interface, for the record.
    pub(crate) fn driver(&self) -> Option<&str> {
        let interfaces = &self.server.interfaces;
        interfaces.iter().find_map(|i| i.driver.as_deref())
    }
}

fn wait(vtld: &mut Background, socket: &Path, interrupt: &Interrupt) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        if status(socket).is_ok() {
            return Ok(());
        }
        interrupt.check()?;
        if let Some(status) = vtld.ended()? {
            bail!("{} ended ({status})", vtld.name());
        }
        if started.elapsed() > START {
            bail!("{} does not answer", vtld.name());
        }
        thread::sleep(Duration::from_millis(5));
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
