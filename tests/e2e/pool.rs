//! Grafts that are taken out of the kernel and put back, and daemons that are in each other's way.

use std::fs;

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, refused, until, vtld, words};

const SIZE: usize = 1 << 18;

impl World {
    /// `vtl graft` on a host, to succeed.
    #[track_caller]
    fn graft(&self, host: Host, args: &[&str]) {
        let output = self
            .vtl(host, &[&["graft"], args].concat())
            .output()
            .expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
    }

    /// Names of the grafts in the kernel of a host.
    fn deployed(&self, host: Host) -> Vec<String> {
        self.pooled(host, true)
    }

    /// Names of the grafts in the pool of a host, or of those in the kernel only.
    fn pooled(&self, host: Host, deployed: bool) -> Vec<String> {
        let output = self
            .vtl(host, &["graft", "list", "--json"])
            .output()
            .expect("vtl runs");
        let list: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let rows = list["grafts"].as_array().expect("a list");
        rows.iter()
            .filter(|row| !deployed || row["deployed"] == true)
            .map(|row| row["name"].as_str().expect("a name").to_owned())
            .collect()
    }
}

#[test]
fn graft__removed_means_plain_tcp_until_it_is_back() {
    let Some(world) = World::new("graft", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 2)).expect("written");
    let [server, server6] = world.servers();
    for host in [Host::Client, Host::Server] {
        let grafts = world.pooled(host, false);
        assert!(!world.deployed(host).is_empty());
        // One that is not in the kernel would be loaded in the place of those taken out.
        for graft in &grafts {
            world.graft(host, &["deploy", graft]);
            world.graft(host, &["remove", graft]);
        }
        assert_eq!(world.deployed(host), Vec::<String>::new());
        let again = world.vtl(host, &["graft", "remove", &grafts[0]]).output();
        refused(&again.expect("vtl runs"), 1, "vtl graft list");
        // Browsers notice nothing; what asked for VTL is told.
        world.download(server, "f");
        let sessions = world.status(Host::Client)["sessions"].clone();
        assert_eq!(sessions.as_array().map(Vec::len), Some(0), "{sessions}");
        let recv = world.start_recv(&world.path("got"), &[]);
        let send = world.start_send(&file, &server6.to_string());
        refused(&send.output(), 1, "graft");
        drop(recv);
        for graft in &grafts {
            world.graft(host, &["deploy", graft]);
        }
        assert_eq!(world.deployed(host).len(), grafts.len());
    }
    let wrong = world
        .vtl(Host::Client, &["graft", "deploy", "no-such"])
        .output();
    refused(&wrong.expect("vtl runs"), 1, "no-such");
    let recv = world.start_recv(&world.path("got"), &[]);
    let send = world.start_send(&file, &server.to_string());
    let sent = send.output();
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output().status.success());
    // One that an application's session uses stays.
    world.meet();
    let used = || {
        let status = world.status(Host::Client);
        let sessions = status["sessions"].as_array().expect("a list").clone();
        let grafts = sessions.iter().filter_map(|s| s["graft"].as_str());
        grafts.map(str::to_owned).collect::<Vec<_>>()
    };
    let graft = &used()[0];
    let recv = world.start_recv(&world.path("held"), &[]);
    world.serve("big", 16 * SIZE);
    world.set_rate(10.0);
    let send = world.start_send(&world.path("www").join("big"), &server.to_string());
    until("a session of its own", || used().len() == 3);
    let output = world
        .vtl(Host::Client, &["graft", "remove", graft])
        .output();
    refused(&output.expect("vtl runs"), 1, "end them first");
    assert!(send.output().status.success());
    assert!(recv.output().status.success());
    until("its end", || used().len() == 2);
    // Hooked flows go on over TCP, and then by another graft.
    let mut download = world.start_download(server6, "big");
    download.reaches(100_000);
    world.graft(Host::Client, &["remove", graft]);
    world.set_rate(100.0);
    assert!(download.process.wait().success());
    download.check();
    until("sessions over another one", || {
        let now = used();
        now.len() == 2 && !now.contains(graft)
    });
}

#[test]
fn vtld__second_one_goes() {
    let Some(world) = World::new("second", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE);
    world.meet();
    world.download(world.servers()[0], "f");
    let second = || {
        let command = world.testbed.command(Host::Client, vtld());
        command.expect("a namespace")
    };
    let output = Process::piped(&mut second()).output();
    refused(&output, 1, "another vtld answers");
    // With a socket of its own it would take the first one's packets away.
    let socket = world.path("second.sock");
    let output = Process::piped(second().arg("--socket").arg(&socket)).output();
    refused(&output, 1, "another vtld runs in this network namespace");
    assert!(!socket.exists());
    // The first one carries on.
    assert!(world.socket(Host::Client).exists());
    for server in world.servers() {
        world.download(server, "f");
    }
    assert!(world.sum(Host::Client, "bytes_received") >= 3 * SIZE as u64);
}
