//! How sessions are opened: with a peer met before, with one that has restarted or has other
//! grafts, both ways at once, under forged requests, and under replayed ones.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use nix::sys::{
    signal::Signal,
    socket::{MsgFlags, SockaddrIn, sendto},
};
use vtl::{Mode, Requirements, Services, Socket};
use vtl_proto::{
    carrier::GRAFT_PORT,
    intf, ip,
    wire::{Data, Extension, Extensions, Gids, Header, MAX_EXTENSIONS, Nego, Packet},
};
use vtl_testbed::{Host, Link};

use crate::{
    attacks::stranger::Stranger,
    harness::{World, memory_kib, until},
    many::{expect, left, open, send},
};

const PORT: u16 = 3000;
fn counter(world: &World, host: Host, name: &str) -> u64 {
    world.status(host)["negotiation"][name]
        .as_u64()
        .expect("a number")
}

fn socket(world: &World, host: Host, mode: Mode, at: SocketAddr) -> Socket {
    let daemon = world.socket(host);
    let made = world
        .testbed
        .in_netns(host, || Socket::init(mode, at, &daemon));
    made.expect("a namespace").expect("a socket")
}

fn server(world: &World) -> SocketAddr {
    SocketAddr::new(world.servers()[0], PORT)
}

fn reliable() -> Requirements {
    Requirements {
        services: Services::RELIABLE.union(Services::ORDERED),
        ..Default::default()
    }
}

/// Both ways.
fn talk(client: &mut Socket, server: &mut Socket, words: &str) {
    send(client, words.as_bytes());
    expect(server, words.as_bytes());
    send(server, words.as_bytes());
    expect(client, words.as_bytes());
}

fn end(client: Socket, mut server: Socket) {
    client.close().expect("delivered");
    assert_eq!(server.recv_data(&mut [0; 1]).expect("the end"), 0);
}

/// The second session with a peer is there, and brings data, before a packet has come back.
#[test]
fn known__no_round_trip() {
    let Some(mut world) = World::with_daemons("known", &Link::new(20.0, 100.0)) else {
        return;
    };
    for round in 1..=2 {
        for muted in [false, true] {
            let mut responder = socket(&world, Host::Server, Mode::Responder, server(&world));
            let mut client = socket(&world, Host::Client, Mode::Initiator, server(&world));
            world.mute_server(muted);
            client.negotiate(&reliable()).expect("a session");
            send(&mut client, b"ahead");
            responder.validate().expect("a session");
            expect(&mut responder, b"ahead");
            world.mute_server(false);
            talk(&mut client, &mut responder, "and more");
            end(client, responder);
            until("nobody listens", || left(&world, Host::Server) == 0);
        }
        assert_eq!(counter(&world, Host::Server, "early"), round);
        assert_eq!(counter(&world, Host::Server, "accepted"), 2 * round);
        // One that has met nobody yet.
        world.take_daemon(Host::Client).kill();
        world.start(Host::Client, &[]);
    }
}

/// Without anybody at the port the application is told, though its data went ahead.
#[test]
fn known__nobody_listens_any_more() {
    let Some(world) = World::with_daemons("deaf", &Link::new(20.0, 100.0)) else {
        return;
    };
    let (mut client, mut responder) = open(&world, PORT);
    talk(&mut client, &mut responder, "once");
    end(client, responder);
    until("nobody listens", || left(&world, Host::Server) == 0);
    let mut client = socket(&world, Host::Client, Mode::Initiator, server(&world));
    let told = client
        .negotiate(&reliable())
        .and_then(|_| client.recv_data(&mut [0; 8]));
    assert!(told.is_err(), "{told:?}");
    drop(client);
    until("it is over", || left(&world, Host::Client) == 0);
}

