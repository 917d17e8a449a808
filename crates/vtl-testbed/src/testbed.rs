//! Creating, using and removing a testbed.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use vtl_link::{BadLink, Host, Link};

use crate::control::{self, Request, Response};
use crate::emulator::{Emulator, Stats, TO_CLIENT, TO_SERVER};
use crate::error::{Error, Result};
use crate::lossy_wire::LossyWire;
use crate::namespace;
use crate::netem;
use crate::offload::{self, Offload};
use crate::state::{self, Process, State};
use crate::tcp::{self, CongestionControl};

/// Lifetime of a testbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// That of the [`Testbed`] value, and at most that of this process: nothing is left behind, also not
    /// after a panic, an interrupt or a kill. The emulator is a thread of this process.
    Guarded,
    /// Until [`Testbed::down`]. The emulator is a process of its own: the current executable with the
    /// arguments `testbed emulate --name NAME`, which must call [`Testbed::emulate`].
    Persistent,
}

/// Implementation of a testbed's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// This crate's emulator in user space.
    Emulator,
    /// The kernel's netem.
    Netem,
    /// None: client and server are the ends of one veth pair; with loss, the router drops packets in the
    /// kernel.
    Direct,
}

/// Environment of commands on a host. Name of the testbed.
const ENV_NAME: &str = "VTL_TESTBED";
/// Control socket of the host's VTL daemon.
const ENV_SOCKET: &str = "VTL_SOCKET";
/// Directory of the host's VTL daemon.
const ENV_STATE: &str = "VTL_STATE";
/// List of the keys of its peers.
const ENV_PEERS: &str = "VTL_PEERS";
/// Environment of this process. `emulator`: use the emulator even if the kernel has netem.
const ENV_BACKEND: &str = "VTL_TESTBED_BACKEND";

/// Timeout for the start of a persistent emulator.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Time from SIGTERM to SIGKILL for processes inside a testbed.
const GRACE: Duration = Duration::from_millis(500);

/// A testbed that is up.
#[derive(Debug)]
pub struct Testbed {
    name: String,
    backend: Backend,
    guard: Option<Guard>,
}

impl Testbed {
    /// Creates a testbed with this link. Removes the remains of dead testbeds first.
    ///
    /// The link is the emulator's, or netem's where the kernel has it and `VTL_TESTBED_BACKEND=netem` is set.
    ///
    /// # Errors
    /// No root, no `ip` tool, an invalid name or link, or a testbed of this name is up. After an error nothing
    /// is left behind.
    pub fn up(name: &str, link: &Link, lifetime: Lifetime) -> Result<Testbed> {
        namespace::check_name(name)?;
        link.check()?;
        need_root()?;
        if let Ok(false) = namespace::root_is_mount_point() {
            return Err(Error::RootNotMounted);
        }
        let _lock = state::lock()?;
        if is_up(name) {
            return Err(Error::AlreadyUp(name.to_owned()));
        }
        remove(name);
        for dead in state::names().iter().filter(|n| !is_up(n)) {
            remove(dead);
        }
        let result = Testbed::build(name, link, lifetime);
        if result.is_err() {
            remove(name);
        }
        result
    }

    fn build(name: &str, link: &Link, lifetime: Lifetime) -> Result<Testbed> {
        let mut guard = match lifetime {
            Lifetime::Guarded => Some(Guard::new(name)?),
            Lifetime::Persistent => None,
        };
        make_hosts(name, link)?;
        // Not by itself: it has no counters, and lacks what some tests need.
        let wants_netem = std::env::var_os(ENV_BACKEND).is_some_and(|b| b == OsStr::new("netem"));
        let backend = if link.direct {
            if link.loses_directly() {
                let Some(guard) = &mut guard else {
                    let what = "a direct link with loss ends with the process that creates it, so it cannot be persistent";
                    return Err(BadLink(what.to_owned()).into());
                };
                guard.wire = Some(LossyWire::build(name, link)?);
            }
            Backend::Direct
        } else if wants_netem && netem::available(name) {
            netem::build(name, link)?;
            Backend::Netem
        } else {
            Backend::Emulator
        };
        let mut record = State {
            name: name.to_owned(),
            backend,
            link: link.clone(),
            process: Process::of(std::process::id()).filter(|_| guard.is_some()),
        };
        if backend == Backend::Emulator {
            match &mut guard {
                Some(guard) => guard.emulator = Some(Emulator::start(name, link)?),
                None => {
                    // The emulator reads its link from the record.
                    state::write(&record)?;
                    record.process = Some(spawn_emulator(name)?);
                }
            }
        }
        state::write(&record)?;
        Ok(Testbed {
            name: name.to_owned(),
            backend,
            guard,
        })
    }

