//! Paths that take nothing of aware applications' but TCP, from the beginning and from some moment on.

use std::{
    fs,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use vtl::{Mode, Socket};
use vtl_testbed::{Host, Link};

use crate::harness::{PATIENCE, World, payload, run, same, until, words};

const SIZE: usize = 2 << 20;
const PORT: u16 = 7300;

impl World {
    /// No packet of VTL's passes but by TCP. (The packet filter does not see what the kernel's programs
    /// send natively; the link drops that.)
    fn leave_tcp_only(&self) {
        self.block(Some(253));
        for host in [Host::Client, Host::Server] {
            self.filter(
                host,
                "table inet no-udp {
                    chain out {
                        type filter hook output priority 0;
                        udp dport 22100 drop
                    }
                }",
            );
        }
    }

    fn let_udp_through(&self) {
        for host in [Host::Client, Host::Server] {
            let mut nft = self.testbed.command(host, "nft").expect("there");
            run(nft.args(["delete", "table", "inet", "no-udp"]));
        }
    }

    /// How the sessions of both hosts go, each way once.
    fn all_ways(&self) -> Vec<String> {
        let mut ways = Vec::new();
        for host in [Host::Client, Host::Server] {
            let status = self.status(host);
            for session in status["sessions"].as_array().expect("a list") {
                ways.push(session["way"].as_str().expect("a word").to_owned());
            }
        }
        ways.sort();
        ways.dedup();
        ways
    }

    #[track_caller]
    fn go_by(&self, way: &str) {
        until(&format!("sessions by {way}"), || self.all_ways() == [way]);
    }

    /// A session between two sockets.
    fn joined(&self, graft: &str, server: usize) -> [Socket; 2] {
        let at = SocketAddr::new(self.servers()[server], PORT);
        let mut responder = self.aware_at(at, Mode::Responder, Host::Server);
        let mut initiator = self.aware_at(at, Mode::Initiator, Host::Client);
        initiator.negotiate_over(graft, &[]).expect("a session");
        responder.validate().expect("a session");
        [initiator, responder]
    }
}

/// One message.
fn exchange(from: &mut Socket, to: &mut Socket, seed: u64) {
    let message = payload(5000, seed);
    from.send_message(&message).expect("sent");
    let mut buffer = vec![0; message.len()];
    let received = to.recv_message(&mut buffer).expect("received");
    assert!(buffer[..received] == message, "message {seed}");
}

/// Sends back what comes, until the session ends.
fn echo(mut socket: Socket) {
    socket.set_timeout(None);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(size @ 1..) = socket.recv_message(&mut buffer) {
        if socket.send_message(&buffer[..size]).is_err() {
            return;
        }
    }
}

#[test]
fn tunnel__opens_where_nothing_else_passes() {
    let Some(world) = World::with_daemons("tunnel", &Link::new(20.0, 30.0)) else {
        return;
    };
    world.leave_tcp_only();
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 9)).expect("written");
    for (i, server) in world.servers().into_iter().enumerate() {
        for again in 0..2 {
            let got = world.path(&format!("got{i}-{again}"));
            let recv = world.start_recv(&got, &[]);
            let mut send = world.start_send(&file, &server.to_string());
            until("the transfer is under way", || {
                assert!(send.ended().is_none(), "vtl send has ended");
                world.sum(Host::Server, "received") > 100
            });
            assert_eq!(world.all_ways(), ["tcp"]);
            let sent = send.output();
            assert!(sent.status.success(), "{}", words(&sent));
            assert!(recv.output().status.success());
            same(&file, &got);
        }
    }
}

/// Loses nothing, doubles nothing, and goes on within seconds, whatever passes.
#[test]
fn tunnel__carries_on_in_mid_flow() {
    let link = Link::new(20.0, 40.0);
    let Some(world) = World::with_daemons("tunnel-mid", &link) else {
        return;
    };
    for (i, graft) in ["stream", "selective-repeat"].into_iter().enumerate() {
        let [mut client, server] = world.joined(graft, i);
        let server = thread::spawn(move || echo(server));
        let mut number = 0;
        // Both directions are at work until that is so.
        let mut until_all_go_by = |way: &str| {
            let begun = Instant::now();
            let mut stall = Duration::ZERO;
            let mut arrived = false;
            while !arrived {
                assert!(begun.elapsed() < PATIENCE, "{graft}: not by {way}");
                arrived = world.all_ways() == [way];
                let size = if graft == "stream" { 50_000 } else { 1000 };
                let sent = Instant::now();
                for n in number..number + 4 {
                    client.send_message(&payload(size, n)).expect("sent");
                }
                let mut buffer = vec![0; size];
                for n in number..number + 4 {
                    assert_eq!(client.recv_message(&mut buffer).expect("received"), size);
                    assert!(buffer == payload(size, n), "{graft}: message {n}");
                }
                number += 4;
                stall = stall.max(sent.elapsed());
            }
            println!(
                "{graft}: by {way} after {:?}, stall {stall:?}",
                begun.elapsed()
            );
        };
        until_all_go_by("native");
        world.leave_tcp_only();
        until_all_go_by("tcp");
        world.let_udp_through();
        until_all_go_by("udp");
        world.leave_tcp_only();
        // Behind UDP, the filter does not see them.
        world.block(Some(17));
        until_all_go_by("tcp");
        world.let_udp_through();
        world.block(None);
        until_all_go_by("native");
        client.close().expect("closed");
        server.join().expect("the echo");
    }
}

