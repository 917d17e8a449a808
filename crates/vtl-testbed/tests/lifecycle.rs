//! Life cycle of testbeds: creation, use, changes, and removal, whatever happens to their creators.

#![allow(non_snake_case, reason = "tests are named `function__case`")]

#[path = "common/mod.rs"]
mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{set_option, settled, since, testbed, turn, within};
use vtl_testbed::{Backend, DirectionStats, Error, Host, Lifetime, Link, Profile, Testbed};
use vtl_testing::{PATIENCE, gone, remains, until};

/// Not a test: the victim of the one below, which runs it in a process of its own.
#[test]
#[ignore = "run by guarded__nothing_is_left_after_a_kill"]
fn guarded__victim() {
    let _testbed = testbed("t-life-kill", &Link::new(10.0, 10.0));
    println!("READY");
    std::thread::sleep(PATIENCE);
}

#[test]
fn guarded__nothing_is_left_after_a_kill() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let mut victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "guarded__victim", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("runs");
    let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
    assert!(lines.any(|l| l.is_ok_and(|l| l.contains("READY"))));
    assert_eq!(
        remains("t-life-kill")
            .iter()
            .filter(|f| !f.contains('.'))
            .count(),
        3
    );
    victim.kill().expect("killed");
    victim.wait().expect("ended");
    gone("t-life-kill");
}

#[test]
fn guarded__nothing_is_left_after_a_panic_or_a_drop() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let name = "t-life-drop";
    let result = std::panic::catch_unwind(|| {
        let testbed = testbed(name, &Link::default());
        assert!(matches!(
            Testbed::up(name, &Link::default(), Lifetime::Guarded),
            Err(Error::AlreadyUp(_))
        ));
        assert_eq!(Testbed::names().iter().filter(|n| *n == name).count(), 1);
        drop(Testbed::attach(name).expect("up"));
        assert!(testbed.stats().is_ok());
        panic!("as planned");
    });
    assert!(result.is_err());
    assert!(remains(name).is_empty());
}

#[test]
fn two_testbeds__are_isolated() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let (a, b) = (
        testbed("t-life-a", &Link::default()),
        testbed("t-life-b", &Link::default()),
    );
    for t in [&a, &b] {
        transfer(t, 100_000, None);
    }
    let (before, _) = (a.stats().expect("stats"), transfer(&b, 100_000, None));
    let after = a.stats().expect("stats");
    // A late acknowledgement of its own transfer, and neighbour solicitations of the kernels.
    let strays = after.up.rx_bytes - before.up.rx_bytes;
    assert!(strays < 10_000, "{before:?}, then {after:?}");
}

/// Transfers bytes by TCP from client to server. Returns the congestion controls in use.
fn transfer(testbed: &Testbed, bytes: usize, expected: Option<&str>) -> Vec<String> {
    let address = testbed.addr4(Host::Server);
    let listener = testbed
        .in_netns(Host::Server, || TcpListener::bind((address, 0)))
        .expect("inside")
        .expect("bound");
    let to = listener.local_addr().expect("an address");
    let mut client = testbed
        .in_netns(Host::Client, || TcpStream::connect(to))
        .expect("inside")
        .expect("connected");
    let (mut server, _) = listener.accept().expect("accepted");
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream.set_write_timeout(Some(PATIENCE)).expect("set");
    }
    let data: Vec<u8> = (0..bytes).map(|i| (i / 7) as u8).collect();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| client.write_all(&data).expect("written"));
        let mut got = vec![0; bytes];
        server.read_exact(&mut got).expect("read");
        assert!(got == data);
        writing.join().expect("written");
    });
    let of = |host| testbed.congestion_controls(host).expect("ss");
    let names: Vec<String> = [of(Host::Client), of(Host::Server)]
        .concat()
        .into_iter()
        .map(|c| c.name)
        .collect();
    if let Some(expected) = expected {
        assert_eq!(names, [expected, expected]);
    }
    names
}

