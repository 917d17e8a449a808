//! Interfaces that come and go while the daemons run.

use std::{fs, process::Command};

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{World, payload, run, same, until};

const SIZE: usize = 1 << 20;
const SERVER: &str = "10.99.7.2";

impl World {
    /// A second cable between client and server.
    fn add_cable(&self) {
        let server = format!("{}-{}", self.testbed.name(), Host::Server.name());
        let ends = [
            (Host::Client, "10.99.7.1/24"),
            (Host::Server, &format!("{SERVER}/24")),
        ];
        let words = "link add late type veth peer name late netns";
        self.ip(Host::Client, &format!("{words} {server}"));
        for (host, address) in ends {
            self.ip(host, &format!("address add {address} dev late"));
            self.ip(host, "link set late up");
        }
    }

    fn ip(&self, host: Host, words: &str) {
        let mut ip: Command = self.testbed.command(host, "ip").expect("a namespace");
        run(ip.args(words.split(' ')));
    }

    /// What a host's daemon says of the cable, if it uses it.
    fn cable(&self, host: Host) -> Option<Value> {
        let status = self.status(host);
        let interfaces = status["interfaces"].as_array().expect("a list");
        interfaces.iter().find(|i| i["name"] == "late").cloned()
    }
}

#[test]
fn interfaces__come_and_go() {
    let Some(world) = World::new("interfaces", &Link::new(2.0, 100.0)) else {
        return;
    };
    let (file, got) = (world.path("file"), world.path("got"));
    fs::write(&file, payload(SIZE, 3)).expect("written");
    // Twice: the second one has other indexes and the same name.
    for _ in 0..2 {
        world.add_cable();
        for host in [Host::Client, Host::Server] {
            until("the cable is used", || world.cable(host).is_some());
        }
        let recv = world.start_recv(&got, &[]);
        let sent = world.start_send(&file, SERVER).output();
        assert!(sent.status.success(), "{sent:?}");
        assert!(recv.output().status.success());
        same(&file, &got);
        for host in [Host::Client, Host::Server] {
            assert!(world.cable(host).expect("there")["driver"].is_string());
        }
        fs::remove_file(&got).expect("there");
        world.ip(Host::Client, "link del late");
        for host in [Host::Client, Host::Server] {
            until("the cable is let go of", || world.cable(host).is_none());
        }
    }
}
