//! Stateless switches: another session takes the place of the one that there is at once, and what was in flight in it
//! is given up, and counted.

use std::{
    os::fd::AsFd,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, poll};
use serde_json::Value;
use vtl::{Error, Mode, Preference, Requirements, Services, Socket, Switches};
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{PATIENCE, World, until};

const PORT: u16 = 7600;
/// Messages of several packets are among those over reliable grafts.
const LONGEST: usize = 5000;

/// What an application says that does without some packets.
fn tolerant() -> Requirements {
    Requirements {
        qos: vtl::Qos {
            max_loss_pct: Some(10.0),
            ..Default::default()
        },
        ..Default::default()
    }
}

/// A client and a server with a session over this graft, which may lose something.
fn pair(world: &World, graft: &str, params: &[(&str, u32)]) -> (Socket, Socket) {
    let mut server = world.aware(Mode::Responder, PORT);
    let mut client = world.aware(Mode::Initiator, PORT);
    (client.negotiate_exactly(&tolerant(), graft, params)).expect("a session");
    server.validate().expect("a session");
    (client, server)
}

/// The message of that number.
fn message(number: u64, max: usize) -> Vec<u8> {
    let length = 8 + (number as usize).wrapping_mul(7919) % (max.min(LONGEST) - 8);
    let byte = |i: usize| (number as usize).wrapping_mul(31).wrapping_add(i) as u8;
    let mut message: Vec<u8> = (0..length).map(byte).collect();
    message[..8].copy_from_slice(&number.to_ne_bytes());
    message
}

/// The message's number, if nothing of it is wrong.
fn number(message: &[u8]) -> u64 {
    let number = u64::from_ne_bytes(message[..8].try_into().expect("eight bytes"));
    let wrong =
        |(i, byte): (usize, &u8)| *byte != (number as usize).wrapping_mul(31).wrapping_add(i) as u8;
    let damaged = message.iter().enumerate().skip(8).any(wrong);
    assert!(
        !damaged,
        "message {number} of {} bytes is damaged",
        message.len()
    );
    number
}

/// One side: sends numbered messages as fast as it may, and receives the other's.
struct Side {
    socket: Socket,
    sent: u64,
    /// Sent in part.
    begun: Option<Vec<u8>>,
    received: Vec<u64>,
    buffer: Vec<u8>,
}

impl Side {
    fn new(socket: Socket) -> Self {
        Self {
            socket,
            sent: 0,
            begun: None,
            received: Vec::new(),
            buffer: vec![0; 1 << 16],
        }
    }

    /// One call of each kind, and waits if neither has anything to do. False at the end.
    fn call(&mut self, sends: bool) -> bool {
        let mut idle = true;
        // What was begun is sent whole, whatever session it goes by.
        if sends || self.begun.is_some() {
            let max = self.socket.max_message();
            let next = match self.begun.take() {
                // A session that takes less has come.
                Some(begun) if begun.len() > max => message(self.sent, max),
                Some(begun) => begun,
                None => message(self.sent, max),
            };
            match self.socket.try_send_message(&next) {
                Ok(true) => (self.sent, idle) = (self.sent + 1, false),
                Ok(false) => self.begun = Some(next),
                Err(Error::MessageSize { .. }) => idle = false,
                Err(error) => panic!("{error}"),
            }
        }
        match self
            .socket
            .try_recv_message(&mut self.buffer)
            .expect("received")
        {
            Some(0) => return false,
            Some(length) => {
                self.received.push(number(&self.buffer[..length]));
                idle = false;
            }
            None => {}
        }
        if idle {
            let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, 5_u8).expect("polled");
        }
        true
    }
}

/// Events `session_cut` of a host's daemon: packets, messages, bytes of all of them, and how many.
fn cuts(world: &World, host: Host) -> (u64, [u64; 3]) {
    let request = Request::Events {
        since: Some(0),
        kinds: vec!["session_cut".to_owned()],
        wait_ms: Some(0),
    };
    let answer = world.call(host, &request);
    let events = answer["events"].as_array().expect("a list");
    let cuts = events.iter().filter(|e| e["event"] == "session_cut");
    let cuts: Vec<&Value> = cuts.collect();
    let sum = |field: &str| cuts.iter().filter_map(|e| e[field].as_u64()).sum();
    (cuts.len() as u64, ["packets", "messages", "bytes"].map(sum))
}

