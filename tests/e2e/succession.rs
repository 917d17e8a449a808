//! Requirements that change in mid-session: another session succeeds the one that there is, while
//! data flow in both directions over a link that loses and reorders some.

use std::{
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, poll};
use vtl::{Error, Mode, Preference, Requirements, Services, Socket};
use vtl_testbed::{Host, Link};

use crate::harness::{PATIENCE, World, payload, until};

const PORT: u16 = 7200;
fn world(name: &str) -> Option<World> {
    let link = Link {
        loss_pct: 1.0,
        reorder_pct: 1.0,
        ..Link::new(10.0, 100.0)
    };
    let world = World::with_daemons(name, &link)?;
    Some(world)
}

/// A client and a server with a session by this graft, or by what is chosen.
fn pair(world: &World, graft: Option<&str>) -> (Socket, Socket) {
    let mut server = world.aware(Mode::Responder, PORT);
    let mut client = world.aware(Mode::Initiator, PORT);
    match graft {
        Some(graft) => client.negotiate_over(graft, &[]),
        None => client.negotiate(&Requirements::STREAM),
    }
    .expect("a session");
    server.validate().expect("a session");
    (client, server)
}

/// Sends one stream, and compares what comes with another.
struct Duplex<'a> {
    socket: Socket,
    out: &'a [u8],
    wanted: &'a [u8],
}

impl Duplex<'_> {
    /// Until so many bytes are left to be sent, and to be received.
    fn run(&mut self, unsent: usize, missing: usize) {
        let end = Instant::now() + PATIENCE;
        let mut buffer = vec![0; 100_000];
        while self.out.len() > unsent || self.wanted.len() > missing {
            assert!(
                Instant::now() < end,
                "{}, {}",
                self.out.len(),
                self.wanted.len()
            );
            let sent = self.socket.try_send_data(self.out).expect("sent");
            self.out = &self.out[sent.unwrap_or(0)..];
            let got = self.socket.try_recv_data(&mut buffer).expect("received");
            let got = got.inspect(|n| assert_ne!(*n, 0, "the end"));
            let (now, later) = self.wanted.split_at(got.unwrap_or(0));
            assert!(buffer[..now.len()] == *now, "other bytes");
            self.wanted = later;
            if got.is_none() && sent.is_none_or(|n| n == 0) {
                let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, 200_u8).expect("polled");
            }
        }
    }

    /// The graft of the last session.
    fn expect_end(mut self) -> String {
        assert_eq!(self.socket.recv_data(&mut [0; 10]).expect("the end"), 0);
        graft(&self.socket)
    }
}

fn graft(socket: &Socket) -> String {
    socket.agreement().expect("a session").graft.clone()
}

/// No session is left, of the daemons' point of view.
fn all_gone(world: &World) {
    for host in [Host::Client, Host::Server] {
        until("no session", || {
            world.status(host)["sessions"]
                .as_array()
                .is_some_and(Vec::is_empty)
        });
    }
}

#[test]
fn negotiate__again_and_again_loses_no_byte() {
    let Some(world) = world("succeed") else {
        return;
    };
    let grafts = [
        "selective-repeat",
        "stream",
        "go-back-n",
        "cubic",
        "udp-plus",
        "stream",
    ];
    let share = 1 << 20;
    let (up, down) = (payload(7 * share, 1), payload(7 * share, 2));
    let (client, server) = pair(&world, None);
    let mut client = Duplex {
        socket: client,
        out: &up,
        wanted: &down,
    };
    let mut server = Duplex {
        socket: server,
        out: &down,
        wanted: &up,
    };
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            server.run(0, 0);
            server.expect_end()
        });
        for (i, graft) in grafts.into_iter().enumerate() {
            let left = (6 - i) * share;
            client.run(left, left);
            let params: &[(&str, u32)] = match graft {
                "udp-plus" => &[("rate", 20_000)],
                _ => &[],
            };
            let agreed = client.socket.negotiate_over(graft, params);
            assert_eq!(agreed.expect("agreed").graft, graft);
            assert_eq!(self::graft(&client.socket), graft);
        }
        client.run(0, 0);
        client.socket.close().expect("closed");
        assert_eq!(server.join().expect("the server"), "stream");
    });
    all_gone(&world);
}

