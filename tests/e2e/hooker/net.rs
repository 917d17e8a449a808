//! A Hooker in a process of its own, and the programs that it captures.

use std::{
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread::{self, JoinHandle},
};

use nix::sys::{
    signal::Signal,
    socket::{Backlog, listen},
};
use vtl_testbed::{Host, Profile};

use crate::harness::{Process, Spoken, World, helper, python3, run, words};

/// Two hosts without daemons, joined by a wire.
pub(super) fn hosts(name: &str) -> Option<World> {
    World::bare(&format!("hooker-{name}"), &Profile::Wire.link())
}

/// The client's address of either family.
pub(super) fn client_ips(world: &World) -> [String; 2] {
    let host = Host::Client;
    [
        world.testbed.addr4(host).to_string(),
        world.testbed.addr6(host).to_string(),
    ]
}

/// The server's address of either family.
pub(super) fn server_ips(world: &World) -> [String; 2] {
    world.servers().map(|server| server.to_string())
}

/// A socket on the server that listens, with room for hundreds that come at once.
fn listener(world: &World, ip: &str, port: u16) -> TcpListener {
    let at = SocketAddr::new(ip.parse().expect("an address"), port);
    let bound = world
        .testbed
        .in_netns(Host::Server, || TcpListener::bind(at));
    let listener = bound.expect("a namespace").expect("a port");
    listen(&listener, Backlog::new(1024).expect("few")).expect("it listens");
    listener
}

/// Serves one connection on the server.
pub(super) fn serve_one(
    world: &World,
    ip: &str,
    port: u16,
    body: impl FnOnce(TcpStream) + Send + 'static,
) -> JoinHandle<()> {
    let listener = listener(world, ip, port);
    thread::spawn(move || body(listener.accept().expect("a connection").0))
}

/// A server that says "PEER LOCAL\n" and then sends back what it gets, until the end.
/// Reports each peer.
pub(super) fn echo_server(world: &World, ip: &str, port: u16) -> mpsc::Receiver<SocketAddr> {
    let listener = listener(world, ip, port);
    let (report, peers) = mpsc::channel();
    thread::spawn(move || {
        while let Ok((mut stream, peer)) = listener.accept() {
            assert_eq!(stream.peer_addr().expect("a peer"), peer);
            let local = stream.local_addr().expect("bound");
            if report.send(peer).is_err() {
                return;
            }
            thread::spawn(move || {
                let _ = stream.write_all(format!("{peer} {local}\n").as_bytes());
                let reader = stream.try_clone().expect("a descriptor");
                let _ = std::io::copy(&mut { reader }, &mut stream);
            });
        }
    });
    peers
}

/// A Hooker without a broker: see `helper/hooker.rs`.
pub(super) struct Hooker<'a> {
    world: &'a World,
    spoken: Spoken,
}

impl<'a> Hooker<'a> {
    pub(super) fn start(world: &'a World, host: Host) -> Self {
        let command = world.testbed.command(host, helper());
        Self::start_as(world, command.expect("a namespace"))
    }

    /// As users of `ip netns exec` start it: without the file systems below /sys.
    pub(super) fn start_without_sys(world: &'a World, host: Host) -> Self {
        let mut command = Command::new("ip");
        let space = world.testbed.netns_path(host);
        let space = space.file_name().expect("a name");
        command.args(["netns", "exec"]).arg(space).arg(helper());
        Self::start_as(world, command)
    }

    fn start_as(world: &'a World, mut command: Command) -> Self {
        command.arg("hooker");
        let mut hooker = Self {
            world,
            spoken: Spoken::start(command),
        };
        assert_eq!(hooker.spoken.line(), "ready");
        hooker
    }

    pub(super) fn pid(&self) -> u32 {
        self.spoken.process.pid()
    }

    /// The next line that it says.
    pub(super) fn line(&mut self) -> String {
        self.spoken.line()
    }

