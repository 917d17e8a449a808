//! `vtl tun up`.

use std::{fs, path::PathBuf, process::Command};

use vtl_testbed::{Host, Link};

use crate::harness::{
    Process, Spoken, World, bad_link, payload, python3, refused, run, source, until, words,
};

/// Addresses in the tunnel.
const CLIENT: [&str; 2] = ["10.9.0.1", "fd00:9::1"];
const SERVER: [&str; 2] = ["10.9.0.2", "fd00:9::2"];

impl World {
    fn tun_log(&self, host: Host) -> PathBuf {
        self.path(&format!("tun-{host:?}.log"))
    }

    /// The command of one end; the server listens.
    fn tun(&self, host: Host, args: &[&str]) -> Command {
        let (peer, [v4, v6]) = match host {
            Host::Client => (Host::Server, CLIENT),
            _ => (Host::Client, SERVER),
        };
        let peer = self.testbed.addr4(peer).to_string();
        let addresses = [format!("{v4}/24"), format!("{v6}/64")];
        let mut command = self.vtl(host, &["tun", "up", "vtl0", "--peer", &peer]);
        for address in &addresses {
            command.args(["--address", address]);
        }
        if host == Host::Server {
            command.arg("--listen");
        }
        command.args(args);
        command
    }

    fn start_tun(&self, host: Host, args: &[&str]) -> Process {
        let log = fs::File::create(self.tun_log(host)).expect("a log");
        Process::start(self.tun(host, args).stderr(log))
    }

    fn tun_says(&self, host: Host, words: &str) -> bool {
        fs::read_to_string(self.tun_log(host)).is_ok_and(|log| log.contains(words))
    }

    /// Both ends, once they carry packets.
    fn start_tunnel(&self, args: &[&str]) -> [Process; 2] {
        let allowed = |arg: &&&str| ***arg == *"--no-encryption";
        let allowed: Vec<_> = args.iter().filter(allowed).copied().collect();
        let server = self.start_tun(Host::Server, &allowed);
        let client = self.start_tun(Host::Client, args);
        self.await_tunnel();
        [server, client]
    }

    fn await_tunnel(&self) {
        for host in [Host::Server, Host::Client] {
            until("the tunnel carries", || self.tun_says(host, "carried to"));
        }
        until("an echo", || self.pings(Host::Client, &["-c1", SERVER[0]]));
    }

    fn on(&self, host: Host, program: &str, args: &[&str]) -> Command {
        let mut command = self.testbed.command(host, program).expect("a namespace");
        command.args(args);
        command
    }

    fn pings(&self, host: Host, args: &[&str]) -> bool {
        let mut ping = self.on(host, "ping", &["-n", "-i0.2", "-W2"]);
        ping.args(args)
            .output()
            .expect("ping runs")
            .status
            .success()
    }

    fn has_interface(&self, host: Host) -> bool {
        let mut ip = self.on(host, "ip", &["link", "show", "dev", "vtl0"]);
        ip.output().expect("ip runs").status.success()
    }

    /// A download by a curl that knows nothing of the tunnel.
    fn start_tunnelled(&self, server: &str, name: &str) -> (Process, PathBuf) {
        let got = self.path(&format!("got-{name}"));
        let _ = fs::remove_file(&got);
        let host = if server.contains(':') {
            format!("[{server}]")
        } else {
            server.to_owned()
        };
        let mut curl = self.on(Host::Client, "curl", &["--noproxy", "*", "-sSfo"]);
        curl.arg(&got).arg(format!("http://{host}/{name}"));
        (Process::piped(&mut curl), got)
    }

    fn tunnelled(&self, server: &str, name: &str, bytes: &[u8]) {
        let (curl, got) = self.start_tunnelled(server, name);
        let output = curl.output();
        assert!(output.status.success(), "{}", words(&output));
        assert!(fs::read(got).expect("a file") == bytes, "other bytes");
    }
}

#[test]
fn tun__carries_what_ip_carries() {
    let Some(mut world) = World::with_daemons("tun", &Link::new(10.0, 200.0)) else {
        return;
    };
    world.start_web();
    let bytes = payload(10 << 20, 1);
    fs::write(world.path("www/file"), &bytes).expect("written");
    let ends = world.start_tunnel(&[]);
    for server in SERVER {
        assert!(world.pings(Host::Client, &["-c3", server]));
        // In fragments, which the hosts put together.
        assert!(world.pings(Host::Client, &["-c3", "-s8000", server]));
        // Of more than the MTU: refused at once.
        let mut long = world.on(
            Host::Client,
            "ping",
            &["-n", "-c1", "-Mdo", "-s1472", server],
        );
        let output = long.output().expect("ping runs");
        assert!(!output.status.success());
        // iputils has another prefix in each release.
        let said = words(&output);
        assert!(said.contains("essage too long"), "{said}");
        world.tunnelled(server, "file", &bytes);
    }
    for client in CLIENT {
        assert!(world.pings(Host::Server, &["-c3", client]));
    }
    // The server's TCP is asked for segments so short that a piece of 64 KiB is hundreds of them.
    let route = [
        "route",
        "replace",
        "10.9.0.0/24",
        "dev",
        "vtl0",
        "advmss",
        "100",
    ];
    run(&mut world.on(Host::Client, "ip", &route));
    fs::write(world.path("www/short"), &bytes[..256 << 10]).expect("written");
    world.tunnelled(SERVER[0], "short", &bytes[..256 << 10]);
    let program = source("programs/datagrams.py").display().to_string();
    let mut echo = Spoken::start(world.on(Host::Server, python3(), &[&program, "serve"]));
    assert_eq!(echo.line(), "ready");
    for server in SERVER {
        run(&mut world.on(Host::Client, python3(), &[&program, "ask", server]));
    }
    drop((echo, ends));
    for host in [Host::Server, Host::Client] {
        until("no interface", || !world.has_interface(host));
    }
}

