//! Paths that do not take IP protocol 253: UDP instead, through NATs too; and neither.

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use serde_json::Value;
use vtl::{Mode, Socket};
use vtl_control::{CarrierSpec, HookTarget, Request};
use vtl_testbed::{Host, Link};

use crate::harness::{
    PATIENCE, Process, World, bad_link, payload, refused, run, same, until, url, vtl, vtld, words,
};

const SIZE: usize = 1 << 20;
const VTL_PROTOCOL: u8 = 253;

fn sessions(world: &World, host: Host) -> Vec<Value> {
    let status = world.status(host);
    status["sessions"].as_array().expect("a list").clone()
}

/// How each of a host's sessions goes.
fn ways(world: &World, host: Host) -> Vec<Value> {
    let sessions = sessions(world, host);
    sessions.iter().map(|s| s["way"].clone()).collect()
}

#[test]
fn ways__udp_where_the_protocol_is_blocked() {
    let Some(mut world) = World::bare("ways", &Link::new(20.0, 30.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    world.serve("meet", 1);
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 9)).expect("written");
    for (driver, ingress) in [("live", "tcx"), ("tc", "xdp")] {
        world.start_both(&["--driver", driver, "--ingress", ingress]);
        let blocked = |link| Link {
            rate_mbit: 20.0,
            rtt_ms: 30.0,
            blocked: Some(VTL_PROTOCOL),
            ..link
        };
        for (i, server) in world.servers().into_iter().enumerate() {
            // As in `World::spoil`: what loses SYNs is not the matter.
            world.testbed.set(&blocked(Link::default())).expect("set");
            world.download(server, "meet");
            until("a carrier", || world.carriers(Host::Client).len() > i);
            world.testbed.set(&blocked(bad_link())).expect("set");
            world.download(server, "f");
            let carried = world.sum(Host::Client, "bytes_received");
            assert!(carried >= (SIZE * (i + 1)) as u64, "{driver}: not carried");
            for host in [Host::Client, Host::Server] {
                let ways = ways(&world, host);
                assert!(
                    ways.len() > i && ways.iter().all(|way| way == "udp"),
                    "{driver}"
                );
            }
            // What loses NEGO, so that a session goes by TCP at first, is not the matter either.
            world.testbed.set(&blocked(Link::default())).expect("set");
            for contact in 0..2 {
                let got = world.path("got");
                let recv = world.start_recv(&got, &["--force"]);
                let sent = world.start_send_early(&file, &server.to_string()).output();
                assert!(sent.status.success(), "{}", words(&sent));
                assert!(recv.output().status.success());
                same(&file, &got);
                // Data went ahead of the answer: by the way that was remembered.
                let status = world.status(Host::Server);
                let early = status["negotiation"]["early"].as_u64().expect("a number");
                assert_eq!(early, (i + contact) as u64, "{driver}");
            }
        }
        world.stop_daemons();
    }
}

/// The client's rules as a NAT that takes no protocol 253.
const NAT: &str = "table inet nat {
    chain forward {
        type filter hook forward priority 0;
        meta l4proto 253 drop
    }
    chain out {
        type nat hook postrouting priority 100;
        meta l4proto udp masquerade to :41000-41999
        masquerade
    }
}";

/// A host behind the client, which is a router for it. Gone when dropped.
struct Inside<'a> {
    world: &'a World,
    name: String,
    daemon: Option<Process>,
}

impl<'a> Inside<'a> {
    fn new(world: &'a World) -> Self {
        let inside = Self {
            world,
            name: format!("{}-inside", world.testbed.name()),
            daemon: None,
        };
        // A run that was killed could not take its own away.
        inside.remove();
        run(Command::new("ip").args(["netns", "add", &inside.name]));
        let (name, client) = (&*inside.name, world.testbed.netns_path(Host::Client));
        let client = client.file_name().and_then(|n| n.to_str()).expect("UTF-8");
        for line in [
            format!("-n {client} link add inside type veth peer name out netns {name}"),
            format!("-n {client} addr add 10.99.0.1/24 dev inside"),
            format!("-n {client} addr add fd99::1/64 dev inside nodad"),
            format!("-n {client} link set inside up"),
            format!("-n {name} addr add 10.99.0.2/24 dev out"),
            format!("-n {name} addr add fd99::2/64 dev out nodad"),
            format!("-n {name} link set lo up"),
            format!("-n {name} link set out up"),
            format!("-n {name} route add default via 10.99.0.1"),
            format!("-n {name} route add default via fd99::1"),
        ] {
            run(Command::new("ip").args(line.split(' ')));
        }
        for (host, device) in [(client, "inside"), (name, "out")] {
            let command =
                format!("netns exec {host} ethtool -K {device} gro on tso off gso off tx off");
            run(Command::new("ip").args(command.split(' ')));
        }
        let forward = || {
            for (key, value) in [("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")] {
                fs::write(format!("/proc/sys/net/{key}"), value).expect("a sysctl");
            }
        };
        world
            .testbed
            .in_netns(Host::Client, forward)
            .expect("there");
        inside
    }