    /// Opens a testbed that another process has created. Dropping the value leaves the testbed up.
    pub fn attach(name: &str) -> Result<Testbed> {
        namespace::check_name(name)?;
        need_root()?;
        match state::read(name).filter(|_| is_up(name)) {
            Some(record) => Ok(Testbed {
                name: name.to_owned(),
                backend: record.backend,
                guard: None,
            }),
            None => Err(Error::NotUp(name.to_owned())),
        }
    }

    /// Removes a testbed, complete or not, alive or dead. Ends the processes that run in its namespaces.
    /// Returns false if there was none.
    pub fn down(name: &str) -> Result<bool> {
        namespace::check_name(name)?;
        need_root()?;
        let _lock = state::lock()?;
        let existed = state::read(name).is_some()
            || Host::ALL
                .iter()
                .any(|h| namespace::path_of(name, *h).exists());
        remove(name);
        Ok(existed)
    }

    /// The names of all testbeds that are up.
    pub fn names() -> Vec<String> {
        state::names().into_iter().filter(|n| is_up(n)).collect()
    }

    /// Runs the emulator of a persistent testbed until [`Testbed::down`]. For the hidden command that
    /// [`Lifetime::Persistent`] starts.
    pub fn emulate(name: &str) -> Result<()> {
        namespace::check_name(name)?;
        need_root()?;
        let record = state::read(name).ok_or_else(|| Error::NotUp(name.to_owned()))?;
        Emulator::start(name, &record.link)?.join();
        Ok(())
    }

    /// The testbed's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The implementation of the link.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The current link.
    pub fn link(&self) -> Result<Link> {
        state::read(&self.name)
            .map(|s| s.link)
            .ok_or_else(|| Error::NotUp(self.name.clone()))
    }

    /// Changes the link under traffic. Queued packets are sent at the new rate; packets in propagation arrive
    /// as scheduled.
    pub fn set(&self, link: &Link) -> Result<()> {
        link.check()?;
        if link.direct != (self.backend == Backend::Direct) {
            return Err(Error::WireFixed);
        }
        match self.backend {
            Backend::Direct => {
                let now = self.link()?;
                if (link.loss_up(), link.loss_down()) != (now.loss_up(), now.loss_down()) {
                    let what = "the loss of a direct link cannot change while it is up: \
                                run `vtl testbed down` and `up` again";
                    return Err(BadLink(what.to_owned()).into());
                }
            }
            Backend::Netem => netem::set(&self.name, link)?,
            Backend::Emulator => {
                control::ask(&self.name, &Request::Set(link.clone()))?;
            }
        }
        let mut record = state::read(&self.name).ok_or_else(|| Error::NotUp(self.name.clone()))?;
        record.link = link.clone();
        state::write(&record)
    }

    /// The link's counters. All zero with another backend than the emulator.
    pub fn stats(&self) -> Result<Stats> {
        if self.backend != Backend::Emulator {
            return Ok(Stats::default());
        }
        match control::ask(&self.name, &Request::Stats)? {
            Response::Stats(stats) => Ok(*stats),
            _ => Err(Error::Emulator {
                name: self.name.clone(),
                problem: "sent an unexpected response".to_owned(),
            }),
        }
    }

    /// Prepares a command on a host, in its network namespace. Its environment has the testbed's name
    /// (`VTL_TESTBED`), and of the host's VTL daemon the socket (`VTL_SOCKET`), the directory with its key
    /// (`VTL_STATE`) and the list of its peers' keys (`VTL_PEERS`).
    pub fn command(&self, host: Host, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = namespace::command_in(&self.netns_path(host), program)?;
        command
            .env(ENV_NAME, &self.name)
            .env(ENV_SOCKET, self.daemon_socket(host))
            .env(ENV_STATE, self.daemon_state(host))
            .env(ENV_PEERS, self.daemon_state(host).join("peers.toml"));
        Ok(command)
    }

    /// Runs `work` on a thread of its own in a host's network namespace, and waits for it. Sockets that it
    /// opens stay in that namespace.
    pub fn in_netns<T: Send>(&self, host: Host, work: impl FnOnce() -> T + Send) -> Result<T> {
        namespace::run_in(&self.netns_path(host), work)
    }