#[test]
fn tune_tcp__takes_effect_and_the_host_is_restored() {
    let Some(_turn) = turn(&["ip", "ss"]) else {
        return;
    };
    let allowed = || {
        std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
            .expect("readable")
    };
    // The list belongs to the machine: other testbeds may be using it.
    let alone = Testbed::names().is_empty();
    let before = allowed();
    {
        let testbed = testbed("t-life-tcp", &Link::new(2.0, 500.0));
        let available =
            std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")
                .expect("readable");
        for cc in available.split_whitespace() {
            for host in [Host::Client, Host::Server] {
                testbed.tune_tcp(host, cc).expect("tuned");
            }
            transfer(&testbed, 1_000_000, Some(cc));
        }
        assert!(matches!(
            testbed.tune_tcp(Host::Client, "nonesuch"),
            Err(Error::NoCongestionControl { .. })
        ));
    }
    if alone && Testbed::names().is_empty() {
        assert_eq!(allowed(), before);
    }
}

#[test]
fn aggregates__pass_whole_and_are_counted() {
    let Some(_turn) = turn(&["ip", "ethtool"]) else {
        return;
    };
    let testbed = testbed("t-life-tso", &Link::new(2.0, 500.0));
    transfer(&testbed, 5_000_000, None);
    assert_eq!(
        testbed.stats().expect("stats").up.aggregates,
        0,
        "one frame is one packet"
    );
    let status = testbed
        .command(Host::Client, "ethtool")
        .expect("a command")
        .args([
            "-K",
            testbed.device(Host::Client),
            "tx-checksum-ip-generic",
            "on",
            "tso",
            "on",
        ])
        .stdout(Stdio::null())
        .status()
        .expect("runs");
    assert!(status.success());
    transfer(&testbed, 5_000_000, None);
    let stats = testbed.stats().expect("stats");
    assert!(stats.up.aggregates > 10, "{stats:?}");
    assert_eq!(stats.up.send_errors, 0, "{stats:?}");
}

/// Fate of numbered datagrams.
struct Datagrams {
    /// Number of arrivals of each.
    arrived: HashMap<u32, u32>,
    /// Arrivals with damage.
    damaged: u64,
    /// Arrivals after a later one.
    overtaken: u64,
    link: DirectionStats,
}

/// Sends numbered datagrams from client to server.
fn datagrams(testbed: &Testbed, link: &Link, count: u32) -> Datagrams {
    testbed.set(link).expect("set");
    let server = testbed
        .in_netns(Host::Server, || UdpSocket::bind("10.73.0.2:9"))
        .expect("inside")
        .expect("bound");
    let client = testbed
        .in_netns(Host::Client, || UdpSocket::bind("10.73.0.1:0"))
        .expect("inside")
        .expect("bound");
    // Damage must reach the application: no checksum.
    set_option(&client, libc::SO_NO_CHECK, 1);
    set_option(&server, libc::SO_RCVBUFFORCE, 64 << 20);
    let up = || testbed.stats().expect("stats").up;
    let before = up();
    for i in 0..count {
        let sent = client.send_to(&i.to_be_bytes().repeat(250), "10.73.0.2:9");
        sent.expect("sent");
        std::thread::sleep(Duration::from_micros(20));
    }
    settled(count.into(), &before, up);
    let mut got = Datagrams {
        arrived: HashMap::new(),
        damaged: 0,
        overtaken: 0,
        link: since(&up(), &before),
    };
    let (mut buffer, mut highest) = ([0; 2000], 0);
    server.set_nonblocking(true).expect("set");
    while let Ok(length) = server.recv(&mut buffer) {
        let words: Vec<u32> = buffer[..length]
            .chunks_exact(4)
            .map(|w| u32::from_be_bytes(w.try_into().expect("four")))
            .collect();
        if words.iter().any(|w| *w != words[0]) {
            got.damaged += 1;
            continue;
        }
        let number = words[0];
        *got.arrived.entry(number).or_insert(0) += 1;
        got.overtaken += u64::from(number < highest);
        highest = highest.max(number);
    }
    got
}

