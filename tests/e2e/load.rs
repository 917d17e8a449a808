//! Many connections of unmodified programs: each carried, none failed, and nothing left of them.

use std::{fs, io::Read, process::Command};

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{Spoken, World, entries, until, vtl};

const PORT: u16 = 7000;

/// Ends the input of `vtl bench load connect`, and says what has become of its connections.
#[track_caller]
fn outcome(mut client: Spoken) -> Value {
    drop(client.told);
    let mut text = String::new();
    client.says.read_to_string(&mut text).expect("a pipe");
    assert!(client.process.wait().success());
    serde_json::from_str(&text).expect("JSON")
}

/// Two hosts over a wire, and a server whose port is hooked.
fn hosts(name: &str) -> Option<(World, Spoken)> {
    let mut world = World::bare(name, &Link::new(0.0, 0.0))?;
    for host in [Host::Server, Host::Client] {
        world.start(host, &["--near", "0"]);
    }
    world.hook_port(PORT);
    let serve = world.vtl(Host::Server, &["bench", "load", "serve", &PORT.to_string()]);
    let mut server = Spoken::start(serve);
    assert_eq!(server.line(), "ready");
    Some((world, server))
}

/// A captured client.
fn connect(world: &World, family: usize, args: &[&str]) -> Command {
    let to = std::net::SocketAddr::new(world.servers()[family], PORT).to_string();
    let vtl = vtl().display().to_string();
    let run = ["run", "--", &vtl, "bench", "load", "connect", &to];
    // So that a busy machine is slow, and nothing worse.
    let max = ["--at-once", "300"];
    world.vtl(Host::Client, &[&run[..], &max, args].concat())
}

#[track_caller]
fn all_good(outcome: &Value, count: u64) {
    let figures = (&outcome["begun"], &outcome["good"]);
    assert_eq!(figures, (&count.into(), &count.into()), "{outcome}");
}

/// What a daemon has for connections: sockets, and entries for them. Rings are made in the meantime.
fn held(world: &mut World, host: Host) -> [usize; 2] {
    let pid = world.daemon(host).pid();
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let kinds = files.flatten().filter_map(|f| fs::read_link(f.path()).ok());
    let sockets = kinds.filter(|kind| kind.to_string_lossy().starts_with("socket:"));
    [sockets.count(), entries(pid, "vtl_own")]
}

/// Opens so many connections by both families, and looks for what is left of them.
fn come_and_go(name: &str, rate: u64, count: u64, args: &[&str]) -> Option<World> {
    let (mut world, _server) = hosts(name)?;
    for family in [0, 1] {
        let meet = connect(&world, family, &["--count", "1"]);
        all_good(&outcome(Spoken::start(meet)), 1);
    }
    until("carriers", || world.carriers(Host::Client).len() == 2);
    let flows = |world: &World, host| world.sum(host, "flows");
    let both = [Host::Client, Host::Server];
    for host in both {
        until("the first flow has ended", || flows(&world, host) == 0);
    }
    // Discovery's connections go a moment after their flows: what they have counts against nobody.
    let before = both.map(|host| held(&mut world, host));
    for family in [0, 1] {
        let numbers = [rate.to_string(), count.to_string()];
        let how = ["--rate", &numbers[0], "--count", &numbers[1]];
        let load = connect(&world, family, &[&how, args].concat());
        let outcome = outcome(Spoken::start(load));
        println!("{outcome}");
        all_good(&outcome, count);
    }
    for (host, before) in both.into_iter().zip(before) {
        until("every flow has ended", || flows(&world, host) == 0);
        // What served to meet may have gone, too.
        until(
            &format!("no more is left on {host:?} than {before:?}"),
            || {
                let now = held(&mut world, host);
                now[0] <= before[0] && now[1] <= before[1]
            },
        );
        let status = world.status(host);
        let sessions = status["sessions"].as_array().expect("a list");
        assert_eq!(sessions.len(), 2, "one a family: {sessions:?}");
    }
    // They went by carriers, but for those whose port lingers in TIME_WAIT at the server: the kernel answers these,
    // and a client has no more ports a minute than this that do not.
    let fresh = if args.is_empty() {
        count
    } else {
        count.min(20_000)
    };
    let bytes = world.sum(Host::Client, "bytes_received");
    assert!(bytes >= 2 * 64 * fresh * 9 / 10, "{bytes} bytes");
    Some(world)
}

#[test]
fn load__five_thousand_come_and_go() {
    come_and_go("load", 1_500, 2_500, &[]);
    come_and_go("load-server", 1_500, 2_500, &["--server-closes"]);
}

/// The port of a connection that has ended lingers for a minute where the client closes first, and a second on the
/// loopback.
#[test]
fn load__more_connections_than_ports() {
    const COUNT: u64 = 4_000;
    let Some((world, _server)) = hosts("load-ports") else {
        return;
    };
    let mut sysctl = world
        .testbed
        .command(Host::Client, "sysctl")
        .expect("a namespace");
    let range = "net.ipv4.ip_local_port_range=40000 41499";
    assert!(
        sysctl
            .args(["-qw", range])
            .status()
            .expect("it runs")
            .success()
    );
    let count = COUNT.to_string();
    let how = ["--rate", "400", "--count", &count];
    for family in [0, 1] {
        all_good(
            &outcome(Spoken::start(connect(&world, family, &how))),
            COUNT,
        );
    }
    let bytes = world.sum(Host::Client, "bytes_received");
    assert!(
        bytes >= 2 * 64 * COUNT * 9 / 10,
        "{bytes} bytes by carriers"
    );
}

#[test]
fn load__more_than_five_thousand_at_once_are_all_carried() {
    const COUNT: u64 = 5_500;
    let Some((world, _server)) = hosts("load-held") else {
        return;
    };
    let count = COUNT.to_string();
    let how = ["--hold", "--rate", "1500", "--count", &count];
    let mut client = Spoken::start(connect(&world, 0, &how));
    assert_eq!(client.line(), format!("held {count}"));
    for host in [Host::Client, Host::Server] {
        assert_eq!(world.sum(host, "flows"), COUNT);
    }
    // Each has another message, and ends.
    all_good(&outcome(client), COUNT);
    for host in [Host::Client, Host::Server] {
        until("every flow has ended", || world.sum(host, "flows") == 0);
    }
}

#[test]
#[ignore = "takes five minutes: make soak"]
fn load__two_thousand_a_second_for_a_minute() {
    for args in [&[][..], &["--server-closes"]] {
        let Some(mut world) = come_and_go("load-minute", 2_000, 120_000, args) else {
            return;
        };
        let server = world.daemon(Host::Server).pid();
        until("the clients' addresses are forgotten", || {
            entries(server, "vtl_pairs") == 0
        });
    }
}
