//! VTL's TCP congestion controls against what their papers promise, coarsely: an unmodified web
//! server sends under one of them, over a link that shows the difference to the kernel's own. They
//! depend on how busy the machine is: `make soak`.

use std::{
    thread,
    time::{Duration, Instant},
};

use vtl_testbed::{DirectionStats, Host, Link};

use crate::harness::{Download, PORT, World, until};

/// More than any test waits for.
const SIZE: usize = 96 << 20;

impl World {
    /// A file to send, and buffers that hold nobody back.
    fn for_controls(name: &str, link: &Link) -> Option<Self> {
        let world = Self::unhooked(name, link)?;
        world.serve("f", SIZE);
        for host in [Host::Client, Host::Server] {
            for buffer in ["tcp_rmem", "tcp_wmem"] {
                world.sysctl(host, buffer, "4096 8388608 33554432");
            }
        }
        Some(world)
    }

    fn sysctl(&self, host: Host, name: &str, value: &str) {
        let write = format!("echo '{value}' >/proc/sys/net/ipv4/{name}");
        self.run(host, &["sh", "-c", &write]);
    }

    fn run(&self, host: Host, args: &[&str]) {
        let mut command = self.testbed.command(host, args[0]).expect("a namespace");
        let status = command.args(&args[1..]).status().expect("it runs");
        assert!(status.success(), "{args:?}");
    }

    /// The server begins to send under a carrier; the client receives under another.
    fn send_under(&self, server: &str, client: &str) -> Download {
        let port = PORT.to_string();
        self.vtl_hook(Host::Server, &["add", "--port", &port, "--carrier", server]);
        let download = self.start_over(client, self.servers()[0], "f");
        until("it begins", || download.arrived() > 0);
        self.vtl_hook(Host::Server, &["remove", "--port", &port]);
        let name = server.trim_start_matches("tcp:");
        let used = self.controls(Host::Server);
        assert!(used.len() == 1 && used[0].contains(name), "{used:?}");
        download
    }

    /// Bytes that arrive within a time under a control.
    fn arrives(&self, server: &str, client: &str, time: Duration) -> u64 {
        let download = self.send_under(server, client);
        let before = download.arrived();
        thread::sleep(time);
        assert!(download.arrived() < SIZE as u64, "the file is too short");
        download.arrived() - before
    }

    /// The web server's congestion window, packets.
    fn window(&self) -> Option<u32> {
        self.figure("cwnd:")
    }

