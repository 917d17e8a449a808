//! Carriers that repeat nothing, under unmodified programs whose flows are marked loss-tolerant.

use std::{
    fs,
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, python3, refused, sha256, source, until};

const SCRIPT: &str = "programs/talk.py";

const LOSSY: [&str; 4] = ["udp", "udp-lite", "dccp-ccid2", "dccp-ccid3"];
/// Where `talk.py` listens.
const TALK: u16 = 5004;
const OTHER: u16 = 5005;
/// Bytes that each side sends.
const SIZE: usize = 1_500_000;

/// Two programs that talk; see `talk.py`.
struct Talk<'a> {
    world: &'a World,
    pace: &'a str,
    server: Process,
}

impl<'a> Talk<'a> {
    /// Starts the one that listens.
    fn new(world: &'a World, pace: &'a str, size: usize) -> Self {
        for (name, seed) in [("client", 1), ("server", 2)] {
            fs::write(world.path(name), payload(size, seed)).expect("written");
        }
        let mut command = world
            .testbed
            .command(Host::Server, python3())
            .expect("a namespace");
        let (sent, got) = (world.path("server"), world.path("server-got"));
        command
            .arg(source(SCRIPT))
            .args(["serve", &TALK.to_string()]);
        let server = Process::start(command.arg(sent).arg(got).arg(pace));
        until("it listens", || {
            let mut ss = (world.testbed.command(Host::Server, "ss")).expect("a namespace");
            let filter = format!("sport = :{TALK}");
            let output = ss.args(["-Htln", &filter]).output().expect("ss runs");
            !output.stdout.is_empty()
        });
        Self {
            world,
            pace,
            server,
        }
    }

    /// Starts the one that calls.
    fn call(&self, carrier: &str, server: IpAddr) -> Process {
        let _ = fs::remove_file(self.world.path("client-got"));
        let _ = fs::remove_file(self.world.path("server-got.done"));
        let run = ["run", "--loss-tolerant", "--carrier", carrier, "--"];
        let port = TALK.to_string();
        let script = source(SCRIPT).display().to_string();
        let python = [python3(), &script, "call", &server.to_string(), &port];
        let run = if carrier.is_empty() {
            &["run", "--"][..]
        } else {
            &run
        };
        let mut command = self.world.vtl(Host::Client, &[run, &python].concat());
        command.arg(self.world.path("client"));
        command.arg(self.world.path("client-got"));
        Process::start(command.arg(self.pace))
    }

    /// Has them talk, and both read the end. Returns the bytes that the server, and the client,
    /// missed.
    #[track_caller]
    fn missed(&self, carrier: &str, server: IpAddr) -> [u64; 2] {
        self.missed_by(self.call(carrier, server), carrier)
    }

    /// The same of those that talk already.
    #[track_caller]
    fn missed_by(&self, mut call: Process, carrier: &str) -> [u64; 2] {
        let status = call.wait();
        assert!(status.success(), "{carrier}: {status}");
        until("the server reads the end", || {
            self.world.path("server-got.done").exists()
        });
        [("client", "server-got"), ("server", "client-got")].map(|(sent, got)| {
            let read = |name| fs::read(self.world.path(name)).expect("a file");
            missing(&read(sent), &read(got))
        })
    }

    /// What both daemons have counted as skipped so far.
    fn skipped(&self) -> [u64; 2] {
        [Host::Server, Host::Client].map(|host| self.world.sum(host, "skipped_bytes"))
    }
}

