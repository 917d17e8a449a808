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

#[test]
fn statistics__tell_what_the_link_did() {
    const RTT_MS: f64 = 20.0;
    const RATE_MBIT: f64 = 20.0;
    let link = Link {
        loss_pct: 5.0,
        ..Link::new(RTT_MS, RATE_MBIT)
    };
    let Some(world) = pair("statistics", &link) else {
        return;
    };
    // With how many packets of 1,000 bytes: some take a round trip for each.
    for (port, (graft, params, count)) in (PORT..).zip([
        ("stream", &[][..], 3000),
        ("stop-and-wait", &[], 100),
        ("go-back-n", &[("window", 20)], 400),
        ("selective-repeat", &[("window", 50)], 2000),
        ("newreno", &[], 800),
        ("cubic", &[], 800),
        ("hybla", &[], 800),
        ("udp-plus", &[("rate", 15_000)], 2000),
        ("partial-reliability", &[("window", 50)], 2000),
        ("partial-order", &[], 800),
        ("dccp-ccid2", &[], 800),
        ("dccp-ccid3", &[], 800),
        ("udp", &[], 2000),
        ("udp-lite", &[("coverage", 100)], 2000),
        ("canonical", &[], 2000),
    ]) {
        // Packets to the server, and those that the link has dropped.
        let link = || {
            let up = world.testbed.stats().expect("an emulator").up;
            let lost = up.lost + up.queue_drops + up.host_drops + up.send_errors;
            (up.rx_packets, lost)
        };
        let before = link();
        let (mut initiator, mut responder) = open(&world, port, graft, params);
        let unreliable = ["udp", "udp-lite", "canonical"].contains(&graft);
        let reading = thread::spawn(move || {
            let mut ignore = |_: &[u8]| ();
            while responder.recv_in_place(64, &mut ignore).expect("received") > 0 {}
        });
        for i in 0..count {
            initiator.send_data(&payload(1000, i)).expect("sent");
            if unreliable && i % 16 == 0 {
                thread::sleep(Duration::from_millis(10)); // nobody else paces them
            }
        }
        until("everything is settled", || {
            let now = initiator.statistics().expect("counted");
            now.sent - now.retransmitted >= count && now.unacknowledged == 0
        });
        let told = initiator.statistics().expect("counted");
        let (packets, lost) = (link().0 - before.0, link().1 - before.1);
        initiator.close().expect("closed");
        reading.join().expect("no panic");
        // What acknowledgements do not tell of yet, and what was no data.
        let slack = 45.0 + 0.1 * lost as f64;
        let all = format!("{graft}: {lost} of {packets} packets were lost; {told:?}");
        assert!((told.lost as f64 - lost as f64).abs() <= slack, "{all}");
        let pct = lost as f64 / packets as f64 * 100.0;
        assert!((told.loss_pct - pct).abs() <= 2.0 + 0.2 * pct, "{all}");
        assert!(told.min_rtt_ms >= RTT_MS, "{all}");
        assert!(told.min_rtt_ms <= told.rtt_ms * 1.001, "{all}");
        assert!(told.rate_mbit > 0.0, "{all}");
        assert!(
            told.delivered > u64::from(unreliable) && told.delivered <= told.sent,
            "{all}"
        );
    }
}
