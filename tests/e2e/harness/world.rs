//! Two hosts with daemons, a web server and a bad link, for one test.

use std::{
    cell::RefCell,
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    sync::Once,
};

use nix::sys::signal::Signal;
use serde_json::Value;
use sha2::{Digest, Sha256};
use vtl::{Mode, Socket};
use vtl_control::{CarrierSpec, Client, HookTarget, Request};
use vtl_testbed::{Host, Lifetime, Link, Testbed};
use vtl_testing::{Turn, turn, turn_alone};

use super::{PATIENCE, Process, run, until, vtl, vtld, words};

/// Where the web server listens.
pub(crate) const PORT: u16 = 80;

/// Of all testbeds' names.
const PREFIX: &str = "e2e-";

/// A link that does everything wrong that a link can.
pub(crate) fn bad_link() -> Link {
    Link {
        loss_pct: 5.0,
        duplicate_pct: 1.0,
        reorder_pct: 2.0,
        corrupt_pct: 1.0,
        ..Link::new(10.0, 100.0)
    }
}

thread_local! {
    /// Why this thread's test fails: [`World`] says it again below the logs, where it is found.
    static FAILURE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps what a failing test says, from now on.
fn keep_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let show = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            FAILURE.with_borrow_mut(|failure| *failure = panic.to_string());
            show(panic);
        }));
    });
}

/// A directory that vanishes with its owner.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Daemon {
    process: Process,
    host: Host,
}

/// Everything that a test uses. Dropped in order of declaration: the link outlives the daemons.
pub(crate) struct World {
    web: Option<Process>,
    daemons: Vec<Daemon>,
    pub(crate) testbed: Testbed,
    scratch: Scratch,
    /// See [`turn`]; `None`: another one of this test has it.
    _turn: Option<Turn>,
}

impl World {
    /// Hosts without daemons; `None` where the test is skipped.
    pub(crate) fn bare(name: &str, link: &Link) -> Option<Self> {
        if !vtl_testing::is_root() {
            return None;
        }
        Some(Self::in_turn(name, link, Some(turn())))
    }

    /// The same while no other test runs: it counts or measures what all have in common.
    pub(crate) fn alone(name: &str, link: &Link) -> Option<Self> {
        if !vtl_testing::is_root() {
            return None;
        }
        Some(Self::in_turn(name, link, Some(turn_alone())))
    }

    /// Hosts without daemons, beside these and while these are used.
    pub(crate) fn beside(&self, link: &Link) -> Self {
        let name = self.testbed.name().trim_start_matches(PREFIX);
        Self::in_turn(&format!("{name}-beside"), link, None)
    }

    fn in_turn(name: &str, link: &Link, turn: Option<Turn>) -> Self {
        keep_failures();
        let name = format!("{PREFIX}{name}");
        // First: it refuses a name that another test uses now.
        let testbed = Testbed::up(&name, link, Lifetime::Guarded).expect("a testbed");
        let path = std::env::temp_dir().join(&name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("www")).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
        let scratch = Scratch(path);
        Self {
            web: None,
            daemons: Vec::new(),
            testbed,
            scratch,
            _turn: turn,
        }
    }

    /// Hosts with daemons.
    pub(crate) fn with_daemons(name: &str, link: &Link) -> Option<Self> {
        let mut world = Self::bare(name, link)?;
        for host in [Host::Server, Host::Client] {
            world.spawn(host, &[]);
        }
        world.ready(Host::Server);
        world.ready(Host::Client);
        Some(world)
    }

    /// Hosts with daemons and a web server whose port is hooked.
    pub(crate) fn new(name: &str, link: &Link) -> Option<Self> {
        let mut world = Self::bare(name, link)?;
        world.start_web();
        world.start_both(&[]);
        Some(world)
    }

    /// Starts both daemons, and hooks the web server's port.
    pub(crate) fn start_both(&mut self, args: &[&str]) {
        for host in [Host::Server, Host::Client] {
            self.spawn(host, args);
        }
        self.ready(Host::Server);
        self.ready(Host::Client);
        self.hook();
    }

    /// Starts one daemon and waits until it answers.
    pub(crate) fn start(&mut self, host: Host, args: &[&str]) {
        self.spawn(host, args);
        self.ready(host);
    }

    /// Starts a daemon of another version.
    pub(crate) fn start_other(&mut self, host: Host, vtld: &Path) {
        self.spawn_program(host, vtld, &[]);
        self.ready(host);
    }

    fn spawn(&mut self, host: Host, args: &[&str]) {
        self.spawn_program(host, &vtld(), args);
    }