#[test]
fn injections__duplicates_reordering_damage() {
    const COUNT: u32 = 8000;
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-inject", &Link::default());
    let perfect = Link::new(4.0, 0.0);

    let link = Link {
        duplicate_pct: 1.0,
        ..perfect.clone()
    };
    let got = datagrams(&testbed, &link, COUNT);
    let twice = got.arrived.values().filter(|n| **n == 2).count() as u64;
    assert_eq!(
        (got.arrived.len() as u32, got.damaged, got.overtaken),
        (COUNT, 0, 0)
    );
    within(twice, COUNT.into(), 1.0, 1.0);

    let link = Link {
        reorder_pct: 2.0,
        ..perfect.clone()
    };
    let got = datagrams(&testbed, &link, COUNT);
    assert_eq!((got.arrived.len() as u32, got.damaged), (COUNT, 0));
    within(got.link.reordered, got.link.rx_packets, 2.0, 1.0);
    // A packet that is held back is overtaken only if others are sent in that time.
    assert!(
        (1..=got.link.reordered).contains(&got.overtaken),
        "{} of {}",
        got.overtaken,
        got.link.reordered
    );

    let link = Link {
        corrupt_pct: 2.0,
        ..perfect
    };
    let got = datagrams(&testbed, &link, COUNT);
    // A bit of the UDP header may be hit as well: then the datagram does not arrive at all.
    let hit = u64::from(COUNT) - got.arrived.len() as u64;
    within(hit, COUNT.into(), 2.0, 1.0);
    assert!((1..=hit).contains(&got.damaged), "{} of {hit}", got.damaged);
}

#[test]
fn set__changes_the_link_under_traffic() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-set", &Link::new(10.0, 0.0));
    let echo = testbed
        .in_netns(Host::Server, || UdpSocket::bind("10.73.0.2:9"))
        .expect("inside")
        .expect("bound");
    let client = testbed
        .in_netns(Host::Client, || UdpSocket::bind("10.73.0.1:0"))
        .expect("inside")
        .expect("bound");
    client.connect("10.73.0.2:9").expect("connected");
    echo.set_read_timeout(Some(PATIENCE)).expect("set");
    let once = || {
        let start = Instant::now();
        client.send(b"x").expect("sent");
        let received = client.recv(&mut [0; 8]);
        received.map(|_| start.elapsed().as_secs_f64() * 1e3)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok((n, from)) = echo.recv_from(&mut [0; 8]) {
                if n == 0 {
                    break;
                }
                echo.send_to(b"x", from).expect("sent");
            }
        });
        client.set_read_timeout(Some(PATIENCE)).expect("set");
        // No packet is early, and one is soon faster than the previous delay allowed.
        for (rtt, below) in [(10.0, 50.0), (60.0, f64::MAX), (20.0, 60.0)] {
            testbed.set(&Link::new(rtt, 0.0)).expect("set");
            until("the new delay", || {
                let took = once().expect("echoed");
                assert!(took >= rtt * 0.999, "{took} for {rtt}");
                took < below
            });
        }
        let lossy = Link {
            loss_up_pct: Some(100.0),
            ..Link::new(10.0, 0.0)
        };
        testbed.set(&lossy).expect("set");
        let lost = testbed.stats().expect("stats").up.lost;
        let short = Some(Duration::from_millis(100));
        client.set_read_timeout(short).expect("set");
        assert!(once().is_err());
        assert_eq!(testbed.link().expect("up").loss_up(), 100.0);
        assert!(testbed.stats().expect("stats").up.lost > lost);
        testbed.set(&Link::new(10.0, 0.0)).expect("set");
        client.send(b"").expect("sent");
    });
}

#[test]
fn wire__is_direct_and_cannot_change() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-wire", &Profile::Wire.link());
    assert_eq!(testbed.backend(), Backend::Direct);
    transfer(&testbed, 1_000_000, None);
    assert!(matches!(
        testbed.set(&Link::new(10.0, 10.0)),
        Err(Error::WireFixed)
    ));
    let lossy = Link {
        loss_pct: 1.0,
        ..Profile::Wire.link()
    };
    assert!(matches!(testbed.set(&lossy), Err(Error::BadLink(_))));
    assert_eq!(testbed.link().expect("up"), Profile::Wire.link());
    assert_eq!(
        IpAddr::from(testbed.addr4(Host::Client)),
        IpAddr::from(Ipv4Addr::new(10, 73, 0, 1))
    );
    assert_eq!(testbed.addr6(Host::Server).to_string(), "fd73::2");
    let v6 = testbed
        .in_netns(Host::Server, || UdpSocket::bind("[fd73::2]:9"))
        .expect("inside");
    assert!(v6.is_ok(), "no duplicate address detection holds it back");
}
