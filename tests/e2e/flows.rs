//! Flows over carriers: what becomes of hooked connections when their carrier breaks in mid-flow, and works
//! again.

use std::{
    fs,
    process::Stdio,
    time::{Duration, Instant},
};

use serde_json::Value;
use vtl_control::{Client, FlowStatus, Request};
use vtl_proto::carrier::Kind;
use vtl_testbed::{Host, Link};
use vtl_testing::Random;

use crate::harness::{World, payload, same, until, url};

const MB: usize = 1 << 20;
/// IP protocol.
const UDP: u8 = 17;
/// Bytes in each direction, and Mbit/s: slow enough for what is to happen in the middle.
const BIG: usize = 48 * MB;
const CRAWL: f64 = 8.0;

/// Both ways in a world with a carrier of the kind.
fn carry_through(carrier: &str, name: &str, happens: impl FnOnce(&mut World, &mut dyn FnMut(u64))) {
    let Some(mut world) = World::new(&format!("{name}-{carrier}"), &Link::new(10.0, 100.0)) else {
        return;
    };
    world.serve("meet", 1);
    let server = world.servers()[0];
    world.start_over(carrier, server, "meet").process.wait();
    until("a carrier", || !world.carriers(Host::Client).is_empty());
    both_ways(&mut world, &["--carrier", carrier], happens);
}

/// A download and an upload at the same time, with options of `vtl run`, while `happens` does something to the link
/// or the daemons.
pub(crate) fn both_ways(
    world: &mut World,
    run: &[&str],
    happens: impl FnOnce(&mut World, &mut dyn FnMut(u64)),
) {
    let server = world.servers()[0];
    world.set_rate(CRAWL);
    let file = world.path("upload");
    fs::write(&file, payload(BIG, 7)).expect("written");
    let from = file.to_str().expect("UTF-8");
    let to = url(server, "up");
    let upload = [&["run"], run, &["--", "curl", "-sS", "-T", from, &to]].concat();
    let mut upload = world
        .vtl(Host::Client, &upload)
        .stdout(Stdio::null())
        .spawn()
        .expect("curl runs");
    world.serve("big", BIG);
    let mut download = world.start_download_run(run, server, "big");
    let mut reached = 0;
    let mut goes_on = |more: u64| {
        reached = reached.max(download.arrived()) + more;
        download.reaches(reached);
    };
    goes_on(100_000);
    happens(world, &mut goes_on);
    world.set_rate(100.0);
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
    let status = upload.wait().expect("curl ends");
    assert!(status.success(), "{status}");
    same(&file, &world.path("www").join("up"));
    until("no flow is left", || {
        [Host::Client, Host::Server]
            .iter()
            .all(|host| world.carriers(*host).iter().all(|row| row["flows"] == 0))
    });
}

fn dropped_in_mid_flow_and_back(carrier: &str) {
    carry_through(carrier, "drop", |world, goes_on| {
        for _ in 0..2 {
            world.block(Some(UDP));
            until("the carrier's end", || {
                [Host::Client, Host::Server]
                    .iter()
                    .all(|host| world.carriers(*host).is_empty())
            });
            // By the flows' own connections.
            goes_on(500_000);
            world.block(None);
            until("a new carrier", || !world.carriers(Host::Client).is_empty());
            let before = world.carried("bytes_received");
            until("flows return", || {
                world.carried("bytes_received") > before + 500_000
            });
        }
    });
}

#[test]
fn quic__dropped_in_mid_flow_and_back() {
    dropped_in_mid_flow_and_back("quic");
}

#[test]
fn sctp__dropped_in_mid_flow_and_back() {
    dropped_in_mid_flow_and_back("sctp");
}

#[test]
fn kcp__dropped_in_mid_flow_and_back() {
    dropped_in_mid_flow_and_back("kcp");
}

/// What flows can be moved to.
pub(crate) fn kinds() -> Vec<&'static str> {
    let mut kinds = vec!["tcp"];
    kinds.extend(Kind::NAMED.map(Kind::name));
    if !std::path::Path::new("/proc/sys/net/mptcp").exists() {
        println!("without mptcp, which this kernel does not have");
        kinds.retain(|kind| *kind != Kind::Mptcp.name());
    }
    kinds
}

impl World {
    /// Moves what a host sends of all flows; how many there are.
    fn move_flows(&self, host: Host, carrier: &str) -> usize {
        let list = self.call(host, &Request::FlowList { from: 0 });
        let flows = list["flows"].as_array().expect("a list");
        for flow in flows {
            let moved = Request::FlowMove {
                id: flow["id"].as_u64().expect("a number"),
                carrier: carrier.to_owned(),
                for_s: None,
            };
            // A carrier that has just come, or broken, may not be known at both hosts yet.
            until("a move", || {
                let answer = Client::connect(&self.socket(host))
                    .and_then(|client| client.call::<FlowStatus>(&moved));
                match answer {
                    Ok(flow) => flow.sends_by == carrier,
                    Err(error) => error.to_string().contains("there is no flow"),
                }
            });
        }
        flows.len()
    }
}

