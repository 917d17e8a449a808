//! `vtl send` and `vtl recv`.

use std::{fs, path::Path, process::Output};

use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, bad_link, payload, refused, same, until, words};

impl World {
    /// `vtl recv` on the server, once it waits at its port.
    pub(crate) fn start_recv(&self, to: &Path, args: &[&str]) -> Process {
        let listening =
            || self.call(Host::Server, &Request::Status { from: 0 })["listeners"].clone();
        until("no receiver", || {
            listening().as_array().is_some_and(Vec::is_empty)
        });
        let to = to.to_str().expect("UTF-8");
        let mut command = self.vtl(Host::Server, &["recv", "--output", to]);
        let mut recv = Process::piped(command.args(args));
        until("vtl recv waits", || {
            assert!(recv.ended().is_none(), "vtl recv has ended");
            listening().as_array().is_some_and(|l| !l.is_empty())
        });
        recv
    }

    /// `vtl send` on the client.
    pub(crate) fn start_send(&self, file: &Path, to: &str) -> Process {
        let file = file.to_str().expect("UTF-8");
        Process::piped(&mut self.vtl(Host::Client, &["send", file, to]))
    }

    /// The same in the clear: then data go ahead of the peer's answer.
    pub(crate) fn start_send_early(&self, file: &Path, to: &str) -> Process {
        let file = file.to_str().expect("UTF-8");
        let args = ["send", file, to, "--no-encryption"];
        Process::piped(&mut self.vtl(Host::Client, &args))
    }

    fn send(&self, file: &Path, to: &str) -> Output {
        self.start_send(file, to).output()
    }
}

#[test]
fn send__every_byte_over_a_bad_link() {
    let Some(mut world) = World::bare("send", &bad_link()) else {
        return;
    };
    for host in [Host::Server, Host::Client] {
        world.start(host, &[]);
    }
    for server in world.servers() {
        for size in [0, 1, 10 << 20] {
            let file = world.path("file");
            fs::write(&file, payload(size, size as u64)).expect("written");
            let got = world.path(&format!("got-{size}-{}", server.is_ipv6()));
            let recv = world.start_recv(&got, &[]);
            let sent = world.send(&file, &server.to_string());
            assert!(sent.status.success(), "{}", words(&sent));
            let received = recv.output();
            assert!(received.status.success(), "{}", words(&received));
            same(&file, &got);
            // Both ends print the same digest.
            let digest = crate::harness::sha256(&fs::read(&file).expect("a file"));
            for output in [&sent, &received] {
                assert!(String::from_utf8_lossy(&output.stdout).contains(&digest));
            }
        }
    }
    let left = || world.call(Host::Client, &Request::Status { from: 0 })["sessions"].clone();
    until("the sessions' end", || {
        left().as_array().is_some_and(Vec::is_empty)
    });
}

#[test]
fn send__what_cannot_be_is_one_sentence() {
    let Some(mut world) = World::bare("sentences", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    let file = world.path("file");
    fs::write(&file, payload(100_000, 1)).expect("written");
    let [server, server6] = world.servers().map(|s| s.to_string());

    // A peer without daemon.
    for send in [&server, &server6].map(|server| world.start_send(&file, server)) {
        refused(&send.output(), 1, "did not answer");
    }
    refused(&world.send(&world.path("no-such"), &server), 1, "no-such");
    refused(
        &world.send(&world.path("www"), &server),
        1,
        "not a regular file",
    );
    refused(&world.send(&file, "127.0.0.1"), 1, "not another host");
    refused(&world.send(&file, "192.0.2.1"), 1, "no route");

    world.start(Host::Server, &[]);
    // Nobody waits at the port.
    refused(&world.send(&file, &server), 1, "no listener at that port");

    // The port is taken.
    let recv = world.start_recv(&world.path(""), &[]);
    let mut second = world.vtl(Host::Server, &["recv", "--output", "/tmp"]);
    refused(&second.output().expect("vtl runs"), 1, "9253 is taken");
    // The receiver has a file of that name already: here, the very file.
    let sent = world.send(&file, &server);
    refused(&sent, 1, "--force");
    refused(&recv.output(), 1, "--force");
    let got = world.path("got");
    fs::write(&got, "old").expect("written");
    let recv = world.start_recv(&got, &["--force"]);
    let sent = world.send(&file, &server);
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output().status.success());
    same(&file, &got);

    // Another port, and its neighbour.
    let recv = world.start_recv(&world.path("got2"), &["--port", "7"]);
    refused(
        &world.send(&file, &format!("{server}:8")),
        1,
        "no listener at that port",
    );
    assert!(
        world
            .send(&file, &format!("[{server6}]:7"))
            .status
            .success()
    );
    assert!(recv.output().status.success());
    same(&file, &world.path("got2"));
}
