//! Scratch network namespaces, and a Hooker in a process of its own inside them.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, SocketAddr},
    os::{fd::AsFd, unix::process::CommandExt},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use nix::{
    sched::{CloneFlags, setns},
    sys::{
        signal::{Signal, kill},
        socket::{setsockopt, sockopt},
    },
    unistd::Pid,
};
use vtld::hooker::{
    Broker, Carrier, ClientFlow, Config, ConnectError, Handle, HeldConnect, Hooker, ServerFlow,
};

/// Why namespaces and programs cannot be had here, if so.
pub(crate) fn cannot_run() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root");
    }
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !has("curl") || python().is_empty() {
        return Some("needs curl and python3");
    }
    let ip = Command::new("ip").arg("-V").output();
    if ip.is_err() {
        Some("needs iproute2")
    } else {
        None
    }
}

/// The interpreter itself: what is in the path may be a slow wrapper. Empty if there is none.
pub(crate) fn python() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let ask = ["-c", "import sys; print(sys.executable)"];
        let output = Command::new("python3").args(ask).output();
        output.map_or(String::new(), |out| {
            String::from_utf8_lossy(&out.stdout).trim().to_owned()
        })
    })
}

/// Two namespaces, `client` and `server`, with a veth pair: 10.77.0.1 and .2, fd77::1 and ::2.
pub(crate) struct Net {
    names: [String; 2],
}

pub(crate) const CLIENT: usize = 0;
pub(crate) const SERVER: usize = 1;
pub(crate) const SERVER_IPS: [&str; 2] = ["10.77.0.2", "fd77::2"];
pub(crate) const CLIENT_IPS: [&str; 2] = ["10.77.0.1", "fd77::1"];

