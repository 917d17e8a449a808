//! Connections of the helper's `talk`, which carry something all the time or nothing, of all carriers, and as many as
//! there can be: their daemons and their control connections are replaced.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Spoken, World, helper, until};

/// Where programs of this module serve.
const TALK: u16 = 7000;

/// Connections of all carriers that carry something all the time, while daemons are replaced so many times; the
/// longest that one of them was silent. `pairs`: now and then both hosts' one right behind the other.
fn many(name: &str, of_each: usize, times: usize, pairs: bool) -> Option<Duration> {
    let mut world = World::new(name, &Link::new(20.0, 200.0))?;
    let kinds = crate::flows::kinds();
    let [server, _] = world.servers();
    let at = SocketAddr::new(server, TALK).to_string();
    let talk = |role, count: &str| {
        [helper().to_str().expect("UTF-8"), "talk", role, &at, count].map(str::to_owned)
    };
    let all = (kinds.len() * of_each).to_string();
    let mut serve = world
        .testbed
        .command(Host::Server, helper())
        .expect("a namespace");
    serve.args(&talk("serve", &all)[1..]);
    let mut programs = vec![Spoken::start(serve)];
    assert_eq!(programs[0].line(), "ready");
    world.hook_port(TALK);
    for kind in &kinds {
        let mut client = world.vtl(Host::Client, &["run", "--carrier", kind, "--"]);
        client.args(talk("connect", &of_each.to_string()));
        programs.push(Spoken::start(client));
    }
    for client in &mut programs[1..] {
        assert_eq!(client.line(), "ready");
    }
    for program in &mut programs {
        assert_eq!(program.line(), "all");
    }
    let is_carried = |world: &World| {
        let carriers = world.carriers(Host::Client);
        let mut wanted = kinds.iter().filter(|kind| **kind != "tcp");
        wanted.all(|kind| carriers.iter().any(|row| row["carrier"] == *kind))
    };
    until("all carriers", || is_carried(&world));
    for turn in 0..times {
        world.take_over([Host::Client, Host::Server][turn % 2]);
        if !pairs || turn % 4 < 2 {
            until("all carriers again", || is_carried(&world));
        }
    }
    // With their inputs they end.
    let parts = programs.into_iter().map(
        |Spoken {
             process,
             told,
             says,
         }| {
            drop(told);
            (process, says)
        },
    );
    let mut longest = 0;
    let names = ["server"].into_iter().chain(kinds);
    for (name, (mut process, mut says)) in names.zip(parts.collect::<Vec<_>>()) {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut says, &mut line).expect("a pipe");
        assert!(process.wait().success(), "a connection broke: {name}");
        println!("{name}: {} ms", line.trim());
        longest = longest.max(line.trim().parse().expect("milliseconds"));
    }
    Some(Duration::from_millis(longest))
}

#[test]
fn take_over__under_many_flows_of_all_carriers() {
    if let Some(longest) = many("takeover-many", 8, 8, true) {
        println!("longest pause {longest:?}");
    }
}

#[test]
#[ignore = "takes minutes: make soak"]
fn take_over__a_hundred_times_under_two_hundred_flows() {
    if let Some(longest) = many("takeover-hundred", 40, 100, false) {
        println!("longest pause {longest:?}");
    }
}

#[test]
#[ignore = "takes a gigabyte on each host: make soak"]
fn take_over__of_ten_thousand_idle_flows() {
    let Some(mut world) = World::new("takeover-idle", &Link::new(10.0, 1000.0)) else {
        return;
    };
    let [server, _] = world.servers();
    let at = SocketAddr::new(server, TALK).to_string();
    // The daemon has two sockets for each.
    let max = crate::many::allow_files(30_000) / 2;
    let count = &max.saturating_sub(500).min(10_000).to_string();
    println!("{count} flows");
    let mut serve = world
        .testbed
        .command(Host::Server, helper())
        .expect("a namespace");
    serve.args(["talk", "serve", &at, count, "idle"]);
    let mut server = Spoken::start(serve);
    assert_eq!(server.line(), "ready");
    world.hook_port(TALK);
    let mut connect = world.vtl(Host::Client, &["run", "--"]);
    connect
        .arg(helper())
        .args(["talk", "connect", &at, count, "idle"]);
    let mut client = Spoken::start(connect);
    assert_eq!(client.line(), "ready");
    assert_eq!([client.line(), server.line()], ["all", "all"]);
    for host in [Host::Client, Host::Server] {
        let before = Instant::now();
        world.take_over(host);
        println!("{host:?}: {:?}", before.elapsed());
    }
    for mut program in [client, server] {
        drop(program.told);
        assert!(program.process.wait().success(), "a connection broke");
    }
}

/// Flows that are there need a control connection, also where their application does not listen any more.
#[test]
fn control_connection__without_a_listener() {
    let Some(world) = World::new("control-alone", &Link::new(10.0, 100.0)) else {
        return;
    };
    let [server, _] = world.servers();
    let at = SocketAddr::new(server, TALK).to_string();
    let serve = world.testbed.command(Host::Server, helper());
    let mut serve = serve.expect("a namespace");
    serve.args(["talk", "serve", &at, "1"]);
    let mut serve = Spoken::start(serve);
    assert_eq!(serve.line(), "ready");
    world.hook_port(TALK);
    let mut connect = world.vtl(Host::Client, &["run", "--carrier", "quic", "--"]);
    connect.arg(helper()).args(["talk", "connect", &at, "1"]);
    let mut client = Spoken::start(connect);
    assert_eq!(client.line(), "ready");
    // The listener has been closed by then.
    assert_eq!([client.line(), serve.line()], ["all", "all"]);
    let carried = || {
        world
            .carriers(Host::Client)
            .iter()
            .any(|row| row["flows"] == 1)
    };
    until("a carrier", carried);
    let list = world.call(Host::Client, &Request::FlowList { from: 0 });
    let own = list["flows"][0]["local"]
        .as_str()
        .expect("its address")
        .to_owned();
    let connections = || -> Vec<String> {
        let ss = world.testbed.command(Host::Client, "ss");
        let mut ss = ss.expect("a namespace");
        let output = ss
            .args(["-Htn", "state", "established", "dst", &at])
            .output();
        let text = String::from_utf8(output.expect("ss runs").stdout).expect("UTF-8");
        let local = |line: &str| {
            line.split_whitespace()
                .nth(2)
                .unwrap_or_default()
                .to_owned()
        };
        text.lines()
            .map(local)
            .filter(|local| *local != own)
            .collect()
    };
    let former = connections();
    assert_eq!(former.len(), 1, "{former:?}");
    let kill = world.testbed.command(Host::Client, "ss");
    let killed = kill
        .expect("a namespace")
        .args(["-K", "src", &former[0]])
        .output();
    assert!(killed.expect("ss runs").status.success());
    until("another control connection", || {
        let now = connections();
        now.len() == 1 && now != former
    });
    // And what it is for.
    until("a carrier", carried);
    drop((client.told, serve.told));
    for mut program in [client.process, serve.process] {
        assert!(program.wait().success(), "the connection broke");
    }
}
