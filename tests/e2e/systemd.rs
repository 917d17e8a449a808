//! The units as they are shipped, under systemd: restarts, an upgrade from a unit that ran as root, and what the
//! daemon and its processes may do.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Command,
};

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::{
    flows::both_ways,
    harness::{World, copy_program, repository, until, vtl, vtld, words},
    restart::flows,
    users::NOBODY,
};

const MB: usize = 1 << 20;
/// What the unit leaves to the daemon: CAP_BPF, PERFMON, NET_ADMIN, NET_RAW, DAC_OVERRIDE, NET_BIND_SERVICE.
const CAPABILITIES: u64 = 1 << 39 | 1 << 38 | 1 << 12 | 1 << 13 | 1 << 1 | 1 << 10;

/// A cgroup of this name is gone with its processes.
fn remove_group(name: &str) {
    let roots = ["", "unified", "systemd"].map(|part| Path::new("/sys/fs/cgroup").join(part));
    for root in roots {
        let mut removed = Command::new("find");
        removed.arg(root.join(name)).args(["-depth", "-type", "d"]);
        removed.args(["-exec", "rmdir", "{}", ";"]);
        // Most of them are not there.
        let _ = removed.output();
    }
}

/// What systemd thinks of all that the unit leaves to the daemon: from 0, nothing, to 10, everything.
#[test]
fn unit__leaves_little_to_the_daemon() {
    const MOST: &str = "--threshold=25";
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let unit = folder.join("vtld.service");
    let text = fs::read_to_string(repository().join("dist/vtld.service")).expect("the unit");
    fs::write(&unit, text.replace("@PREFIX@", "/usr")).expect("written");
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--no-pager", "--offline=true", MOST]);
    match analyze.arg(&unit).output() {
        Ok(output) => assert!(output.status.success(), "{}", words(&output)),
        Err(_) => vtl_testing::skip("no systemd-analyze here"),
    }
}

/// What a process may do, as `/proc/PID/status` says.
#[derive(Debug)]
struct Rights {
    name: String,
    /// Real, effective, saved, and of the file system.
    uids: Vec<u32>,
    permitted: u64,
    /// Those that programs which it starts would have.
    passed_on: u64,
    is_filtered: bool,
}

impl Rights {
    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|line| line.trim_start_matches(':').trim())
        };
        let set = |name| u64::from_str_radix(field(name)?, 16).ok();
        Some(Self {
            name: field("Name")?.to_owned(),
            uids: field("Uid")?
                .split_whitespace()
                .filter_map(|uid| uid.parse().ok())
                .collect(),
            permitted: set("CapPrm")?,
            passed_on: set("CapAmb")? | set("CapInh")?,
            is_filtered: field("Seccomp")? == "2",
        })
    }
}

/// systemd on the server, with vtld as its service.
struct Manager {
    /// Its number here.
    pid: String,
    group: String,
}

