//! Kinds of carriers of flows, under unmodified programs.

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{
    Download, Held, PORT, World, bad_link, payload, process_of_carriers, until, url, words,
};

const MB: usize = 1 << 20;
/// IP protocol.
const UDP: u8 = 17;

#[track_caller]
fn finish(mut download: Download) {
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
}

impl World {
    /// Begins a large download.
    fn start_big(&self, carrier: &str, server: IpAddr, megabytes: usize) -> Download {
        self.serve("big", megabytes * MB);
        let mut download = self.start_over(carrier, server, "big");
        download.reaches(100_000);
        download
    }
}

#[test]
fn quic__every_byte_over_a_bad_link() {
    every_byte_over_a_bad_link("quic");
}

#[test]
fn sctp__every_byte_over_a_bad_link() {
    every_byte_over_a_bad_link("sctp");
}

#[test]
fn kcp__every_byte_over_a_bad_link() {
    every_byte_over_a_bad_link("kcp");
}

#[test]
fn graft__every_byte_over_a_bad_link() {
    every_byte_over_a_bad_link("graft");
}

/// Counts what carriers carry, those included that another one has replaced.
#[derive(Default)]
struct Carried {
    last: u64,
    total: u64,
}

impl Carried {
    fn count(&mut self, now: u64) {
        self.total += now.checked_sub(self.last).unwrap_or(now);
        self.last = now;
    }
}

fn every_byte_over_a_bad_link(carrier: &str) {
    let Some(world) = World::new(&format!("{carrier}-bad"), &Link::new(10.0, 100.0)) else {
        return;
    };
    world.meet_by(&["--carrier", carrier]);
    world.testbed.set(&bad_link()).expect("set");
    // KCP takes such losses for congestion.
    let big = if carrier == "kcp" { MB } else { 8 * MB };
    let sizes = [0, 1, MB, big];
    for size in sizes {
        world.serve(&format!("f{size}"), size);
    }
    let sent = payload(big / 2, 7);
    // KCP may be silent for so long on such a link that its flows go by TCP until another one is there.
    let share = if carrier == "kcp" { 2 } else { 1 };
    for (i, server) in world.servers().into_iter().enumerate() {
        let mut down = Carried::default();
        let carried = |figure: &str| {
            let all = world.carriers(Host::Client);
            let of_it = all.iter().filter(|t| t["peer"] == server.to_string());
            of_it.filter_map(|t| t[figure].as_u64()).sum::<u64>()
        };
        for size in sizes {
            finish(world.start_over(carrier, server, &format!("f{size}")));
            down.count(carried("bytes_received"));
        }
        world.upload_run(&["--carrier", carrier], server, &format!("up{i}"), &sent);
        let up = carried("bytes_sent");
        // One carrier a family took it, and nothing went around them.
        let [min_down, min_up] = [sizes.iter().sum::<usize>(), sent.len()];
        assert!(down.total >= (min_down / share) as u64, "{}", down.total);
        assert!(up >= (min_up / share) as u64, "{up}");
    }
    until("a carrier a family", || {
        world.carriers(Host::Client).len() == 2
    });
    let carriers = world.carriers(Host::Client);
    // KCP does not say.
    assert!(
        carrier == "kcp" || world.carried("lost") > 0,
        "{carriers:?}"
    );
    until("no flow is left", || {
        [Host::Client, Host::Server]
            .iter()
            .all(|host| world.carriers(*host).iter().all(|t| t["flows"] == 0))
    });
}

#[test]
fn quic__a_stalled_flow_holds_up_nobody() {
    a_stalled_flow_holds_up_nobody("quic");
}

#[test]
fn sctp__a_stalled_flow_holds_up_nobody() {
    a_stalled_flow_holds_up_nobody("sctp");
}

#[test]
fn kcp__a_stalled_flow_holds_up_nobody() {
    a_stalled_flow_holds_up_nobody("kcp");
}

#[test]
fn graft__a_stalled_flow_holds_up_nobody() {
    a_stalled_flow_holds_up_nobody("graft");
}