/// Bytes of `sent` that are missing in `got`, which must be the others, in order.
#[track_caller]
fn missing(sent: &[u8], got: &[u8]) -> u64 {
    /// No eight bytes of the payload are the same.
    const WINDOW: usize = 8;
    /// Shorter pieces come between two losses, and are looked for no farther.
    const SHORTEST: usize = 3;
    const NEAR: usize = 64 << 10;
    let find = |from: &[u8], what: &[u8]| from.windows(what.len()).position(|w| w == what);
    let (mut at, mut rest) = (0, got);
    while !rest.is_empty() {
        let same = sent[at..]
            .iter()
            .zip(rest)
            .take_while(|(a, b)| a == b)
            .count();
        (at, rest) = (at + same, &rest[same..]);
        if !rest.is_empty() {
            // The few bytes that were the same by chance belong to what follows.
            let ahead = &sent[at..];
            let window = &rest[..WINDOW.min(rest.len())];
            let near = &ahead[..NEAR.min(ahead.len())];
            let shorter = || {
                let lengths = (SHORTEST..window.len()).rev();
                lengths
                    .into_iter()
                    .find_map(|len| find(near, &window[..len]))
            };
            at += find(ahead, window).or_else(shorter).unwrap_or_else(|| {
                let (left, found) = (rest.len(), find(sent, window));
                panic!("behind byte {at} come {window:?}, which were sent at {found:?}; {left} are left")
            });
        }
    }
    (sent.len() - got.len()) as u64
}

#[test]
fn missing__tells_gaps_from_copies() {
    let sent = payload(200_000, 3);
    let parts = |ranges: &[std::ops::Range<usize>]| -> Vec<u8> {
        ranges
            .iter()
            .flat_map(|of| sent[of.clone()].to_vec())
            .collect()
    };
    assert_eq!(missing(&sent, &sent), 0);
    // Pieces shorter than a window, between gaps.
    let got = parts(&[0..1000, 2000..2005, 4000..150_000, 151_000..151_003]);
    assert_eq!(missing(&sent, &got), (sent.len() - got.len()) as u64);
    for wrong in [
        [0..3000, 1000..5000],
        [0..3000, 2990..5000],
        [5000..9000, 0..4000],
    ] {
        let got = parts(&wrong);
        assert!(
            std::panic::catch_unwind(|| missing(&sent, &got)).is_err(),
            "{wrong:?}"
        );
    }
}

impl World {
    /// Hosts with daemons, and a port of the server that is marked.
    fn tolerant(name: &str, link: &Link) -> Option<Self> {
        let world = Self::with_daemons(name, link)?;
        let port = TALK.to_string();
        world.vtl_hook(Host::Server, &["add", "--port", &port, "--loss-tolerant"]);
        Some(world)
    }

    fn grafts(&self, host: Host) -> Vec<String> {
        let status = self.status(host);
        let sessions = status["sessions"].as_array().expect("a list");
        // One that is being opened has none.
        let name = |s: &Value| Some(s["graft"].as_str()?.to_owned());
        sessions.iter().filter_map(name).collect()
    }
}

#[test]
fn lossy__what_is_missing_was_counted_and_the_rest_is_in_order() {
    let Some(world) = World::tolerant("lossy", &Link::new(10.0, 100.0)) else {
        return;
    };
    let talk = Talk::new(&world, "1", SIZE);
    let [server, server6] = world.servers();
    let mut before = [0, 0];
    for (i, carrier) in LOSSY.into_iter().enumerate() {
        world.set_loss(0.0);
        let server = if i % 2 == 0 { server } else { server6 };
        // A first flow opens the session, so that it does not meet the loss.
        let first = talk.call(carrier, server);
        until("a session", || {
            world
                .grafts(Host::Server)
                .iter()
                .any(|graft| graft == carrier)
        });
        first.kill();
        until("it has ended", || {
            world.sum(Host::Server, "flows") == 0 && world.path("server-got.done").exists()
        });
        world.set_loss(5.0);
        before = [Host::Server, Host::Client].map(|h| world.sum(h, "skipped_bytes"));
        let missed = talk.missed(carrier, server);
        let after = talk.skipped();
        let counted = [0, 1].map(|end| after[end] - before[end]);
        assert_eq!(missed, counted, "{carrier}");
        // By TCP, as its session was given up after a second of silence, a direction may have missed nothing.
        assert!(missed[0] + missed[1] > 0, "{carrier}: {missed:?}");
        assert!(missed[0] < SIZE as u64 / 2, "{carrier}: {missed:?}");
    }
    assert_ne!(before, [0, 0]);
    assert_eq!(world.grafts(Host::Client), LOSSY);
    let text = world
        .vtl(Host::Client, &["status"])
        .output()
        .expect("vtl runs");
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.contains("skipped bytes"), "{text}");
}