    /// What `ss` says of the web server's connection.
    fn figure(&self, name: &str) -> Option<u32> {
        let mut ss = self
            .testbed
            .command(Host::Server, "ss")
            .expect("a namespace");
        let filter = ["-tinH", "state", "established", "( sport = :80 )"];
        let output = ss.args(filter).output().expect("ss runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let figure = text.split_whitespace().find_map(|w| w.strip_prefix(name))?;
        figure.parse().ok()
    }

    /// The smallest and the largest window within a time.
    fn windows(&self, time: Duration) -> (u32, u32) {
        let end = Instant::now() + time;
        let (mut min, mut max) = (u32::MAX, 0);
        while Instant::now() < end {
            if let Some(window) = self.window() {
                min = min.min(window);
                max = max.max(window);
            }
        }
        assert!(max > 0, "nothing is sent");
        (min, max)
    }

    fn down(&self) -> DirectionStats {
        self.testbed.stats().expect("an emulator").down
    }
}

/// Behind the threshold, the rate on a path of 500 ms grows like that of Reno on one of 25 ms: by
/// 1 / 0.025² = 1,600 packets/s each second (Caini and Firrincieli, section 3).
#[test]
#[ignore = "measures windows and queues: make soak"]
fn hybla__grows_on_500_ms_as_reno_does_on_25_ms() {
    const SECONDS: f64 = 3.0;
    let Some(world) = World::for_controls("control-hybla", &Link::new(500.0, 100.0)) else {
        return;
    };
    // The kernel takes the threshold of the route, once it keeps figures of the destination.
    let client = format!("{}/32", world.testbed.addr4(Host::Client));
    let route = [
        "ip", "route", "replace", &client, "dev", "eth0", "ssthresh", "lock", "20",
    ];
    world.run(Host::Server, &route);
    world.sysctl(Host::Server, "tcp_no_ssthresh_metrics_save", "0");
    world.serve("meet", 1);
    world.download(world.servers()[0], "meet");
    let mut grown = Vec::new();
    for control in ["tcp:reno", "tcp:hybla"] {
        let download = world.send_under(control, "tcp");
        let begin = Instant::now();
        let first = world.window().expect("it sends");
        thread::sleep(Duration::from_secs_f64(SECONDS));
        let window = world.window().expect("it sends");
        let took = begin.elapsed().as_secs_f64();
        drop(download);
        // Packets/s each second, of 1,600.
        let growth = f64::from(window.saturating_sub(first)) / 0.5 / took;
        println!("{control}: window {first} to {window} in {took:.2} s: {growth:.0} packets/s²");
        grown.push(growth);
    }
    assert!(grown[0] < 1600.0 / 20.0, "Reno would do: {grown:?}");
    assert!((600.0..3200.0).contains(&grown[1]), "{grown:?}");
}

/// `stream` keeps to the path's rate where packets get lost by chance, where Reno halves its window each
/// time, and keeps no queue where none do.
#[test]
#[ignore = "measures windows and queues: make soak"]
fn stream__is_not_slowed_down_by_random_losses_and_keeps_no_queue() {
    let link = Link {
        queue_packets: Some(200),
        ..Link::new(40.0, 20.0)
    };
    let Some(world) = World::for_controls("control-stream", &link) else {
        return;
    };
    let time = Duration::from_secs(5);
    let share = |bytes: u64| bytes as f64 * 8.0 / 20e6 / time.as_secs_f64();
    let clean = share(world.arrives("tcp:stream", "tcp", time));
    let down = world.down();
    println!("clean: {clean:.2} of the link, {down:?}");
    assert!(clean > 0.8, "{clean}");
    assert!(down.sojourn_p50_us < 10_000, "{down:?}");
    world.set_loss(2.0);
    let lossy = share(world.arrives("tcp:stream", "tcp", time));
    let reno = share(world.arrives("tcp:reno", "tcp", time));
    println!("2 % lost: {lossy:.2} of the link, Reno {reno:.2}");
    assert!(lossy > 0.7 && lossy > 2.0 * reno, "{lossy} {reno}");
    // All is lost for a second or two, which its timer tells: it goes on as before.
    let download = world.send_under("tcp:stream", "tcp");
    for seconds in [1, 2] {
        thread::sleep(Duration::from_secs(1));
        world.set_loss(100.0);
        thread::sleep(Duration::from_secs(seconds));
        world.set_loss(0.0);
        let before = download.arrived();
        until("the next bytes", || download.arrived() > before);
        thread::sleep(Duration::from_secs(1));
        let from = download.arrived();
        thread::sleep(time);
        let after = share(download.arrived() - from);
        println!("after an outage of {seconds} s: {after:.2} of the link");
        assert!(after > 0.7, "{after}");
    }
}

/// Vegas holds 2 to 4 packets in the queue and loses none, where CUBIC fills it (Brakmo and
/// Peterson, section 3.2); and it fills the link.
#[test]
#[ignore = "measures windows and queues: make soak"]
fn vegas__keeps_the_queue_short() {
    let link = Link {
        queue_packets: Some(100),
        ..Link::new(40.0, 20.0)
    };
    let Some(world) = World::for_controls("control-vegas", &link) else {
        return;
    };
    let time = Duration::from_secs(5);
    let bytes = world.arrives("tcp:vegas", "tcp", time);
    let vegas = world.down();
    println!("vegas: {bytes} bytes, {vegas:?}");
    let filled = bytes as f64 * 8.0 / 20e6 / time.as_secs_f64();
    assert!(filled > 0.7, "{filled} of the link");
    assert_eq!(vegas.queue_drops, 0, "{vegas:?}");
    world.arrives("tcp:cubic", "tcp", time);
    let cubic = world.down();
    println!("cubic: {cubic:?}");
    assert!(cubic.queue_drops > 0, "CUBIC fills it: {cubic:?}");
    assert!(
        vegas.sojourn_p95_us * 2 < cubic.sojourn_p95_us,
        "{vegas:?} {cubic:?}"
    );
}

/// After a random loss Westwood+ goes on with the estimated bandwidth * shortest round-trip time,
/// where Reno halves the window (Grieco and Mascolo, section 2).
#[test]
#[ignore = "measures windows and queues: make soak"]
fn westwood__goes_on_behind_random_losses() {
    let link = Link {
        queue_packets: Some(300),
        ..Link::new(80.0, 20.0)
    };
    let Some(world) = World::for_controls("control-westwood", &link) else {
        return;
    };
    let product = link.bdp_bytes() as f64 / 1500.0;
    // The receiver offers a little more than the path holds: the window stays there.
    let server = format!("{}/32", world.testbed.addr4(Host::Server));
    let max = (link.bdp_bytes() * 21 / 20).to_string();
    let route = [
        "ip", "route", "replace", &server, "dev", "eth0", "window", &max,
    ];
    world.run(Host::Client, &route);
    let mut windows = Vec::new();
    for control in ["tcp:reno", "tcp:westwood"] {
        let _download = world.send_under(control, "tcp");
        thread::sleep(Duration::from_secs(2));
        // Behind the first loss the window is no longer that of slow start, twice what is sent.
        for _ in 0..2 {
            let lost = world.down().lost;
            world
                .testbed
                .set(&Link {
                    loss_down_pct: Some(2.0),
                    ..link.clone()
                })
                .expect("set");
            until("a loss", || world.down().lost > lost);
            world.testbed.set(&link).expect("set");
            thread::sleep(Duration::from_secs(2));
        }
        let threshold = world.figure("ssthresh:").expect("it sends");
        println!("{control}: threshold {threshold} of {product:.0} packets");
        windows.push(f64::from(threshold) / product);
    }
    assert!(windows[0] < 0.75, "Reno would do: {windows:?}");
    assert!((0.8..1.3).contains(&windows[1]), "{windows:?}");
}

/// DCTCP cuts its window in proportion to the marked packets: a little each time on a link that
/// marks early, where Reno halves it at each mark (RFC 8257, 3.3).
#[test]
#[ignore = "measures windows and queues: make soak"]
fn dctcp__cuts_in_proportion_to_the_marks() {
    let link = Link {
        queue_packets: Some(300),
        ecn_ms: Some(5.0),
        ..Link::new(40.0, 20.0)
    };
    let Some(world) = World::for_controls("control-dctcp", &link) else {
        return;
    };
    for host in [Host::Client, Host::Server] {
        world.sysctl(host, "tcp_ecn", "1");
    }
    let swing = |control: &str, other: &str| {
        let before = world.down();
        let _download = world.send_under(control, other);
        thread::sleep(Duration::from_secs(4));
        let (min, max) = world.windows(Duration::from_secs(4));
        let after = world.down();
        println!("{control}: window {min} to {max}, {after:?}");
        assert!(after.marked > before.marked, "the link marks: {after:?}");
        assert_eq!(after.queue_drops, 0, "{after:?}");
        f64::from(min) / f64::from(max)
    };
    let dctcp = swing("tcp:dctcp", "tcp:dctcp");
    let reno = swing("tcp:reno", "tcp:reno");
    assert!(reno < 0.58, "Reno would do: {reno}");
    assert!(dctcp > 0.6, "{dctcp}");
}