/// The grafts of the switches, in turn: with what is in flight in order, none of which gives up anything by itself.
fn next(switch: u64) -> (&'static str, &'static [(&'static str, u32)]) {
    match switch % 3 {
        0 => ("partial-reliability", &[("max-loss", 0), ("window", 64)]),
        1 => ("selective-repeat", &[("window", 64)]),
        _ => ("go-back-n", &[("window", 64)]),
    }
}

/// So many switches, by the client, while both sides send. Returns what both have counted.
fn switch(world: &World, switches: u64) -> [Switches; 2] {
    let (client, server) = pair(world, "go-back-n", &[("window", 64)]);
    let (mut client, mut server) = (Side::new(client), Side::new(server));
    let phase = AtomicU64::new(0);
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            // 1: send no more; 2: all was received here, and is there.
            while phase.load(Ordering::SeqCst) == 0 || server.begun.is_some() {
                assert!(server.call(true));
            }
            let end = Instant::now() + PATIENCE;
            while server.socket.unacknowledged() > 0 {
                assert!(Instant::now() < end, "nothing is acknowledged");
                assert!(server.call(false));
            }
            phase.store(2, Ordering::SeqCst);
            while server.call(false) {}
            server
        });
        for i in 0..switches {
            let before = (client.sent, client.received.len());
            until("messages in both directions", || {
                (0..50).for_each(|_| assert!(client.call(true)));
                client.sent > before.0 + 60 && client.received.len() > before.1 + 20
            });
            while client.begun.is_some() {
                assert!(client.call(true));
            }
            client.socket.set_stateless(true);
            let (graft, params) = next(i);
            let agreed = client.socket.negotiate_exactly(&tolerant(), graft, params);
            assert_eq!(agreed.expect("agreed").graft, graft);
        }
        (0..100).for_each(|_| assert!(client.call(true)));
        while client.begun.is_some() {
            assert!(client.call(true));
        }
        phase.store(1, Ordering::SeqCst);
        until("all is received", || {
            (0..50).for_each(|_| assert!(client.call(false)));
            phase.load(Ordering::SeqCst) == 2
        });
        // What the server's last acknowledgements were for may be read now.
        while client
            .socket
            .try_recv_message(&mut client.buffer)
            .expect("received")
            .is_some_and(|n| {
                client.received.push(number(&client.buffer[..n]));
                n > 0
            })
        {}
        let counted = client.socket.switches();
        client.socket.close().expect("closed");
        let server = serving.join().expect("the server");
        let counted = [counted, server.socket.switches()];
        for (at, (sent, received)) in [
            (client.sent, &server.received),
            (server.sent, &client.received),
        ]
        .into_iter()
        .enumerate()
        {
            let given_up = counted[at].given_up;
            let in_order = received.is_sorted_by(|a, b| a < b);
            assert!(in_order, "twice, or out of order: {received:?}");
            let missing = sent - received.len() as u64;
            println!("direction {at}: {sent} sent, {missing} missing, {given_up:?}");
            assert!(
                missing <= given_up.messages,
                "{missing} missing, {given_up:?}"
            );
            assert!(given_up.messages <= given_up.packets, "{given_up:?}");
        }
        counted
    })
}

#[test]
fn negotiate__stateless_gives_up_what_was_in_flight_and_no_more() {
    let link = Link {
        loss_pct: 5.0,
        ..Link::new(20.0, 50.0)
    };
    let Some(world) = World::with_daemons("stateless", &link) else {
        return;
    };
    // `VTL_SWITCHES=1000 cargo test … stateless` for more of them.
    let switches = std::env::var("VTL_SWITCHES").map_or(8, |n| n.parse().expect("a number"));
    let counted = switch(&world, switches);
    for (host, counted) in [Host::Client, Host::Server].into_iter().zip(counted) {
        assert_eq!(counted.count, switches);
        assert!(counted.given_up.packets > 0, "nothing was in flight");
        if switches > 100 {
            continue; // more than one answer has
        }
        let given_up = counted.given_up;
        let summed = [given_up.packets, given_up.messages, given_up.bytes];
        assert_eq!(cuts(&world, host), (switches, summed));
    }
    for host in [Host::Client, Host::Server] {
        until("no session", || {
            (world.status(host)["sessions"].as_array()).is_some_and(Vec::is_empty)
        });
    }
}

