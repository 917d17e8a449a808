//! Daemons that are replaced under running connections, by another daemon or by the service manager.

use std::{
    fs::{self, File},
    io::{IoSliceMut, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixDatagram,
    },
    path::Path,
    process::{ExitStatus, Stdio},
    thread,
    time::Duration,
};

use nix::{
    cmsg_space,
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        signal::Signal,
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use serde_json::Value;
use vtl_control::{Client, HookTarget, Request};
use vtl_testbed::{Host, Link};

use crate::{
    flows::both_ways,
    harness::{Process, World, same, until, url, vtld},
};

const MB: usize = 1 << 20;

impl World {
    /// Another daemon takes over from a host's.
    pub(crate) fn take_over(&mut self, host: Host) {
        self.take_over_with(host, &[]);
    }

    pub(crate) fn take_over_with(&mut self, host: Host, args: &[&str]) {
        let mut former = self.take_daemon(host);
        self.start(host, &[&["--take-over"], args].concat());
        let status = former.wait();
        assert!(
            status.success(),
            "the former daemon ends in order: {status}"
        );
        // Until then it may have been the former one that answered, and it may end before this one
        // has read what it left.
        let socket = self.socket(host);
        let answers = || self.testbed.in_netns(host, || Client::connect(&socket));
        until("the next daemon answers", || {
            answers().is_ok_and(|c| c.is_ok())
        });
    }
}

/// The ids of a host's flows.
pub(crate) fn flows(world: &World, host: Host) -> Vec<u64> {
    let list = world.call(host, &Request::FlowList { from: 0 });
    let flows = list["flows"].as_array().expect("a list");
    flows
        .iter()
        .filter_map(|flow| flow["id"].as_u64())
        .collect()
}

fn taken_over(carrier: &str) {
    let Some(mut world) = World::new(&format!("takeover-{carrier}"), &Link::new(10.0, 100.0))
    else {
        return;
    };
    let run = ["--carrier", carrier];
    world.meet_by(&run);
    both_ways(&mut world, &run, |world, goes_on| {
        for host in [Host::Client, Host::Server, Host::Server, Host::Client] {
            let before = flows(world, host);
            assert_eq!(before.len(), 2);
            world.take_over(host);
            assert_eq!(flows(world, host), before);
            goes_on(300_000);
            let received = || world.carried("bytes_received");
            until("a new carrier", || !world.carriers(Host::Client).is_empty());
            let before = received();
            until("flows return to it", || received() > before + 200_000);
        }
    });
}

#[test]
fn take_over__of_grafts() {
    taken_over("graft");
}

#[test]
fn take_over__of_quic() {
    taken_over("quic");
}

#[test]
fn take_over__of_sctp() {
    taken_over("sctp");
}

#[test]
fn take_over__of_both_at_once_over_a_bad_link() {
    let Some(mut world) = World::new("takeover-bad", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.spoil();
    both_ways(&mut world, &[], |world, goes_on| {
        for _ in 0..5 {
            let mut former = [Host::Client, Host::Server].map(|host| world.take_daemon(host));
            world.start(Host::Client, &["--take-over"]);
            world.start(Host::Server, &["--take-over"]);
            for daemon in &mut former {
                assert!(daemon.wait().success());
            }
            goes_on(200_000);
        }
    });
}

/// Plays the service manager: keeps what a host's daemon leaves, and gives it to the next one.
struct Manager {
    socket: UnixDatagram,
    path: String,
    kept: Vec<OwnedFd>,
    /// How long it waits for signs of life, if it wants any.
    watchdog: Option<Duration>,
}

impl Manager {
    fn new(world: &World) -> Self {
        let path = world.path("notify");
        let socket = UnixDatagram::bind(&path).expect("bound");
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("set");
        Self {
            socket,
            path: path.to_str().expect("UTF-8").to_owned(),
            kept: Vec::new(),
            watchdog: None,
        }
    }

    /// The next message, whose descriptor is kept if that is what it asks for.
    fn hear(&mut self) -> String {
        let mut bytes = [0; 1024];
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let mut space = cmsg_space!([RawFd; 4]);
        let received = recvmsg::<()>(
            self.socket.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )
        .expect("a message");
        let mut came = Vec::new();
        for control in received.cmsgs().expect("not cut") {
            if let ControlMessageOwned::ScmRights(rights) = control {
                // SAFETY: the kernel has just made them.
                came.extend(rights.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }));
            }
        }
        let len = received.bytes;
        let text = String::from_utf8_lossy(&bytes[..len]).into_owned();
        if text.contains("FDSTORE=1") {
            assert!(text.contains("FDNAME=vtld-handover"), "{text}");
            assert!(text.contains("FDPOLL=0"), "{text}");
            self.kept.append(&mut came);
        }
        text
    }

    /// Starts a daemon, with what is kept.
    fn start(&mut self, world: &mut World, host: Host) {
        let kept = self.kept.pop();
        let script = match &kept {
            Some(fd) => {
                fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).expect("set");
                format!(
                    "exec 3<&{}; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=vtld-handover",
                    fd.as_raw_fd()
                )
            }
            None => "true".to_owned(),
        };
        let script = format!("{script}; export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; exec \"$0\"");
        let panics = world.path("panic");
        world.start_as(host, |command, vtld| {
            command
                .args(["-c", &script, vtld.to_str().expect("UTF-8")])
                .env("NOTIFY_SOCKET", &self.path)
                .env("VTL_TEST_PANIC", &panics);
            if let Some(watchdog) = self.watchdog {
                command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
            }
        });
        let is_told = |text: String| text.contains("READY=1");
        until("it is ready", || is_told(self.hear()));
    }

    /// As `systemctl restart` does it.
    fn restart(&mut self, world: &mut World, host: Host) {
        let mut former = world.take_daemon(host);
        former.signal(Signal::SIGTERM);
        let status = self.inherit(&mut former);
        assert!(status.success(), "{status}");
        self.start(world, host);
    }

    /// Keeps what a daemon leaves that is ending.
    fn inherit(&mut self, former: &mut Process) -> ExitStatus {
        let is_kept = |text: String| text.contains("FDSTORE=1");
        until("it hands over", || is_kept(self.hear()));
        // Read, and its descriptor closed: so much for the barrier.
        assert!(self.hear().contains("BARRIER=1"));
        former.wait()
    }

    /// One of a daemon's threads panics, and `Restart=on-failure` brings the daemon back. `poke` has idle threads run.
    fn panic(
        &mut self,
        world: &mut World,
        host: Host,
        thread: &str,
        mut poke: impl FnMut() + Send,
    ) {
        let order = world.path("panic");
        fs::write(&order, thread).expect("written");
        let socket = world.socket(host);
        let mut former = world.take_daemon(host);
        thread::scope(|scope| {
            // A request may have no answer before the daemon's end.
            scope.spawn(|| {
                while order.exists() {
                    poke();
                    for request in [Request::GraftList, Request::FlowList { from: 0 }] {
                        let client = Client::connect(&socket);
                        let _ = client.and_then(|client| client.call::<Value>(&request));
                    }
                }
            });
            until("the thread panics", || !order.exists());
            let status = self.inherit(&mut former);
            assert_eq!(status.code(), Some(1), "{thread}");
        });
        self.start(world, host);
    }
}