    fn remove(&self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }

    /// The client is a NAT for it.
    fn behind_nat(world: &'a World) -> Self {
        world.filter(Host::Client, NAT);
        let inside = Self::new(world);
        let forgetful = || {
            // So soon it forgets who had which port.
            for key in ["udp_timeout", "udp_timeout_stream"] {
                let path = format!("/proc/sys/net/netfilter/nf_conntrack_{key}");
                fs::write(path, "2").expect("a sysctl");
            }
        };
        let done = world.testbed.in_netns(Host::Client, forgetful);
        done.expect("there");
        inside
    }

    /// The server knows the way to it.
    fn routed(world: &'a World) -> Self {
        let inside = Self::new(world);
        let server = world.testbed.netns_path(Host::Server);
        let server = server.file_name().and_then(|n| n.to_str()).expect("UTF-8");
        let client = Host::Client;
        for line in [
            format!(
                "-n {server} route replace 10.99.0.0/24 via {}",
                world.testbed.addr4(client)
            ),
            format!(
                "-n {server} route replace fd99::/64 via {}",
                world.testbed.addr6(client)
            ),
        ] {
            run(Command::new("ip").args(line.split(' ')));
        }
        inside
    }

    fn stop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.signal(nix::sys::signal::Signal::SIGTERM);
            assert!(daemon.wait().success());
        }
    }

    fn socket(&self) -> PathBuf {
        self.world.path("inside.sock")
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", self.name))
            .arg(program)
            .env("VTL_SOCKET", self.socket())
            .env("VTL_STATE", self.world.path("inside-state"))
            .env("VTL_PEERS", self.world.path("peers.toml"))
            .env("VTL_LOG", "vtld=debug,info");
        command
    }

    fn start(&mut self, args: &[&str]) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.world.path("curl.log"));
        let mut command = self.command(&vtld());
        command.args(args).stderr(log.expect("a log"));
        self.daemon = Some(Process::start(&mut command));
        until("the daemon answers", || self.status().is_some());
    }

    fn status(&self) -> Option<Value> {
        let output = self.command(&vtl()).args(["status", "--json"]).output();
        serde_json::from_slice(&output.ok()?.stdout).ok()
    }

    /// The carriers to an address.
    fn carriers(&self, server: IpAddr) -> Vec<Value> {
        let status = self.status().expect("a status");
        let mut rows = status["carriers"].as_array().expect("a list").clone();
        rows.retain(|row| row["peer"] == server.to_string());
        rows
    }

    fn download(&self, server: IpAddr, name: &str) {
        let to = self.world.path("got-inside");
        let mut curl = self.command(&vtl());
        curl.args(["run", "--", "curl", "--noproxy", "*", "-sS", "--fail", "-o"])
            .arg(&to)
            .arg(url(server, name));
        run(&mut curl);
        same(&self.world.path("www").join(name), &to);
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.signal(nix::sys::signal::Signal::SIGTERM);
            daemon.wait();
        }
        self.remove();
    }
}

/// A session that says nothing until the NAT gives it another port goes on.
#[track_caller]
fn forgotten(world: &World, inside: &Inside<'_>) {
    let at = SocketAddr::new(world.servers()[0], 7300);
    let socket = |mode, daemon: &Path| {
        let mut socket = Socket::init(mode, at, daemon).expect("a socket");
        socket.set_timeout(Some(PATIENCE));
        socket
    };
    let mut server = socket(Mode::Responder, &world.socket(Host::Server));
    let mut client = socket(Mode::Initiator, &inside.socket());
    client.negotiate_over("stream", &[]).expect("a session");
    server.validate().expect("a session");
    let port = || {
        let all = sessions(world, Host::Server);
        let ours = all.iter().find(|s| s["port"] == 7300).expect("there");
        ours["udp_port"].clone()
    };
    let mut ports = Vec::new();
    // It may be given the same one by chance.
    for _ in 0..3 {
        let mut buffer = [0; 100];
        client.send_message(b"are you there?").expect("sent");
        server.recv_message(&mut buffer).expect("it has come");
        server.send_message(b"yes").expect("sent");
        assert_eq!(client.recv_message(&mut buffer).expect("its answer"), 3);
        ports.push(port());
        if ports.iter().any(|other| *other != ports[0]) {
            break;
        }
        thread::sleep(Duration::from_secs(4));
    }
    assert!(ports.iter().any(|other| *other != ports[0]), "{ports:?}");
    client.close().expect("closed");
}

