//! A link that goes away in the middle, for a while and for good.

use std::{
    fs,
    time::{Duration, Instant},
};

use vtl_testbed::{Host, Link};

use crate::{
    process::{Process, refused, until, words},
    world::{World, payload, same},
};

const SIZE: usize = 5 << 20;

impl World {
    /// A file on its way from the client to the server: sender, receiver.
    fn sending(&self) -> [Process; 2] {
        let file = self.path("file");
        fs::write(&file, payload(SIZE, 3)).expect("written");
        let recv = self.start_recv(&self.path("got"), &[]);
        let mut send = self.start_send(&file, &self.servers()[0].to_string());
        until("the transfer is under way", 20, || {
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
    let sent = send.output(40);
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output(10).status.success());
    same(&world.path("file"), &world.path("got"));
    assert!(download.process.wait(40).success());
    download.check();
}

#[test]
fn outage__for_good_is_an_error_everywhere() {
    let Some(world) = World::new("blackhole", &Link::new(10.0, 20.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let [send, recv] = world.sending();
    let mut download = world.start_download(world.servers()[1], "f");
    download.reaches(100_000);
    let started = Instant::now();
    world.set_loss(100.0);
    refused(&send.output(40), 1, " broke");
    refused(&recv.output(10), 1, " broke");
    assert!(!world.path("got").exists(), "half a file was kept");
    download.broke(20);
    assert!(started.elapsed() < Duration::from_secs(40));
    for host in [Host::Client, Host::Server] {
        until("all sessions end", 20, || {
            world.status(host)["sessions"]
                .as_array()
                .is_some_and(Vec::is_empty)
        });
    }
    // And the link comes back.
    world.set_loss(0.0);
    world.download(world.servers()[1], "f");
}