fn a_stalled_flow_holds_up_nobody(carrier: &str) {
    let Some(world) = World::new(&format!("{carrier}-stall"), &Link::new(5.0, 100.0)) else {
        return;
    };
    world.meet_by(&["--carrier", carrier]);
    world.serve("f", MB / 2);
    let server = world.servers()[0];
    let mut stalled = world.start_big(carrier, server, 32);
    stalled.process.signal(Signal::SIGSTOP);
    let taken = || world.carried("bytes_received");
    // Until nothing moves any more: it fills what may be held for it.
    let mut before = 0;
    until("the stopped flow stops its sender", || {
        std::thread::sleep(Duration::from_millis(500));
        std::mem::replace(&mut before, taken()) == taken()
    });
    let downloads: Vec<_> = (0..10)
        .map(|_| world.start_over(carrier, server, "f"))
        .collect();
    downloads.into_iter().for_each(finish);
    assert_eq!(world.carriers(Host::Client).len(), 2);
    assert!(stalled.process.ended().is_none());
    stalled.process.signal(Signal::SIGCONT);
    finish(stalled);
}

#[test]
fn quic__where_udp_is_dropped_tcp_carries() {
    where_udp_is_dropped_tcp_carries("quic");
}

#[test]
fn sctp__where_udp_is_dropped_tcp_carries() {
    where_udp_is_dropped_tcp_carries("sctp");
}

#[test]
fn kcp__where_udp_is_dropped_tcp_carries() {
    where_udp_is_dropped_tcp_carries("kcp");
}

fn where_udp_is_dropped_tcp_carries(carrier: &str) {
    let Some(world) = World::new(&format!("{carrier}-blocked"), &Link::new(5.0, 100.0)) else {
        return;
    };
    world.block(Some(UDP));
    world.serve("f", MB);
    for server in world.servers() {
        // The first one waits for UDP in vain, the second does not, nor those at the same time.
        let both = [(); 2].map(|()| world.start_over(carrier, server, "f"));
        both.into_iter().for_each(finish);
        finish(world.start_over(carrier, server, "f"));
    }
    assert_eq!(world.carriers(Host::Client), Vec::<Value>::new());
}

#[test]
fn quic__dies_with_either_daemon() {
    dies_with_either_daemon("quic");
}

#[test]
fn sctp__dies_with_either_daemon() {
    dies_with_either_daemon("sctp");
}

#[test]
fn kcp__dies_with_either_daemon() {
    dies_with_either_daemon("kcp");
}

#[test]
fn graft__dies_with_either_daemon() {
    dies_with_either_daemon("graft");
}

fn dies_with_either_daemon(carrier: &str) {
    let Some(mut world) = World::new(&format!("{carrier}-kill"), &Link::new(5.0, 20.0)) else {
        return;
    };
    world.serve("f", MB / 4);
    let server = world.servers()[0];
    for victim in [Host::Server, Host::Client] {
        world.meet_by(&["--carrier", carrier]);
        let mut download = world.start_big(carrier, server, 8);
        let daemon = world.take_daemon(victim);
        let held = Held::by(daemon.pid());
        daemon.kill();
        download.broke();
        held.assert_gone();
        let other = match victim {
            Host::Server => Host::Client,
            _ => Host::Server,
        };
        until("the carriers' end", || world.carriers(other).is_empty());
        if victim == Host::Server {
            // Plain TCP at once.
            finish(world.start_over(carrier, server, "f"));
        }
        world.start(victim, &[]);
        if victim == Host::Server {
            world.hook();
            until("it is used again", || {
                let before = world.carried("bytes_received");
                finish(world.start_over(carrier, server, "f"));
                world.carried("bytes_received") >= before + MB as u64 / 4
            });
        }
    }
    world.meet_by(&["--carrier", carrier]);
    // In order: the same, and nothing is left.
    let mut download = world.start_big(carrier, server, 8);
    world.stop_daemons();
    download.broke();
}

#[test]
fn quic__goes_on_behind_its_process() {
    goes_on_behind_its_process("quic");
}

#[test]
fn sctp__goes_on_behind_its_process() {
    goes_on_behind_its_process("sctp");
}

#[test]
fn kcp__goes_on_behind_its_process() {
    goes_on_behind_its_process("kcp");
}