#[test]
fn ways__through_a_nat() {
    let Some(mut world) = World::bare("ways-nat", &Link::new(20.0, 20.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    world.start(Host::Server, &[]);
    world.hook();
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 9)).expect("written");
    let mut inside = Inside::behind_nat(&world);
    for driver in ["live", "tc"] {
        inside.start(&["--driver", driver]);
        for server in world.servers() {
            inside.download(server, "f");
            until("a carrier", || !inside.carriers(server).is_empty());
            inside.download(server, "f");
            let carried = inside.carriers(server)[0]["bytes_received"].as_u64();
            assert!(carried >= Some(SIZE as u64), "{carried:?}");
            let got = world.path("got");
            let recv = world.start_recv(&got, &["--force"]);
            let to = server.to_string();
            let mut send = inside.command(&vtl());
            let output = send.arg("send").arg(&file).arg(&to).output();
            let output = output.expect("vtl runs");
            assert!(output.status.success(), "{}", words(&output));
            assert!(recv.output().status.success());
            same(&file, &got);
        }
        // The server sees the NAT's address and port.
        for session in sessions(&world, Host::Server) {
            let port = session["udp_port"].as_u64().expect("a number");
            assert!((41_000..42_000).contains(&port), "{session}");
        }
        if driver == "tc" {
            forgotten(&world, &inside);
        }
        inside.stop();
        until("the sessions' end", || {
            sessions(&world, Host::Server).is_empty()
        });
    }
}

/// Of a router that runs VTL itself: what it does not forward of others' sessions does not arrive. It
/// serves a port that is the server's, too, at whatever address.
#[test]
fn ways__through_a_router_that_runs_vtl() {
    for ingress in ["tcx", "xdp"] {
        let Some(mut world) = World::bare("ways-router", &Link::new(20.0, 20.0)) else {
            return;
        };
        world.start_web();
        world.serve("f", SIZE);
        let listen = || TcpListener::bind("[::]:80").expect("a port");
        let _listener = world.testbed.in_netns(Host::Client, listen).expect("there");
        world.start_both(&["--ingress", ingress]);
        let request = Request::HookAdd {
            target: HookTarget::Port(80),
            carrier: CarrierSpec::default(),
        };
        world.call(Host::Client, &request);
        let mut inside = Inside::routed(&world);
        for way in ["native", "udp"] {
            if way == "udp" {
                let rules = "table inet router {
                    chain forward {
                        type filter hook forward priority 0;
                        meta l4proto 253 drop
                    }
                }";
                world.filter(Host::Client, rules);
            }
            inside.start(&[]);
            for server in world.servers() {
                println!("{ingress}, {way}, {server}");
                inside.download(server, "f");
                until("a carrier", || !inside.carriers(server).is_empty());
                inside.download(server, "f");
                let carried = inside.carriers(server)[0]["bytes_received"].as_u64();
                assert!(carried >= Some(SIZE as u64), "{carried:?}");
                let status = inside.status().expect("a status");
                let sessions = status["sessions"].as_array().expect("a list");
                let mut ours = sessions.iter().filter(|s| s["peer"] == server.to_string());
                assert!(ours.all(|s| s["way"] == way), "{sessions:?}");
            }
            inside.stop();
        }
        // None of it was the router's.
        let status = world.status(Host::Client);
        assert!(status["packets"]["others"].as_u64() > Some(100), "{status}");
        assert_eq!(status["sessions"].as_array().map(Vec::len), Some(0));
    }
}

#[test]
fn ways__tcp_where_none_leads_there() {
    let Some(mut world) = World::bare("ways-none", &Link::new(20.0, 20.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    world.start_both(&[]);
    let rules = "table inet none {
        chain out {
            type filter hook output priority 0;
            meta l4proto 253 drop
            udp dport 22100 drop
            tcp dport 22100 drop
        }
    }";
    world.filter(Host::Client, rules);
    let file = world.path("file");
    fs::write(&file, payload(1, 9)).expect("written");
    let server = world.servers()[0].to_string();
    let in_vain = world.start_send(&file, &server);
    for server in world.servers() {
        for _ in 0..2 {
            world.download(server, "f");
            assert_eq!(world.sum(Host::Client, "bytes_received"), 0);
        }
    }
    refused(&in_vain.output(), 1, "port 22100");
    // Once there is a way again, aware applications find it at once.
    let mut nft = world.testbed.command(Host::Client, "nft").expect("there");
    run(nft.args(["delete", "table", "inet", "none"]));
    let got = world.path("got");
    let recv = world.start_recv(&got, &["--force"]);
    let sent = world.start_send(&file, &server).output();
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output().status.success());
    same(&file, &got);
    let server = world.servers()[0];
    world.meet();
    world.download(server, "f");
    assert!(world.sum(Host::Client, "bytes_received") >= SIZE as u64);
    let status = world.call(Host::Client, &Request::Status { from: 0 });
    // UDP goes off 50 ms behind the native way, and may win on a busy machine.
    let way = &status["sessions"][0]["way"];
    assert!(way == "native" || way == "udp", "{way}");
}