#[test]
fn restart__by_the_service_manager() {
    let Some(mut world) = World::bare("restart-manager", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    let mut manager = Manager::new(&world);
    manager.start(&mut world, Host::Server);
    world.hook();
    world.meet();
    both_ways(&mut world, &[], |world, goes_on| {
        for _ in 0..3 {
            let before = flows(world, Host::Server);
            assert_eq!(before.len(), 2);
            manager.restart(world, Host::Server);
            assert_eq!(flows(world, Host::Server), before);
            goes_on(300_000);
            until("flows return to a carrier", || {
                let list = world.call(Host::Server, &Request::FlowList { from: 0 });
                let flows = list["flows"].as_array().expect("a list");
                flows.iter().all(|flow| flow["sends_by"] == "graft")
            });
        }
    });
    assert_eq!(manager.kept.len(), 0);
}

/// A listener of the server's that nobody hooks, so that the client's daemon proxies connections to it; and an
/// application at the client that sends back what it gets.
fn proxied(world: &World) -> (Process, TcpStream) {
    let [server, _] = world.servers();
    let listener = world
        .testbed
        .in_netns(Host::Server, || TcpListener::bind((server, 7777)))
        .expect("in the namespace")
        .expect("bound");
    let script = "import socket,sys\n\
                  s = socket.create_connection((sys.argv[1], 7777))\n\
                  while b := s.recv(100): s.sendall(b)\n";
    let mut command = world.vtl(Host::Client, &["run", "--", "python3", "-uc", script]);
    // Its end is told there.
    command.arg(server.to_string()).stderr(Stdio::null());
    let process = Process::start(&mut command);
    let (stream, _) = listener.accept().expect("accepted");
    (process, stream)
}

/// Whatever thread panics: what the others have goes on in the next daemon.
#[test]
fn panic__in_any_thread() {
    let Some(mut world) = World::bare("panic", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Server, &[]);
    let mut manager = Manager::new(&world);
    manager.start(&mut world, Host::Client);
    world.hook();
    world.meet();
    let (_application, stream) = proxied(&world);
    let echoes = || {
        (&stream).write_all(b"x").expect("written");
        (&stream).read_exact(&mut [0]).expect("it comes back");
    };
    both_ways(&mut world, &[], |world, goes_on| {
        let threads = [
            "vtl-broker",
            "vtl-shard-0",
            "vtl-launcher",
            "vtl-control",
            "vtl-hooker",
        ];
        for thread in threads {
            let before = flows(world, Host::Client);
            manager.panic(world, Host::Client, thread, || {});
            assert_eq!(flows(world, Host::Client), before, "{thread}");
            echoes();
            goes_on(300_000);
            until("flows return to a carrier", || {
                !world.carriers(Host::Client).is_empty()
            });
        }
        let poke = || drop((&stream).write_all(b"x"));
        manager.panic(world, Host::Client, "vtl-proxy", poke);
        // With the thread that carried it.
        until("the proxied connection is reset", || {
            !matches!((&stream).read(&mut [0]), Ok(1))
        });
        goes_on(300_000);
    });
    // Flows end with their thread, and are no whole ones. Hooks stay.
    let [server, _] = world.servers();
    world.serve("big", 64 * MB);
    world.serve("f", MB / 4);
    let mut download = world.start_download(server, "big");
    download.reaches(100_000);
    manager.panic(&mut world, Host::Client, "vtl-flows", || {});
    download.broke();
    world.meet();
    let before = world.sum(Host::Client, "bytes_received");
    world.download(server, "f");
    assert!(world.sum(Host::Client, "bytes_received") > before);
    assert_eq!(manager.kept.len(), 0);
}

/// Holds one thread of a process, and lets it go when it is dropped.
struct Held(Pid);

impl Held {
    fn new(process: u32, name: &str) -> Self {
        let mut tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
        let is_named = |path: &Path| {
            let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
            comm.trim() == name
        };
        let found = tasks.find_map(|task| Some(task.ok()?.path()).filter(|path| is_named(path)));
        let number = found
            .as_deref()
            .and_then(Path::file_name)
            .expect("the thread");
        let number = number.to_str().and_then(|text| text.parse().ok());
        let held = Self(Pid::from_raw(number.expect("a number")));
        held.ask(libc::PTRACE_SEIZE);
        held.ask(libc::PTRACE_INTERRUPT);
        waitpid(held.0, Some(WaitPidFlag::__WALL)).expect("it is held");
        held
    }

    fn ask(&self, what: libc::c_uint) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: these requests read and write no memory.
        let done = unsafe { libc::ptrace(what, self.0.as_raw(), none, none) };
        assert_eq!(done, 0, "ptrace");
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ask(libc::PTRACE_DETACH);
    }
}