/// Answers messages with themselves, until the end; says over which grafts.
fn echo(mut socket: Socket) -> Vec<String> {
    let mut buffer = vec![0; 1 << 20];
    let mut grafts = vec![graft(&socket)];
    loop {
        let got = socket.recv_message(&mut buffer).expect("received");
        if grafts.last() != Some(&graft(&socket)) {
            grafts.push(graft(&socket));
        }
        if got == 0 {
            return grafts;
        }
        socket.send_message(&buffer[..got]).expect("sent");
    }
}

#[test]
fn negotiate__again_is_followed_by_a_peer_that_waits() {
    let Some(world) = world("succeed-wait") else {
        return;
    };
    let (mut client, server) = pair(&world, Some("selective-repeat"));
    let server = thread::spawn(move || echo(server));
    let mut buffer = vec![0; 1 << 20];
    let mut exchange = |client: &mut Socket, size| {
        let message = payload(size, 3);
        client.send_message(&message).expect("sent");
        let got = client.recv_message(&mut buffer).expect("received");
        assert!(buffer[..got] == message);
    };
    exchange(&mut client, 300_000);
    // A graft with lists in its rings, and one without order between them.
    let grafts = ["partial-order", "stream", "dccp-ccid2", "newreno"];
    for name in grafts {
        // What was refused changes nothing.
        let refused = client.negotiate_over("none-such", &[]);
        assert!(matches!(refused, Err(Error::Daemon(_))), "{refused:?}");
        let mut both = Requirements::STREAM;
        both.qos.max_loss_pct = Some(5.0);
        let refused = client.negotiate(&both);
        assert!(
            matches!(refused, Err(Error::Contradiction(_))),
            "{refused:?}"
        );
        if graft(&client) != "dccp-ccid2" {
            exchange(&mut client, 100);
        }
        assert_eq!(
            client.negotiate_over(name, &[]).expect("agreed").graft,
            name
        );
        // What may be lost is not waited for.
        if name != "dccp-ccid2" {
            (0..20).for_each(|_| exchange(&mut client, 700));
        }
    }
    client.close().expect("closed");
    let used = server.join().expect("the server");
    let order: Vec<&str> = used.iter().map(String::as_str).collect();
    assert_eq!(
        order,
        ["selective-repeat", "partial-order", "stream", "newreno"]
    );
    all_gone(&world);
}

#[test]
fn negotiate__again_from_both_sides_at_once() {
    let Some(world) = world("succeed-both") else {
        return;
    };
    let (up, down) = (payload(3 << 20, 1), payload(3 << 20, 2));
    let (client, server) = pair(&world, None);
    let run = |socket, out, wanted, initiator: bool| {
        let mut side = Duplex {
            socket,
            out,
            wanted,
        };
        let grafts = if initiator {
            ["go-back-n", "newreno", "stream"]
        } else {
            ["cubic", "stream", "hybla"]
        };
        let mut changed = 0;
        for (i, graft) in (1..).zip(grafts) {
            let left = up.len() - i * up.len() / 4;
            side.run(left, left);
            match side.socket.negotiate_over(graft, &[]) {
                Ok(agreed) => {
                    assert_eq!(agreed.graft, graft);
                    changed += 1;
                }
                // Refused because the other one was first.
                Err(Error::Daemon(error)) => {
                    assert!(error.to_string().contains("chang"), "{error}");
                }
                Err(error) => panic!("{error}"),
            }
        }
        side.run(0, 0);
        if initiator {
            side.socket.close().expect("closed");
        } else {
            side.expect_end();
        }
        changed
    };
    let changed = thread::scope(|scope| {
        let server = scope.spawn(|| run(server, &down, &up, false));
        run(client, &up, &down, true) + server.join().expect("the server")
    });
    assert!(changed >= 1, "{changed} changes");
    all_gone(&world);
}