#[test]
fn lossy__without_loss_nothing_is_missing() {
    let Some(world) = World::tolerant("lossy-clean", &Link::new(5.0, 100.0)) else {
        return;
    };
    let talk = Talk::new(&world, "0", SIZE);
    for carrier in LOSSY {
        for server in world.servers() {
            assert_eq!(talk.missed(carrier, server), [0, 0], "{carrier}");
            for (sent, got) in [("client", "server-got"), ("server", "client-got")] {
                let [sent, got] = [sent, got].map(|name| fs::read(world.path(name)).expect("read"));
                assert_eq!(sha256(&sent), sha256(&got));
            }
        }
    }
    assert_eq!(talk.skipped(), [0, 0]);
    let mut both = LOSSY.map(|carrier| [carrier; 2]).concat();
    both.sort_unstable();
    for host in [Host::Client, Host::Server] {
        let mut grafts = world.grafts(host);
        grafts.sort_unstable();
        assert_eq!(grafts, both);
    }
    // Flows that are not marked do not get into those sessions.
    assert_eq!(talk.missed("", world.servers()[0]), [0, 0]);
    assert!(world.grafts(Host::Client).contains(&"stream".to_owned()));
}

#[test]
fn lossy__only_what_is_marked_at_both_ends() {
    let Some(world) = World::with_daemons("lossy-mark", &Link::new(10.0, 100.0)) else {
        return;
    };
    for carrier in LOSSY {
        let run = ["run", "--carrier", carrier, "--", "true"];
        let output = world.vtl(Host::Client, &run).output().expect("vtl runs");
        refused(
            &output,
            1,
            "mark these flows loss-tolerant (--loss-tolerant)",
        );
    }
    let run = ["run", "--loss-tolerant", "--", "true"];
    let output = world.vtl(Host::Client, &run).output().expect("vtl runs");
    refused(&output, 1, "has no use for the mark");
    let port = [
        "hook",
        "add",
        "--port",
        "80",
        "--carrier",
        "udp",
        "--loss-tolerant",
    ];
    let output = world.vtl(Host::Server, &port).output().expect("vtl runs");
    refused(&output, 1, "who connects chooses it");
    // The server's port is hooked, and not marked.
    let [port, other] = [TALK, OTHER].map(|port| port.to_string());
    world.vtl_hook(Host::Server, &["add", "--port", &port]);
    let talk = Talk::new(&world, "1", SIZE / 3);
    world.set_loss(3.0);
    let server = world.servers()[0];
    assert_eq!(talk.missed("udp", server), [0, 0]);
    assert_eq!(world.grafts(Host::Client), [""; 0]);
    // Another one is marked: there may be a session, but this port's flows are not in it.
    world.vtl_hook(Host::Server, &["add", "--port", &other, "--loss-tolerant"]);
    for carrier in ["dccp-ccid2", "udp", "udp"] {
        assert_eq!(talk.missed(carrier, server), [0, 0]);
    }
    assert_eq!(world.sum(Host::Server, "flows"), 0);
    assert_eq!(talk.skipped(), [0, 0]);
}