/// The manager hears that all is well only while all threads are at work on which connections depend.
#[test]
fn watchdog__a_thread_that_hangs() {
    const WATCHDOG: Duration = Duration::from_secs(1);
    let Some(mut world) = World::bare("watchdog", &Link::new(10.0, 100.0)) else {
        return;
    };
    let mut manager = Manager::new(&world);
    manager.watchdog = Some(WATCHDOG);
    manager.start(&mut world, Host::Client);
    let is_fed = |manager: &mut Manager| manager.hear().contains("WATCHDOG=1");
    let complaints = |world: &World| {
        let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
        log.matches("a thread hangs").count()
    };
    for (turn, name) in ["vtl-broker", "vtl-flows", "vtl-hooker"].iter().enumerate() {
        assert!(is_fed(&mut manager));
        let held = Held::new(world.daemon(Host::Client).pid(), name);
        manager.socket.set_nonblocking(true).expect("set");
        until("it is missed", || {
            while manager.socket.recv(&mut [0; 64]).is_ok() {}
            complaints(&world) > turn
        });
        thread::sleep(2 * WATCHDOG);
        let heard = manager.socket.recv(&mut [0; 64]);
        assert!(
            heard.is_err(),
            "{name}: the manager was told that all is well"
        );
        manager.socket.set_nonblocking(false).expect("set");
        drop(held);
    }
    assert!(is_fed(&mut manager));
}