/// What parses the peer's packets has no privileges, and costs no flow where it dies or hangs.
fn goes_on_behind_its_process(carrier: &str) {
    let Some(mut world) = World::new(&format!("{carrier}-process"), &Link::new(5.0, 10.0)) else {
        return;
    };
    world.meet_by(&["--carrier", carrier]);
    let server = world.servers()[0];
    let download = world.start_big(carrier, server, 24);
    for (host, signal) in [
        (Host::Server, Signal::SIGKILL),
        (Host::Client, Signal::SIGSTOP),
    ] {
        let daemon = world.daemon(host).pid();
        let pid = process_of_carriers(daemon, carrier).expect("it runs");
        confined(pid);
        kill(Pid::from_raw(pid as i32), signal).expect("it lives");
        until("another carrier, by another process", || {
            process_of_carriers(daemon, carrier).is_some_and(|other| other != pid)
                && world.carried("bytes_received") > 100_000
        });
    }
    finish(download);
    let daemon = world.take_daemon(Host::Client);
    let pid = process_of_carriers(daemon.pid(), carrier).expect("it runs");
    daemon.kill();
    until("it ends with its daemon", || {
        !fs::exists(format!("/proc/{pid}")).expect("looked up")
    });
}

/// A process has no privileges, and no descriptors that it does not need.
fn confined(pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let none = "0000000000000000";
    for (what, value) in [
        ("CapInh", none),
        ("CapPrm", none),
        ("CapEff", none),
        ("CapAmb", none),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let line = format!("\n{what}:\t{value}\n");
        assert!(status.contains(&line), "{what}: {status}");
    }
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs") {
        let path = entry.expect("an entry").path();
        let Ok(file) = fs::read_link(&path) else {
            continue; // closed meanwhile
        };
        let file = file.to_string_lossy().into_owned();
        let number = path.file_name().and_then(|name| name.to_str());
        let is_output = matches!(number, Some("1" | "2"));
        let good = ["socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]"];
        assert!(
            is_output || good.iter().any(|g| file.starts_with(g)),
            "{file}"
        );
    }
}

#[test]
fn quic__strangers_harm_nothing() {
    strangers_harm_nothing("quic");
}

#[test]
fn sctp__strangers_harm_nothing() {
    strangers_harm_nothing("sctp");
}

#[test]
fn kcp__strangers_harm_nothing() {
    strangers_harm_nothing("kcp");
}

fn strangers_harm_nothing(carrier: &str) {
    let Some(world) = World::new(&format!("{carrier}-hostile"), &Link::new(5.0, 100.0)) else {
        return;
    };
    world.meet_by(&["--carrier", carrier]);
    let server = world.servers()[0];
    let download = world.start_big(carrier, server, 8);
    let port = udp_port(&world);
    let space = &world.testbed;
    // What is neither QUIC nor SCTP nor KCP, what looks like QUIC, and discovery connections that ask for nonsense.
    let noise = move || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        for seed in 0..2_000 {
            let mut packet = payload(1 + seed as usize % 1_400, seed);
            if seed % 2 == 0 {
                // A long header of version 1.
                packet.splice(0..0, [0xc3, 0, 0, 0, 1, 8]);
                packet.resize(1_200, 0);
            }
            let _ = socket.send_to(&packet, (server, port));
        }
    };
    space.in_netns(Host::Client, noise).expect("a namespace");
    finish(download);
    assert_eq!(world.carriers(Host::Server).len(), 2);
    let plain = move || {
        let mut stream = TcpStream::connect(SocketAddr::new(server, PORT)).expect("a server");
        stream
            .write_all(b"GET /meet HTTP/1.0\r\n\r\n")
            .expect("sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        answer
    };
    let answer = space.in_netns(Host::Client, plain).expect("a namespace");
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
}