#[test]
fn negotiate__again_from_a_graft_that_loses() {
    let Some(world) = world("succeed-lossy") else {
        return;
    };
    let unlucky = || {
        let up = world.testbed.stats().expect("an emulator").up;
        (up.lost + up.queue_drops + up.host_drops + up.reordered) as usize
    };
    let unlucky_before = unlucky();
    let (mut client, mut server) = pair(&world, Some("udp"));
    let server = thread::spawn(move || {
        let mut numbers = Vec::new();
        let mut buffer = [0; 100];
        while server.recv_message(&mut buffer).expect("received") > 0 {
            numbers.push(u64::from_ne_bytes(buffer[..8].try_into().expect("eight")));
        }
        (numbers, graft(&server))
    });
    let count = 2000_u64;
    for number in 0..count {
        if number == count / 2 {
            let mut wanted = Requirements::STREAM;
            wanted.set(Services::CONGESTION_CONTROL, Preference::Prefer);
            client.negotiate(&wanted).expect("agreed");
        }
        client.send_message(&number.to_ne_bytes()).expect("sent");
        if number < count / 2 {
            thread::sleep(Duration::from_micros(100));
        }
    }
    client.close().expect("closed");
    let (numbers, last) = server.join().expect("the server");
    assert_eq!(last, "stream");
    let (before, after): (Vec<u64>, Vec<u64>) = numbers.iter().partition(|n| **n < count / 2);
    assert!(after.iter().copied().eq(count / 2..count), "{after:?}");
    // What the link loses, or holds back until the graft has changed, is missing, and nothing else.
    let excused = unlucky() - unlucky_before;
    assert!(
        before.len() + excused >= count as usize / 2,
        "{} of 1,000, {excused} of them or of others lost or late",
        before.len()
    );
    let mut once = before.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), before.len());
    all_gone(&world);
}

/// A non-blocking sender whose application never receives.
#[test]
fn negotiate__again_and_again_does_not_hold_a_side_that_only_sends() {
    let Some(world) = world("succeed-sender") else {
        return;
    };
    let (mut client, mut server) = pair(&world, None);
    let (beat, beats) = std::sync::mpsc::channel();
    thread::spawn(move || {
        loop {
            // Never waits, says its documentation.
            if server.try_send_data(b"x").is_err() || beat.send(()).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    });
    let mut buffer = [0; 1000];
    for change in 1..=9 {
        client.send_data(b"unread").expect("sent");
        // Reads the server's LAST of the session before.
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            let _ = client.try_recv_data(&mut buffer).expect("received");
            thread::sleep(Duration::from_millis(5));
        }
        let _ = client.negotiate_over(["cubic", "stream"][change % 2], &[]);
        while beats.try_recv().is_ok() {}
        let beat = beats.recv_timeout(PATIENCE);
        assert!(beat.is_ok(), "try_send_data hangs after change {change}");
    }
}