#[test]
fn tun__over_a_graft_of_choice_and_a_bad_link() {
    let Some(mut world) = World::with_daemons("tungraft", &bad_link()) else {
        return;
    };
    world.start_web();
    let bytes = payload(2 << 20, 1);
    fs::write(world.path("www/file"), &bytes).expect("written");
    for args in [&["--graft", "stream"][..], &["--no-encryption"]] {
        let ends = world.start_tunnel(args);
        for server in SERVER {
            world.tunnelled(server, "file", &bytes);
        }
        drop(ends);
    }
}

#[test]
fn tun__comes_back_after_either_end_was_killed() {
    let Some(mut world) = World::with_daemons("tunback", &Link::new(10.0, 20.0)) else {
        return;
    };
    world.start_web();
    let bytes = payload(8 << 20, 1);
    fs::write(world.path("www/file"), &bytes).expect("written");
    let [server, client] = world.start_tunnel(&[]);
    let (curl, got) = world.start_tunnelled(SERVER[0], "file");
    until("bytes", || got.metadata().is_ok_and(|m| m.len() > 100_000));
    // The connection inside waits for the tunnel.
    server.kill();
    until("no interface", || !world.has_interface(Host::Server));
    let server = world.start_tun(Host::Server, &[]);
    let output = curl.output();
    assert!(output.status.success(), "{}", words(&output));
    assert!(fs::read(&got).expect("a file") == bytes, "other bytes");
    client.kill();
    until("no interface", || !world.has_interface(Host::Client));
    let client = world.start_tun(Host::Client, &[]);
    world.await_tunnel();
    for host in [Host::Server, Host::Client] {
        world.take_daemon(host).kill();
        world.start(host, &[]);
        until("an echo", || world.pings(Host::Client, &["-c1", SERVER[1]]));
    }
    drop((server, client));
}

#[test]
fn tun__lets_in_only_sources_that_are_routed_there() {
    let Some(world) = World::with_daemons("tunsource", &Link::new(2.0, 100.0)) else {
        return;
    };
    let [_server, client] = world.start_tunnel(&[]);
    let other = ["address", "add", "10.10.0.2/32", "dev", "vtl0"];
    run(&mut world.on(Host::Server, "ip", &other));
    // Where its answer would go by another way, only the tunnel stands between.
    run(&mut world.on(
        Host::Client,
        "ip",
        &["route", "add", "10.10.0.0/24", "dev", "vtl0"],
    ));
    let from_other = ["-c2", "-I10.10.0.2", CLIENT[0]];
    assert!(!world.pings(Host::Server, &from_other));
    assert!(world.pings(Host::Server, &["-c2", CLIENT[0]]));
    drop(client);
    until("no interface", || !world.has_interface(Host::Client));
    let _client = world.start_tun(Host::Client, &["--route", "10.10.0.0/24"]);
    world.await_tunnel();
    assert!(world.pings(Host::Server, &from_other));
}

#[test]
fn tun__takes_no_session_in_the_clear_or_of_others() {
    let Some(world) = World::with_daemons("tunclear", &Link::new(2.0, 100.0)) else {
        return;
    };
    let server = world.start_tun(Host::Server, &[]);
    let client = world.start_tun(Host::Client, &["--no-encryption"]);
    until("a refusal", || {
        world.tun_says(Host::Server, "is not encrypted")
    });
    assert!(!world.pings(Host::Client, &["-c2", SERVER[0]]));
    drop((server, client));
    until("no interface", || !world.has_interface(Host::Server));
    // The client comes by the address that it has in IPv6.
    let _server = world.start_tun(Host::Server, &[]);
    let peer = world.testbed.addr6(Host::Server).to_string();
    let other = [
        "tun",
        "up",
        "vtl1",
        "--peer",
        &peer,
        "--address",
        "10.9.0.3/24",
    ];
    let _client = Process::start(&mut world.vtl(Host::Client, &other));
    until("a refusal", || {
        world.tun_says(Host::Server, "is not the --peer")
    });
}

#[test]
fn tun__what_cannot_be_is_one_sentence() {
    let Some(mut world) = World::bare("tunsentences", &Link::new(2.0, 100.0)) else {
        return;
    };
    let output = |command: &mut Command| command.output().expect("vtl runs");
    refused(&output(&mut world.tun(Host::Client, &[])), 69, "vtld");
    world.start(Host::Client, &[]);
    let peer = world.testbed.addr4(Host::Server).to_string();
    let covers = format!("{peer}/32");
    let circle = output(&mut world.tun(Host::Client, &["--route", &covers]));
    refused(&circle, 1, "would itself be reached through vtl0");
    let twice = output(&mut world.tun(Host::Client, &["--address", "10.9.0.1/24"]));
    refused(&twice, 1, "ip address add 10.9.0.1/24");
    assert!(!world.has_interface(Host::Client));
    // Also where nobody listens at the other end, a second one of the name is refused.
    let first = world.start_tun(Host::Client, &[]);
    until("its interface", || world.has_interface(Host::Client));
    let second = output(&mut world.tun(Host::Client, &[]));
    refused(&second, 1, "there is an interface vtl0 already");
    until("no peer", || world.tun_says(Host::Client, "tried again"));
    // The interface is taken from it.
    run(&mut world.on(Host::Client, "ip", &["link", "delete", "vtl0"]));
    let mut first = first;
    assert_eq!(first.wait().code(), Some(1));
    assert!(world.tun_says(Host::Client, "interface vtl0 is gone"));
}