/// Who is not among those that VTL is for has plain TCP, and hears nothing of VTL.
#[test]
fn from__others_have_plain_tcp() {
    let Some(mut world) = World::bare("from", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    world.start(
        Host::Server,
        &["--from", "fd73::/64", "--from", "192.0.2.7"],
    );
    world.hook();
    world.serve("f", 1 << 20);
    let [v4, v6] = world.servers();
    for server in [v4, v6] {
        world.download(server, "f");
    }
    until("a carrier", || !world.carriers(Host::Client).is_empty());
    world.download(v4, "f");
    let carriers = world.carriers(Host::Client);
    let peers: Vec<_> = carriers.iter().map(|row| &row["peer"]).collect();
    assert_eq!(peers, [&v6.to_string()]);
    let stranger = &mut Stranger::new(&world, v4);
    assert!(!stranger.is_answered(PORT));
}

/// Who has a ticket, or any number of addresses of its own, leaves places to others.
#[test]
fn room__of_one_network_is_not_all() {
    let Some(mut world) = World::bare("network", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    world.start(Host::Server, &["--max-sessions", "16"]);
    // Three quarters.
    let mut held: Vec<_> = (0..12).map(|i| open(&world, PORT + i)).collect();
    let ask = |family: usize, port| {
        let at = SocketAddr::new(world.servers()[family], port);
        let mut responder = socket(&world, Host::Server, Mode::Responder, at);
        let mut client = socket(&world, Host::Client, Mode::Initiator, at);
        let negotiated = client.negotiate(&reliable()).map(drop);
        negotiated.map(|()| {
            responder.validate().expect("a session");
            (client, responder)
        })
    };
    let refused = ask(0, PORT + 20).map(drop);
    assert!(
        refused
            .as_ref()
            .is_err_and(|e| e.to_string().contains("room")),
        "{refused:?}"
    );
    // Another network has some of the last quarter, but not all of it.
    for port in [PORT + 21, PORT + 22] {
        held.push(ask(1, port).expect("room"));
    }
    assert!(ask(1, PORT + 23).is_err());
    for (client, responder) in held {
        end(client, responder);
    }
    until("there is room again", || left(&world, Host::Server) == 0);
    let (client, responder) = ask(0, PORT).expect("room");
    end(client, responder);
}

/// A ticket from before the peer's restart costs a round trip, and nothing else.
#[test]
fn known__peer_restarted() {
    let Some(mut world) = World::with_daemons("stale", &Link::new(40.0, 100.0)) else {
        return;
    };
    let (mut client, mut responder) = open(&world, PORT);
    talk(&mut client, &mut responder, "before");
    end(client, responder);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut daemon = world.take_daemon(Host::Server);
        daemon.signal(signal);
        daemon.wait();
        world.start(Host::Server, &[]);
        let mut responder = socket(&world, Host::Server, Mode::Responder, server(&world));
        let mut client = socket(&world, Host::Client, Mode::Initiator, server(&world));
        client.negotiate(&reliable()).expect("a session");
        let words: Vec<u8> = (0..300_000u32).map(|i| i as u8).collect();
        let sender = thread::spawn(move || {
            send(&mut client, &words);
            (client, words)
        });
        responder.validate().expect("a session");
        let wanted: Vec<u8> = (0..300_000u32).map(|i| i as u8).collect();
        expect(&mut responder, &wanted);
        let (mut client, _) = sender.join().expect("no panic");
        talk(&mut client, &mut responder, "after");
        assert_eq!(counter(&world, Host::Server, "early"), 0);
        assert_eq!(counter(&world, Host::Server, "accepted"), 1);
        end(client, responder);
    }
}

/// The graft that is preferred is not there any more: the session is by another one, whether data
/// have gone ahead or not.
#[test]
fn pools__the_next_choice() {
    let Some(world) = World::with_daemons("pools", &Link::new(20.0, 100.0)) else {
        return;
    };
    let agreed = |world: &World| {
        let mut responder = socket(world, Host::Server, Mode::Responder, server(world));
        let mut client = socket(world, Host::Client, Mode::Initiator, server(world));
        client.negotiate(&reliable()).expect("a session");
        send(&mut client, b"something");
        let graft = responder.validate().expect("a session").graft;
        expect(&mut responder, b"something");
        talk(&mut client, &mut responder, "more");
        end(client, responder);
        until("it is over", || left(world, Host::Server) == 0);
        graft
    };
    let first = agreed(&world);
    let remove = |name: &str| {
        let output = world.vtl(Host::Server, &["graft", "remove", name]).output();
        assert!(output.expect("vtl runs").status.success());
    };
    remove(&first);
    let second = agreed(&world);
    assert_ne!(first, second);
    // The same offer now leads there at once.
    assert_eq!(agreed(&world), second);
    assert!(counter(&world, Host::Server, "early") >= 1);
}

/// Each host opens a session with the other, at the same time and to the same port.
#[test]
fn crossing__two_sessions() {
    let Some(world) = World::with_daemons("crossing", &Link::new(40.0, 100.0)) else {
        return;
    };
    let to = |host| match host {
        Host::Server => world.testbed.addr4(Host::Client),
        _ => world.testbed.addr4(Host::Server),
    };
    for round in 0..3 {
        let hosts = [Host::Client, Host::Server];
        let responders = hosts.map(|host| socket(&world, host, Mode::Responder, server(&world)));
        let initiators = hosts.map(|host| {
            let at = SocketAddr::new(to(host).into(), PORT);
            socket(&world, host, Mode::Initiator, at)
        });
        let opening: Vec<_> = initiators
            .into_iter()
            .map(|mut socket| {
                thread::spawn(move || {
                    socket.negotiate(&reliable()).expect("a session");
                    send(&mut socket, b"across");
                    socket
                })
            })
            .collect();
        let accepting: Vec<_> = responders
            .into_iter()
            .map(|mut socket| {
                thread::spawn(move || {
                    socket.validate().expect("a session");
                    expect(&mut socket, b"across");
                    socket
                })
            })
            .collect();
        let mut opened: Vec<_> = opening
            .into_iter()
            .map(|t| t.join().expect("open"))
            .collect();
        let mut accepted: Vec<_> = accepting
            .into_iter()
            .map(|t| t.join().expect("open"))
            .collect();
        accepted.reverse();
        for (client, server) in opened.iter_mut().zip(&mut accepted) {
            talk(client, server, "and back");
        }
        for (client, server) in opened.into_iter().zip(accepted) {
            end(client, server);
        }
        for host in hosts {
            until("they are over", || left(&world, host) == 0);
        }
        println!("crossing: round {round}");
    }
}

/// Most packets of the negotiation are lost, doubled, late or damaged.
#[test]
fn weather__every_session_opens_or_says_why() {
    let link = Link {
        loss_pct: 20.0,
        duplicate_pct: 5.0,
        reorder_pct: 5.0,
        corrupt_pct: 2.0,
        ..Link::new(10.0, 100.0)
    };
    let Some(world) = World::with_daemons("weather", &link) else {
        return;
    };
    let mut opened = 0;
    for i in 0..12u16 {
        let at = SocketAddr::new(world.servers()[0], PORT + i);
        let mut responder = socket(&world, Host::Server, Mode::Responder, at);
        let mut client = socket(&world, Host::Client, Mode::Initiator, at);
        if client.negotiate(&reliable()).is_ok() {
            let words = format!("number {i}");
            send(&mut client, words.as_bytes());
            responder.validate().expect("a session");
            expect(&mut responder, words.as_bytes());
            talk(&mut client, &mut responder, "so it works");
            opened += 1;
        }
    }
    // Of a hundred, one or two do not.
    println!("weather: {opened} of 12 sessions opened");
    assert!(opened > 0);
}

/// A peer that speaks another version only.
#[test]
fn version__of_another_world() {
    let Some(mut world) = World::bare("version", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    let client = world.testbed.addr4(Host::Client);
    let peer = Stranger::on(&world, Host::Server, client.into());
    let over = Arc::new(AtomicBool::new(false));
    let until_then = Arc::clone(&over);
    let answering = thread::spawn(move || {
        while !until_then.load(Relaxed) {
            for packet in peer.overhear() {
                if let Packet::Nego(nego) = packet {
                    peer.send_packet(&Packet::NegoNack(Nego {
                        header: Header {
                            sid: nego.sid,
                            token: nego.token,
                            ..Header::default()
                        },
                        peer_token: nego.token,
                        reason: intf::VTL_NACK_VERSION as u8,
                        ..Nego::default()
                    }));
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let mut socket = socket(&world, Host::Client, Mode::Initiator, server(&world));
    let error = socket.negotiate(&reliable()).expect_err("no session");
    over.store(true, Relaxed);
    answering.join().expect("no panic");
    assert!(error.to_string().contains("version"), "{error}");
    // And one that asks in another version is told.
    let stranger = Stranger::on(&world, Host::Server, client.into());
    let nack = |p: &Packet<'_>| matches!(p, Packet::NegoNack(n) if n.reason == 4);
    for version in [1, 3] {
        let mut bytes = [0; 160];
        bytes[0] = version << 4 | intf::VTL_NEGO as u8;
        until("a refusal", || {
            stranger.send(&bytes);
            thread::sleep(Duration::from_millis(30));
            stranger.overhear().iter().any(nack)
        });
        stranger.overhear();
    }
}

/// Extensions that fill a NEGO reach the daemon, which refuses for their sake only critical ones.
#[test]
fn extensions__ignored_or_refused() {
    let Some(mut world) = World::bare("extensions", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    let client = world.testbed.addr4(Host::Client);
    let stranger = Stranger::on(&world, Host::Server, client.into());
    let reasons = [intf::VTL_NACK_NO_LISTENER, intf::VTL_NACK_EXTENSION];
    for (critical, reason) in [false, true].into_iter().zip(reasons) {
        let mut bytes = [0; MAX_EXTENSIONS];
        let extension = Extension {
            kind: 0x1234,
            critical,
            value: &[7; MAX_EXTENSIONS - 4],
        };
        extension.emit(&mut bytes).expect("fits");
        let nego = Packet::Nego(Nego {
            token: reason.into(),
            sid: 1,
            ring_slots: 1024,
            max_payload: 1400,
            port: PORT,
            gids: Gids::new(&[1, 2]).expect("few"),
            extensions: Extensions::parse(&bytes).expect("one"),
            ..Nego::default()
        });
        let token = u64::from(reason);
        let refused = |p: &Packet<'_>| {
            matches!(p, Packet::NegoNack(n)
                if u32::from(n.reason) == reason && n.peer_token == token)
        };
        until("a refusal", || {
            stranger.send_packet(&nego);
            thread::sleep(Duration::from_millis(30));
            stranger.overhear().iter().any(refused)
        });
    }
}

/// The session of an answer that the initiator cannot take is ended, since the peer has made it.
#[test]
fn extensions__an_answer_with_a_critical_one_is_declined() {
    let Some(mut world) = World::bare("declined", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    let client = world.testbed.addr4(Host::Client);
    let peer = Stranger::on(&world, Host::Server, client.into());
    let made = (9, 77);
    let answering = thread::spawn(move || {
        let mut bytes = [0; 8];
        let extension = Extension {
            kind: 0x1234,
            critical: true,
            value: &[7; 4],
        };
        extension.emit(&mut bytes).expect("fits");
        loop {
            for packet in peer.overhear() {
                match packet {
                    Packet::Nego(nego) => peer.send_packet(&Packet::NegoAck(Nego {
                        header: Header {
                            sid: nego.sid,
                            token: nego.token,
                            ..Header::default()
                        },
                        sid: made.0,
                        token: made.1,
                        peer_token: nego.token,
                        ring_slots: 1024,
                        max_payload: 1400,
                        port: nego.port,
                        gids: Gids::new(&nego.gids[..1]).expect("one"),
                        extensions: Extensions::parse(&bytes).expect("one"),
                        ..Nego::default()
                    })),
                    Packet::Close(header) if (header.sid, header.token) == made => return header,
                    _ => {}
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let mut socket = socket(&world, Host::Client, Mode::Initiator, server(&world));
    let error = socket.negotiate(&reliable()).expect_err("no session");
    assert!(error.to_string().contains("extension"), "{error}");
    until("the end of the peer's session", || answering.is_finished());
    let close = answering.join().expect("no panic");
    assert_eq!(u32::from(close.flags), intf::VTL_F_ABORT);
}

/// What an eavesdropper repeats after a session opens nothing and delivers nothing.
#[test]
fn replay__opens_nothing() {
    let Some(world) = World::with_daemons("replay", &Link::new(20.0, 100.0)) else {
        return;
    };
    let (mut client, mut responder) = open(&world, PORT);
    talk(&mut client, &mut responder, "first");
    end(client, responder);
    until("it is over", || left(&world, Host::Server) == 0);
    let eavesdropper = Stranger::new(&world, world.servers()[0]);
    let (mut client, mut responder) = open(&world, PORT);
    talk(&mut client, &mut responder, "transfer 100");
    assert_eq!(counter(&world, Host::Server, "early"), 1);
    end(client, responder);
    until("it is over", || left(&world, Host::Server) == 0);
    let heard = eavesdropper.overhear();
    let early = heard.iter().find_map(|packet| match packet {
        Packet::Nego(nego) if nego.header.token != 0 => Some(*nego),
        _ => None,
    });
    let early = early.expect("a NEGO with early data");
    let _again = socket(&world, Host::Server, Mode::Responder, server(&world));
    for xid in 1..20 {
        eavesdropper.send_packet(&Packet::Nego(early));
        thread::sleep(Duration::from_millis(20));
        eavesdropper.send_packet(&Packet::Data(Data {
            header: Header {
                flags: 0,
                gid: early.gids[0],
                ..early.header
            },
            seq: 0,
            xid,
            ts: 1,
            payload: b"transfer 100",
        }));
    }
    until("they are counted", || {
        counter(&world, Host::Server, "replays") == 19
    });
    assert_eq!(left(&world, Host::Server), 0);
    assert_eq!(counter(&world, Host::Server, "accepted"), 2);
}

/// Forged requests from everywhere: they cost no memory, and honest strangers get in.
#[test]
fn flood__from_forged_addresses() {
    let Some(mut world) = World::with_daemons("forged", &Link::new(10.0, 100.0)) else {
        return;
    };
    // Or nobody would wait at the flows' port.
    world.hook();
    let flood = Flood::begin(&world);
    until("strangers' places are taken", || {
        counter(&world, Host::Server, "cookies") > 500
    });
    let pid = world.daemon(Host::Server).pid();
    let before = memory_kib(pid);
    for i in 0..5 {
        // A client that has met nobody yet.
        let mut daemon = world.take_daemon(Host::Client);
        daemon.signal(Signal::SIGTERM);
        daemon.wait();
        world.start(Host::Client, &[]);
        let mut responder = socket(&world, Host::Server, Mode::Responder, server(&world));
        let mut client = socket(&world, Host::Client, Mode::Initiator, server(&world));
        client.negotiate(&reliable()).expect("a session");
        send(&mut client, format!("honest {i}").as_bytes());
        responder.validate().expect("a session");
        expect(&mut responder, format!("honest {i}").as_bytes());
        end(client, responder);
        let status = world.status(Host::Server);
        assert!(status["negotiation"]["strangers"].as_u64() <= Some(8));
        assert!(left(&world, Host::Server) <= 9);
    }
    let cookies = counter(&world, Host::Server, "cookies");
    let sent = flood.end();
    let after = memory_kib(pid);
    println!("forged: {sent} sent, {cookies} cookies, {before} KiB became {after}");
    assert!(after < before + 4096, "{before} KiB became {after}");
    until("strangers' sessions end", || {
        left(&world, Host::Server) == 0
    });
}

/// Requests with invented source addresses, some thousand a second.
struct Flood {
    over: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl Flood {
    fn begin(world: &World) -> Self {
        let raw = || {
            // SAFETY: a plain system call.
            let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW) };
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            // SAFETY: a new descriptor that nobody else owns.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let fd = world.testbed.in_netns(Host::Client, raw);
        let fd = fd.expect("a namespace");
        let to = world.testbed.addr4(Host::Server);
        let over = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        let (ended, count) = (Arc::clone(&over), Arc::clone(&sent));
        let thread = thread::spawn(move || {
            let mut number = 1u32;
            while !ended.load(Relaxed) {
                for _ in 0..20 {
                    number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let packet = forged(number, to);
                    let at = SockaddrIn::from(std::net::SocketAddrV4::new(to, 0));
                    if sendto(fd.as_raw_fd(), &packet, &at, MsgFlags::empty()).is_ok() {
                        count.fetch_add(1, Relaxed);
                    }
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        Self { over, sent, thread }
    }

    fn end(self) -> u64 {
        self.over.store(true, Relaxed);
        self.thread.join().expect("no panic");
        self.sent.load(Relaxed)
    }
}

/// An IPv4 packet with a NEGO, from an address that a number gives.
fn forged(number: u32, to: Ipv4Addr) -> Vec<u8> {
    let nego = Nego {
        token: u64::from(number) << 7 | 1,
        sid: 1 + number % 1000,
        ring_slots: 1024,
        max_payload: 1400,
        port: [GRAFT_PORT, PORT][number as usize / 7 % 2],
        gids: Gids::new(&[1, 2]).expect("few"),
        ..Nego::default()
    };
    let mut packet = [0; size_of::<intf::vtl_nego>()];
    Packet::Nego(nego).emit(&mut packet).expect("fits");
    let from = Ipv4Addr::new(198, 18, (number >> 16) as u8, (number >> 24) as u8);
    let mut frame = Vec::new();
    ip::enclose(&packet, from.into(), to.into(), &mut frame);
    frame.split_off(ip::field::IP)
}