    /// Path of a host's network namespace, as of `ip netns`.
    pub fn netns_path(&self, host: Host) -> PathBuf {
        namespace::path_of(&self.name, host)
    }

    /// Path of the control socket of a host's VTL daemon.
    pub fn daemon_socket(&self, host: Host) -> PathBuf {
        PathBuf::from(format!(
            "/run/vtl/{}.sock",
            namespace::name_of(&self.name, host)
        ))
    }

    /// Directory of a host's VTL daemon; removed with the testbed.
    pub fn daemon_state(&self, host: Host) -> PathBuf {
        state::path(&self.name, "state").join(host.name())
    }

    /// A host's IPv4 address. For the router, which has none, the unused third address.
    pub fn addr4(&self, host: Host) -> Ipv4Addr {
        Ipv4Addr::new(10, 73, 0, number(host))
    }

    /// A host's IPv6 address. For the router, which has none, the unused third address.
    pub fn addr6(&self, host: Host) -> Ipv6Addr {
        Ipv6Addr::new(0xfd73, 0, 0, 0, 0, 0, 0, number(host).into())
    }

    /// A host's network device towards the other host; of the router, the one towards the client.
    pub fn device(&self, host: Host) -> &'static str {
        if host == Host::Router {
            TO_CLIENT
        } else {
            DEVICE
        }
    }

    /// Configures a host as a TCP baseline: this congestion control for all new connections, buffers that grow
    /// up to twice the bandwidth-delay product and at least 32 MiB, SACK, timestamps, and no metrics of earlier
    /// connections.
    ///
    /// Adds the congestion control to the host's list of allowed ones, which is restored when the last testbed
    /// goes down.
    pub fn tune_tcp(&self, host: Host, congestion_control: &str) -> Result<()> {
        tcp::tune(&self.name, host, &self.link()?, congestion_control)
    }

    /// The established TCP connections of a host with the congestion control that each uses, from `ss -tin`.
    /// Believe this, not the configuration: an accepted connection takes its namespace's default unless its
    /// listener has chosen one.
    pub fn congestion_controls(&self, host: Host) -> Result<Vec<CongestionControl>> {
        tcp::connections(&self.name, host)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else {
            return;
        };
        let lock = state::lock();
        drop(guard.emulator);
        drop(guard.wire);
        remove(&self.name);
        drop(guard.watcher);
        drop(lock);
    }
}

/// The parts of a guarded testbed that live in this process.
#[derive(Debug)]
struct Guard {
    emulator: Option<Emulator>,
    wire: Option<LossyWire>,
    watcher: Watcher,
}

impl Guard {
    fn new(name: &str) -> Result<Guard> {
        Ok(Guard {
            emulator: None,
            wire: None,
            watcher: Watcher::start(name)?,
        })
    }
}

/// A shell that removes the testbed if this process ends without doing so.
#[derive(Debug)]
struct Watcher {
    shell: Child,
    line: Option<ChildStdin>,
}

impl Watcher {
    fn start(name: &str) -> Result<Watcher> {
        let names: Vec<String> = Host::ALL
            .iter()
            .map(|h| namespace::name_of(name, *h))
            .collect();
        let saved = state::saved_congestion_controls();
        // A line on the pipe: exit. The pipe's end without one: this process has died.
        let script = format!(
            "trap '' INT TERM HUP; read -r line && exit; \
             exec 9> {directory}/lock; flock 9; \
             for n in {namespaces}; do \
               kill $(ip netns pids $n) ; \
               for d in {DEVICE} {TO_CLIENT} {TO_SERVER}; do ip -n $n link del $d; done; \
               ip netns del $n; \
             done; \
             rm -rf {directory}/{name}.json {directory}/{name}.sock {directory}/{name}.state; \
             if [ -e {saved} ] && ! ls {directory}/*.json; then \
               cat {saved} > /proc/sys/net/ipv4/tcp_allowed_congestion_control && rm -f {saved}; \
             fi",
            namespaces = names.join(" "),
            directory = state::directory().display(),
            saved = saved.display(),
        );
        let mut shell = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // An interrupt from the terminal goes to the process group: not to this shell.
            .process_group(0)
            .spawn()
            .map_err(Error::system("run `sh`"))?;
        let line = shell.stdin.take();
        Ok(Watcher { shell, line })
    }
}