    fn spawn_program(&mut self, host: Host, vtld: &Path, args: &[&str]) {
        let command = self.testbed.command(host, vtld);
        let mut command = command.expect("a namespace");
        command.args(args);
        self.spawn_command(host, command);
    }

    /// Starts a daemon by a shell's command, which `prepare` completes; `vtld`: the program.
    pub(crate) fn start_as(&mut self, host: Host, prepare: impl FnOnce(&mut Command, &Path)) {
        let command = self.testbed.command(host, "bash");
        let mut command = command.expect("a namespace");
        prepare(&mut command, &vtld());
        self.spawn_command(host, command);
        self.ready(host);
    }

    fn spawn_command(&mut self, host: Host, mut command: Command) {
        assert!(
            self.daemons.iter().all(|d| d.host != host),
            "one daemon a host"
        );
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path(host));
        command
            .env("VTL_LOG", "vtld=debug,info")
            .stdout(std::process::Stdio::null());
        let process = Process::start(command.stderr(log.expect("a log")));
        self.daemons.push(Daemon { process, host });
    }

    fn ready(&mut self, host: Host) {
        let log = self.log_path(host);
        let socket = self.socket(host);
        let daemon = self.daemon(host);
        until("the daemon answers", || {
            let text = || fs::read_to_string(&log).unwrap_or_default();
            assert!(daemon.ended().is_none(), "the daemon has ended: {}", text());
            Client::connect(&socket).and_then(|c| c.status()).is_ok()
        });
    }

    /// Has the server's daemon serve the web server's port.
    pub(crate) fn hook(&self) {
        self.hook_port(PORT);
    }

    /// Has the server's daemon serve a port.
    pub(crate) fn hook_port(&self, port: u16) {
        let request = Request::HookAdd {
            target: HookTarget::Port(port),
            carrier: CarrierSpec::default(),
        };
        self.call(Host::Server, &request);
    }

    /// Whether this test has started daemons. A socket proves nothing: a killed run leaves it behind.
    pub(crate) fn has_daemons(&self) -> bool {
        !self.daemons.is_empty()
    }

    pub(crate) fn daemon(&mut self, host: Host) -> &mut Process {
        let found = self.daemons.iter_mut().find(|d| d.host == host);
        &mut found.expect("its daemon runs").process
    }

    /// Takes a daemon away, to be ended by the test.
    pub(crate) fn take_daemon(&mut self, host: Host) -> Process {
        let at = self
            .daemons
            .iter()
            .position(|d| d.host == host)
            .expect("its daemon runs");
        self.daemons.remove(at).process
    }

    pub(crate) fn socket(&self, host: Host) -> PathBuf {
        self.testbed.daemon_socket(host)
    }

    /// A socket of an application for VTL port `port` of the server: there, or at the client.
    #[track_caller]
    pub(crate) fn aware(&self, mode: Mode, port: u16) -> Socket {
        let host = match mode {
            Mode::Initiator => Host::Client,
            Mode::Responder => Host::Server,
        };
        self.aware_at(SocketAddr::new(self.servers()[0], port), mode, host)
    }

    /// A socket of an application on a host, for an address and VTL port.
    #[track_caller]
    pub(crate) fn aware_at(&self, at: SocketAddr, mode: Mode, host: Host) -> Socket {
        let mut made = None;
        // Until a child that another test has forked executes its program, it holds this process's descriptors, and the
        // port of a socket that was closed here stays taken.
        until("a socket", || {
            made = Socket::init(mode, at, &self.socket(host)).ok();
            made.is_some()
        });
        let mut socket = made.expect("a socket");
        socket.set_timeout(Some(PATIENCE));
        socket
    }

    /// One request to a host's daemon.
    #[track_caller]
    pub(crate) fn call(&self, host: Host, request: &Request) -> Value {
        let client = Client::connect(&self.socket(host)).expect("the daemon answers");
        client
            .call(request)
            .unwrap_or_else(|error| panic!("{request:?}: {error}"))
    }

    /// `vtl status --json` on a host.
    #[track_caller]
    pub(crate) fn status(&self, host: Host) -> Value {
        let output = self
            .vtl(host, &["status", "--json"])
            .output()
            .expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// A figure of a host's sessions and carriers, summed up.
    pub(crate) fn sum(&self, host: Host, figure: &str) -> u64 {
        let status = self.status(host);
        let rows = ["sessions", "carriers"].map(|name| status[name].as_array().expect("a list"));
        let figures = rows.into_iter().flatten().map(|row| &row[figure]);
        figures.filter_map(Value::as_u64).sum()
    }

    /// The `vtl` command on a host.
    pub(crate) fn vtl(&self, host: Host, args: &[&str]) -> Command {
        let mut command = self.testbed.command(host, vtl()).expect("a namespace");
        command.args(args);
        command
    }

    /// An unmodified curl on the client, hooked by `vtl run`.
    pub(crate) fn curl(&self, args: &[&str]) -> Command {
        self.curl_run(&[], args)
    }

    /// The same with options of `vtl run`.
    fn curl_run(&self, run: &[&str], args: &[&str]) -> Command {
        let curl = ["--", "curl", "--noproxy", "*", "-sS", "--fail"];
        self.vtl(Host::Client, &[&["run"], run, &curl, args].concat())
    }

    /// Downloads a file by a hooked curl, and demands the very bytes.
    #[track_caller]
    pub(crate) fn download(&self, server: IpAddr, name: &str) {
        let mut transfer = self.start_download(server, name);
        let status = transfer.process.wait();
        assert!(status.success(), "curl of {name} from {server}: {status}");
        transfer.check();
    }

    /// Has carriers to both of the server's addresses opened: what follows goes by them from its first byte on.
    pub(crate) fn meet(&self) {
        self.meet_by(&[]);
    }

    /// The same with options of `vtl run`.
    pub(crate) fn meet_by(&self, run: &[&str]) {
        self.serve("meet", 1);
        for server in self.servers() {
            let mut download = self.start_download_run(run, server, "meet");
            let status = download.process.wait();
            assert!(status.success(), "{status}");
            let is_there = |row: &Value| row["peer"] == server.to_string();
            until("a carrier", || {
                self.carriers(Host::Client).iter().any(is_there)
            });
            // The control connection is up, too: segments that get lost while it opens take long.
            let client = Client::connect(&self.socket(Host::Client)).expect("a daemon");
            let is_it = |peer: &vtl_control::Peer| peer.known.name == server.to_string();
            until("its key is known", || {
                client.peers().is_ok_and(|all| all.peers.iter().any(is_it))
            });
        }
    }

    /// Begins to download a file by a hooked curl.
    pub(crate) fn start_download(&self, server: IpAddr, name: &str) -> Download {
        self.start_download_by(server, name, &[])
    }

    /// The same with more of curl's options.
    pub(crate) fn start_download_by(&self, server: IpAddr, name: &str, args: &[&str]) -> Download {
        self.begin(
            |to| self.curl(&[args, &["-o", to, &url(server, name)]].concat()),
            name,
        )
    }

    /// The same with options of `vtl run`.
    pub(crate) fn start_download_run(&self, run: &[&str], server: IpAddr, name: &str) -> Download {
        self.begin(
            |to| self.curl_run(run, &["-o", to, &url(server, name)]),
            name,
        )
    }

    /// An upload of `bytes` by curl, with options of `vtl run`, that has to arrive whole.
    pub(crate) fn upload_run(&self, run: &[&str], server: IpAddr, name: &str, bytes: &[u8]) {
        let from = self.path(name);
        fs::write(&from, bytes).expect("written");
        let path = from.to_str().expect("UTF-8");
        let output = self
            .curl_run(run, &["-T", path, &url(server, name)])
            .output();
        let output = output.expect("curl runs");
        assert!(output.status.success(), "{run:?}: {}", words(&output));
        same(&from, &self.path("www").join(name));
    }

    fn begin(&self, curl: impl FnOnce(&str) -> Command, name: &str) -> Download {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let to = self.path(&format!("got-{number}"));
        let mut command = curl(to.to_str().expect("UTF-8"));
        let process = Process::start(command.stderr(self.client_log()));
        Download {
            process,
            wanted: self.path("www").join(name),
            to,
        }
    }

    fn client_log(&self) -> File {
        File::options()
            .create(true)
            .append(true)
            .open(self.path("curl.log"))
            .expect("a log")
    }

    /// A file that the web server serves.
    pub(crate) fn serve(&self, name: &str, size: usize) -> PathBuf {
        let path = self.path("www").join(name);
        fs::write(&path, payload(size, size as u64)).expect("written");
        path
    }

    /// A place in the test's own directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.0.join(name)
    }

    pub(crate) fn log_path(&self, host: Host) -> PathBuf {
        self.path(&format!("vtld-{}.log", host.name()))
    }

    /// The server's IPv4 and IPv6 addresses.
    pub(crate) fn servers(&self) -> [IpAddr; 2] {
        let (v4, v6) = (
            self.testbed.addr4(Host::Server),
            self.testbed.addr6(Host::Server),
        );
        [v4.into(), v6.into()]
    }

    /// Starts an unmodified web server on the server, and waits until it listens.
    pub(crate) fn start_web(&mut self) {
        let dir = &self.scratch.0;
        let config = dir.join("nginx.conf");
        fs::write(&config, configuration(dir)).expect("written");
        let mut command = self
            .testbed
            .command(Host::Server, "nginx")
            .expect("a namespace");
        command
            .arg("-p")
            .arg(dir)
            .arg("-c")
            .arg(&config)
            .arg("-e")
            .arg(dir.join("error.log"));
        let mut web = Process::start(&mut command);
        until("nginx listens", || {
            assert!(web.ended().is_none(), "nginx has ended");
            let mut ss = self
                .testbed
                .command(Host::Server, "ss")
                .expect("a namespace");
            let output = ss.args(["-Htln", "sport = :80"]).output().expect("ss runs");
            String::from_utf8_lossy(&output.stdout).lines().count() >= 2
        });
        self.web = Some(web);
    }

    /// Ends both daemons in order.
    pub(crate) fn stop_daemons(&mut self) {
        for daemon in &self.daemons {
            daemon.process.signal(Signal::SIGTERM);
        }
        for mut daemon in self.daemons.drain(..) {
            let status = daemon.process.wait();
            let host = daemon.host.name();
            assert!(
                status.success(),
                "the {host}'s daemon ends in order: {status}"
            );
        }
    }

    /// Opens both families' sessions, then makes the link do everything wrong: a destination whose
    /// answers to three SYNs are lost counts as one without VTL, which is right and not the matter.
    pub(crate) fn spoil(&self) {
        self.meet();
        self.testbed.set(&bad_link()).expect("set");
    }

    /// Gives a host rules of the packet filter (nft).
    #[track_caller]
    pub(crate) fn filter(&self, host: Host, rules: &str) {
        let file = self.path("rules.nft");
        fs::write(&file, rules).expect("written");
        let nft = self.testbed.command(host, "nft");
        run(nft.expect("a namespace").arg("-f").arg(&file));
    }

    /// Has the link drop the packets of an IP protocol, or none.
    pub(crate) fn block(&self, protocol: Option<u8>) {
        let link = Link {
            blocked: protocol,
            ..self.testbed.link().expect("a link")
        };
        self.testbed.set(&link).expect("set");
    }

    /// Makes the link as fast as wanted, Mbit/s: a transfer that something is to happen to in the middle
    /// crawls until it has happened.
    pub(crate) fn set_rate(&self, mbit: f64) {
        let link = Link {
            rate_mbit: mbit,
            ..self.testbed.link().expect("a link")
        };
        self.testbed.set(&link).expect("set");
    }

    /// Makes the link as long as wanted.
    pub(crate) fn set_rtt(&self, ms: f64) {
        let link = Link {
            rtt_ms: ms,
            ..self.testbed.link().expect("a link")
        };
        self.testbed.set(&link).expect("set");
    }

    /// The carriers that are no grafts.
    pub(crate) fn carriers(&self, host: Host) -> Vec<Value> {
        let status = self.status(host);
        status["carriers"].as_array().expect("a list").clone()
    }

    /// A figure of the client's carriers, summed up.
    pub(crate) fn carried(&self, figure: &str) -> u64 {
        let all = self.carriers(Host::Client);
        all.iter().map(|t| t[figure].as_u64().unwrap_or(0)).sum()
    }

    /// Has the link lose everything that comes from the server, or nothing but what it loses anyway.
    pub(crate) fn mute_server(&self, mute: bool) {
        let link = Link {
            loss_down_pct: mute.then_some(100.0),
            ..self.testbed.link().expect("a link")
        };
        self.testbed.set(&link).expect("set");
    }

    /// Makes the link as lossy as wanted.
    pub(crate) fn set_loss(&self, pct: f64) {
        let link = Link {
            loss_pct: pct,
            ..self.testbed.link().expect("a link")
        };
        self.testbed.set(&link).expect("set");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for daemon in &self.daemons {
                let request = Request::Status { from: 0 };
                // It may be the test's daemon that does not answer.
                let answer = Client::connect(&self.socket(daemon.host))
                    .and_then(|client| client.call(&request));
                let status = answer.map_or_else(|e| e.to_string(), |s| telling(s).to_string());
                eprintln!("-- {}: {status}", daemon.host.name());
            }
            eprintln!("-- link: {:?}", self.testbed.stats());
        } else {
            self.stop_daemons();
        }
        // Of daemons that were killed.
        for host in [Host::Client, Host::Server] {
            let _ = fs::remove_file(self.socket(host));
            if let Ok(namespace) = fs::metadata(self.testbed.netns_path(host)) {
                let _ = fs::remove_file(format!("/run/vtl/net-{}.lock", namespace.ino()));
            }
        }
        if !std::thread::panicking() {
            return;
        }
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(self.testbed.name());
        let _ = fs::create_dir_all(&kept);
        eprintln!("-- whole logs: {}", kept.display());
        for name in ["vtld-server.log", "vtld-client.log", "curl.log"] {
            let text = fs::read_to_string(self.path(name)).unwrap_or_default();
            let _ = fs::write(kept.join(name), &text);
            let told = |line: &&str| !line.contains(" DEBUG ");
            let lines: Vec<&str> = text.lines().filter(told).collect();
            let last = lines[lines.len().saturating_sub(15)..].join("\n");
            eprintln!("-- {name}:\n{last}");
        }
        FAILURE.with_borrow(|failure| eprintln!("-- {failure}"));
    }
}