/// What connects to the port and has nothing to do with VTL.
const STRANGERS: &str = r#"
import os, socket, struct, sys, time
held = []
for i in range(400):
    s = socket.create_connection((sys.argv[1], 22100), 5)
    s.setblocking(False)
    kind = i % 5
    size = 24 + i
    header = bytes([0x20 | i % 8]) + os.urandom(23)
    try:
        if kind == 0:
            s.send(os.urandom(4096))
        elif kind == 1:
            s.send(b"GET / HTTP/1.1\r\n\r\n")
        elif kind == 2:  # packets of no session
            for _ in range(200):
                s.send(struct.pack(">H", size) + header + os.urandom(size - 24))
        elif kind == 3:  # half of one
            s.send(struct.pack(">H", 2048) + header)
        else:  # another version's NEGO, whose answers nobody reads
            for _ in range(2000):
                s.send(struct.pack(">H", 160) + bytes([0x73]) + os.urandom(159))
    except (BlockingIOError, ConnectionError):
        pass
    held.append(s)
time.sleep(1)
open_still = 0
for s in held:
    try:
        while s.recv(65536):
            pass
    except BlockingIOError:
        open_still += 1
    except OSError:
        pass
print(open_still)
"#;

#[test]
fn tunnel__strangers_take_nothing_away() {
    let Some(world) = World::with_daemons("tunnel-hostile", &Link::new(10.0, 50.0)) else {
        return;
    };
    world.leave_tcp_only();
    let server = world.servers()[0].to_string();
    // The server is where they go, and where the session is opened from: nobody can take the
    // client's own connections.
    let at = SocketAddr::new(world.testbed.addr4(Host::Client).into(), PORT);
    let mut responder = world.aware_at(at, Mode::Responder, Host::Client);
    let mut initiator = world.aware_at(at, Mode::Initiator, Host::Server);
    initiator.negotiate_over("stream", &[]).expect("a session");
    responder.validate().expect("a session");
    let mut strangers = world
        .testbed
        .command(Host::Client, "python3")
        .expect("there");
    let strangers = thread::spawn(move || strangers.args(["-c", STRANGERS, &server]).output());
    let mut seed = 0;
    while !strangers.is_finished() || seed < 10 {
        exchange(&mut initiator, &mut responder, seed);
        exchange(&mut responder, &mut initiator, seed + 1);
        seed += 2;
    }
    let output = strangers.join().expect("it runs").expect("python runs");
    assert!(output.status.success(), "{}", words(&output));
    let held = String::from_utf8_lossy(&output.stdout);
    let held: u32 = held.trim().parse().expect("a number");
    assert!(held <= 16, "{held} connections of one address are held");
    assert_eq!(world.all_ways(), ["tcp"]);
    initiator.close().expect("closed");
}

/// Whoever has something to say, and whichever direction is blocked; and where nobody says anything.
#[test]
fn tunnel__takes_over_in_one_direction() {
    let Some(mut world) = World::with_daemons("tunnel-one", &Link::new(20.0, 40.0)) else {
        return;
    };
    let [mut client, mut server] = world.joined("stream", 0);
    exchange(&mut client, &mut server, 0);
    let mut seed = 1;
    for from in [Host::Client, Host::Server] {
        for by_client in [true, false] {
            world.leave_tcp_only();
            world
                .testbed
                .set(&Link {
                    blocked_from: Some(from),
                    ..world.testbed.link().expect("a link")
                })
                .expect("set");
            let (one, other) = if by_client {
                (&mut client, &mut server)
            } else {
                (&mut server, &mut client)
            };
            let begun = Instant::now();
            while world.all_ways() != ["tcp"] {
                assert!(
                    begun.elapsed() < PATIENCE,
                    "{from:?} is cut off, {by_client}"
                );
                exchange(one, other, seed);
                seed += 1;
            }
            println!(
                "{from:?} cut off, client sends {by_client}: {:?}",
                begun.elapsed()
            );
            world.block(None);
            world.let_udp_through();
            world.go_by("native");
            exchange(&mut client, &mut server, seed);
            exchange(&mut server, &mut client, seed + 1);
        }
    }
    // An idle one finds it out before anybody needs it.
    world.leave_tcp_only();
    world.go_by("tcp");
    exchange(&mut server, &mut client, 0);
    // And both daemons are idle.
    let daemons = [Host::Client, Host::Server].map(|host| world.daemon(host).pid());
    let before = daemons.map(processor_ticks);
    thread::sleep(Duration::from_secs(3));
    for (pid, before) in daemons.into_iter().zip(before) {
        let ticks = processor_ticks(pid) - before;
        assert!(
            ticks < 100,
            "a daemon took {ticks} of 300 ticks of the processor's"
        );
    }
    server.close().expect("closed");
}

/// Hundredths of a second that a process has run: proc(5), `utime` and `stime`.
fn processor_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let behind_name = stat.rsplit_once(") ").expect("a name").1;
    let fields: Vec<&str> = behind_name.split(' ').collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    ticks(11) + ticks(12)
}
