//! Connections that require a carrier: by VTL or not at all.

use std::{
    fs,
    io::Write,
    net::{IpAddr, TcpListener},
    process::{Command, Output},
    thread,
};

use vtl_control::{FlowList, FlowStatus, Request};
use vtl_testbed::{Host, Link};

use crate::harness::{
    Process, Wire, World, any_payload, payload, run, same, tcp_payload, until, url, words, words_of,
};

const SIZE: usize = 2 << 20;
/// Slow enough for what is to happen in the middle.
const CRAWL: f64 = 8.0;
/// IP protocol.
const UDP: u8 = 17;
/// Of a server that speaks first.
const PORT: u16 = 3000;

#[track_caller]
fn assert_silent(bytes: &[u8], heard: &[u8]) {
    assert_eq!(words_of(bytes, heard), 0, "of {} heard", bytes.len());
    for word in [&b"HTTP/1.1"[..], b"GET /", b"PUT /"] {
        assert!(!heard.windows(word.len()).any(|w| w == word), "heard");
    }
}

/// All that a program has said.
fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &words(output)
}

/// A connect that must have failed for want of a carrier.
#[track_caller]
fn assert_unreachable(output: &Output) {
    // Of curl: couldn't connect.
    let said = said(output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("No route to host"), "{said}");
}

impl World {
    fn required(&self, args: &[&str], server: IpAddr) -> Output {
        let mut curl = self.required_curl(args, server);
        curl.output().expect("curl runs")
    }

    fn required_curl(&self, args: &[&str], server: IpAddr) -> Command {
        let url = url(server, "f");
        // Long before TCP would give up.
        let curl = ["-sSv", "--noproxy", "*", "--connect-timeout", "60", "-o"];
        let to = self.path("never");
        let to = [to.to_str().expect("UTF-8"), &url];
        let line = [&["run", "--require", "--", "curl"], &curl[..], &to, args].concat();
        self.vtl(Host::Client, &line)
    }

    /// The flows of a host that require a carrier.
    fn required_flows(&self, host: Host) -> Vec<FlowStatus> {
        let list = self.call(host, &Request::FlowList { from: 0 });
        let list: FlowList = serde_json::from_value(list).expect("a list");
        let all = list.flows.into_iter();
        all.filter(|flow| flow.requires_carrier).collect()
    }

    /// Both hosts' TCP gives up after three seconds instead of a quarter of an hour.
    fn hurry(&self) {
        for host in [Host::Client, Host::Server] {
            let sysctl = self.testbed.command(host, "sysctl");
            let mut sysctl = sysctl.expect("a namespace");
            run(sysctl.args(["-qw", "net.ipv4.tcp_retries2=3"]));
        }
    }
}

#[test]
fn require__peer_without_vtl_is_an_error() {
    let Some(mut world) = World::bare("require-plain", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    world.serve("f", SIZE);
    let wire = Wire::tap(&world, Host::Client, tcp_payload);
    for server in world.servers() {
        assert_unreachable(&world.required(&[], server));
    }
    // Such a socket cannot be captured.
    let bound = world.required(&["--interface", "if!eth0"], world.servers()[0]);
    assert_eq!(bound.status.code(), Some(7), "{}", said(&bound));
    assert_silent(&payload(SIZE, SIZE as u64), &wire.end());
    // It is known now that the server has no VTL, which changes nothing.
    let wire = Wire::tap(&world, Host::Client, tcp_payload);
    for server in world.servers() {
        world.download(server, "f");
    }
    let heard = wire.end();
    let all = words_of(&payload(SIZE, SIZE as u64), &heard);
    assert!(all > SIZE / 8 / 2, "the tap hears TCP: {all}");
    for server in world.servers() {
        assert_unreachable(&world.required(&[], server));
    }
    let run = ["run", "--require", "--carrier", "tcp:cubic", "--", "true"];
    let refused = world.vtl(Host::Client, &run).output().expect("vtl runs");
    let said = words(&refused);
    assert!(
        !refused.status.success() && said.contains("--require"),
        "{said}"
    );
}

/// From the first byte on, in both directions, also where the server speaks first.
#[test]
fn require__not_a_byte_by_tcp() {
    let Some(mut world) = World::new("require", &Link::new(10.0, 100.0)) else {
        return;
    };
    let wanted = payload(SIZE, SIZE as u64);
    world.serve("f", SIZE);
    world.hook_port(PORT);
    for (i, carrier) in [None, Some("quic")].into_iter().enumerate() {
        let server = world.servers()[i];
        // Nobody has met anybody.
        world.stop_daemons();
        world.start_both(&[]);
        world.hook_port(PORT);
        let mut args = vec!["--require"];
        args.extend(carrier.map(|_| "--carrier"));
        args.extend(carrier);
        let wire = Wire::tap(&world, Host::Client, tcp_payload);

        let listen = || TcpListener::bind((server, PORT));
        let listener = world.testbed.in_netns(Host::Server, listen);
        let listener = listener.expect("a namespace").expect("a port");
        let speaks = thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("a client");
            client.write_all(&payload(SIZE, 9)).expect("taken");
        });
        let got = world.path("banner");
        let cat = format!("cat </dev/tcp/{server}/{PORT} >{}", got.display());
        let cat = [&["run"], &args[..], &["--", "bash", "-c", &cat]].concat();
        let cat = world.vtl(Host::Client, &cat).output().expect("bash runs");
        assert!(cat.status.success(), "{}", words(&cat));
        speaks.join().expect("taken");
        assert_eq!(fs::read(&got).expect("there"), payload(SIZE, 9));

        let mut download = world.start_download_run(&args, server, "f");
        let status = download.process.wait();
        assert!(status.success(), "{status}");
        download.check();
        world.upload_run(&args, server, "up", &payload(SIZE, 7));

        let heard = wire.end();
        assert_silent(&wanted, &heard);
        assert_silent(&payload(SIZE, 7), &heard);
        assert_silent(&payload(SIZE, 9), &heard);
    }
}

