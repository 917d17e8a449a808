//! Many sessions side by side: each exact, and nothing left of them.

use std::{net::SocketAddr, thread};

use vtl::{Mode, Requirements, Services, Socket};
use vtl_testbed::{Host, Link};

use crate::{
    process::until,
    world::{World, payload},
};

const SESSIONS: u16 = 200;
const PORT: u16 = 3000;
const MESSAGE: usize = 64;
const BULK: usize = 50_000;

/// A session between applications that live on the hosts themselves, so that they run their own
/// egress.
pub(crate) fn open(world: &World, port: u16) -> (Socket, Socket) {
    let at = SocketAddr::new(world.servers()[0], port);
    let socket = |host, mode| {
        let daemon = world.socket(host);
        let made = world
            .testbed
            .in_netns(host, || Socket::init(mode, at, &daemon));
        made.expect("a namespace").expect("a socket")
    };
    let mut responder = socket(Host::Server, Mode::Responder);
    let mut initiator = socket(Host::Client, Mode::Initiator);
    let wanted = Requirements {
        services: Services::RELIABLE.union(Services::ORDERED),
        ..Default::default()
    };
    // Nobody waits for this thread if the negotiation fails: the test ends, the daemon with it.
    let accepting = thread::spawn(move || {
        responder.validate().expect("a session");
        responder
    });
    initiator.negotiate(&wanted).expect("a session");
    (initiator, accepting.join().expect("no panic"))
}

pub(crate) fn send(from: &mut Socket, mut data: &[u8]) {
    while !data.is_empty() {
        data = &data[from.send_data(data).expect("sent")..];
    }
}

pub(crate) fn expect(to: &mut Socket, wanted: &[u8]) {
    let mut got = vec![0; wanted.len()];
    let mut filled = 0;
    while filled < got.len() {
        let n = to.recv_data(&mut got[filled..]).expect("received");
        assert_ne!(n, 0, "it ended after {filled} bytes");
        filled += n;
    }
    assert!(got == wanted);
}

pub(crate) fn left(world: &World, host: Host) -> usize {
    world.status(host)["sessions"]
        .as_array()
        .map_or(usize::MAX, Vec::len)
}

#[test]
fn sessions__two_hundred_at_once() {
    let Some(mut world) = World::bare("many", &Link::new(2.0, 200.0)) else {
        return;
    };
    world.start(Host::Server, &[]);
    world.start(Host::Client, &[]);
    let mut pairs: Vec<_> = (0..SESSIONS).map(|i| open(&world, PORT + i)).collect();
    assert_eq!(left(&world, Host::Client), usize::from(SESSIONS));

    let data = |i: usize, size| payload(size, i as u64);
    // Each message alone is called by its application; several at once are the pump's.
    for round in 0..3 {
        let message = |i: usize| data(i + round, MESSAGE);
        for (i, (client, _)) in pairs.iter_mut().enumerate() {
            send(client, &message(i));
        }
        for (i, (_, server)) in pairs.iter_mut().enumerate() {
            expect(server, &message(i));
            send(server, &message(i));
        }
        for (i, (client, _)) in pairs.iter_mut().enumerate() {
            expect(client, &message(i));
        }
    }
    for (i, (client, _)) in pairs.iter_mut().enumerate() {
        send(client, &data(i, BULK));
    }
    for (i, (_, server)) in pairs.iter_mut().enumerate() {
        expect(server, &data(i, BULK));
    }
    for (client, mut server) in pairs {
        client.close().expect("delivered");
        assert_eq!(server.recv_data(&mut [0; 1]).expect("the end"), 0);
    }
    for host in [Host::Client, Host::Server] {
        until("every session has ended", 10, || left(&world, host) == 0);
    }
    // Their rings can be had again.
    let (mut client, mut server) = open(&world, PORT);
    send(&mut client, b"once more");
    expect(&mut server, b"once more");
}