    /// Has it do something; what it answers.
    fn ask(&mut self, order: &str) -> Result<String, String> {
        writeln!(self.spoken.told, "{order}").expect("it runs");
        loop {
            // It tells of connections in between.
            let line = self.spoken.line();
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("ok", answer) => return Ok(answer.trim().to_owned()),
                ("error", reason) => return Err(reason.to_owned()),
                _ => {}
            }
        }
    }

    /// Has it do something, which must succeed.
    #[track_caller]
    pub(super) fn order(&mut self, order: &str) -> String {
        self.ask(order).unwrap_or_else(|e| panic!("{order}: {e}"))
    }

    /// Gives an order that must fail; what it says of that.
    #[track_caller]
    pub(super) fn refused(&mut self, order: &str) -> String {
        self.ask(order).expect_err(order)
    }

    /// Drops what it has said so far.
    pub(super) fn forget_answers(&mut self) {
        // Its answer comes after all that.
        self.order("list");
    }

    /// Starts a program whose connections are captured.
    pub(super) fn run(&mut self, args: &[&str]) -> Process {
        let command = self.world.testbed.command(Host::Client, "sh");
        let mut command = command.expect("a namespace");
        command.args(["-c", "read _; exec \"$@\"", "sh"]).args(args);
        let mut process = Process::start_reading(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        );
        self.order(&format!("pid {}", process.pid()));
        let mut input = process.child().stdin.take().expect("piped");
        input.write_all(b"\n").expect("it waits");
        process
    }

    /// Runs a program to its end and demands success.
    #[track_caller]
    pub(super) fn output(&mut self, args: &[&str]) -> Output {
        let output = self.run(args).output();
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s));
        assert!(output.status.success(), "{args:?}: {stdout}\n{stderr}");
        output
    }

    /// Starts a captured Python program with the prelude.
    pub(super) fn run_python(&mut self, program: &str) -> Process {
        let program = format!("{PRELUDE}\n{program}");
        self.run(&[python3(), "-SEc", &program])
    }

    /// Runs one to its end; what it says.
    #[track_caller]
    pub(super) fn python(&mut self, program: &str) -> String {
        let program = format!("{PRELUDE}\n{program}");
        let output = self.output(&[python3(), "-SEc", &program]);
        let text = String::from_utf8(output.stdout).expect("text");
        text.trim_end().to_owned()
    }

    /// Kills it.
    pub(super) fn kill(self) {
        self.spoken.process.signal(Signal::SIGKILL);
        drop(self);
    }

    /// Ends it in order.
    pub(super) fn stop(self) {
        let Spoken {
            mut process, told, ..
        } = self.spoken;
        drop(told);
        assert!(process.wait().success());
    }
}

/// Connections by family, whatever came of a connect, and everything until the end.
pub(super) const PRELUDE: &str = r"
import errno, os, socket, struct, sys, time
def connect(host, port, timeout=None):
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

/// Runs a Python program that no hook captures; what it says.
#[track_caller]
pub(super) fn native_python(world: &World, program: &str) -> String {
    let program = format!("{PRELUDE}\n{program}");
    let command = world.testbed.command(Host::Client, python3());
    let output = command
        .expect("a namespace")
        .args(["-SEc", &program])
        .output();
    let output = output.expect("python3 runs");
    assert!(output.status.success(), "{}", words(&output));
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

/// A program, and what it talks to.
pub(super) fn program(body: &str, host: &str, port: u16) -> String {
    format!("HOST, PORT = '{host}', {port}\n{body}")
}

/// Routes from the client to nowhere: 10.78.0.0/24 and fd78::/64.
pub(super) fn add_unreachable(world: &World) {
    for args in [
        "-4 route add unreachable 10.78.0.0/24",
        "-6 route add unreachable fd78::/64",
    ] {
        let command = world.testbed.command(Host::Client, "ip");
        run(command.expect("a namespace").args(args.split(' ')));
    }
}
