//! Hosts that are near, over a clean path: connections go past vtld until that changes.

use std::net::IpAddr;

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{World, payload, until};

const SIZE: usize = 1 << 20;
/// Milliseconds: where round trips of 10 count as near.
const NEAR: &str = "50";

impl World {
    /// The hosts that the client has found to be near.
    fn near(&self) -> Vec<String> {
        let status = self.status(Host::Client);
        let near = status["near"].as_array().into_iter().flatten();
        near.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Downloads until a server counts as near.
    fn come_near(&self, server: IpAddr) {
        until("the server is near", || {
            self.download(server, "little");
            self.near().contains(&server.to_string())
        });
    }

    /// Bytes that VTL carries of a download.
    fn carries(&self, server: IpAddr, run: &[&str]) -> u64 {
        let before = self.sum(Host::Client, "bytes_received");
        let mut download = self.start_download_run(run, server, "f");
        assert!(download.process.wait().success(), "{run:?}");
        download.check();
        self.sum(Host::Client, "bytes_received") - before
    }
}

fn world(name: &str) -> Option<World> {
    let mut world = World::bare(name, &Link::new(10.0, 100.0))?;
    world.start_web();
    world.start_both(&["--near", NEAR]);
    world.serve("f", SIZE);
    world.serve("little", 1000);
    Some(world)
}

#[test]
fn near__connections_go_past_vtld() {
    let Some(mut world) = world("near") else {
        return;
    };
    for server in world.servers() {
        // Too few to be sure.
        for _ in 0..7 {
            world.download(server, "little");
        }
        assert!(!world.near().contains(&server.to_string()));
        world.come_near(server);
        // Control frames may come.
        assert!(world.carries(server, &[]) < 10_000);
        world.upload_run(&[], server, "up", &payload(SIZE, 3));
        // What names a carrier, or must not be seen, is carried all the same.
        for run in [
            &["--carrier", "graft"],
            &["--require"],
            &["--require-encryption"],
        ] as [&[&str]; 3]
        {
            until("it is carried", || {
                world.carries(server, run) > SIZE as u64 / 2
            });
        }
        assert!(world.carries(server, &[]) < 10_000);
    }
    // Where nothing is near.
    world.stop_daemons();
    world.start_both(&["--near", "0"]);
    let server = world.servers()[0];
    for _ in 0..20 {
        world.download(server, "little");
    }
    assert_eq!(world.near(), Vec::<String>::new());
    until("it is carried", || {
        world.carries(server, &[]) > SIZE as u64 / 2
    });
}

/// A path that was near and clean, and what comes over it.
fn returns(name: &str, spoil: impl FnOnce(&World), go: impl Fn(&World, IpAddr)) {
    let Some(world) = world(name) else {
        return;
    };
    let server = world.servers()[0];
    world.come_near(server);
    spoil(&world);
    until("it is not near any more", || {
        go(&world, server);
        world.near().is_empty()
    });
    until("flows are carried", || {
        world.carries(server, &[]) > SIZE as u64 / 2
    });
    // Even if it is good again: for a while.
    world.testbed.set(&Link::new(10.0, 100.0)).expect("set");
    for _ in 0..20 {
        world.download(server, "little");
    }
    assert_eq!(world.near(), Vec::<String>::new());
}

#[test]
fn near__downloads_over_a_path_that_loses_return() {
    returns(
        "near-down",
        |world| world.set_loss(5.0),
        |world, server| world.download(server, "f"),
    );
}

#[test]
fn near__uploads_over_a_path_that_loses_return() {
    let bytes = payload(SIZE, 3);
    returns(
        "near-up",
        |world| world.set_loss(5.0),
        |world, server| world.upload_run(&[], server, "up", &bytes),
    );
}

#[test]
fn near__connections_over_a_path_that_has_become_long_return() {
    let long = Link::new(300.0, 100.0);
    returns(
        "near-long",
        |world| world.testbed.set(&long).expect("set"),
        |world, server| world.download(server, "little"),
    );
}
