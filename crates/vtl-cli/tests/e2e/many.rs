//! Many sessions side by side: each exact, and nothing left of them.

use std::{net::SocketAddr, path::Path, thread, time::Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use vtl::{Agreement, Error, Mode, Requirements, Services, Socket, control::Client};
use vtl_testbed::{Host, Link};

use crate::{
    process::{memory_kib, until},
    world::{World, payload},
};

const SESSIONS: u16 = 200;
const PORT: u16 = 3000;
const MESSAGE: usize = 64;
const BULK: usize = 50_000;

/// A session between applications that live on the hosts themselves, so that they run their own
/// egress.
pub(crate) fn open(world: &World, port: u16) -> (Socket, Socket) {
    let wanted = Requirements {
        services: Services::RELIABLE.union(Services::ORDERED),
        ..Default::default()
    };
    open_with(world, port, |initiator| initiator.negotiate(&wanted))
}

fn open_with(
    world: &World,
    port: u16,
    negotiate: impl FnOnce(&mut Socket) -> Result<Agreement, Error>,
) -> (Socket, Socket) {
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
    // Nobody waits for this thread if the negotiation fails: the test ends, the daemon with it.
    let accepting = thread::spawn(move || {
        responder.validate().expect("a session");
        responder
    });
    negotiate(&mut initiator).expect("a session");
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

/// How many files this process, and so the daemons, may open. As many as are `wanted`, if that is
/// allowed.
fn allow_files(wanted: u64) -> u64 {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("there is a limit");
    let limit = hard.max(wanted);
    let raised = setrlimit(Resource::RLIMIT_NOFILE, limit, limit);
    raised.map_or_else(
        |_| {
            setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("within the limit");
            hard
        },
        |()| limit,
    )
}

/// Grafts that lose nothing and keep the order.
const GRAFTS: [&str; 7] = [
    "stream",
    "selective-repeat",
    "go-back-n",
    "stop-and-wait",
    "newreno",
    "cubic",
    "hybla",
];

#[test]
fn sessions__a_thousand_over_different_grafts() {
    const ALL: u16 = 1000;
    const BYTES: usize = 15_000;
    const FILES: u64 = 16_000;
    let files = allow_files(FILES);
    if files < FILES {
        println!("skipped: a process may open {files} files here, and this takes {FILES}");
        return;
    }
    let Some(mut world) = World::bare("thousand", &Link::new(1.0, 500.0)) else {
        return;
    };
    world.start(Host::Server, &[]);
    world.start(Host::Client, &[]);
    let over = |i: u16| {
        let graft = GRAFTS[usize::from(i) % GRAFTS.len()];
        open_with(&world, PORT + i, |initiator| {
            initiator.negotiate_over(graft, &[])
        })
    };
    let mut pairs: Vec<_> = (0..ALL).map(over).collect();
    // Both ways, and all of them at once.
    let data = |i: usize| payload(BYTES, i as u64);
    for (i, (client, server)) in pairs.iter_mut().enumerate() {
        send(client, &data(i));
        send(server, &data(i + usize::from(ALL)));
    }
    for (i, (client, server)) in pairs.iter_mut().enumerate() {
        expect(server, &data(i));
        expect(client, &data(i + usize::from(ALL)));
    }
    assert_eq!(left(&world, Host::Client), usize::from(ALL));
}

const OPENERS: u64 = 4;

/// Asks a daemon for a session, which ends with the connection.
fn granted(daemon: &Path, request: &Value) -> Client {
    let client = Client::connect(daemon).expect("a daemon");
    let granted = client.call_with_descriptors(request);
    granted.unwrap_or_else(|error| panic!("{request}: {error}"));
    client
}

/// As many at once on each of several threads.
fn granted_at_once(count: u64, daemon: &Path, request: &Value) -> Vec<Client> {
    thread::scope(|scope| {
        let part = || {
            let each = (0..count / OPENERS).map(|_| granted(daemon, request));
            each.collect::<Vec<_>>()
        };
        let parts: Vec<_> = (0..OPENERS).map(|_| scope.spawn(part)).collect();
        parts
            .into_iter()
            .flat_map(|part| part.join().expect("sessions"))
            .collect()
    })
}

#[test]
fn sessions__idle_ones_and_their_application_dies() {
    idle("idle", 1500);
}

#[test]
#[ignore = "takes a gigabyte on each host, and a quarter of a minute: a run by hand"]
fn sessions__ten_thousand_idle_ones_and_their_application_dies() {
    idle("idle-most", 10_000);
}

/// Opens so many sessions, in which nothing happens, at once, and closes what their application had
/// opened.
fn idle(name: &str, wanted: u64) {
    // Of a daemon each session takes three descriptors, of this process two. Who may not raise the
    // limit has fewer sessions.
    let files = allow_files(1 << 16);
    let count = wanted.min((files - 1000) / 3 / OPENERS * OPENERS);
    if count < wanted {
        println!("of {wanted} sessions only {count}: a process may open {files} files");
    }
    let Some(mut world) = World::bare(name, &Link::new(1.0, 200.0)) else {
        return;
    };
    // Beside the idle ones some that are not.
    let most = (wanted + 100).to_string();
    let room = ["--max-sessions", &most, "--ring-memory", "800"];
    world.start(Host::Server, &room);
    world.start(Host::Client, &room);
    let [server, client] = [Host::Server, Host::Client].map(|host| world.socket(host));
    // The first one, with large rings, and the last one, with the smallest.
    let mut first = open(&world, PORT);
    let listener = Client::connect(&server).expect("a daemon");
    let key = listener
        .call(&json!({ "op": "listen", "port": PORT + 1 }))
        .expect("a port")["key"]
        .take();
    let began = Instant::now();
    let (to, services) = (world.servers()[0], Services::RELIABLE | Services::ORDERED);
    let connect =
        json!({ "op": "connect", "host": to, "port": PORT + 1, "services": services.bits() });
    let accept = json!({ "op": "accept", "key": key });
    let held = thread::scope(|scope| {
        let accepted = scope.spawn(|| granted_at_once(count, &server, &accept));
        let connected = granted_at_once(count, &client, &connect);
        [connected, accepted.join().expect("sessions")]
    });
    println!("{count} sessions in {:?}", began.elapsed());
    let mut last = open(&world, PORT + 2);
    for host in [Host::Client, Host::Server] {
        assert_eq!(left(&world, host) as u64, count + 2);
        let resident = memory_kib(world.daemon(host).pid()) >> 10;
        println!("{host:?}: {resident} MiB resident");
        assert!(resident < 400, "{resident} MiB");
    }
    let exact = |(client, server): &mut (Socket, Socket)| {
        let data = payload(BULK, 7);
        thread::scope(|scope| {
            scope.spawn(|| send(client, &data));
            expect(server, &data);
        });
    };
    exact(&mut first);
    exact(&mut last);
    // As the kernel does it when a process is killed.
    drop(held);
    for host in [Host::Client, Host::Server] {
        until("they have ended", 30, || left(&world, host) == 2);
    }
    exact(&mut first);
    let mut again: Vec<_> = (0..8).map(|i| open(&world, PORT + 3 + i)).collect();
    again.iter_mut().for_each(exact);
}
