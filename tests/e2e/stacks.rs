//! Flows of unmodified programs over several paths at once: the carrier `multipath`.

use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{World, payload, run, until};

const MB: usize = 1 << 20;
/// The hosts' addresses on the second path.
const SECOND: [(Host, &str); 2] = [(Host::Client, "10.99.1.1"), (Host::Server, "10.99.1.2")];

/// Two hosts with a link between them, and with another one, whose hosts lend their interfaces.
struct TwoPaths {
    world: World,
    second: World,
}

impl TwoPaths {
    /// With daemons and a web server; `None` where the test is skipped.
    fn new(name: &str, first: &Link, second: &Link) -> Option<Self> {
        let mut world = World::bare(name, first)?;
        let second = world.beside(second);
        for (host, address) in SECOND {
            let to = format!("{}-{}", world.testbed.name(), host.name());
            let ip = |world: &World, line: &str| {
                let ip = world.testbed.command(host, "ip");
                run(ip.expect("a namespace").args(line.split(' ')));
            };
            ip(&second, "link set eth0 down");
            ip(&second, "link set eth0 name second");
            ip(&second, &format!("link set second netns {to}"));
            ip(&world, "link set second up");
            ip(&world, &format!("address add {address}/24 dev second"));
        }
        world.start_web();
        world.start_both(&[]);
        Some(Self { world, second })
    }

    /// Bytes of a host's carriers, one figure for each of them.
    fn carried(&self, host: Host, figure: &str) -> Vec<u64> {
        let carriers = self.world.carriers(host);
        let figures = carriers.iter().filter_map(|row| row[figure].as_u64());
        figures.collect()
    }

    /// The stacks of a host's only flow, as `vtl flow show` has them; none before it begins.
    fn stacks(&self, host: Host) -> Vec<Value> {
        let list = self.world.call(host, &Request::FlowList { from: 0 });
        let Some(id) = list["flows"][0]["id"].as_u64() else {
            return Vec::new();
        };
        let flow = self.world.call(host, &Request::FlowShow { id });
        flow["stacks"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until a host's only flow has moved bytes by both stacks, the first one the path of its connection.
    #[track_caller]
    fn moves_by_both(&self, host: Host, figure: &str) {
        let (_, second) = SECOND[usize::from(host == Host::Server)];
        until("bytes by both stacks", || {
            let stacks = self.stacks(host);
            let has_moved = |stack: &Value| stack[figure].as_u64() > Some(64 << 10);
            stacks.len() == 2 && stacks.iter().all(has_moved) && {
                let are_first = [&stacks[0], &stacks[1]].map(|stack| stack["first"] == true);
                are_first == [true, false] && stacks[1]["local"] == second
            }
        });
    }

    /// Takes a host's address on the second path away (`del`), or gives it back (`add`).
    fn address(&self, host: Host, word: &str) {
        let (_, address) = SECOND[usize::from(host == Host::Server)];
        let ip = self.world.testbed.command(host, "ip");
        let line = format!("address {word} {address}/24 dev second");
        run(ip.expect("a namespace").args(line.split(' ')));
    }

    /// Opens both paths.
    #[track_caller]
    fn meet(&self, carrier: &str) {
        let server = self.world.servers()[0];
        self.world.serve("meet", 1);
        let mut download = self
            .world
            .start_download_run(&["--carrier", carrier], server, "meet");
        assert!(download.process.wait().success());
        self.come_to(2);
    }

    /// Waits for so many carriers at both hosts.
    #[track_caller]
    fn come_to(&self, count: usize) {
        until(&format!("{count} carriers at both hosts"), || {
            let is_so = |host| self.world.carriers(host).len() == count;
            is_so(Host::Client) && is_so(Host::Server)
        });
    }
}

/// Each of two figures is at least so much.
#[track_caller]
fn both(figures: &[u64], min: usize) {
    let are = figures.len() == 2 && figures.iter().all(|bytes| *bytes >= min as u64);
    assert!(are, "{figures:?}: each at least {min}");
}

#[test]
fn multipath__downloads_and_uploads_by_both_paths() {
    let (first, second) = (Link::new(20.0, 50.0), Link::new(60.0, 50.0));
    let lossy = |link| Link {
        loss_pct: 1.0,
        ..link
    };
    let Some(paths) = TwoPaths::new("stacks", &lossy(first), &lossy(second)) else {
        return;
    };
    let world = &paths.world;
    let server = world.servers()[0];
    paths.meet("multipath");
    world.serve("big", 12 * MB);
    let run = ["--carrier", "multipath"];
    let mut download = world.start_download_run(&run, server, "big");
    assert!(download.process.wait().success());
    download.check();
    both(&paths.carried(Host::Server, "bytes_sent"), 2 * MB);
    let before = paths.carried(Host::Client, "bytes_sent");
    world.upload_run(&run, server, "up", &payload(8 * MB, 7));
    let after = paths.carried(Host::Client, "bytes_sent");
    let sent: Vec<u64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
    both(&sent, MB);
}

/// Without the path of the connection itself, from the middle of a transfer on. Nothing falls back to TCP, which has no
/// path left.
#[test]
fn multipath__goes_on_without_the_first_path() {
    let Some(paths) = TwoPaths::new("stacks-cut", &Link::new(20.0, 30.0), &Link::new(40.0, 30.0))
    else {
        return;
    };
    let world = &paths.world;
    let server = world.servers()[0];
    paths.meet("multipath");
    world.serve("big", 12 * MB);
    let mut download = world.start_download_run(&["--carrier", "multipath"], server, "big");
    download.reaches(2 * MB as u64);
    world.set_loss(100.0);
    assert!(download.process.wait().success());
    download.check();
    // The other way round: it comes back, and brings a transfer to its end alone.
    world.set_loss(0.0);
    until("the first path again", || {
        world.carriers(Host::Client).len() == 2
    });
    let mut download = world.start_download_run(&["--carrier", "multipath"], server, "big");
    download.reaches(2 * MB as u64);
    paths.second.set_loss(100.0);
    assert!(download.process.wait().success());
    download.check();
}

/// Paths end and begin with addresses while bytes move, and with a daemon.
#[test]
fn multipath__follows_addresses_and_a_take_over() {
    let crawling = Link::new(10.0, 8.0);
    let Some(mut paths) = TwoPaths::new("stacks-move", &crawling, &crawling) else {
        return;
    };
    let server = paths.world.servers()[0];
    paths.meet("multipath");
    paths.world.serve("big", 16 * MB);
    let run = ["--carrier", "multipath"];
    let mut download = paths.world.start_download_run(&run, server, "big");
    download.reaches(MB as u64);
    paths.moves_by_both(Host::Client, "bytes_received");
    paths.moves_by_both(Host::Server, "bytes_sent");
    paths.address(Host::Client, "del");
    paths.come_to(1);
    paths.address(Host::Client, "add");
    paths.come_to(2);
    paths.address(Host::Server, "del");
    // The server tells: the client tries no more.
    paths.come_to(1);
    paths.address(Host::Server, "add");
    paths.come_to(2);
    paths.world.take_over(Host::Client);
    paths.come_to(2);
    paths.world.take_over(Host::Server);
    paths.come_to(2);
    assert!(download.process.ended().is_none(), "it has ended before");
    for world in [&paths.world, &paths.second] {
        world.set_rate(100.0);
    }
    assert!(download.process.wait().success());
    download.check();
}