#[test]
fn lossy__rules_mark_both_ends() {
    let Some(mut world) = World::bare("lossy-rules", &Link::new(5.0, 100.0)) else {
        return;
    };
    let rules = |host: Host, text: String| -> PathBuf {
        let file = world.path(&format!("{}.toml", host.name()));
        fs::write(&file, text).expect("written");
        file
    };
    let rule = "[[rule]]\nname = \"calls\"\n";
    let server = rules(Host::Server, format!("{rule}listen = {TALK}\n"));
    let client = rules(Host::Client, String::new());
    let arg = |file: &PathBuf| file.to_str().expect("UTF-8").to_owned();
    world.start(Host::Server, &["--rules", &arg(&server)]);
    world.start(Host::Client, &["--rules", &arg(&client)]);
    let add = |more: &[&str]| {
        let port = TALK.to_string();
        let add = [
            "rule",
            "add",
            "calls",
            "--port",
            &port,
            "--carrier",
            "dccp-ccid3",
        ];
        let mut command = world.vtl(Host::Client, &[&add, more].concat());
        command.output().expect("vtl runs")
    };
    refused(&add(&[]), 1, "loss-tolerant (loss_tolerant = true)");
    assert!(add(&["--loss-tolerant"]).status.success());
    let talk = Talk::new(&world, "0", SIZE / 3);
    let call = || {
        let mut command = world
            .testbed
            .command(Host::Client, python3())
            .expect("a namespace");
        let server = world.servers()[0].to_string();
        command
            .arg(source(SCRIPT))
            .args(["call", &server, &TALK.to_string()]);
        command
            .arg(world.path("client"))
            .arg(world.path("client-got"));
        assert!(Process::start(command.arg("0")).wait().success());
    };
    call();
    assert_eq!(world.grafts(Host::Client), [""; 0]);
    // The same port gets its mark, and stays hooked.
    fs::write(
        &server,
        format!("{rule}listen = {TALK}\nloss_tolerant = true\n"),
    )
    .expect("written");
    world.call(Host::Server, &Request::RuleReload);
    until("its flows go by it", || {
        call();
        world.grafts(Host::Client) == ["dccp-ccid3"]
    });
    assert_eq!(world.grafts(Host::Server), ["dccp-ccid3"]);
    assert_eq!(talk.skipped(), [0, 0]);
}

#[test]
fn lossy__a_killed_daemon_is_no_end() {
    let Some(mut world) = World::tolerant("lossy-kill", &Link::new(5.0, 100.0)) else {
        return;
    };
    let server = world.servers()[0];
    for (carrier, victim) in [("udp", Host::Server), ("dccp-ccid2", Host::Client)] {
        let daemon = world.take_daemon(victim);
        let talk = Talk::new(&world, "1", 20 * SIZE);
        let mut call = talk.call(carrier, server);
        let got = |name: &str| world.path(name).metadata().map_or(0, |m| m.len());
        until("both have got something", || {
            assert!(call.ended().is_none(), "too early");
            got("client-got") > 100_000 && got("server-got") > 100_000
        });
        daemon.kill();
        assert_eq!(call.wait().code(), Some(3), "a reset");
        until("the server's end", || {
            world.path("server-got.done").exists()
        });
        let theirs = fs::read(world.path("server-got")).expect("a file");
        assert!(theirs.ends_with(b"RESET"), "the server read an end");
        talk.server.kill();
        world.start(victim, &[]);
        if victim == Host::Server {
            let port = TALK.to_string();
            world.vtl_hook(Host::Server, &["add", "--port", &port, "--loss-tolerant"]);
        }
    }
}

