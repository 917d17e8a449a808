//! Testbeds come, work, change and go, whatever happens to those who made them.

#![allow(non_snake_case, reason = "tests are named `function__case`")]
#![allow(dead_code, reason = "what the other tests share")]

#[path = "common/mod.rs"]
mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{set_option, testbed, turn};
use vtl_testbed::{Backend, Error, Host, Lifetime, Link, Profile, Testbed};

fn vtl(name: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vtl-testbed"))
        .args(["testbed", "--name", name])
        .args(args)
        .env("VTL_TESTBED_BACKEND", "emulator")
        .output()
        .expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What is left of a testbed.
fn remains(name: &str) -> Vec<String> {
    let of = |directory: &str| {
        std::fs::read_dir(directory)
            .into_iter()
            .flatten()
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .filter(|f| f.starts_with(name))
            .collect::<Vec<_>>()
    };
    [of("/run/netns"), of("/run/vtl/testbed")].concat()
}

fn gone_within(name: &str, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        if remains(name).is_empty() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("{:?}", remains(name));
    false
}

#[test]
fn command_line__up_exec_set_status_down() {
    let Some(_turn) = turn("command line", &["ip"]) else {
        return;
    };
    let name = "t-life-cli";
    vtl(name, &["down"]);
    let missing = vtl(name, &["exec", "client", "--", "true"]);
    assert_eq!(
        text(&missing.stderr),
        format!(
            "error: there is no testbed \"{name}\": run `vtl testbed up --name {name}` first\n"
        )
    );

    let up = vtl(name, &["up", "--profile", "campus", "--loss", "1"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let again = vtl(name, &["up"]);
    assert!(!again.status.success());
    assert_eq!(
        text(&again.stderr),
        format!(
            "error: the testbed \"{name}\" is already up: run `vtl testbed down --name {name}` first\n"
        )
    );

    assert_eq!(
        vtl(name, &["exec", "server", "--", "sh", "-c", "exit 7"])
            .status
            .code(),
        Some(7)
    );
    let env = vtl(
        name,
        &[
            "exec",
            "client",
            "--",
            "sh",
            "-c",
            "echo $VTL_TESTBED $VTL_SOCKET",
        ],
    );
    assert_eq!(
        text(&env.stdout),
        format!("{name} /run/vtl/{name}-client.sock\n")
    );

    assert!(vtl(name, &["set", "--rtt", "30"]).status.success());
    let status: serde_json::Value =
        serde_json::from_slice(&vtl(name, &["status", "--json"]).stdout).expect("JSON");
    assert_eq!(status["link"]["rtt_ms"], 30.0);
    assert_eq!(status["link"]["loss_pct"], 1.0);
    assert!(status["stats"]["up"]["rx_packets"].is_u64());
    let wrong = vtl(name, &["set", "--loss", "120"]);
    assert_eq!(
        text(&wrong.stderr),
        "error: bad link: loss of 120 % is not between 0 and 100\n"
    );

    // A process left inside is ended, too.
    let mut inside = Testbed::attach(name)
        .and_then(|t| t.command(Host::Server, "sleep"))
        .expect("a command")
        .arg("1000")
        .spawn()
        .expect("runs");
    assert!(vtl(name, &["down"]).status.success());
    assert!(!inside.wait().expect("ended").success());
    assert!(gone_within(name, Duration::from_secs(1)));
    assert_eq!(
        text(&vtl(name, &["down"]).stdout),
        format!("{name}: there was none\n")
    );
}

#[test]
fn up__sweeps_what_a_dead_emulator_left() {
    let Some(_turn) = turn("sweep", &["ip"]) else {
        return;
    };
    let name = "t-life-sweep";
    vtl(name, &["down"]);
    assert!(vtl(name, &["up"]).status.success());
    let record: serde_json::Value = serde_json::from_slice(
        &std::fs::read(format!("/run/vtl/testbed/{name}.json")).expect("a record"),
    )
    .expect("JSON");
    let pid = record["process"]["pid"].as_i64().expect("a pid") as i32;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    )
    .expect("killed");
    let deadline = Instant::now() + Duration::from_secs(2);
    while !matches!(Testbed::attach(name), Err(Error::NotUp(_))) {
        assert!(
            Instant::now() < deadline,
            "a dead emulator makes a dead testbed"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let up = vtl(name, &["up"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    assert!(vtl(name, &["down"]).status.success());
    // A namespace without a record is half a testbed.
    assert!(
        Command::new("ip")
            .args(["netns", "add", &format!("{name}-router")])
            .status()
            .expect("runs")
            .success()
    );
    assert_eq!(
        text(&vtl(name, &["down"]).stdout),
        format!("{name}: removed\n")
    );
    assert!(remains(name).is_empty());
}

/// Not a test: the victim of the one below, which runs it in a process of its own.
#[test]
#[ignore = "run by guarded__nothing_is_left_after_a_kill"]
fn guarded__victim() {
    let _testbed = testbed("t-life-kill", &Link::new(10.0, 10.0));
    println!("READY");
    std::thread::sleep(Duration::from_secs(30));
}

#[test]
fn guarded__nothing_is_left_after_a_kill() {
    let Some(_turn) = turn("guard", &["ip"]) else {
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
    assert!(gone_within("t-life-kill", Duration::from_secs(3)));
}

#[test]
fn guarded__nothing_is_left_after_a_panic_or_a_drop() {
    let Some(_turn) = turn("drop", &["ip"]) else {
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
fn two_testbeds__do_not_meet() {
    let Some(_turn) = turn("two", &["ip"]) else {
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
    assert_eq!(
        a.stats().expect("stats").up.rx_packets,
        before.up.rx_packets
    );
}

/// Moves bytes by TCP from client to server. Returns the congestion controls that were at work.
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
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("set");
        stream
            .set_write_timeout(Some(Duration::from_secs(5)))
            .expect("set");
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
    let Some(_turn) = turn("tune", &["ip", "ss"]) else {
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
    let Some(_turn) = turn("aggregates", &["ip", "ethtool"]) else {
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

/// Sends numbered datagrams from client to server and returns how often each arrived, those that arrived
/// damaged, and how many came behind a later one.
fn datagrams(testbed: &Testbed, count: u32) -> (HashMap<u32, u32>, u32, u32) {
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
    server
        .set_read_timeout(Some(Duration::from_millis(200)))
        .expect("set");
    let (mut arrived, mut damaged, mut overtaken, mut highest) = (HashMap::new(), 0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..count {
                client
                    .send_to(&i.to_be_bytes().repeat(250), "10.73.0.2:9")
                    .expect("sent");
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let mut buffer = [0; 2000];
        while let Ok(length) = server.recv(&mut buffer) {
            let words: Vec<u32> = buffer[..length]
                .chunks_exact(4)
                .map(|w| u32::from_be_bytes(w.try_into().expect("four")))
                .collect();
            let number = words[0].max(words[1]).min(words[2].max(words[1]));
            if words.iter().any(|w| *w != words[0]) {
                damaged += 1;
                continue;
            }
            *arrived.entry(number).or_insert(0) += 1;
            overtaken += u32::from(number < highest);
            highest = highest.max(number);
        }
    });
    (arrived, damaged, overtaken)
}

#[test]
fn injections__duplicates_reordering_damage() {
    let Some(_turn) = turn("injections", &["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-inject", &Link::default());
    const COUNT: u32 = 8000;
    let around = |got: u32, pct: f64| {
        let (p, n) = (pct / 100.0, f64::from(COUNT));
        (f64::from(got) - n * p).abs() <= 4.0 * (n * p * (1.0 - p)).sqrt()
    };
    let perfect = Link::new(4.0, 0.0);

    testbed
        .set(&Link {
            duplicate_pct: 1.0,
            ..perfect.clone()
        })
        .expect("set");
    let (arrived, damaged, overtaken) = datagrams(&testbed, COUNT);
    let twice = arrived.values().filter(|n| **n == 2).count() as u32;
    assert_eq!((arrived.len() as u32, damaged, overtaken), (COUNT, 0, 0));
    assert!(around(twice, 1.0), "{twice}");

    testbed
        .set(&Link {
            reorder_pct: 2.0,
            ..perfect.clone()
        })
        .expect("set");
    let (arrived, damaged, overtaken) = datagrams(&testbed, COUNT);
    assert_eq!((arrived.len() as u32, damaged), (COUNT, 0));
    assert!(around(overtaken, 2.0), "{overtaken}");

    testbed
        .set(&Link {
            corrupt_pct: 2.0,
            ..perfect
        })
        .expect("set");
    let (arrived, damaged, _) = datagrams(&testbed, COUNT);
    // A bit of the UDP header may be hit as well: then the datagram does not arrive at all.
    assert!(
        around(COUNT - arrived.len() as u32, 2.0),
        "{} {damaged}",
        arrived.len()
    );
    assert!(damaged > 0);
}

#[test]
fn set__changes_the_link_under_traffic() {
    let Some(_turn) = turn("set", &["ip"]) else {
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
    client
        .set_read_timeout(Some(Duration::from_secs(1)))
        .expect("set");
    echo.set_read_timeout(Some(Duration::from_millis(500)))
        .expect("set");
    let once = || {
        let start = Instant::now();
        client.send(b"x").expect("sent");
        client
            .recv(&mut [0; 8])
            .map(|_| start.elapsed().as_secs_f64() * 1e3)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok((_, from)) = echo.recv_from(&mut [0; 8]) {
                echo.send_to(b"x", from).expect("sent");
            }
        });
        for rtt in [10.0, 60.0, 20.0] {
            testbed.set(&Link::new(rtt, 0.0)).expect("set");
            let best = (0..4)
                .map(|_| once().expect("echoed"))
                .fold(f64::MAX, f64::min);
            assert!((best - rtt).abs() < 2.0, "{best} for {rtt}");
        }
        testbed
            .set(&Link {
                loss_up_pct: Some(100.0),
                ..Link::new(10.0, 0.0)
            })
            .expect("set");
        client
            .set_read_timeout(Some(Duration::from_millis(100)))
            .expect("set");
        assert!(once().is_err());
    });
    assert_eq!(testbed.link().expect("up").loss_up(), 100.0);
}

#[test]
fn wire__is_direct_and_stays_so() {
    let Some(_turn) = turn("wire", &["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-wire", &Profile::Wire.link());
    assert_eq!(testbed.backend(), Backend::Direct);
    transfer(&testbed, 1_000_000, None);
    assert!(matches!(
        testbed.set(&Link::new(10.0, 10.0)),
        Err(Error::WireFixed)
    ));
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

#[test]
fn exec__of_a_program_that_is_not_there() {
    let Some(_turn) = turn("exec", &["ip"]) else {
        return;
    };
    let testbed = testbed("t-life-exec", &Link::default());
    let output = vtl(testbed.name(), &["exec", "client", "--", "/nonesuch"]);
    assert!(
        text(&output.stderr).starts_with("error: cannot run /nonesuch: No such file"),
        "{output:?}"
    );
}