#[test]
fn sctp__takes_thousands_of_flows() {
    const FLOWS: u64 = 4000;
    let Some(world) = World::new("sctp-many", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.meet_by(&["--carrier", "sctp"]);
    world.serve("f", 1000);
    let many = format!("{}?[1-{FLOWS}]", url(world.servers()[0], "f"));
    let curl = ["run", "--carrier", "sctp", "--", "curl", "-sS", "--fail"];
    let parallel = ["--parallel", "--parallel-max", "100", "-o", "/dev/null"];
    let before = world.carried("bytes_received");
    let output = world
        .vtl(Host::Client, &[&curl[..], &parallel[..]].concat())
        .args(["-H", "Connection: close", &many])
        .output()
        .expect("curl runs");
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(world.carriers(Host::Client).len(), 2);
    let carried = world.carried("bytes_received") - before;
    // Some are over on their own connections before they can go by another.
    assert!(carried > FLOWS / 2 * 1000, "{carried}");
    until("no flow is left", || {
        [Host::Client, Host::Server]
            .iter()
            .all(|host| world.carriers(*host).iter().all(|t| t["flows"] == 0))
    });
}

/// `ip` and `tc` on a host, by words.
fn run_on(world: &World, host: Host, line: &str) {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let mut command = world.testbed.command(host, program).expect("a namespace");
    let output = command.args(words).output().expect("it runs");
    assert!(output.status.success(), "{line}: {output:?}");
}

/// A second path between the hosts, at 40 Mbit/s, that MPTCP may use.
fn second_path(world: &World) {
    let server = format!("{}-{}", world.testbed.name(), Host::Server.name());
    run_on(
        world,
        Host::Client,
        &format!("ip link add second type veth peer name second netns {server}"),
    );
    for (host, address) in [(Host::Client, "10.99.1.1"), (Host::Server, "10.99.1.2")] {
        for line in [
            "ip link set second up",
            &format!("ip address add {address}/24 dev second"),
            "ip mptcp limits set subflows 2 add_addr_accepted 2",
            "tc qdisc add dev second root tbf rate 40mbit burst 32k latency 50ms",
        ] {
            run_on(world, host, line);
        }
    }
    let signal = "ip mptcp endpoint add 10.99.1.2 dev second signal";
    run_on(world, Host::Server, signal);
}

/// Bytes that the client got by the second path.
fn by_second_path(world: &World) -> u64 {
    let mut ip = world
        .testbed
        .command(Host::Client, "ip")
        .expect("a namespace");
    let ip = ip.args(["-s", "-j", "link", "show", "dev", "second"]);
    let output = ip.output().expect("ip runs");
    let all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    all[0]["stats64"]["rx"]["bytes"].as_u64().expect("a number")
}

#[test]
fn mptcp__carries_over_two_paths() {
    if !std::path::Path::new("/proc/sys/net/mptcp").exists() {
        vtl_testing::skip("this kernel has no MPTCP");
        return;
    }
    let Some(mut world) = World::new("mptcp", &Link::new(5.0, 40.0)) else {
        return;
    };
    second_path(&world);
    world.meet_by(&["--carrier", "mptcp"]);
    let [server, server6] = world.servers();
    world.serve("f", MB);
    // One path goes in mid-flow: the other carries on, or the flow's own connection where MPTCP takes more than a
    // second to find out.
    let mut download = world.start_big("mptcp", server, 12);
    until("the second path is used", || {
        assert!(download.process.ended().is_none(), "too early");
        by_second_path(&world) > MB as u64
    });
    run_on(&world, Host::Client, "ip link set second down");
    finish(download);
    finish(world.start_over("mptcp", server6, "f"));
    assert!(world.carried("bytes_received") > MB as u64);
    // Refused as over TCP; and a reset is no end.
    let mut curl = world.vtl(Host::Client, &["run", "--carrier", "mptcp", "--", "curl"]);
    let closed = format!("http://{server}:81/");
    let status = curl.args(["-sS", &closed]).status().expect("curl runs");
    assert_eq!(status.code(), Some(7), "it could not connect");
    let mut download = world.start_big("mptcp", server, 12);
    world.take_daemon(Host::Server).kill();
    download.broke();
    until("the carriers' end", || {
        world.carriers(Host::Client).is_empty()
    });
    finish(world.start_over("mptcp", server, "f"));
}

/// Where the server's daemon waits for carriers in UDP.
pub(crate) fn udp_port(world: &World) -> u16 {
    let mut ss = world
        .testbed
        .command(Host::Server, "ss")
        .expect("a namespace");
    let output = ss.args(["-Hulnp"]).output().expect("ss runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("vtld"));
    let port = line.and_then(|line| line.split_whitespace().nth(3)?.rsplit(':').next());
    let port = port.and_then(|port| port.parse().ok());
    port.unwrap_or_else(|| panic!("no UDP port: {text}"))
}