/// A poller while the answer waits for the end of a message.
#[test]
fn negotiate__again_in_a_message_makes_no_poller_spin() {
    let Some(world) = world("succeed-spin") else {
        return;
    };
    let (mut client, server) = pair(&world, None);
    let message = payload(60 << 20, 1);
    let wanted = Requirements::STREAM;
    assert!(client.try_negotiate(&wanted).expect("asked").is_none());
    assert!(!client.try_send_message(&message).expect("begun"));
    let spins = |client: &mut Socket| {
        let (end, mut spins) = (Instant::now() + Duration::from_secs(3), 0);
        while Instant::now() < end {
            let _ = client.try_send_message(&message).expect("begun");
            let mut fds = [PollFd::new(client.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, 200_u8).expect("polled");
            spins += 1;
        }
        spins
    };
    let first = spins(&mut client);
    let second = spins(&mut client);
    drop(server);
    assert!(
        second < 100,
        "{first}, then {second} wake-ups in three seconds"
    );
}

/// close() of one side while the peer has not read what the other sent.
#[test]
fn close__after_a_change_says_what_was_not_delivered() {
    let Some(world) = world("succeed-close") else {
        return;
    };
    let (mut client, mut server) = pair(&world, None);
    // More than the client's ring takes: the client never reads.
    let data = payload(64 << 20, 1);
    let (mut sent, mut in_vain) = (0, 0);
    until("both rings are full", || {
        let more = server.try_send_data(&data[sent..]).expect("sent");
        sent += more.unwrap_or(0);
        in_vain = if more.is_none() { in_vain + 1 } else { 0 };
        in_vain == 100
    });
    assert!(server.unacknowledged() > 0);
    client.negotiate_over("cubic", &[]).expect("agreed");
    client.close().expect("closed");
    until("the server hears of it", || {
        !matches!(server.try_recv_data(&mut [0; 10]), Ok(None))
    });
    let left = server.unacknowledged();
    let closed = server.close();
    assert!(
        closed.is_err(),
        "{left} packets were never delivered: {closed:?}"
    );
}

/// A peer takes reliability away from who required it.
#[test]
fn negotiate__again_takes_away_nothing_that_the_peer_required() {
    let Some(world) = world("succeed-down") else {
        return;
    };
    let (mut client, mut server) = pair(&world, None);
    server.negotiate_over("udp", &[]).ok();
    thread::sleep(Duration::from_millis(300));
    let _ = client.try_recv_data(&mut [0; 10]);
    assert!(
        client
            .agreement()
            .expect("a session")
            .services
            .contains(Services::RELIABLE),
        "{:?}",
        client.agreement()
    );
}

/// What `ControlBroker::without` sends when the graft that the peer chose is of no use: the session stays.
#[test]
fn negotiate__again_taken_back_changes_nothing() {
    use vtl_proto::{
        intf,
        wire::{Gids, Header, Nego, Packet},
    };
    let Some(world) = world("succeed-without") else {
        return;
    };
    let stranger = crate::attacks::stranger::Stranger::new(&world, world.servers()[0]);
    let (mut client, mut server) = pair(&world, Some("stream"));
    let of = stranger
        .overhear()
        .into_iter()
        .find_map(|p| match p {
            Packet::NegoAck(n) => Some((n.sid, n.token)),
            _ => None,
        })
        .expect("the answer");
    let nego = Nego {
        header: Header {
            flags: intf::VTL_F_SUCCEED as u8,
            gid: 0,
            sid: of.0,
            token: of.1,
        },
        token: 77,
        sid: 901,
        ring_slots: 64,
        max_payload: 1400,
        port: PORT,
        services: Services::RELIABLE.bits(),
        gids: Gids::new(&[1, 2, 3]).expect("few"),
        ..Nego::default()
    };
    let mut answer = None;
    until("an answer", || {
        stranger.send_packet(&Packet::Nego(nego));
        thread::sleep(Duration::from_millis(50));
        for packet in stranger.overhear() {
            if let Packet::NegoAck(n) = packet {
                answer = Some((n.sid, n.token));
            }
        }
        answer.is_some()
    });
    let (sid, token) = answer.expect("until");
    for _ in 0..3 {
        stranger.send_packet(&Packet::Close(Header {
            flags: intf::VTL_F_ABORT as u8,
            gid: 0,
            sid,
            token,
        }));
    }
    thread::sleep(Duration::from_millis(300));
    client.send_data(b"still there").expect("sent");
    let mut buffer = [0; 100];
    let sent = server.send_data(b"so am I");
    let got = server.recv_data(&mut buffer);
    assert!(sent.is_ok() && got.is_ok(), "{sent:?}, {got:?}");
    assert_eq!(client.recv_data(&mut buffer).expect("received"), 7);
}
