//! A chain of three gateways: the one in the middle ends a flow of one hop, and begins another on the next.

use std::{fs, path::PathBuf, process::Command};

use serde_json::Value;
use vtl_control::Client;
use vtl_testbed::{Host, Link};

use super::{Behind, add_gateway, by_grafts, netns, route};
use crate::harness::{Process, Spoken, World, run, until, vtl, vtld};

/// The last gateway: a daemon in the namespace of a host behind the testbed's server.
struct Last<'a> {
    host: &'a Behind,
    folder: PathBuf,
}

impl Last<'_> {
    /// A program of VTL's there.
    fn command(&self, program: &str) -> Command {
        let mut command = self.host.command(program);
        let state = self.folder.join("last");
        command
            .env("VTL_SOCKET", self.folder.join("last.sock"))
            .env("VTL_PEERS", state.join("peers.toml"))
            .env("VTL_STATE", state);
        command
    }

    fn start(&self) -> Process {
        let log = fs::File::create(self.folder.join("vtld-last.log")).expect("a log");
        let mut command = self.command(vtld().to_str().expect("UTF-8"));
        command
            .args(["--near", "0", "--flow-memory", "64"])
            .env("VTL_LOG", "vtld=debug,info");
        let mut daemon = Process::start(command.stderr(log));
        until("the last gateway answers", || {
            assert!(daemon.ended().is_none(), "the daemon has ended");
            let client = Client::connect(&self.folder.join("last.sock"));
            client.and_then(|client| client.status()).is_ok()
        });
        let mut add = self.command(vtl().to_str().expect("UTF-8"));
        run(add.args(["gateway", "add", "out"]));
        daemon
    }

    /// Bytes that its grafts have received for flows.
    fn received(&self) -> u64 {
        let mut status = self.command(vtl().to_str().expect("UTF-8"));
        let output = status.args(["status", "--json"]).output();
        let status: Value =
            serde_json::from_slice(&output.expect("vtl runs").stdout).expect("JSON");
        let rows = status["carriers"].as_array().expect("a list").iter();
        let grafts = rows.filter(|row| row["carrier"] == "graft");
        grafts
            .filter_map(|row| row["bytes_received"].as_u64())
            .sum()
    }
}

/// Two hosts without VTL, three gateways: flows are carried over both hops, whole or broken as TCP's are. Without the
/// gateway in the middle connections are forwarded there.
#[test]
fn gateway__in_a_chain_of_three() {
    let link = Link {
        loss_pct: 1.0,
        ..Link::new(20.0, 100.0)
    };
    let Some(mut world) = World::bare("gatewaychain", &link) else {
        return;
    };
    // The windows between gateways are small, and full soon.
    world.start(Host::Client, &["--flow-memory", "64"]);
    world.start(Host::Server, &["--flow-memory", "64", "--near", "0"]);
    let client = Behind::new(&world, Host::Client);
    let third = Behind::new(&world, Host::Server);
    let name = format!("{}-behind-all", world.testbed.name());
    let server = Behind::of(&third.name, name, 3);
    let middle = netns(&world, Host::Server);
    route(&middle, 3, third.addresses);
    let [v4, v6] = [
        world.testbed.addr4(Host::Server).into(),
        world.testbed.addr6(Host::Server).into(),
    ];
    route(&netns(&world, Host::Client), 3, [v4, v6]);
    let last = Last {
        host: &third,
        folder: world.path(""),
    };
    let mut daemon = last.start();
    for host in [Host::Client, Host::Server] {
        add_gateway(&world, host, &[]);
    }
    run(&mut world.vtl(Host::Server, &["gateway", "add", "inside"]));
    for address in server.addresses {
        let mut served = server.serve(address, 80);
        assert_eq!(client.says("names", address, 80), "same", "{address}");
        let by = || [by_grafts(&world, Host::Client), last.received()];
        let before = by();
        until("grafts carry over both hops", || {
            assert_eq!(client.says("echo", address, 80), "whole", "{address}");
            before
                .iter()
                .zip(by())
                .all(|(before, now)| now > before + (2 << 20))
        });
        let urgent = "some!more 4rest 11 ?";
        assert_eq!(client.says("urgent", address, 80), urgent, "{address}");
        assert_eq!(client.says("reset", address, 80), "before ECONNRESET");
        assert_eq!(client.says("abort", address, 80), "aborted", "{address}");
        assert_eq!(served.line(), "end: ECONNRESET");
        assert_eq!(client.says("connect", address, 81), "ECONNREFUSED");
        if address.is_ipv4() {
            assert_eq!(client.says("stall", address, 80), "stopped, whole");
        }
    }
    // The gateway in the middle dies.
    let [address, _] = server.addresses;
    let mut served = server.serve(address, 82);
    let before = last.received();
    let mut flood = Spoken::start(client.python("flood", address, 82));
    until("a flow of both hops", || {
        last.received() > before + (1 << 20)
    });
    world.take_daemon(Host::Server).kill();
    assert_eq!(flood.line(), "ECONNRESET");
    assert_eq!(served.line(), "end: ECONNRESET");
    assert_eq!(client.says("echo", address, 82), "whole");
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(daemon.wait().success());
    world.stop_daemons();
}