impl Manager {
    /// Starts it, and waits until vtld serves.
    fn start(world: &mut World) -> Self {
        let group = format!("vtl-test-{}", std::process::id());
        let socket = world.socket(Host::Server);
        let run = world.path("run");
        world.start_as(Host::Server, |command, vtld| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
            let project = folder.parent().expect("the project's folder");
            command.arg(folder.join("e2e/systemd.sh"));
            command.arg(project).arg(vtld);
            command.arg(&socket).arg(&group).arg(&run);
        });
        let outer = world.daemon(Host::Server).pid();
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"));
        let pid = children.expect("unshare runs").trim().to_owned();
        Self { pid, group }
    }

    /// What a command says that runs where it does.
    #[track_caller]
    fn run(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.pid, "-m", "-p", "-n", "-C"]);
        let output = command.args(arguments).output().expect("nsenter runs");
        assert!(output.status.success(), "{arguments:?}: {}", words(&output));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    #[track_caller]
    fn restart(&self) {
        self.run(&["systemctl", "restart", "vtld"]);
    }

    /// vtld and its processes of carriers.
    fn processes(&self) -> Vec<Rights> {
        // One may end meanwhile.
        let script = "for f in /proc/[0-9]*/status; do cat $f 2>/dev/null; echo; done; true";
        let all = self.run(&["sh", "-c", script]);
        let all = all.split("\n\n").filter_map(Rights::parse);
        all.filter(|p| p.name.starts_with("vtld")).collect()
    }

    /// Number of a user.
    fn user(&self, name: &str) -> u32 {
        self.run(&["id", "-u", name]).parse().expect("a number")
    }

    /// The mode and the owner of what a daemon has written.
    fn owner(&self, file: &str) -> String {
        self.run(&["stat", "-c", "%a %U", &format!("/var/lib/vtl/{file}")])
    }

    /// The control group of a program that `vtl run` starts as a user, once it has made a connection.
    fn hooked(&self, world: &World, user: &[&str], to: SocketAddr) -> String {
        let listener = world
            .testbed
            .in_netns(Host::Client, || TcpListener::bind(to));
        let listener = listener.expect("in the namespace").expect("bound");
        let script = "import socket,sys\n\
                      s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n\
                      print(*[g for g in open('/proc/self/cgroup') if g.startswith('0::')])";
        let socket = world.socket(Host::Server);
        let program = world.path("run").join("vtl");
        copy_program(vtl(), &program);
        let socket = format!("VTL_SOCKET={}", socket.display());
        let (ip, port) = (to.ip().to_string(), to.port().to_string());
        let output = format!("StandardOutput=file:/run/vtl/said-{port}");
        self.run(
            &[
                &["systemd-run", "--quiet", "-p", &output],
                user,
                // That folder is there, too.
                &["-E", &socket, "/run/vtl/vtl", "run", "--"],
                &["/usr/bin/python3", "-c", script, &ip, &port],
            ]
            .concat(),
        );
        listener.set_nonblocking(true).expect("set");
        until("a connection", || listener.accept().is_ok());
        let said = world.path("run").join(format!("said-{port}"));
        let said = || fs::read_to_string(&said).unwrap_or_default();
        until("its group", || !said().is_empty());
        said()
    }
}

/// What all have that the unit has started.
fn check_rights(manager: &Manager) {
    let vtl = manager.user("vtl");
    let all = manager.processes();
    let (daemons, carriers): (Vec<_>, Vec<_>) = all.iter().partition(|p| p.name == "vtld");
    assert_eq!(daemons.len(), 1, "{all:?}");
    assert_eq!(daemons[0].permitted, CAPABILITIES, "{all:?}");
    assert!(carriers.len() >= 3, "one for each kind: {all:?}");
    assert!(carriers.iter().all(|p| p.permitted == 0), "{all:?}");
    for process in &all {
        assert_eq!(process.uids, [vtl; 4], "{process:?}");
        assert_eq!(process.passed_on, 0, "{process:?}");
        assert!(process.is_filtered, "{process:?}");
    }
}

/// Members of the group, and root, get their programs hooked.
fn check_hooks(world: &World, manager: &Manager) {
    let nobody = format!("--uid={NOBODY}");
    let to = world.testbed.addr4(Host::Client);
    for (port, user) in (7001..).zip([&[][..], &[&nobody, "--gid=vtl"]]) {
        let group = manager.hooked(world, user, SocketAddr::new(to.into(), port));
        let name = group.trim().rsplit_once('/').map(|(_, name)| name);
        assert!(
            name.is_some_and(|name| name.starts_with("vtl-") && name.contains(".run-")),
            "{user:?}: {group}"
        );
    }
    // What it writes later is its own, too.
    let state = world.testbed.daemon_state(Host::Client);
    let key = fs::read_to_string(state.join("host.pub")).expect("its key");
    let key = key.split_whitespace().last().expect("a key");
    let trust = ["peer", "trust", "gate", key, "--address", "192.0.2.7"];
    let output = world.vtl(Host::Server, &trust).output().expect("vtl runs");
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(manager.owner("known_peers.toml"), "600 vtl");
}

