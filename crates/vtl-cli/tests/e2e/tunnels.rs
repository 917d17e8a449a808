//! Carriers that are no grafts, under unmodified programs.

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::{
    process::until,
    world::{Download, World},
};

const SIZE: usize = 8 << 20;

fn finish(mut download: Download) {
    let status = download.process.wait(70);
    assert!(status.success(), "{status}");
    download.check();
}

impl World {
    fn tunnels(&self, host: Host) -> Vec<Value> {
        let status = self.status(host);
        status["tunnels"].as_array().expect("a list").clone()
    }

    /// Has tunnels to both of the server's addresses opened: what follows is not decided by how
    /// soon the first flow gets one.
    fn meet_by(&self, carrier: &str) {
        self.serve("meet", 1);
        for (open, server) in (1..).zip(self.servers()) {
            finish(self.start_over(carrier, server, "meet"));
            until("a tunnel", 20, || self.tunnels(Host::Client).len() == open);
        }
    }
}

#[test]
fn quic__carries_flows_as_streams_of_one_connection() {
    let Some(world) = World::new("tunnel-quic", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE);
    world.meet_by("quic");
    for server in world.servers() {
        finish(world.start_over("quic", server, "f"));
    }
    for host in [Host::Client, Host::Server] {
        let tunnels = world.tunnels(host);
        assert_eq!(tunnels.len(), 2, "{tunnels:?}");
    }
    let received: Vec<_> = world
        .tunnels(Host::Client)
        .iter()
        .map(|t| t["bytes_received"].as_u64().expect("a number"))
        .collect();
    assert!(received.iter().all(|n| *n > SIZE as u64), "{received:?}");
}
