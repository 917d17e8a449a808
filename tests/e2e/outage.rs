//! A link that goes away in the middle, for a while and for good, for all packets and for VTL's.

use std::{
    fs,
    time::{Duration, Instant},
};

use vtl_proto::carrier::GRAFT_PORT;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, refused, same, until, words};

const SIZE: usize = 5 << 20;

impl World {
    /// A file on its way from the client to the server: sender, receiver.
    fn sending(&self) -> [Process; 2] {
        let file = self.path("file");
        fs::write(&file, payload(SIZE, 3)).expect("written");
        let recv = self.start_recv(&self.path("got"), &[]);
        let mut send = self.start_send(&file, &self.servers()[0].to_string());
        until("the transfer is under way", || {
            assert!(send.ended().is_none(), "vtl send has ended");
            self.sum(Host::Server, "received") > 500
        });
        [send, recv]
    }
}

#[test]
fn outage__of_two_seconds_is_survived() {
    let Some(world) = World::new("outage", &Link::new(10.0, 30.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let [send, recv] = world.sending();
    let server = world.servers()[1];
    let mut download = world.start_download(server, "f");
    download.reaches(100_000);
    world.set_loss(100.0);
    std::thread::sleep(Duration::from_secs(2));
    world.set_loss(0.0);
    let sent = send.output();
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output().status.success());
    same(&world.path("file"), &world.path("got"));
    assert!(download.process.wait().success());
    download.check();
}

#[test]
fn outage__of_half_a_minute_is_an_error_but_for_tcp_programs() {
    let Some(world) = World::new("blackhole", &Link::new(10.0, 20.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let [send, recv] = world.sending();
    let mut download = world.start_download(world.servers()[1], "f");
    download.reaches(100_000);
    world.set_loss(100.0);
    refused(&send.output(), 1, " broke");
    refused(&recv.output(), 1, " broke");
    assert!(!world.path("got").exists(), "half a file was kept");
    for host in [Host::Client, Host::Server] {
        until("their sessions end", || {
            let status = world.status(host);
            let mut sessions = status["sessions"].as_array().expect("a list").iter();
            sessions.all(|session| session["port"] == GRAFT_PORT)
        });
    }
    // And the link comes back: TCP would have waited for that.
    assert!(download.process.ended().is_none(), "it has not waited");
    world.set_loss(0.0);
    assert!(download.process.wait().success());
    download.check();
    world.download(world.servers()[1], "f");
}

/// Downloads during which the path begins to drop VTL's packets, each time a little later. They go on over their
/// own connections, and then by a session behind UDP.
fn dropped(name: &str, rounds: u32) {
    let Some(mut world) = World::new(name, &Link::new(20.0, 40.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let server = world.servers()[1];
    for round in 0..rounds {
        // The way of the last session is remembered.
        if round > 0 {
            world.stop_daemons();
            world.start_both(&[]);
        }
        world.meet();
        let mut download = world.start_download(server, "f");
        download.reaches(1 + (u64::from(round) * 997 % 4096) * 1024);
        world.block(Some(253));
        let started = Instant::now();
        assert!(download.process.wait().success(), "round {round}");
        download.check();
        println!("round {round}: {:?} behind it", started.elapsed());
        until("a session behind UDP", || {
            let peer = server.to_string();
            let status = world.status(Host::Client);
            let mut sessions = status["sessions"].as_array().expect("a list").iter();
            sessions.any(|session| session["peer"] == peer && session["way"] == "udp")
        });
        world.meet();
        world.download(server, "f");
        world.block(None);
    }
}

#[test]
fn path_that_drops_vtl__flows_go_on_over_tcp() {
    dropped("fallback", 3);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn path_that_drops_vtl__a_hundred_times() {
    dropped("fallback-100", 100);
}
