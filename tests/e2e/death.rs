//! Daemons that end in order, that are killed, and that come back.

use std::fs;

use nix::sys::signal::Signal;
use vtl_testbed::{Host, Link};

use crate::harness::{Download, Held, Process, World, groups, refused, same, until, url, words};

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
    // A program that stays where it is hooked, and goes on when the daemon has died.
    let (go, got) = (world.path("go"), world.path("got-behind"));
    let script = "while [ ! -e \"$1\" ]; do sleep 0.05; done; curl -sS --fail -o \"$2\" \"$3\"";
    let mut command = world.vtl(
        Host::Client,
        &["run", "--", "sh", "-c", script, "sh", go.to_str().unwrap()],
    );
    command.arg(&got).arg(url(server, "f"));
    let mut hooked = Process::piped(&mut command);
    let name = || fs::read_to_string(format!("/proc/{}/comm", hooked.pid())).unwrap_or_default();
    until("the program runs", || name().trim() == "sh");

    let daemon = world.take_daemon(Host::Client);
    let (pid, held) = (daemon.pid(), Held::by(daemon.pid()));
    assert!(!groups(pid).is_empty());
    daemon.kill();
    for download in &mut downloads {
        download.broke();
    }
    nothing_left(&world, Host::Client, &held);
    fs::write(&go, "").expect("written");
    let status = hooked.wait();
    let output = hooked.output();
    assert!(status.success(), "{}", words(&output));
    same(&small, &got);
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
