//! Flows of unmodified programs over several paths at once: the carrier `multipath`.

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
            ip(&world, &format!("address add {address}/24 dev second"));
            ip(&world, "link set second up");
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

    /// Opens both paths.
    #[track_caller]
    fn meet(&self, carrier: &str) {
        let server = self.world.servers()[0];
        self.world.serve("meet", 1);
        let mut download = self
            .world
            .start_download_run(&["--carrier", carrier], server, "meet");
        assert!(download.process.wait().success());
        until("two carriers at both hosts", || {
            let count = |host| self.world.carriers(host).len();
            count(Host::Client) == 2 && count(Host::Server) == 2
        });
    }
}

/// Each of two figures is at least so much.
#[track_caller]
fn both(figures: &[u64], least: usize) {
    let are = figures.len() == 2 && figures.iter().all(|bytes| *bytes >= least as u64);
    assert!(are, "{figures:?}: each at least {least}");
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
    drop(paths.second);
}