/// What is not nothing: of a failure on a machine far away, little more than a page comes back.
fn telling(value: Value) -> Value {
    let nothing = |v: &Value| {
        matches!(v, Value::Null | Value::Bool(false))
            || v.as_f64() == Some(0.0)
            || v.as_str() == Some("")
            || v.as_array().is_some_and(Vec::is_empty)
            || v.as_object().is_some_and(serde_json::Map::is_empty)
    };
    match value {
        Value::Array(list) => list.into_iter().map(telling).collect(),
        Value::Object(map) => map
            .into_iter()
            .map(|(key, value)| (key, telling(value)))
            .filter(|(_, value)| !nothing(value))
            .collect(),
        other => other,
    }
}

/// A download under way.
pub(crate) struct Download {
    pub(crate) process: Process,
    wanted: PathBuf,
    to: PathBuf,
}

impl Download {
    /// Bytes that have arrived.
    pub(crate) fn arrived(&self) -> u64 {
        self.to.metadata().map_or(0, |m| m.len())
    }

    /// Waits until so much has arrived, and not all of it.
    #[track_caller]
    pub(crate) fn reaches(&mut self, bytes: u64) {
        until("the download is under way", || {
            assert!(
                self.process.ended().is_none(),
                "it ended after {} bytes",
                self.arrived()
            );
            self.arrived() >= bytes
        });
    }

