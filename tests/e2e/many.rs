//! Many sessions side by side: each exact, and nothing left of them.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{ChildStdout, Stdio},
    thread,
    time::Instant,
};

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::Signal,
};
use vtl::{Agreement, Error, Mode, Requirements, Services, Socket};
use vtl_testbed::{Host, Link};

use crate::harness::{Account, Process, World, helper, memory_kib, payload, until};

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

pub(crate) fn open_with(
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
    world.start_both(&["--shards", "3"]);
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
        until("every session has ended", || left(&world, host) == 0);
    }
    // Their rings can be had again.
    let (mut client, mut server) = open(&world, PORT);
    send(&mut client, b"once more");
    expect(&mut server, b"once more");
}

/// How many files this process, and so the daemons, may open. As many as are `wanted`, if that is
/// allowed.
pub(crate) fn allow_files(wanted: u64) -> u64 {
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
    if allow_files(FILES) < FILES {
        vtl_testing::skip("a process may not open as many files as sessions need");
        return;
    }
    let Some(mut world) = World::bare("thousand", &Link::new(1.0, 500.0)) else {
        return;
    };
    // Of which one network has three quarters.
    world.start_both(&["--max-sessions", "1400"]);
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

/// Processes on each host that have sessions.
const APPLICATIONS: u16 = 4;
/// What a session's socket takes of its process.
const DESCRIPTORS: u64 = 6;

/// An application with many sessions, until it is killed: `tests/helper`.
struct Application {
    process: Process,
    says: BufReader<ChildStdout>,
}

impl Application {
    /// Opens `count` sessions with another one. A responder's returns once the port is taken.
    fn start(world: &World, host: Host, port: u16, count: u64) -> Self {
        let mut command = world.testbed.command(host, helper()).expect("a namespace");
        let at = SocketAddr::new(world.servers()[0], port);
        let role = match host {
            Host::Server => "listen",
            Host::Client | Host::Router => "connect",
        };
        command
            .args(["hold", role, &at.to_string(), &count.to_string()])
            .stdout(Stdio::piped());
        let mut process = Process::start(&mut command);
        let says = process.child().stdout.take().expect("piped");
        let mut started = Self {
            process,
            says: BufReader::new(says),
        };
        started.await_word("ready");
        started
    }

    #[track_caller]
    fn await_word(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim_end() != word {
            line.clear();
            let read = self.says.read_line(&mut line).expect("a pipe");
            assert_ne!(read, 0, "it ended before it was {word}");
        }
    }
}

#[test]
fn sessions__idle_ones_and_their_application_dies() {
    idle("idle", 1500, None);
}

#[test]
#[ignore = "takes a gigabyte on each host: make soak"]
fn sessions__ten_thousand_idle_ones_and_their_application_dies() {
    idle("idle-most", 10_000, Some(1 << 30));
}

/// Opens so many sessions, in which nothing happens, at once, and kills their applications. `max`:
/// memory of a host, its applications included, bytes.
fn idle(name: &str, wanted: u64, max: Option<u64>) {
    // Of a daemon each session takes one descriptor, of its application more.
    let each = wanted / u64::from(APPLICATIONS);
    let needed = (wanted + 1000).max(each * DESCRIPTORS + 100);
    if allow_files(needed) < needed {
        vtl_testing::skip("a process may not open as many files as sessions need");
        return;
    }
    let count = each * u64::from(APPLICATIONS);
    let account = |host: Host| Account::open(&format!("{name}-{}", host.name()));
    let hosts = [Host::Server, Host::Client].map(|host| (host, account(host)));
    let Some(mut world) = World::alone(name, &Link::new(1.0, 200.0)) else {
        return;
    };
    let counted = |account: &Option<Account>, start: &mut dyn FnMut()| match account {
        Some(account) => account.during(start),
        None => start(),
    };
    // Beside the idle ones some that are not.
    // One network has three quarters of the places at most.
    let sessions = (wanted + wanted / 3 + 100).to_string();
    let room = ["--max-sessions", &sessions, "--ring-memory", "600"];
    for (host, account) in &hosts {
        counted(account, &mut || world.start(*host, &room));
    }
    // The first one, with large rings, and the last one, with the smallest.
    let mut first = open(&world, PORT);
    let began = Instant::now();
    let mut applications = Vec::new();
    for (host, account) in &hosts {
        for port in (PORT + 1..).take(APPLICATIONS.into()) {
            counted(account, &mut || {
                applications.push(Application::start(&world, *host, port, each));
            });
        }
    }
    for application in &mut applications {
        application.await_word("all");
    }
    println!("{count} sessions in {:?}", began.elapsed());
    let mut last = open(&world, PORT + APPLICATIONS + 1);
    for (host, account) in &hosts {
        assert_eq!(left(&world, *host) as u64, count + 2);
        let pid = world.daemon(*host).pid();
        let resident = memory_kib(pid) >> 10;
        let open = fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("it runs")
            .count();
        println!("{host:?}: {resident} MiB resident, {open} descriptors");
        assert!(resident < 400, "{resident} MiB");
        if let Some(account) = account {
            let bytes = account.bytes();
            println!("{host:?}: {} MiB in all", bytes >> 20);
            assert!(max.is_none_or(|max| bytes < max), "{bytes} bytes");
        }
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
    let began = Instant::now();
    for application in &applications {
        application.process.signal(Signal::SIGKILL);
    }
    drop(applications);
    println!("the applications have gone after {:?}", began.elapsed());
    for (host, _) in &hosts {
        until("they have ended", || left(&world, *host) == 2);
    }
    println!("their sessions after {:?}", began.elapsed());
    exact(&mut first);
    let mut again: Vec<_> = (0..8).map(|i| open(&world, PORT + 100 + i)).collect();
    again.iter_mut().for_each(exact);
}