/// Root's daemon takes over from the unit's, and leaves nothing in its way.
fn check_take_over(world: &mut World, manager: &Manager) {
    let vtld = vtld();
    let socket = world.socket(Host::Server);
    let (vtld, socket) = (
        vtld.to_str().expect("UTF-8"),
        socket.to_str().expect("UTF-8"),
    );
    both_ways(world, &[], |world, goes_on| {
        let before = flows(world, Host::Server);
        assert_eq!(before.len(), 2);
        let by_hand = ["systemd-run", "--unit=by-hand", vtld, "--socket", socket];
        manager.run(&[&by_hand[..], &["--take-over"]].concat());
        let is_roots = || {
            let all = manager.processes();
            let vtld: Vec<_> = all.iter().filter(|p| p.name == "vtld").collect();
            matches!(vtld[..], [vtld] if vtld.uids == [0; 4])
        };
        until("root's alone is left", is_roots);
        assert_eq!(flows(world, Host::Server), before);
        goes_on(300_000);
    });
    manager.run(&["systemctl", "stop", "by-hand"]);
    manager.run(&["systemctl", "start", "vtld"]);
    world.hook();
    world.meet();
}

#[test]
#[ignore = "needs systemd: make soak"]
fn restart__by_systemd() {
    let Some(mut world) = World::bare("restart-systemd", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    let manager = Manager::start(&mut world);
    let key = || manager.run(&["cat", "/var/lib/vtl/host.pub"]);
    world.hook();
    world.meet();
    let former = (key(), manager.owner("host.key"));
    assert_eq!(former.1, "600 root");
    let kinds = |name| {
        manager
            .processes()
            .iter()
            .all(|p| p.uids == [manager.user(name); 4])
    };
    assert!(kinds("root"), "{:?}", manager.processes());
    both_ways(&mut world, &[], |world, goes_on| {
        for round in 0..5 {
            let before = flows(world, Host::Server);
            assert_eq!(before.len(), 2);
            if round == 1 {
                let units = ["/run/systemd/upgrade/.", "/run/systemd/system"];
                manager.run(&["cp", "-r", units[0], units[1]]);
                manager.run(&["systemctl", "daemon-reload"]);
            }
            manager.restart();
            assert_eq!(flows(world, Host::Server), before);
            goes_on(300_000);
        }
    });
    assert!(kinds("vtl"), "{:?}", manager.processes());
    assert_eq!(
        (key(), manager.owner("host.key")),
        (former.0, "600 vtl".into())
    );
    let kept = [
        "systemctl",
        "show",
        "vtld",
        "-p",
        "NFileDescriptorStore",
        "--value",
    ];
    assert_eq!(manager.run(&kept), "0");
    // Processes of carriers may do under the unit what they need.
    for carrier in ["graft:stream", "quic", "sctp", "kcp"] {
        world.meet_by(&["--carrier", carrier]);
    }
    let status = world.status(Host::Server);
    let interfaces = status["interfaces"].as_array().expect("a list");
    let live = |row: &Value| row["driver"] == "live";
    assert!(interfaces.iter().any(live), "live frames: {status}");
    check_rights(&manager);
    check_hooks(&world, &manager);
    check_take_over(&mut world, &manager);
    // Where it is stopped for good, connections end, and new ones are plain TCP.
    world.serve("big", 64 * MB);
    world.serve("f", MB / 4);
    let [server, _] = world.servers();
    let mut download = world.start_download(server, "big");
    download.reaches(100_000);
    manager.run(&["systemctl", "stop", "vtld"]);
    download.broke();
    world.download(server, "f");
    world.take_daemon(Host::Server).kill();
    remove_group(&manager.group);
    let _ = fs::remove_file(world.socket(Host::Server));
}
