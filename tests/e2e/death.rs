//! Daemons that end in order, that are killed, and that come back.

use std::{
    fs,
    io::{BufRead, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use nix::sys::signal::Signal;
use vtl_testbed::{Host, Link};

use crate::harness::{
    Download, Held, Process, Spoken, World, groups, refused, same, until, url, vtl, words,
};

const MB: usize = 1 << 20;

/// Slow enough for a download to be interrupted.
fn slow_link() -> Link {
    Link::new(10.0, 20.0)
}

/// Bytes of one that will be: it would take half a minute.
const BIG: usize = 64 * MB;

/// Two downloads under way, IPv4 and IPv6.
fn under_way(world: &World) -> [Download; 2] {
    world.meet();
    let mut downloads = world
        .servers()
        .map(|server| world.start_download(server, "big"));
    for download in &mut downloads {
        download.reaches(100_000);
    }
    assert!(
        world.sum(Host::Client, "bytes_received") >= 200_000,
        "VTL carries them"
    );
    downloads
}

/// A hooked program that downloads a file once it is told to.
struct Waiting {
    program: Process,
    go: PathBuf,
    got: PathBuf,
}

impl Waiting {
    fn start(world: &World, server: IpAddr) -> Self {
        let (go, got) = (world.path("go"), world.path("got-behind"));
        let _ = fs::remove_file(&go);
        let script = "while [ ! -e \"$1\" ]; do sleep 0.05; done; curl -sS --fail -o \"$2\" \"$3\"";
        let run = ["run", "--", "sh", "-c", script, "sh", go.to_str().unwrap()];
        let mut command = world.vtl(Host::Client, &run);
        command.arg(&got).arg(url(server, "f"));
        let program = Process::piped(&mut command);
        let name = || fs::read_to_string(format!("/proc/{}/comm", program.pid()));
        until("the program runs", || {
            name().is_ok_and(|name| name.trim() == "sh")
        });
        Self { program, go, got }
    }

    /// It gets the file.
    fn goes_on(mut self, file: &Path) {
        fs::write(&self.go, "").expect("written");
        let status = self.program.wait();
        let output = self.program.output();
        assert!(status.success(), "{}", words(&output));
        same(file, &self.got);
    }
}

/// A daemon's end took everything along.
fn nothing_left(world: &World, host: Host, held: &Held) {
    assert!(held.links() > 0 && held.maps() > 0, "{held:?}");
    held.assert_gone();
    let mut ip = world.testbed.command(host, "ip").expect("a namespace");
    let output = ip
        .args(["-d", "link", "show", "dev", "eth0"])
        .output()
        .expect("ip runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && !text.contains("xdp"), "{text}");
    let mut pids = world.testbed.command(host, "ip").expect("a namespace");
    let space = format!("{}-{}", world.testbed.name(), host.name());
    let output = pids
        .args(["netns", "pids", &space])
        .output()
        .expect("ip runs");
    for pid in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        assert!(!name.starts_with("vtl"), "{pid} {name} still runs");
    }
}

#[test]
fn kill__of_the_servers_daemon() {
    let Some(mut world) = World::new("kill-server", &slow_link()) else {
        return;
    };
    world.serve("big", BIG);
    world.serve("f", MB / 4);
    let servers = world.servers();
    let mut downloads = under_way(&world);
    let daemon = world.take_daemon(Host::Server);
    let held = Held::by(daemon.pid());
    daemon.kill();
    for download in &mut downloads {
        download.broke();
    }
    nothing_left(&world, Host::Server, &held);
    // Plain TCP at once.
    for server in servers {
        world.download(server, "f");
    }
    until("the client's sessions end", || {
        world.status(Host::Client)["sessions"]
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    assert_eq!(
        world.carriers(Host::Client),
        Vec::<serde_json::Value>::new()
    );
    // With a new daemon nothing is worse.
    world.start(Host::Server, &[]);
    world.hook();
    for server in servers {
        world.download(server, "f");
    }
}

#[test]
fn kill__and_restart_of_the_servers_daemon() {
    let Some(mut world) = World::new("restart", &slow_link()) else {
        return;
    };
    world.serve("big", BIG);
    world.serve("f", MB / 4);
    let mut downloads = under_way(&world);
    world.take_daemon(Host::Server).kill();
    world.start(Host::Server, &[]);
    world.hook();
    for download in &mut downloads {
        download.broke();
    }
    // The client's daemon finds the new one.
    world.meet();
    for server in world.servers() {
        world.download(server, "f");
    }
    let carried = world.sum(Host::Client, "bytes_received");
    assert!(
        carried >= 2 * (MB / 4) as u64,
        "VTL carried {carried} bytes"
    );
}

#[test]
fn kill__of_the_clients_daemon() {
    let Some(mut world) = World::new("kill-client", &slow_link()) else {
        return;
    };
    world.serve("big", BIG);
    let small = world.serve("f", MB / 4);
    let [server, _] = world.servers();
    let mut downloads = under_way(&world);
    let waiting = Waiting::start(&world, server);

    let daemon = world.take_daemon(Host::Client);
    let (pid, held) = (daemon.pid(), Held::by(daemon.pid()));
    assert!(!groups(pid).is_empty());
    daemon.kill();
    for download in &mut downloads {
        download.broke();
    }
    nothing_left(&world, Host::Client, &held);
    waiting.goes_on(&small);
    // The server's daemon notices, and goes on serving.
    until("the server's sessions end", || {
        world.status(Host::Server)["sessions"]
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    world.start(Host::Client, &[]);
    assert_eq!(
        groups(pid),
        Vec::<std::path::PathBuf>::new(),
        "swept by the next daemon"
    );
    world.meet();
    for server in world.servers() {
        world.download(server, "f");
    }
    assert!(world.sum(Host::Client, "bytes_received") >= 2 * (MB / 4) as u64);
}

/// As if they hung: new connections are left to TCP, and those that there are go on later.
#[test]
fn stopped__daemons_are_passed_by() {
    // Heartbeats count for a second.
    const STALE: Duration = Duration::from_millis(1_300);
    let Some(mut world) = World::new("stopped", &slow_link()) else {
        return;
    };
    world.serve("long", 24 * MB);
    let small = world.serve("f", MB / 4);
    for host in [Host::Server, Host::Client] {
        world.meet();
        let [server, _] = world.servers();
        let mut long = world.start_download(server, "long");
        long.reaches(100_000);
        let waiting = Waiting::start(&world, server);
        let daemon = world.daemon(host);
        daemon.signal(Signal::SIGSTOP);
        sleep(STALE);
        waiting.goes_on(&small);
        world.daemon(host).signal(Signal::SIGCONT);
        assert!(long.process.wait().success());
        long.check();
        let received = || world.sum(Host::Client, "bytes_received");
        let before = received();
        until("VTL carries again", || {
            world.download(server, "f");
            received() > before
        });
    }
}

/// Each command says that the daemon does not answer; `vtl top` also obeys keys meanwhile.
#[test]
fn stopped__daemon_holds_up_no_command() {
    // Longer than `vtl top` sleeps between two questions.
    const ASKS: Duration = Duration::from_millis(1_300);
    let Some(mut world) = World::new("hangs", &slow_link()) else {
        return;
    };
    let host = Host::Client;
    let file = world.path("sent");
    fs::write(&file, "x").expect("written");
    let [server, _] = world.servers().map(|server| server.to_string());
    let tops = [("q", 0), ("\x03", 130)].map(|(key, status)| {
        let mut script = (world.testbed.command(host, "script")).expect("a namespace");
        script.args(["-qec", &format!("{} top", vtl().display()), "/dev/null"]);
        let mut top = Spoken::start(script);
        let mut taken = Vec::new();
        top.says.read_until(b'h', &mut taken).expect("a pipe");
        assert_eq!(taken, b"\x1b[?1049h", "it has the terminal");
        (top, key, status)
    });
    world.daemon(host).signal(Signal::SIGSTOP);
    let asking = [
        &["status"][..],
        &["top", "--count", "1"],
        &["flow", "list"],
        &["path", "list"],
        &["events"],
        &["hook", "list", "--json"],
        &["send", file.to_str().unwrap(), &server],
        &["recv", "--output", "/nonexistent"],
        &["graft", "list"],
        &["run", "--", "true"],
    ]
    .map(|args| Process::piped(&mut world.vtl(host, args)));
    sleep(ASKS);
    for (mut top, key, status) in tops {
        top.told.write_all(key.as_bytes()).expect("a pipe");
        assert_eq!(top.process.wait().code(), Some(status), "{key:?}");
    }
    for command in asking {
        refused(&command.output(), 69, "did not answer within 10 s");
    }
    world.daemon(host).signal(Signal::SIGCONT);
    let status = world.vtl(host, &["status"]).output().expect("vtl runs");
    assert!(status.status.success(), "{}", words(&status));
}

#[test]
fn terminate__leaves_nothing() {
    let Some(mut world) = World::new("term", &slow_link()) else {
        return;
    };
    world.serve("big", BIG);
    world.serve("f", MB / 4);
    for host in [Host::Server, Host::Client] {
        let mut downloads = under_way(&world);
        // Who waits for a session must not keep the daemon from ending in order.
        let mut recv = world.vtl(host, &["recv", "--output", "/nonexistent"]);
        let recv = Process::piped(&mut recv);
        until("vtl recv waits", || {
            world.status(host)["listeners"]
                .as_array()
                .is_some_and(|l| !l.is_empty())
        });
        let mut daemon = world.take_daemon(host);
        let (pid, held) = (daemon.pid(), Held::by(daemon.pid()));
        daemon.signal(Signal::SIGTERM);
        let status = daemon.wait();
        assert_eq!(status.code(), Some(0), "{status}");
        refused(&recv.output(), 1, "stopping");
        assert!(!world.socket(host).exists(), "its socket is still there");
        for download in &mut downloads {
            download.broke();
        }
        nothing_left(&world, host, &held);
        until("its control groups are gone", || groups(pid).is_empty());
        world.start(host, &[]);
        if host == Host::Server {
            world.hook();
        }
    }
    for server in world.servers() {
        world.download(server, "f");
    }
}

/// The server's daemon ends while nothing gets through, so that neither the end of a carrier nor a reset arrives.
/// Programs are told all the same.
fn unheard(carrier: &str) {
    let name = format!("unheard-{carrier}");
    let Some(mut world) = World::new(&name, &slow_link()) else {
        return;
    };
    world.serve("big", BIG);
    let mut downloads = world
        .servers()
        .map(|server| world.start_over(carrier, server, "big"));
    for download in &mut downloads {
        download.reaches(100_000);
    }
    world.set_loss(100.0);
    let mut daemon = world.take_daemon(Host::Server);
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.wait().success());
    world.set_loss(0.0);
    for download in &mut downloads {
        download.broke();
    }
}

#[test]
fn terminate__unheard_by_grafts() {
    unheard("graft");
}

#[test]
fn terminate__unheard_by_quic() {
    unheard("quic");
}