fn ip(args: &str) {
    let output = Command::new("ip")
        .args(args.split(' '))
        .output()
        .expect("ip runs");
    assert!(
        output.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Net {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("hk{}-{number}{end}", std::process::id());
        let net = Self {
            names: [name("c"), name("s")],
        };
        for name in &net.names {
            ip(&format!("netns add {name}"));
            ip(&format!("-n {name} link set lo up"));
        }
        let [client, server] = &net.names;
        ip(&format!(
            "-n {client} link add v0 type veth peer name v0 netns {server}"
        ));
        for (side, name) in net.names.iter().enumerate() {
            ip(&format!(
                "-n {name} addr add {}/24 dev v0",
                CLIENT_IPS[0].replace(".1", &format!(".{}", side + 1))
            ));
            ip(&format!(
                "-n {name} addr add fd77::{}/64 dev v0 nodad",
                side + 1
            ));
            ip(&format!("-n {name} link set v0 up"));
        }
        ip(&format!("-n {client} route add unreachable 10.78.0.0/24"));
        ip(&format!("-n {client} route add unreachable fd78::/64"));
        net
    }

    /// A command that will run in one of the namespaces.
    pub(crate) fn command(&self, side: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let namespace = File::open(format!("/run/netns/{}", self.names[side])).unwrap();
        let mut command = Command::new(program);
        // SAFETY: setns is async-signal-safe and touches no memory of this process.
        unsafe {
            command.pre_exec(move || Ok(setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?));
        }
        command
    }

    /// Runs `body` on a thread inside one of the namespaces.
    pub(crate) fn thread<T: Send + 'static>(
        &self,
        side: usize,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> std::thread::JoinHandle<T> {
        let namespace = File::open(format!("/run/netns/{}", self.names[side])).unwrap();
        std::thread::spawn(move || {
            setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
            body()
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

/// A Hooker in its own process: this test program, started again.
pub(crate) struct Daemon {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

const MARKER: &str = "daemon: ";

impl Daemon {
    pub(crate) fn start(net: &Net, side: usize) -> Self {
        Self::start_as(net.command(side, std::env::current_exe().unwrap()))
    }

    /// As users of `ip netns exec` start it: without the file systems below /sys.
    pub(crate) fn start_without_sys(net: &Net, side: usize) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &net.names[side]]);
        command.arg(std::env::current_exe().unwrap());
        Self::start_as(command)
    }

    fn start_as(mut command: Command) -> Self {
        let mut child = command
            .args(["--exact", "daemon", "--ignored", "--nocapture"])
            .env("VTL_TEST_DAEMON", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut daemon = Self {
            child,
            commands,
            answers,
        };
        assert_eq!(daemon.answer(), "ready");
        daemon
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that the daemon says.
    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.answers.read_line(&mut line).unwrap() > 0,
                "the daemon has died"
            );
            if let Some((_, answer)) = line.split_once(MARKER) {
                return answer.trim_end().to_owned();
            }
        }
    }

    /// Gives an order; the answer begins with "ok" or this panics.
    pub(crate) fn order(&mut self, order: &str) -> String {
        writeln!(self.commands.as_mut().unwrap(), "{order}").unwrap();
        loop {
            let answer = self.answer();
            if let Some(rest) = answer.strip_prefix("ok") {
                return rest.trim().to_owned();
            }
            assert!(!answer.starts_with("error"), "{order}: {answer}");
        }
    }

    /// Starts a program whose connections are captured.
    pub(crate) fn run(&mut self, net: &Net, args: &[&str]) -> Child {
        let mut child = net
            .command(CLIENT, "sh")
            .args(["-c", "read _; exec \"$@\"", "sh"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        self.order(&format!("pid {}", child.id()));
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        child
    }

    /// Runs a program to its end and demands success.
    pub(crate) fn output(&mut self, net: &Net, args: &[&str]) -> Output {
        let output = self.run(net, args).wait_with_output().unwrap();
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s));
        assert!(output.status.success(), "{args:?}: {stdout}\n{stderr}");
        output
    }

    /// Gives an order that must fail; what the daemon says of it.
    pub(crate) fn refused(&mut self, order: &str) -> String {
        writeln!(self.commands.as_mut().unwrap(), "{order}").unwrap();
        loop {
            let answer = self.answer();
            assert!(!answer.starts_with("ok"), "{order}: {answer}");
            if let Some(reason) = answer.strip_prefix("error ") {
                return reason.to_owned();
            }
        }
    }

    /// Drops what the daemon has said so far.
    pub(crate) fn forget_answers(&mut self) {
        // Its answer comes after all that.
        self.order("list");
    }

    /// Starts a captured Python program with the prelude.
    pub(crate) fn run_python(&mut self, net: &Net, program: &str) -> Child {
        let program = format!("{PRELUDE}\n{program}");
        self.run(net, &[python(), "-SEc", &program])
    }

    /// Runs a Python program with this prelude: sockets by family, and the error of a connect.
    pub(crate) fn python(&mut self, net: &Net, program: &str) -> String {
        let program = format!("{PRELUDE}\n{program}");
        let output = self.output(net, &[python(), "-SEc", &program]);
        String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned()
    }

    pub(crate) fn kill(&mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL).unwrap();
        self.child.wait().unwrap();
    }

    /// Ends the daemon in order.
    pub(crate) fn stop(mut self) {
        drop(self.commands.take());
        assert!(self.child.wait().unwrap().success());
    }

    /// The control groups that the daemon made.
    pub(crate) fn groups(pid: u32) -> Vec<PathBuf> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let entries = roots
            .iter()
            .filter_map(|root| std::fs::read_dir(root).ok())
            .flatten();
        let paths = entries.flatten().map(|entry| entry.path());
        let prefix = format!("vtl-{pid}-");
        paths
            .filter(|path| {
                path.file_name()
                    .is_some_and(|n| n.to_string_lossy().starts_with(&prefix))
            })
            .collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already ended is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) const PRELUDE: &str = r"
import errno, os, socket, struct, sys, time
def connect(host, port, timeout=10):
    s = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    s.settimeout(timeout)
    s.connect((host, port))
    return s
def outcome(host, port):
    try:
        connect(host, port).close()
        return 'connected'
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))
def read_all(s):
    data = b''
    while True:
        part = s.recv(65536)
        if not part:
            return data
        data += part