/// A thousand moves to anything at 5 % loss. It says how long the downloads stood still at most: with
/// moves, and by each carrier without.
#[test]
#[ignore = "takes minutes: make soak"]
fn moves__a_thousand() {
    let mut random = Random(1);
    let (mut moves, mut longest) = (0, Duration::ZERO);
    let stands_still = |goes_on: &mut dyn FnMut(u64)| {
        let began = Instant::now();
        goes_on(1);
        began.elapsed()
    };
    for kind in kinds().into_iter().filter(|kind| *kind != "tcp") {
        carry_through(kind, "stays", |world, goes_on| {
            world.set_loss(5.0);
            let gaps = (0..400).map(|_| stands_still(goes_on));
            println!("by {kind}: {:?} at most", gaps.max());
            world.set_loss(0.0);
        });
    }
    while moves < 1000 {
        carry_through("quic", "moves", |world, goes_on| {
            let kinds = kinds();
            // Only the client has carriers opened.
            for kind in &kinds {
                moves += world.move_flows(Host::Client, kind);
            }
            world.set_loss(5.0);
            for _ in 0..25 {
                for host in [Host::Client, Host::Server] {
                    let kind = kinds[random.below(kinds.len() as u64) as usize];
                    moves += world.move_flows(host, kind);
                }
                longest = longest.max(stands_still(goes_on));
            }
        });
        println!("{moves} moves, {longest:?} at most");
    }
}

/// Moves of both hosts' sending directions between all kinds, while data go both ways and packets get lost.
#[test]
fn moves__by_hand_again_and_again() {
    carry_through("quic", "move", |world, goes_on| {
        let kinds = kinds();
        world.set_loss(2.0);
        for kind in kinds.iter().cycle().take(4 * kinds.len()) {
            let received = || {
                let all = world.carriers(Host::Client);
                let mut of_kind = all.iter().filter(|row| row["carrier"] == *kind);
                of_kind.find_map(|row| row["bytes_received"].as_u64())
            };
            let mut before = received();
            let moves = || {
                // The client has it opened if there is none.
                for host in [Host::Client, Host::Server] {
                    assert!(world.move_flows(host, kind) > 0);
                }
            };
            moves();
            goes_on(30_000);
            if *kind != "tcp" {
                let mut latest = received();
                until("flows go by it", || {
                    let now = received();
                    if now < std::mem::replace(&mut latest, now) {
                        // It has broken, as it may where several packets in a row get lost.
                        before = None;
                        moves();
                    }
                    now > before.max(Some(1_000))
                });
            }
        }
        for (host, program) in [(Host::Client, "curl"), (Host::Server, "nginx")] {
            let list = || -> Vec<serde_json::Value> {
                let list = world.vtl(host, &["flow", "list", "--json"]).output();
                let list: serde_json::Value =
                    serde_json::from_slice(&list.expect("vtl runs").stdout).expect("JSON");
                list["flows"].as_array().expect("a list").clone()
            };
            let all = list();
            assert!(!all.is_empty());
            for flow in &all {
                assert_eq!(flow["program"], program, "{flow}");
                assert!(flow["pid"].as_i64() > Some(1), "{flow}");
                let tells = flow["profile_evidence"].as_str();
                assert!(
                    tells.is_some_and(|tells| tells.starts_with("HTTP ")),
                    "{flow}"
                );
                assert!(flow["profile"].is_string(), "{flow}");
                let size = flow["size"].as_str();
                assert!(matches!(size, Some("mouse" | "elephant")), "{flow}");
            }
            let moves = |flow: &serde_json::Value| {
                ["sends_mbit", "receives_mbit"].map(|rate| flow[rate].as_f64()) != [Some(0.0); 2]
            };
            // A lost packet may hold up both for a second.
            until("bytes move", || list().iter().any(moves));
        }
        let all = world.carriers(Host::Client);
        assert_eq!(all.len(), kinds.len() - 1, "{all:?}");
    });
}

/// What waits at the senders on a slow path is little, by each carrier: control frames, new flows, and bytes by the
/// carrier that a flow is moved to wait behind it.
#[test]
fn moves__find_short_queues() {
    carry_through("quic", "queue", |world, goes_on| {
        let hosts = [Host::Client, Host::Server];
        for kind in kinds().into_iter().filter(|kind| *kind != "tcp") {
            for host in hosts {
                assert!(world.move_flows(host, kind) > 0);
            }
            goes_on(2 * MB as u64);
            let bytes = |host, what: &str| {
                let all = world.carriers(host);
                let mut of_kind = all.iter().filter(|row| row["carrier"] == kind);
                of_kind.find_map(|row| row[what].as_u64()).expect(what)
            };
            for [from, to] in [hosts, [Host::Server, Host::Client]] {
                let received = bytes(to, "bytes_received");
                let waiting = bytes(from, "bytes_sent").saturating_sub(received);
                println!("by {kind}: {waiting} bytes from {from:?}");
                assert!(
                    waiting < 2 * MB as u64,
                    "by {kind}: {waiting} bytes wait at {from:?}"
                );
            }
        }
    });
}