/// Networks that take the option out, wherever.
#[test]
fn require__stripped_option_is_an_error() {
    let Some(mut world) = World::bare("require-strip", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    let meddlers = [
        (Host::Client, "tcp flags syn reset tcp option 253"),
        (Host::Server, "tcp flags syn reset tcp option 253"),
        (Host::Client, "tcp flags syn tcp option 253 exists drop"),
        (Host::Client, "tcp flags & syn == 0 reset tcp option 253"),
    ];
    for (i, (host, rule)) in meddlers.into_iter().enumerate() {
        let rules = format!(
            "table inet meddler {{
                chain out {{
                    type filter hook postrouting priority 0;
                    {rule}
                }}
            }}"
        );
        world.filter(host, &rules);
        world.start_both(&[]);
        let wire = Wire::tap(&world, Host::Client, tcp_payload);
        println!("{rule}");
        assert_unreachable(&world.required(&[], world.servers()[i % 2]));
        assert_silent(&payload(SIZE, SIZE as u64), &wire.end());
        world.stop_daemons();
        let mut nft = world.testbed.command(host, "nft").expect("a namespace");
        run(nft.args(["delete", "table", "inet", "meddler"]));
    }
}

/// A carrier that is gone in mid-flow: the flow waits for the next one, or ends in an error.
#[test]
fn require__blocked_in_mid_flow() {
    let Some(world) = World::new("require-block", &Link::new(10.0, 100.0)) else {
        return;
    };
    const BIG: usize = 8 * SIZE;
    world.serve("f", BIG);
    let wanted = payload(BIG, BIG as u64);
    let server = world.servers()[0];
    let args = ["--require", "--carrier", "quic"];
    let hosts = [Host::Client, Host::Server];
    let waits = |flows: &[FlowStatus]| flows.iter().all(|flow| flow.sends_by == "none");
    let wire = Wire::tap(&world, Host::Client, tcp_payload);
    for is_for_good in [false, true] {
        world.set_rate(CRAWL);
        let mut download = world.start_download_run(&args, server, "f");
        download.reaches(100_000);
        let flows = world.required_flows(Host::Client);
        let [flow] = &flows[..] else {
            panic!("{flows:?}");
        };
        assert_eq!((&*flow.sends_by, &*flow.receives_by), ("quic", "quic"));
        let id = flow.id.to_string();
        let shown = world.vtl(Host::Client, &["flow", "show", &id]).output();
        let shown = said(&shown.expect("vtl runs"));
        assert!(shown.contains("requires carrier"), "{shown}");
        let moved = ["flow", "move", &id, "--carrier", "tcp"];
        let moved = world.vtl(Host::Client, &moved).output().expect("vtl runs");
        assert!(words(&moved).contains("requires a carrier"), "{moved:?}");
        if is_for_good {
            world.hurry();
        }
        world.block(Some(UDP));
        until("flows wait", || {
            let flows = hosts.map(|host| world.required_flows(host));
            let gone = flows.iter().all(Vec::is_empty);
            is_for_good && gone || !gone && flows.iter().all(|flows| waits(flows))
        });
        if is_for_good {
            download.broke();
        } else {
            let before = download.arrived();
            thread::sleep(std::time::Duration::from_secs(3));
            assert_eq!(download.arrived(), before, "nothing comes");
            assert!(download.process.ended().is_none(), "it waits");
        }
        world.block(None);
        world.set_rate(100.0);
        if !is_for_good {
            let status = download.process.wait();
            assert!(status.success(), "{status}");
            download.check();
        }
        let gone = || {
            hosts
                .iter()
                .all(|host| world.required_flows(*host).is_empty())
        };
        until("no flow is left", gone);
    }
    assert_silent(&wanted, &wire.end());
}