impl Drop for Watcher {
    /// Ends the shell by a line. If it began to remove the testbed, it would wait for the lock, and the holder
    /// of the lock, which waits here, for the shell.
    fn drop(&mut self) {
        if let Some(mut line) = self.line.take() {
            let _ = line.write_all(b"done\n");
        }
        let _ = self.shell.wait();
    }
}

/// The network device of the client and of the server.
pub(crate) const DEVICE: &str = "eth0";

/// Last byte of a host's addresses.
pub(crate) fn number(host: Host) -> u8 {
    match host {
        Host::Client => 1,
        Host::Server => 2,
        Host::Router => 3,
    }
}

fn need_root() -> Result<()> {
    if nix::unistd::geteuid().is_root() {
        Ok(())
    } else {
        Err(Error::NotRoot)
    }
}

/// Whether a testbed's namespaces exist and the process on which it depends is alive.
fn is_up(name: &str) -> bool {
    state::read(name).is_some_and(|record| {
        Host::ALL
            .iter()
            .all(|h| namespace::path_of(name, *h).exists())
            && record.process.is_none_or(Process::is_alive)
            && (record.backend != Backend::Emulator || record.process.is_some())
    })
}

/// Removes everything that exists of a testbed. The caller holds the lock.
fn remove(name: &str) {
    if let Some(State {
        backend: Backend::Emulator,
        process: Some(process),
        ..
    }) = state::read(name)
        && process.is_alive()
        && process.pid != std::process::id() as i32
    {
        let _ = control::ask(name, &Request::Stop);
    }
    let hosts: Vec<Host> = Host::ALL
        .into_iter()
        .filter(|h| namespace::path_of(name, *h).exists())
        .collect();
    end_processes(name, &hosts);
    for host in hosts {
        // A namespace outlives its name while anything refers to it: remove its devices first.
        for device in [DEVICE, TO_CLIENT, TO_SERVER] {
            let _ = namespace::ip(&["-n", &namespace::name_of(name, host), "link", "del", device]);
        }
        let _ = namespace::ip(&["netns", "del", &namespace::name_of(name, host)]);
    }
    state::remove(name);
    tcp::restore_allowed();
}