    /// The whole file must be there, with the very bytes.
    #[track_caller]
    pub(crate) fn check(&self) {
        same(&self.wanted, &self.to);
    }

    /// It must have been told of an error, and must not look complete.
    #[track_caller]
    pub(crate) fn broke(&mut self) {
        // Of curl: a part of the file; no answer; an error while receiving.
        const BROKEN: [i32; 3] = [18, 52, 56];
        let status = self.process.wait();
        let told = status.code().is_some_and(|code| BROKEN.contains(&code));
        assert!(told, "curl was told of no broken connection: {status}");
        let whole = self.wanted.metadata().expect("a file").len();
        assert!(self.arrived() < whole, "everything has arrived");
        // What did arrive is right.
        let (wanted, got) = (fs::read(&self.wanted), fs::read(&self.to));
        assert!(wanted.expect("a file").starts_with(&got.expect("a file")));
    }
}

/// Two files must be the same.
#[track_caller]
pub(crate) fn same(wanted: &Path, got: &Path) {
    let read = |path: &Path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (wanted, got) = (read(wanted), read(got));
    assert_eq!(wanted.len(), got.len(), "sizes");
    assert_eq!(sha256(&wanted), sha256(&got), "SHA-256");
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Bytes that no compression shortens and no offset repeats.
pub(crate) fn payload(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        // xorshift64*, Vigna 2016.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut bytes: Vec<u8> = (0..size.div_ceil(8))
        .flat_map(|_| next().to_le_bytes())
        .collect();
    bytes.truncate(size);
    bytes
}

/// A URL of the web server.
pub(crate) fn url(server: IpAddr, name: &str) -> String {
    match server {
        IpAddr::V4(v4) => format!("http://{v4}:{PORT}/{name}"),
        IpAddr::V6(v6) => format!("http://[{v6}]:{PORT}/{name}"),
    }
}

/// Everything nginx writes stays below `dir`.
fn configuration(dir: &Path) -> String {
    let dir = dir.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {dir}/{what};\n"))
        .concat();
    format!(
        "daemon off; user root; worker_processes 1; pid {dir}/nginx.pid;\n\
         error_log {dir}/error.log;\n\
         events {{ worker_connections 64; }}\n\
         http {{\n\
         access_log off; client_max_body_size 64m; {temporary}\
         server {{ listen {PORT}; listen [::]:{PORT}; root {dir}/www; dav_methods PUT; }}\n\
         }}\n"
    )
}