/// Data go ahead of the answer by the way that led there the last time.
#[test]
fn ways__one_that_is_closed_meanwhile() {
    let Some(world) = World::with_daemons("ways-closed", &Link::new(20.0, 30.0)) else {
        return;
    };
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 9)).expect("written");
    let got = world.path("got");
    let early = || {
        let status = world.status(Host::Server);
        status["negotiation"]["early"].as_u64().expect("a number")
    };
    for server in world.servers() {
        // Native, then by UDP after all, then by UDP from the start.
        for blocked in [None, Some(VTL_PROTOCOL), Some(VTL_PROTOCOL)] {
            let before = early();
            world.block(blocked);
            let recv = world.start_recv(&got, &["--force"]);
            let sent = world.start_send_early(&file, &server.to_string()).output();
            assert!(sent.status.success(), "{}", words(&sent));
            assert!(recv.output().status.success());
            same(&file, &got);
            assert_eq!(early() - before, u64::from(blocked.is_some()));
        }
    }
    let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
    assert!(
        !log.contains("aborted before the peer confirmed it"),
        "{log}"
    );
}

/// A host's packet filter, and the hook there. What is dropped as it leaves is unsent for the host's own TCP.
type Hook = (Host, &'static str);
const CLIENT_OUT: Hook = (Host::Client, "postrouting");
const SERVER_OUT: Hook = (Host::Server, "postrouting");
const SERVER_IN: Hook = (Host::Server, "prerouting");

/// Networks that do not like the TCP option of discovery, or not much of UDP: where it meets what, and
/// the rules of the packet filter for it.
const MEDDLERS: [(&str, Hook, &str); 10] = [
    (
        "SYNs lose it",
        CLIENT_OUT,
        "tcp flags syn reset tcp option 253",
    ),
    (
        "answers lose it",
        SERVER_OUT,
        "tcp flags syn reset tcp option 253",
    ),
    (
        "SYNs with it are dropped",
        CLIENT_OUT,
        "tcp flags syn tcp option 253 exists drop",
    ),
    (
        "answers with it are dropped",
        SERVER_OUT,
        "tcp flags syn tcp option 253 exists drop",
    ),
    (
        "acknowledgements lose it",
        CLIENT_OUT,
        "tcp flags & syn == 0 reset tcp option 253",
    ),
    (
        "acknowledgements lose it, and VTL is for nobody",
        CLIENT_OUT,
        "tcp flags & syn == 0 reset tcp option 253; meta l4proto { 253, udp } drop",
    ),
    (
        "acknowledgements with it are dropped",
        CLIENT_OUT,
        "tcp flags & syn == 0 tcp option 253 exists drop",
    ),
    (
        "acknowledgements with it are dropped elsewhere",
        SERVER_IN,
        "tcp flags & syn == 0 tcp option 253 exists drop",
    ),
    (
        "it is mangled",
        CLIENT_OUT,
        "tcp option 253 exists tcp option @253,16,16 set 0xffff",
    ),
    (
        "UDP is for few and VTL for nobody",
        CLIENT_OUT,
        "meta l4proto 253 drop; meta l4proto udp limit rate over 20/second burst 20 packets drop",
    ),
];

#[test]
fn ways__middleboxes_that_meddle_with_handshakes() {
    meddle("meddlers-syn", &MEDDLERS[..4]);
}

#[test]
fn ways__middleboxes_that_meddle_behind_handshakes() {
    meddle("meddlers", &MEDDLERS[4..]);
}

fn meddle(name: &str, meddlers: &[(&str, Hook, &str)]) {
    let Some(mut world) = World::bare(name, &Link::new(20.0, 30.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    for (i, &(what, (host, hook), rule)) in meddlers.iter().enumerate() {
        // A kind of network has either family.
        let server = world.servers()[i % 2];
        let rules = rule.split("; ").collect::<Vec<_>>().join("\n");
        let rules = format!(
            "table inet meddler {{
                chain meddle {{
                    type filter hook {hook} priority 0;
                    {rules}
                }}
            }}"
        );
        world.filter(host, &rules);
        world.start_both(&[]);
        for carrier in ["graft:stream", "quic", "graft:stream"] {
            println!("{what}: {server}, {carrier}");
            let mut download = world.start_over(carrier, server, "f");
            assert!(download.process.wait().success());
            download.check();
        }
        world.stop_daemons();
        let mut nft = world.testbed.command(host, "nft").expect("a namespace");
        run(nft.args(["delete", "table", "inet", "meddler"]));
    }
}