/// Where nothing else works, what requires encryption goes inside TLS over the daemons' connection, and comes back.
#[test]
fn require__encryption_in_every_weather() {
    let Some(mut world) = World::new("require-crypt", &Link::new(10.0, 100.0)) else {
        return;
    };
    const BIG: usize = 8 * SIZE;
    world.serve("f", BIG);
    world.serve("g", SIZE);
    let taps = [Host::Client, Host::Server].map(|at| Wire::tap(&world, at, any_payload));
    let [server, v6] = world.servers();
    let args = ["--require-encryption", "--carrier", "quic"];
    world.block(Some(UDP));
    world.set_rate(CRAWL);
    let mut download = world.start_download_run(&args, server, "f");
    download.reaches(100_000);
    let by = |host, name: &str| {
        let flows = world.required_flows(host);
        flows.iter().all(|flow| flow.requires_encryption)
            && flows.iter().any(|flow| flow.sends_by == name)
    };
    for host in [Host::Client, Host::Server] {
        assert!(by(host, "tls"), "{:?}", world.required_flows(host));
    }
    world.block(None);
    until("a better carrier takes over", || by(Host::Server, "quic"));
    let reached = download.arrived() + 100_000;
    download.reaches(reached);
    world.block(Some(UDP));
    until("it has broken", || by(Host::Server, "tls"));
    world.set_rate(100.0);
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
    world.upload_run(&args, v6, "up", &payload(SIZE, 7));
    world.block(None);

    // Whatever daemons do otherwise.
    world.stop_daemons();
    world.start_both(&["--no-encryption"]);
    for carrier in ["graft", "sctp", "mptcp"] {
        let args = ["--require-encryption", "--carrier", carrier];
        let mut download = world.start_download_run(&args, v6, "g");
        let status = download.process.wait();
        assert!(status.success(), "{carrier}: {status}");
        download.check();
        for row in world.carriers(Host::Server) {
            assert_eq!(row["encrypted"], true, "{row}");
        }
    }
    let heard = taps.map(Wire::end).concat();
    for bytes in [
        payload(BIG, BIG as u64),
        payload(SIZE, SIZE as u64),
        payload(SIZE, 7),
    ] {
        assert_silent(&bytes, &heard);
    }
    assert!(heard.len() > BIG, "the taps hear: {}", heard.len());
}

/// The same by a rule, for a program that nobody hooked.
#[test]
fn require__by_a_rule() {
    let Some(mut world) = World::bare("require-rule", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    let file = world.path("etc").join("rules.toml");
    world.start(Host::Client, &["--rules", file.to_str().expect("UTF-8")]);
    let rule = ["rule", "add", "must", "--port", "80", "--carrier", "quic"];
    let rule = [&rule[..], &["--require-carrier"]].concat();
    let added = world.vtl(Host::Client, &rule).output().expect("vtl runs");
    assert!(added.status.success(), "{}", words(&added));
    let explain = ["rule", "explain", "--to", "10.73.0.2:80"];
    let explained = world.vtl(Host::Client, &explain).output();
    let explained = said(&explained.expect("vtl runs"));
    assert!(explained.contains("quic, required"), "{explained}");
    let to = world.path("got");
    let curl = |world: &World, server| {
        let curl = world.testbed.command(Host::Client, "curl");
        let mut curl = curl.expect("a namespace");
        curl.args(["-sSv", "--noproxy", "*", "--fail", "-g", "-o"]);
        Process::piped(curl.arg(&to).arg(url(server, "f"))).output()
    };
    for server in world.servers() {
        assert_unreachable(&curl(&world, server));
    }
    world.start(Host::Server, &[]);
    world.hook();
    let wire = Wire::tap(&world, Host::Client, tcp_payload);
    for server in world.servers() {
        let output = curl(&world, server);
        assert!(output.status.success(), "{}", words(&output));
        same(&world.path("www").join("f"), &to);
    }
    assert_silent(&payload(SIZE, SIZE as u64), &wire.end());

    // Services that require encryption say the same.
    let removed = ["rule", "remove", "must"];
    run(&mut world.vtl(Host::Client, &removed));
    let rule = [
        "rule",
        "add",
        "secret",
        "--port",
        "80",
        "--require",
        "encryption",
    ];
    run(&mut world.vtl(Host::Client, &rule));
    let wire = Wire::tap(&world, Host::Server, any_payload);
    world.block(Some(UDP));
    for server in world.servers() {
        let output = curl(&world, server);
        assert!(output.status.success(), "{}", words(&output));
        same(&world.path("www").join("f"), &to);
    }
    assert_silent(&payload(SIZE, SIZE as u64), &wire.end());
}

/// Daemons are replaced in mid-flow, whose flows lie on their TCP connections in between.
#[test]
fn require__through_new_daemons() {
    let Some(mut world) = World::new("require-over", &Link::new(10.0, 100.0)) else {
        return;
    };
    const BIG: usize = 8 * SIZE;
    world.serve("f", BIG);
    let wire = Wire::tap(&world, Host::Client, tcp_payload);
    world.set_rate(CRAWL);
    let server = world.servers()[0];
    let mut download = world.start_download_run(&["--require"], server, "f");
    for (i, host) in [Host::Client, Host::Server].into_iter().enumerate() {
        download.reaches((i as u64 + 1) * 100_000);
        world.take_over(host);
    }
    let reached = download.arrived() + 100_000;
    download.reaches(reached);
    world.set_rate(100.0);
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
    assert_silent(&payload(BIG, BIG as u64), &wire.end());
}
