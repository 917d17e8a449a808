//! Every graft carries data between two hosts, over a link that does everything wrong.

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use vtl::{Mode, Socket};
use vtl_testbed::{Host, Link};

use crate::harness::{World, bad_link, payload, same, until, words};

const PORT: u16 = 2000;

/// Two hosts with daemons.
fn pair(name: &str, link: &Link) -> Option<World> {
    let mut world = World::bare(name, link)?;
    for host in [Host::Server, Host::Client] {
        world.start(host, &[]);
    }
    Some(world)
}

#[test]
fn reliable_grafts__send_a_file_exactly() {
    let Some(world) = pair("grafts", &bad_link()) else {
        return;
    };
    let [server, server6] = world.servers();
    for (graft, size, more) in [
        ("stop-and-wait", 80_000, &[][..]),
        ("go-back-n", 400_000, &["--param", "window=40"]),
        ("selective-repeat", 1 << 20, &[]),
        ("selective-repeat", 4 << 20, &["--param", "window=200"]),
        ("udp-plus", 1 << 20, &["--param", "rate=50000"]),
        ("newreno", 300_000, &[]),
        ("cubic", 300_000, &[]),
        ("hybla", 300_000, &[]),
        ("stream", 4 << 20, &[]),
    ] {
        let file = world.path("file");
        fs::write(&file, payload(size, 7)).expect("written");
        let got = world.path(&format!("got-{graft}-{}", more.len()));
        let recv = world.start_recv(&got, &[]);
        let to = if size % 3 == 0 { server } else { server6 }.to_string();
        let file_name = file.to_str().expect("UTF-8");
        let args = [&["send", file_name, &to, "--graft", graft], more].concat();
        let sent = world.vtl(Host::Client, &args).output().expect("vtl runs");
        assert!(sent.status.success(), "{graft}: {}", words(&sent));
        assert!(words(&sent).contains(graft), "{}", words(&sent));
        let received = recv.output();
        assert!(received.status.success(), "{graft}: {}", words(&received));
        same(&file, &got);
    }
}

/// A session over a graft between two applications of ours.
fn open(world: &World, port: u16, graft: &str, params: &[(&str, u32)]) -> (Socket, Socket) {
    let at = SocketAddr::new(world.servers()[usize::from(port % 2)], port);
    let socket = |host, mode| Socket::init(mode, at, &world.socket(host)).expect("a socket");
    let mut responder = socket(Host::Server, Mode::Responder);
    let mut initiator = socket(Host::Client, Mode::Initiator);
    let accepting = thread::spawn(move || {
        responder.validate().expect("a session");
        responder
    });
    let agreement = initiator.negotiate_over(graft, params).expect("a session");
    assert_eq!(agreement.graft, graft);
    (initiator, accepting.join().expect("no panic"))
}

/// Datagram `i`: its number, and bytes that follow from it.
fn datagram(i: u32) -> Vec<u8> {
    let mut bytes = i.to_le_bytes().to_vec();
    bytes.extend(payload(200 + (i as usize * 7) % 900, i.into()));
    bytes
}

#[test]
fn datagram_grafts__bring_most_and_nothing_wrong() {
    const COUNT: u32 = 1000;
    let link = Link {
        loss_pct: 5.0,
        reorder_pct: 2.0,
        ..Link::new(10.0, 100.0)
    };
    let Some(world) = pair("datagrams", &link) else {
        return;
    };
    let grafts = [
        ("canonical", &[][..]),
        ("udp", &[]),
        ("udp-lite", &[("coverage", 100)]),
        ("dccp-ccid2", &[]),
        ("dccp-ccid3", &[]),
        ("partial-reliability", &[("window", 100), ("fec", 4)]),
    ];
    // Packets to the server that the link has dropped.
    let dropped = || {
        let up = world.testbed.stats().expect("an emulator").up;
        up.lost + up.queue_drops + up.host_drops + up.send_errors
    };
    for (port, (graft, params)) in (PORT..).zip(grafts) {
        let before = dropped();
        let (mut initiator, mut responder) = open(&world, port, graft, params);
        let arrived = AtomicU64::new(0);
        let got = thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut got = BTreeSet::new();
                let mut take = |packet: &[u8]| {
                    let Some((number, _)) = packet.split_first_chunk() else {
                        assert!(packet.is_empty(), "a packet that was given up");
                        return;
                    };
                    let number = u32::from_le_bytes(*number);
                    assert!(packet == datagram(number), "datagram {number} is damaged");
                    got.insert(number);
                    arrived.store(got.len() as u64, Relaxed);
                };
                while responder.recv_in_place(64, &mut take).expect("received") > 0 {}
                got.len() as u64
            });
            for i in 0..COUNT {
                let bytes = datagram(i);
                assert_eq!(initiator.send_data(&bytes).expect("sent"), bytes.len());
                if i % 16 == 0 {
                    thread::sleep(Duration::from_millis(2)); // nobody else paces them
                }
            }
            // What is missing was lost on the way; the end takes with it what still waits.
            until("all the others have come", || {
                arrived.load(Relaxed) + dropped() - before >= u64::from(COUNT)
            });
            initiator.close().expect("closed");
            reading.join().expect("no panic")
        });
        assert!(got <= COUNT.into(), "{graft}: {got} of {COUNT}");
        let sent_again = graft == "partial-reliability";
        assert!(
            sent_again || got < COUNT.into(),
            "{graft}: nothing was lost"
        );
    }
}