/// Flows that were moved by hand to a carrier that breaks go by the best one that is left.
#[test]
fn moves__end_with_their_carrier() {
    carry_through("graft", "leave", |world, goes_on| {
        let hosts = [Host::Client, Host::Server];
        for host in hosts {
            assert!(world.move_flows(host, "quic") > 0);
        }
        goes_on(100_000);
        world.block(Some(UDP));
        until("the flows are back", || {
            hosts.iter().all(|host| {
                let list = world.call(*host, &Request::FlowList { from: 0 });
                let flows = list["flows"].as_array().expect("a list");
                flows.iter().all(|flow| flow["sends_by"] == "graft")
            })
        });
        goes_on(500_000);
        world.block(None);
    });
}

#[test]
fn quic__silence_of_seconds() {
    silence_of_seconds("quic");
}

#[test]
fn sctp__silence_of_seconds() {
    silence_of_seconds("sctp");
}

#[test]
fn graft__silence_of_seconds() {
    silence_of_seconds("graft");
}

#[test]
fn kcp__silence_of_seconds() {
    silence_of_seconds("kcp");
}

#[test]
fn mptcp__silence_of_seconds() {
    if std::path::Path::new("/proc/sys/net/mptcp").exists() {
        silence_of_seconds("mptcp");
    } else {
        vtl_testing::skip("this kernel has no MPTCP");
    }
}

/// A firewall that refuses a flow's own connection in mid-flow stops the flow, until it admits it again.
#[test]
fn quic__obeys_a_firewall() {
    obeys_a_firewall("quic", Host::Client, ("postrouting", "sport"));
}

#[test]
fn graft__obeys_a_firewall() {
    obeys_a_firewall("graft", Host::Server, ("input", "sport"));
}

#[test]
fn sctp__obeys_a_firewall() {
    obeys_a_firewall("sctp", Host::Server, ("postrouting", "dport"));
}

/// `at`: where the rule looks, and by which of a packet's ports it knows the client's.
fn obeys_a_firewall(carrier: &str, host: Host, at: (&str, &str)) {
    let (hook, side) = at;
    carry_through(carrier, "licence", |world, goes_on| {
        let list = world.call(Host::Client, &Request::FlowList { from: 0 });
        let ports: Vec<_> = list["flows"].as_array().expect("a list").iter().collect();
        let ports = ports.iter().map(|flow| {
            let local = flow["local"].as_str().expect("an address");
            local.rsplit(':').next().expect("a port").to_owned()
        });
        let ports = ports.collect::<Vec<_>>().join(", ");
        world.filter(
            host,
            &format!(
                "table inet firewall {{
                    chain flows {{
                        type filter hook {hook} priority 0;
                        tcp {side} {{ {ports} }} drop
                    }}
                }}"
            ),
        );
        let carried = || world.carried("bytes_received") + world.carried("bytes_sent");
        let began = Instant::now();
        let (mut before, mut moved) = (carried(), began);
        until("the flows stop", || {
            let now = carried();
            if std::mem::replace(&mut before, now) != now {
                moved = Instant::now();
            }
            moved.elapsed() > Duration::from_secs(3)
        });
        println!(
            "{carrier}: the last bytes moved {:?} after it",
            moved - began
        );
        assert!(
            !world.carriers(Host::Client).is_empty(),
            "the carrier works"
        );
        let mut nft = world.testbed.command(host, "nft").expect("a namespace");
        let removed = nft.args(["delete", "table", "inet", "firewall"]).status();
        assert!(removed.expect("nft runs").success());
        goes_on(100_000);
    });
}

fn silence_of_seconds(carrier: &str) {
    carry_through(carrier, "silence", |world, goes_on| {
        world.mute_server(true);
        until("the carrier's end", || {
            world.carriers(Host::Client).is_empty()
        });
        world.mute_server(false);
        goes_on(500_000);
    });
}

/// While a host takes an upload it sends a little all the time, as fast as there is something to be said: that is
/// not what the path can carry, and a download has yet to find out.
#[test]
fn graft__an_upload_says_nothing_about_downloads() {
    let Some(world) = World::new("upload-first", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.meet_by(&["--carrier", "graft"]);
    let server = world.servers()[0];
    world.upload_run(&["--carrier", "graft"], server, "up", &payload(16 * MB, 3));
    let status = world.status(Host::Server);
    let sessions = status["sessions"].as_array().expect("a list");
    let took = |session: &&Value| session["received"].as_u64() > Some(5000);
    let session = (sessions.iter().find(took)).unwrap_or_else(|| panic!("{sessions:?}"));
    assert!(session["sent"].as_u64() > Some(100), "{session}");
    assert_eq!(session["mode"], "startup", "{session}");
}