#[test]
fn lossy__a_restart_is_no_end() {
    for (carrier, host) in [("udp", Host::Server), ("dccp-ccid3", Host::Client)] {
        let link = Link::new(5.0, 100.0);
        let Some(mut world) = World::tolerant(&format!("lossy-{}", host.name()), &link) else {
            return;
        };
        let talk = Talk::new(&world, "1", 8 * SIZE);
        let mut call = talk.call(carrier, world.servers()[0]);
        let serving = talk.server;
        let come = |world: &World| world.sum(Host::Client, "bytes_received");
        until("bytes come by it", || come(&world) > 100_000);
        let mut gone = Duration::ZERO;
        for _ in 0..2 {
            let before = come(&world);
            let begin = Instant::now();
            world.take_over(host);
            until("another session", || come(&world) < before);
            until("bytes come by that", || come(&world) > 100_000);
            gone += begin.elapsed();
        }
        assert!(call.ended().is_none(), "{carrier}: too early");
        assert!(call.wait().success(), "{carrier}");
        until("the server reads the end", || {
            world.path("server-got.done").exists()
        });
        // Of what was on its way, 1,000 bytes a millisecond; everything else is there, in order.
        let most = (SIZE as u64 + gone.as_millis() as u64 * 1000).min(4 * SIZE as u64);
        for (sent, got) in [("client", "server-got"), ("server", "client-got")] {
            let [sent, got] = [sent, got].map(|name| fs::read(world.path(name)).expect("a file"));
            let missing = missing(&sent, &got);
            assert!(missing < most, "{carrier}: {missing} of {most}");
        }
        serving.kill();
    }
}

#[test]
fn lossy__a_path_that_takes_nothing_is_left_for_tcp() {
    let Some(world) = World::tolerant("lossy-block", &Link::new(5.0, 100.0)) else {
        return;
    };
    for (carrier, server) in ["udp", "dccp-ccid2"].into_iter().zip(world.servers()) {
        let talk = Talk::new(&world, "1", 4 * SIZE);
        let mut call = talk.call(carrier, server);
        let before = [Host::Server, Host::Client].map(|h| world.sum(h, "bytes_received"));
        until("something has come by it", || {
            assert!(call.ended().is_none(), "too early");
            let now = [Host::Server, Host::Client].map(|h| world.sum(h, "bytes_received"));
            now[0] > before[0] + 100_000 && now[1] > before[1] + 100_000
        });
        let skipped = talk.skipped();
        world.block(Some(253));
        let missed = talk.missed_by(call, carrier);
        assert!(missed[0] < 2 * SIZE as u64, "{carrier}: {missed:?}");
        // Another session, in UDP.
        until("all of that was counted", || {
            let now = talk.skipped();
            [0, 1].map(|end| now[end].saturating_sub(skipped[end])) == missed
        });
        world.block(None);
        talk.server.kill();
    }
}