/// A server that says who its clients are, line by line, and a client that stays.
#[test]
fn take_over__what_applications_see_stays() {
    let Some(mut world) = World::new("takeover-seen", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.meet();
    let [server, _] = world.servers();
    let listener = world
        .testbed
        .in_netns(Host::Server, || TcpListener::bind((server, 7777)))
        .expect("in the namespace")
        .expect("bound");
    // One by VTL, one that the client's daemon proxies, as nobody hooks its port.
    for hooked in [true, false] {
        if hooked {
            world.hook_port(7777);
        } else {
            let target = HookTarget::Port(7777);
            world.call(Host::Server, &Request::HookRemove { target });
        }
        let script = "import socket,sys\n\
                      s = socket.create_connection((sys.argv[1], 7777))\n\
                      for line in sys.stdin:\n\
                      \u{20}s.sendall(line.encode())\n\
                      \u{20}print(s.recv(100).decode().strip(), s.getsockname(), s.getpeername(), flush=True)\n";
        let mut command = world.vtl(Host::Client, &["run", "--", "python3", "-uc", script]);
        command.arg(server.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut client = Process::start_reading(&mut command);
        let (mut stream, shown): (TcpStream, SocketAddr) = listener.accept().expect("accepted");
        let mut said = String::new();
        for round in 0..4 {
            match round {
                1 => world.take_over(Host::Server),
                2 => world.take_over(Host::Client),
                _ => {}
            }
            let input = client.child().stdin.as_mut().expect("piped");
            writeln!(input, "{round}").expect("it reads");
            let mut bytes = [0; 2];
            stream.read_exact(&mut bytes).expect("its line");
            assert_eq!(bytes, [b'0' + round, b'\n']);
            assert_eq!(stream.peer_addr().expect("connected"), shown);
            stream.write_all(b"heard\n").expect("written");
            let output = client.child().stdout.as_mut().expect("piped");
            let mut line = Vec::new();
            while line.last() != Some(&b'\n') {
                let mut byte = [0];
                output.read_exact(&mut byte).expect("its line");
                line.push(byte[0]);
            }
            let line = String::from_utf8(line).expect("UTF-8");
            assert!(round == 0 || line == said, "{line} instead of {said}");
            assert!(
                line.starts_with("heard ('") && !line.contains("127."),
                "{line}"
            );
            said = line;
        }
        // Its end is told through both.
        drop(client.child().stdin.take());
        assert_eq!(stream.read(&mut [0]).expect("in order"), 0);
        assert!(client.wait().success());
        // No connection of the daemons' own has come while they changed.
        if hooked {
            listener.set_nonblocking(true).expect("ours");
            let other = listener.accept().map(|(_, from)| from);
            assert!(other.is_err(), "{other:?}");
            listener.set_nonblocking(false).expect("ours");
        }
    }
}

/// Where rules say which ports are hooked, too, no connection of the daemons' own reaches an application while they
/// change.
#[test]
fn take_over__applications_see_no_daemon_at_ports_of_rules() {
    let Some(mut world) = World::bare("takeover-rules", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    let rules = world.path("rules.toml");
    fs::write(&rules, "[[rule]]\nname = \"all\"\nlisten = [80, 7777]\n").expect("written");
    let rules = ["--rules", rules.to_str().expect("UTF-8")];
    world.start(Host::Server, &rules);
    world.start(Host::Client, &[]);
    world.meet();
    let [server, _] = world.servers();
    let listener = world
        .testbed
        .in_netns(Host::Server, || TcpListener::bind((server, 7777)))
        .expect("in the namespace")
        .expect("bound");
    let mut command = world.vtl(Host::Client, &["run", "--", "python3", "-uc"]);
    command.args([
        "import socket,sys\ns = socket.create_connection((sys.argv[1], 7777))\nsys.stdin.read()",
        &server.to_string(),
    ]);
    let mut client = Process::start_reading(command.stdin(Stdio::piped()));
    let (mut stream, _) = listener.accept().expect("accepted");
    for host in [Host::Server, Host::Client, Host::Server] {
        world.take_over_with(host, &rules[..if host == Host::Server { 2 } else { 0 }]);
        // Flows are asked for again, by a control connection.
        until("a carrier", || !world.carriers(Host::Client).is_empty());
    }
    drop(client.child().stdin.take());
    assert_eq!(stream.read(&mut [0]).expect("in order"), 0);
    assert!(client.wait().success());
    listener.set_nonblocking(true).expect("ours");
    let other = listener.accept().map(|(_, from)| from);
    assert!(other.is_err(), "{other:?}");
}

/// Programs and ports that were hooked are.
#[test]
fn take_over__hooks_stay() {
    let Some(mut world) = World::new("takeover-hooks", &Link::new(10.0, 100.0)) else {
        return;
    };
    // The hosts have not met: more than TCP brings meanwhile, also of daemons that are busy.
    world.serve("f", 16 * MB);
    let [server, _] = world.servers();
    let (go, got) = (world.path("go"), world.path("got"));
    let script = "while [ ! -e \"$1\" ]; do sleep 0.05; done; curl -sS --fail -o \"$2\" \"$3\"";
    let arguments = [
        "run",
        "--",
        "sh",
        "-c",
        script,
        "sh",
        go.to_str().expect("UTF-8"),
    ];
    let mut command = world.vtl(Host::Client, &arguments);
    command.arg(&got).arg(url(server, "f"));
    let mut hooked = Process::start(&mut command);
    let hooks = |world: &World, host| {
        let list = world.call(host, &Request::HookList);
        list["hooks"].as_array().map_or(0, Vec::len)
    };
    until("the program is hooked", || hooks(&world, Host::Client) == 1);
    for host in [Host::Client, Host::Server, Host::Client] {
        world.take_over(host);
    }
    assert_eq!(
        [Host::Client, Host::Server].map(|host| hooks(&world, host)),
        [1, 1]
    );
    let before = world.sum(Host::Client, "bytes_received");
    File::create(&go).expect("made");
    assert!(hooked.wait().success());
    same(&world.path("www").join("f"), &got);
    let received = world.sum(Host::Client, "bytes_received") - before;
    assert!(received > 0, "VTL carried nothing");
    until("its group is gone", || hooks(&world, Host::Client) == 0);
}

#[test]
fn take_over__from_nobody_and_by_nobody() {
    let Some(mut world) = World::with_daemons("takeover-nobody", &Link::new(10.0, 100.0)) else {
        return;
    };
    // There is none: one sentence, and no daemon.
    let socket = world.path("none.sock");
    let mut command = world
        .testbed
        .command(Host::Client, vtld())
        .expect("a namespace");
    let output = command
        .arg("--take-over")
        .arg("--socket")
        .arg(&socket)
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("no VTL daemon answers"), "{said}");
    // One that asks and goes: the daemon ends in order, and another one starts without anything.
    let mut former = world.take_daemon(Host::Client);
    // From another network namespace it is refused.
    let socket = world.socket(Host::Client);
    let far = Client::connect(&socket).expect("it answers");
    let refused = far.call::<vtl_control::Done>(&Request::TakeOver);
    assert!(refused.is_err());
    let near = world
        .testbed
        .in_netns(Host::Client, || Client::connect(&socket));
    let client = near.expect("in the namespace").expect("it answers");
    let (_, left): (vtl_control::Done, _) = client
        .call_with_descriptors(&Request::TakeOver)
        .expect("it agrees");
    drop(left);
    assert!(former.wait().success());
    world.start(Host::Client, &[]);
}