/// Whoever has required reliability keeps it, whichever side asks.
#[test]
fn negotiate__stateless_is_refused_where_nothing_may_be_lost() {
    let Some(world) = World::with_daemons("stateless-no", &Link::new(10.0, 100.0)) else {
        return;
    };
    let mut server = world.aware(Mode::Responder, PORT);
    let mut client = world.aware(Mode::Initiator, PORT);
    client.negotiate(&Requirements::STREAM).expect("a session");
    server.validate().expect("a session");
    let refused = |socket: &mut Socket, why: &str| {
        socket.set_stateless(true);
        let refusal = socket.negotiate_exactly(&tolerant(), "go-back-n", &[]);
        socket.set_stateless(false);
        let refusal = refusal.expect_err("refused").to_string();
        assert!(refusal.contains(why), "{refusal}");
        assert_eq!(refusal.lines().count(), 1, "{refusal}");
    };
    let bytes = |from: &mut Socket, to: &mut Socket| {
        let mut buffer = [0; 10];
        assert_eq!(from.send_data(b"sacred").expect("sent"), 6);
        assert_eq!(to.recv_data(&mut buffer).expect("received"), 6);
        assert_eq!(&buffer[..6], b"sacred");
    };
    refused(
        &mut client,
        "the application requires reliability of this session",
    );
    refused(&mut server, "promise that nothing is lost");
    bytes(&mut client, &mut server);
    // The server has required it, and its client does without from some time on: the client's host cannot know.
    let mut wanted = Requirements::STREAM;
    wanted.set(Services::CONGESTION_CONTROL, Preference::Prefer);
    let follow = |socket: &mut Socket, other: &mut Socket| {
        until("it has gone over", || {
            let _ = other.try_recv_data(&mut [0; 10]).expect("received");
            other.agreement() == socket.agreement()
                || other.agreement().map(|a| &a.graft) == socket.agreement().map(|a| &a.graft)
        });
    };
    (server.negotiate_exactly(&wanted, "cubic", &[])).expect("agreed");
    follow(&mut server, &mut client);
    bytes(&mut server, &mut client);
    bytes(&mut client, &mut server);
    (client.negotiate_exactly(&tolerant(), "go-back-n", &[])).expect("agreed");
    follow(&mut client, &mut server);
    bytes(&mut client, &mut server);
    bytes(&mut server, &mut client);
    refused(&mut client, "its application requires that nothing is lost");
    bytes(&mut client, &mut server);
    bytes(&mut server, &mut client);
    assert_eq!(client.switches().count + server.switches().count, 0);
    client.close().expect("closed");
}

/// How long a switch takes from the request until the peer has the first message of the new session, and until the
/// request has returned: stateless beside stateful, in turn.
#[test]
#[ignore = "a measurement, of two minutes"]
fn negotiate__stateless_beside_stateful() {
    const ROUNDS: usize = 10;
    const BACKLOG: u64 = 200;
    println!("rtt_ms,loss_pct,from,mode,round,agreed_ms,first_ms,given_up_packets,given_up_bytes");
    for (rtt, loss) in [(20.0, 0.0), (20.0, 5.0), (320.0, 0.0)] {
        let link = Link {
            loss_pct: loss,
            ..Link::new(rtt, 50.0)
        };
        let Some(world) = World::with_daemons("stateless-cost", &link) else {
            return;
        };
        for from in ["go-back-n", "partial-reliability"] {
            for round in 0..2 * ROUNDS {
                let stateless = round % 2 == 0;
                let (agreed, first, switches) = one_switch(&world, from, stateless, BACKLOG);
                println!(
                    "{rtt},{loss},{from},{},{},{:.2},{:.2},{},{}",
                    if stateless { "stateless" } else { "stateful" },
                    round / 2,
                    agreed.as_secs_f64() * 1e3,
                    first.as_secs_f64() * 1e3,
                    switches.given_up.packets,
                    switches.given_up.bytes,
                );
            }
        }
    }
}

/// One switch from a graft with a window of 16 packets, and so many more in its ring, to `partial-reliability`.
fn one_switch(
    world: &World,
    from: &str,
    stateless: bool,
    backlog: u64,
) -> (Duration, Duration, Switches) {
    let (mut client, mut server) = pair(world, from, &[("window", 16)]);
    let receiver = thread::spawn(move || {
        let mut buffer = vec![0; 2000];
        loop {
            let length = server.recv_message(&mut buffer).expect("received");
            assert_ne!(length, 0, "the end");
            if buffer[..length].starts_with(b"new") {
                return (Instant::now(), server);
            }
        }
    });
    // In the midst of it: the window moves, and is full.
    let old = [7; 1000];
    (0..backlog / 4).for_each(|_| client.send_message(&old).expect("sent"));
    until("something is acknowledged", || {
        client.unacknowledged() < backlog / 4
    });
    while client.unacknowledged() < backlog {
        client.send_message(&old).expect("sent");
    }
    client.set_stateless(stateless);
    let start = Instant::now();
    (client.negotiate_exactly(&tolerant(), "partial-reliability", &[("window", 1024)]))
        .expect("agreed");
    let agreed = start.elapsed();
    client.send_message(b"new").expect("sent");
    let (came, server) = receiver.join().expect("received");
    drop(server);
    (agreed, came - start, client.switches())
}