/// A rule's connections lose something only while its condition holds, where both hosts let them, and no more than the
/// graft's bound; others of the same rule, to a port that lets nothing get lost, lose nothing.
#[test]
fn lossy__a_condition_moves_to_partial_reliability_and_back() {
    const NEAR: f64 = 10.0;
    const FAR: f64 = 200.0;
    const LARGE: usize = 8 << 20;
    const WINDOW: u64 = 128;
    let Some(mut world) = World::bare("lossy-when", &Link::new(NEAR, 50.0)) else {
        return;
    };
    let rules = |host: Host, text: String| {
        let file = world.path(&format!("{}.toml", host.name()));
        fs::write(&file, text).expect("written");
        file.to_str().expect("UTF-8").to_owned()
    };
    let listen =
        |name: &str, port, mark| format!("[[rule]]\nname = \"{name}\"\nlisten = {port}\n{mark}\n");
    let marked = listen("marked", TALK, "loss_tolerant = true");
    let server = rules(Host::Server, marked + &listen("exact", OTHER, ""));
    let client = rules(
        Host::Client,
        format!(
            "[[rule]]\nname = \"far\"\nport = [{TALK}, {OTHER}]\ncarrier = \"graft:go-back-n?window=64\"\n\
             loss_tolerant = true\ndwell = \"500ms\"\nwhen = {{ if = \"rtt >= 100ms for 200ms\", \
             carrier = \"graft:partial-reliability?max-loss=50&window={WINDOW}\" }}\n"
        ),
    );
    world.start(Host::Server, &["--rules", &server, "--log", "debug"]);
    world.start(Host::Client, &["--rules", &client, "--log", "debug"]);
    world.set_loss(2.0);
    let talk = Talk::new(&world, "1", LARGE);
    let server = world.servers()[0].to_string();
    let script = source(SCRIPT);
    let talks = |host: Host, args: &[&str], [sent, got]: [&str; 2]| {
        let mut command = (world.testbed.command(host, python3())).expect("a namespace");
        command.arg(&script).args(args);
        command.arg(world.path(sent)).arg(world.path(got)).arg("1");
        Process::start(&mut command)
    };
    let [port, other] = [TALK, OTHER].map(|port| port.to_string());
    let exact = talks(
        Host::Server,
        &["serve", &other],
        ["server", "exact-server-got"],
    );
    until("the other listens", || {
        let mut ss = (world.testbed.command(Host::Server, "ss")).expect("a namespace");
        let output = ss.args(["-Htln", &format!("sport = :{OTHER}")]).output();
        !output.expect("ss runs").stdout.is_empty()
    });
    let call = ["call", &server, &port];
    let mut call = talks(Host::Client, &call, ["client", "client-got"]);
    let mut other = talks(
        Host::Client,
        &["call", &server, &other],
        ["client", "exact-client-got"],
    );
    let arrived = || {
        let of = |name: &str| world.path(name).metadata().map_or(0, |m| m.len());
        of("client-got").min(of("server-got"))
    };
    let goes_by = |graft: &str| {
        let of = |host| world.grafts(host).iter().any(|name| name == graft);
        of(Host::Client) && of(Host::Server)
    };
    until("it goes by go-back-n", || {
        goes_by("go-back-n") && arrived() > 200_000
    });
    assert_eq!(talk.skipped(), [0, 0]);
    world.set_rtt(FAR);
    until("something is lost both ways", || {
        assert!(call.ended().is_none(), "it ended: {:?}", talk.skipped());
        talk.skipped().iter().all(|skipped| *skipped > 0)
    });
    assert!(goes_by("partial-reliability"));
    world.set_rtt(NEAR);
    let log_of = |host| fs::read_to_string(world.log_path(host)).expect("a log");
    let log = || log_of(Host::Client);
    until("it is back", || {
        assert!(call.ended().is_none(), "it ended: {}", log());
        log().contains("to=graft:go-back-n?window=64")
    });
    let (so_far, at) = (talk.skipped(), arrived());
    // Two windows: what was on its way then, and what went the old way until the server was told.
    let on_its_way = 2 * WINDOW * 1500;
    until("it goes on", || {
        assert!(call.ended().is_none(), "it ended");
        arrived() > at + on_its_way
    });
    let lost = talk.skipped();
    let missed = talk.missed_by(call, "when");
    // What was on its way by then may have got lost; nothing after that.
    assert!(lost[0] >= so_far[0] && lost[1] >= so_far[1]);
    assert_eq!((missed, talk.skipped()), (lost, lost));
    // At most 5 of 100 packets, of up to 1,440 bytes of which records of 1,000 fill some less.
    assert!(
        missed.iter().all(|bytes| *bytes * 10 <= LARGE as u64),
        "{missed:?}"
    );
    assert!(other.wait().success());
    until("the other's end", || {
        world.path("exact-server-got.done").exists()
    });
    for (sent, got) in [
        ("client", "exact-server-got"),
        ("server", "exact-client-got"),
    ] {
        let [sent, got] = [sent, got].map(|name| fs::read(world.path(name)).expect("a file"));
        assert!(
            sent == got,
            "{got} bytes of {sent}",
            got = got.len(),
            sent = sent.len()
        );
    }
    exact.kill();
    for host in [Host::Client, Host::Server] {
        let log = log_of(host);
        for moved in log
            .lines()
            .filter(|line| line.contains("flows: moved to another path"))
        {
            println!("{}: {moved}", host.name());
        }
    }
}