/// Ends the processes inside a testbed: by SIGTERM, and after [`GRACE`] by SIGKILL.
fn end_processes(name: &str, hosts: &[Host]) {
    let own = std::process::id() as i32;
    let inside = || {
        hosts
            .iter()
            .flat_map(|h| namespace::pids_in(name, *h))
            .filter(|pid| *pid != own)
    };
    let deadline = Instant::now() + GRACE;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut any = false;
        for pid in inside() {
            any = true;
            let _ = kill(Pid::from_raw(pid), signal);
        }
        while any
            && signal == Signal::SIGTERM
            && Instant::now() < deadline
            && inside().next().is_some()
        {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Creates the namespaces, their devices and their addresses.
fn make_hosts(name: &str, link: &Link) -> Result<()> {
    let direct = link.direct && !link.loses_directly();
    for host in Host::ALL {
        namespace::ip(&["netns", "add", &namespace::name_of(name, host)])?;
        namespace::run_in(&namespace::path_of(name, host), || {
            // Duplicate address detection would delay the first IPv6 packets by a second, and router
            // solicitations would count as packets of the experiment.
            for scope in ["all", "default"] {
                namespace::write_sysctl(&format!("ipv6/conf/{scope}/accept_dad"), "0")?;
                namespace::write_sysctl(&format!("ipv6/conf/{scope}/router_solicitations"), "0")?;
                if host == Host::Router {
                    namespace::write_sysctl(&format!("ipv6/conf/{scope}/disable_ipv6"), "1")?;
                }
            }
            Ok::<(), Error>(())
        })??;
    }
    if direct {
        join(name, (Host::Client, DEVICE), (Host::Server, DEVICE))?;
    } else {
        join(name, (Host::Client, DEVICE), (Host::Router, TO_CLIENT))?;
        join(name, (Host::Server, DEVICE), (Host::Router, TO_SERVER))?;
        // `gro on` switches on NAPI at both ends, which XDP transmission into a veth needs. The router must
        // not merge packets, or a loss would take several: with this limit none are merged.
        namespace::ip_batch(
            name,
            Host::Router,
            &format!(
                "link set {TO_CLIENT} gro_max_size 1\nlink set {TO_SERVER} gro_max_size 1\n\
                 link set lo up\nlink set {TO_CLIENT} up\nlink set {TO_SERVER} up\n"
            ),
        )?;
    }
    if !link.direct {
        for host in [Host::Client, Host::Server] {
            coalesce(name, host)?;
        }
    }
    for (host, peer) in [(Host::Client, Host::Server), (Host::Server, Host::Client)] {
        let (own, other) = (number(host), number(peer));
        // Permanent neighbour entries: a lost ARP request would cost a second and look like a slow protocol.
        namespace::ip_batch(
            name,
            host,
            &format!(
                "link set lo up\n\
                 link set {DEVICE} address 02:56:54:4c:00:0{own}\n\
                 link set {DEVICE} up\n\
                 addr add 10.73.0.{own}/24 dev {DEVICE}\n\
                 addr add fd73::{own}/64 dev {DEVICE} nodad\n\
                 neigh replace 10.73.0.{other} lladdr 02:56:54:4c:00:0{other} dev {DEVICE} nud permanent\n\
                 neigh replace fd73::{other} lladdr 02:56:54:4c:00:0{other} dev {DEVICE} nud permanent\n"
            ),
        )?;
    }
    Ok(())
}

/// Configures interrupt moderation on a host, as of a network card: while packets keep coming, they are
/// received in batches 50 µs apart; the first packet after a pause is received at once. The emulator sends
/// frames one by one; without this, each would pass through the receiver's whole stack alone.
fn coalesce(name: &str, host: Host) -> Result<()> {
    let space = namespace::name_of(name, host);
    // `ip netns exec`, since only it mounts a /sys that shows the namespace's devices.
    let script = format!(
        "cd /sys/class/net/{DEVICE} && echo 50000 > gro_flush_timeout && echo 2 > napi_defer_hard_irqs"
    );
    namespace::ip(&["netns", "exec", &space, "sh", "-c", &script]).map(drop)
}

/// Creates a veth pair. One queue at each end: with more, packets of one flow could be reordered.
fn join(name: &str, a: (Host, &str), b: (Host, &str)) -> Result<()> {
    let (space_a, space_b) = (namespace::name_of(name, a.0), namespace::name_of(name, b.0));
    let one = ["numrxqueues", "1", "numtxqueues", "1"];
    let mut args = vec!["link", "add", a.1, "netns", &space_a];
    args.extend(one);
    args.extend(["type", "veth", "peer", "name", b.1, "netns", &space_b]);
    args.extend(one);
    namespace::ip(&args)?;
    for (host, device) in [a, b] {
        namespace::run_in(&namespace::path_of(name, host), || {
            // Frames on the link have complete checksums and at most 1,500 bytes, as segmentation offload goes
            // off with the checksums'. The router keeps its offloads: it must be able to forward the aggregates
            // of a host whose offloads are switched on again.
            if host != Host::Router {
                offload::set(device, Offload::TxChecksum, false)?;
            }
            offload::set(device, Offload::Gro, true)
        })??;
    }
    Ok(())
}

/// Starts the emulator of a persistent testbed and waits until it responds.
fn spawn_emulator(name: &str) -> Result<Process> {
    let failed = |problem: String| Error::Emulator {
        name: name.to_owned(),
        problem,
    };
    let program = std::env::current_exe().map_err(Error::system("find the current executable"))?;
    let log_path = state::log_path(name);
    let log = std::fs::File::create(&log_path).map_err(Error::file("create", &log_path))?;
    let arguments: [OsString; 4] = [
        "testbed".into(),
        "emulate".into(),
        "--name".into(),
        name.into(),
    ];
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    // SAFETY: setsid is a plain system call and may be made between fork and exec.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into));
    }
    let mut child = command
        .spawn()
        .map_err(Error::system("start the emulator"))?;
    let process = Process::of(child.id());
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            let log = std::fs::read_to_string(&log_path).unwrap_or_default();
            let why = log
                .lines()
                .next()
                .map_or_else(|| status.to_string(), str::to_owned);
            return Err(failed(format!("did not start: {why}")));
        }
        if state::socket_path(name).exists() && control::ask(name, &Request::Stats).is_ok() {
            return process.ok_or_else(|| failed("ended at once".to_owned()));
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed("did not start within five seconds".to_owned()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// As when `ip` fails, or is interrupted, while a testbed is created: the lock is held then.
    #[test]
    fn watcher__ends_without_the_lock() {
        if !vtl_testing::is_root() {
            return;
        }
        let lock = state::lock().expect("a lock");
        let ends = thread::spawn(|| drop(Watcher::start("t-watcher").expect("a shell")));
        vtl_testing::until("the shell has ended", || ends.is_finished());
        drop(lock);
    }
}