";

/// Carries everything over plain TCP, and says what came. Ordered to, it acts as if there were a
/// session to every host, and answers from another thread.
#[derive(Default)]
struct Plain {
    handle: OnceLock<Handle>,
    session: Mutex<String>,
}

impl Broker for Plain {
    fn knows(&self, _host: IpAddr) -> bool {
        *self.session.lock().unwrap() == "full"
    }

    fn try_session(&self, held: HeldConnect) -> Result<(), HeldConnect> {
        let mode = self.session.lock().unwrap().clone();
        let answer: Box<dyn FnOnce(HeldConnect) + Send> = match mode.as_str() {
            "" | "full" => return Err(held),
            "accept" => Box::new(|held| {
                let greeting = format!("{} {}", held.src(), held.dest());
                held.accept(move |app| {
                    let mut app = app.unwrap();
                    app.write_all(greeting.as_bytes()).unwrap();
                    setsockopt(&app, sockopt::Linger, &NO_LINGER).unwrap();
                });
            }),
            "fall back" => Box::new(HeldConnect::fall_back),
            "drop" => Box::new(drop),
            "refuse" => Box::new(|held| held.refuse(ConnectError::Refused)),
            "unreachable" => Box::new(|held| held.refuse(ConnectError::HostUnreachable)),
            "timeout" => Box::new(|held| held.refuse(ConnectError::TimedOut)),
            _ => panic!("{mode}"),
        };
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            answer(held);
        });
        Ok(())
    }

    fn client(&self, flow: ClientFlow) {
        println!("{MARKER}client {} {}", flow.src, flow.dest);
        let handle = self.handle.get().unwrap().clone();
        let peer = flow.peer;
        flow.app.accept(move |app| {
            if let Ok(app) = app {
                handle.carry(app, peer, None);
            }
        });
    }

    fn server(&self, flow: ServerFlow) {
        println!("{MARKER}server {} {}", flow.client, flow.dest);
        let handle = self.handle.get().unwrap();
        let (app, guard) = handle.connect_local_app(flow.dest, flow.client).unwrap();
        handle.carry(flow.peer, app, Some(guard));
    }
}

const NO_LINGER: nix::libc::linger = nix::libc::linger {
    l_onoff: 0,
    l_linger: 0,
};

/// The daemon's side of [`Daemon`].
pub(crate) fn daemon() {
    let broker = Arc::new(Plain::default());
    let config = Config {
        plain_ttl: Duration::from_secs(600),
        ..Config::default()
    };
    let hooker = Hooker::start(config, broker.clone()).unwrap();
    assert!(broker.handle.set(hooker.handle()).is_ok());
    println!("\n{MARKER}ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, object) = line.split_once(' ').unwrap_or((&line, ""));
        let begin = std::time::Instant::now();
        let result = match verb {
            "pid" => hooker
                .hook_pid(object.parse().unwrap(), &Carrier::Best)
                .map(|id| id.to_string()),
            "port" => hooker
                .hook_port(object.parse().unwrap(), &Carrier::Best)
                .map(|id| id.to_string()),
            "cgroup" => hooker
                .hook_cgroup(object.as_ref(), &Carrier::Best)
                .map(|id| id.to_string()),
            "unhook" => hooker
                .unhook(object.parse().unwrap())
                .map(|()| String::new()),
            "forget" => {
                hooker
                    .handle()
                    .forget_plain(object.parse::<SocketAddr>().unwrap());
                Ok(String::new())
            }
            "session" => {
                object.clone_into(&mut broker.session.lock().unwrap());
                Ok(String::new())
            }
            "list" => Ok(format!("{:?}", hooker.list())),
            _ => panic!("{line}"),
        };
        match result {
            Ok(text) => println!("{MARKER}ok {text} {} us", begin.elapsed().as_micros()),
            Err(error) => println!("{MARKER}error {error}"),
        }
    }
    drop(hooker);
}
