//! Hosts are known by their keys.

use std::{fs, net::IpAddr};

use serde_json::{Value, json};
use vtl_control::{FlowList, FlowStatus, PeerKey, Request};
use vtl_testbed::{Host, Link};

use crate::harness::{Wire, World, any_payload, payload, until, url, words, words_of};

impl World {
    /// What `vtl peer list` says on a host.
    fn known_peers(&self, host: Host) -> Value {
        self.call(host, &Request::PeerList { from: 0 })
    }

    /// A host's own key.
    fn key(&self, host: Host) -> String {
        self.known_peers(host)["key"]
            .as_str()
            .expect("a key")
            .to_owned()
    }

    /// Bytes that the client has received from an address of the server by carriers of a kind.
    fn received(&self, carrier: &str, server: IpAddr) -> u64 {
        let of_it = |row: &&Value| row["peer"] == server.to_string() && row["carrier"] == carrier;
        let rows = self.carriers(Host::Client);
        let rows = rows.iter().filter(of_it);
        rows.filter_map(|row| row["bytes_received"].as_u64()).sum()
    }

    /// The operator's list of a host, whose daemon does not run.
    fn list_peers(&self, host: Host, text: &str) {
        let state = self.testbed.daemon_state(host);
        fs::create_dir_all(&state).expect("a folder");
        fs::write(state.join("peers.toml"), text).expect("written");
    }

    /// The flows that the server has.
    fn server_flows(&self) -> Vec<FlowStatus> {
        let list = self.call(Host::Server, &Request::FlowList { from: 0 });
        let list: FlowList = serde_json::from_value(list).expect("a list");
        list.flows
    }

    fn restart(&mut self, host: Host) {
        let daemon = self.take_daemon(host);
        daemon.signal(nix::sys::signal::Signal::SIGTERM);
        assert!({ daemon }.wait().success());
        self.start(host, &[]);
    }

    fn logged(&self, host: Host, words: &str) -> usize {
        let log = fs::read_to_string(self.log_path(host)).expect("a log");
        log.matches(words).count()
    }
}

/// A key is learned at the first contact, and another one at the same address is nobody's who is trusted.
#[test]
fn key__learned_and_changed() {
    let Some(mut world) = World::new("key", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.serve("f", 1 << 20);
    for carrier in ["quic", "graft"] {
        let run: &[&str] = if carrier == "graft" {
            &[]
        } else {
            &["--carrier", carrier]
        };
        world.meet_by(run);
    }
    let server = world.key(Host::Server);
    assert_ne!(server, world.key(Host::Client));
    until("both addresses are learned", || {
        world.known_peers(Host::Client)["peers"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    });
    let [v4, _] = world.servers().map(|at| at.to_string());
    let known =
        json!({ "name": v4, "key": server, "addresses": [format!("{v4}/32")], "listed": false });
    let peers = world.known_peers(Host::Client);
    let is_known = |all: &Value| all.as_array().is_some_and(|all| all.contains(&known));
    assert!(is_known(&peers["peers"]), "{peers}");
    assert_eq!(
        world.known_peers(Host::Server)["peers"],
        json!([]),
        "clients roam"
    );

    // The same host again.
    for host in [Host::Client, Host::Server] {
        world.restart(host);
    }
    world.hook();
    assert_eq!(world.key(Host::Server), server);
    world.meet();
    assert_eq!(world.logged(Host::Client, "has changed"), 0);

    // Another one, for all that anybody knows.
    fs::remove_file(world.testbed.daemon_state(Host::Server).join("host.key")).expect("removed");
    world.restart(Host::Server);
    world.hook();
    assert_ne!(world.key(Host::Server), server);
    let at = world.servers()[0];
    world.download(at, "f");
    until("the change is seen", || {
        world.logged(Host::Client, "has changed") > 0
    });
    until("its carriers end", || {
        world
            .carriers(Host::Client)
            .iter()
            .all(|row| row["peer"] != v4)
    });
    world.download(at, "f");
    assert!(
        world
            .carriers(Host::Client)
            .iter()
            .all(|row| row["peer"] != v4)
    );

    // It is right.
    let mut forget = world.vtl(Host::Client, &["peer", "forget", &v4]);
    assert!(forget.status().expect("vtl runs").success());
    until("a carrier", || {
        world.download(at, "f");
        world
            .carriers(Host::Client)
            .iter()
            .any(|row| row["peer"] == v4)
    });
}

/// Where only known peers are taken, a stranger has plain TCP, until somebody trusts it.
#[test]
fn key__known_only() {
    let Some(mut world) = World::bare("key-known", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.list_peers(Host::Server, "policy = \"known\"\n");
    world.start_both(&[]);
    world.serve("f", 1 << 20);
    let servers = world.servers();
    let runs: [&[&str]; 2] = [&[], &["--carrier", "quic"]];
    for run in runs {
        for server in servers {
            let mut download = world.start_download_run(run, server, "f");
            assert!(download.process.wait().success());
            download.check();
        }
    }
    until("the client is refused", || {
        world.logged(Host::Server, "nobody knows the key") > 1
    });
    assert_eq!(world.carried("bytes_received"), 0);
    let client = world.key(Host::Client);
    world.call(
        Host::Server,
        &Request::PeerTrust(PeerKey {
            name: "laptop".into(),
            key: client,
            addresses: vec!["10.73.0.0/24".into()],
            reach: None,
        }),
    );
    for (run, carrier) in runs.into_iter().zip(["graft", "quic"]) {
        until("it is carried", || {
            let mut download = world.start_download_run(run, servers[0], "f");
            assert!(download.process.wait().success());
            world.received(carrier, servers[0]) > 1 << 19
        });
        assert_eq!(world.received(carrier, servers[1]), 0, "not its place");
    }
}

/// Somebody on the path has the server's HELLO say that it knows no TLS.
#[test]
fn key__tls_taken_out_of_hello() {
    let Some(mut world) = World::bare("key-tls", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    const SIZE: usize = 1 << 20;
    let wanted = payload(SIZE, SIZE as u64);
    world.serve("f", SIZE);
    let server = world.servers()[0];
    let meddle = |world: &World| {
        // HELLO, of 4 bytes, by its type and its body; bit 40 of its offset.
        world.filter(
            Host::Server,
            "table ip meddler {
                 chain out {
                     type filter hook output priority 0
                     @ih,32,24 0x411 @ih,128,32 0x56544c32 counter @ih,80,8 set 0
                 }
             }",
        );
    };
    let leave = |world: &World| {
        let nft = |args: &str| {
            let mut nft = world.testbed.command(Host::Server, "nft").expect("one");
            let output = nft.args(args.split(' ')).output().expect("nft runs");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let counted = nft("list table ip meddler");
        assert!(!counted.contains("packets 0 "), "it meddles: {counted}");
        nft("delete table ip meddler");
    };

    // Nobody has met anybody: what requires encryption finds nobody, and sends nothing.
    meddle(&world);
    world.start_both(&[]);
    let tap = Wire::tap(&world, Host::Client, any_payload);
    let to = world.path("never");
    let curl = ["--", "curl", "-sS", "-o", to.to_str().expect("UTF-8")];
    let run = [&["run", "--require-encryption"], &curl[..]].concat();
    let mut curl = world.vtl(Host::Client, &run);
    let output = curl.arg(url(server, "f")).output().expect("curl runs");
    assert_eq!(output.status.code(), Some(7), "{}", words(&output));
    assert_eq!(words_of(&wanted, &tap.end()), 0);
    world.download(server, "f");
    leave(&world);

    // Hosts that have met.
    world.stop_daemons();
    world.start_both(&[]);
    world.meet();
    let said = "shows no key any more";
    let before = world.logged(Host::Client, said);
    meddle(&world);
    world.restart(Host::Server);
    world.hook();
    until("it is noticed", || {
        world.download(server, "f");
        world.logged(Host::Client, said) > before
    });
    until("its carriers end", || {
        world
            .carriers(Host::Client)
            .iter()
            .all(|row| row["peer"] != server.to_string())
    });
    let before = world.carried("bytes_received");
    world.download(server, "f");
    assert_eq!(world.carried("bytes_received"), before, "by plain TCP");
    leave(&world);
    until("a carrier", || {
        world.download(server, "f");
        world.carried("bytes_received") > before
    });
}

/// A peer reaches by VTL what the operator says; all else stays plain TCP, or fails where a carrier is required.
#[test]
fn key__what_a_peer_may_reach() {
    const SIZE: usize = 4 << 20;
    let Some(mut world) = World::bare("key-reach", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.list_peers(Host::Server, "reach = \"1-79\"\n");
    world.start_both(&[]);
    world.serve("f", SIZE);
    let server = world.servers()[0];
    for (run, carrier) in [(&[][..], "graft"), (&["--carrier", "quic"], "quic")] {
        // The first begins before anybody knows who the client is; later ones by the carrier that there is.
        let has_one = |world: &World| {
            let rows = world.carriers(Host::Server);
            rows.iter().any(|row| row["carrier"] == carrier)
        };
        until("a carrier", || {
            let mut download = world.start_download_run(run, server, "f");
            assert!(download.process.wait().success());
            download.check();
            has_one(&world)
        });
        world.set_rate(8.0);
        let mut download = world.start_download_run(run, server, "f");
        download.reaches(1 << 19);
        let flows = world.server_flows();
        let of_it: Vec<_> = flows
            .iter()
            .filter(|flow| flow.bytes_sent > 1 << 18)
            .collect();
        let [flow] = of_it[..] else {
            panic!("one flow: {flows:?}");
        };
        assert_eq!(
            (flow.sends_by.as_str(), flow.receives_by.as_str()),
            ("tcp", "tcp")
        );
        assert_eq!(
            flow.why,
            "port 80 is out of the `reach` of a peer that is not listed (peers.toml)"
        );
        let moved = world
            .vtl(
                Host::Server,
                &["flow", "move", &flow.id.to_string(), "--carrier", carrier],
            )
            .output()
            .expect("vtl runs");
        assert!(words(&moved).contains("reach"), "{}", words(&moved));
        world.set_rate(100.0);
        assert!(download.process.wait().success());
        download.check();
        assert!(has_one(&world));
        assert!(
            world.received(carrier, server) < SIZE as u64 / 8,
            "none of the flows'"
        );
    }
    let to = world.path("never");
    let url = url(server, "f");
    let line = [
        "run",
        "--require",
        "--",
        "curl",
        "-sS",
        "-o",
        to.to_str().expect("UTF-8"),
        &url,
    ];
    let curl = world.vtl(Host::Client, &line).output().expect("curl runs");
    assert!(!curl.status.success(), "{}", words(&curl));
    assert_eq!(to.metadata().map_or(0, |meta| meta.len()), 0);

    let client = world.key(Host::Client);
    let trust = ["peer", "trust", "laptop", &client, "--reach", "80"];
    assert!(
        world
            .vtl(Host::Server, &trust)
            .status()
            .expect("vtl runs")
            .success()
    );
    let shown = world
        .vtl(Host::Server, &["peer", "show", "laptop"])
        .output();
    let shown = String::from_utf8(shown.expect("vtl runs").stdout).expect("UTF-8");
    assert!(shown.contains("reach: 80"), "{shown}");
    world.restart(Host::Server);
    world.hook();
    until("it is carried", || {
        world.download(server, "f");
        world.received("graft", server) > SIZE as u64 / 2
    });
    let curl = world.vtl(Host::Client, &line).output().expect("curl runs");
    assert!(curl.status.success(), "{}", words(&curl));
}

/// Hosts that have one authority's key, and none of each other's.
#[test]
fn key__certified() {
    const SIZE: usize = 1 << 20;
    let Some(mut world) = World::bare("key-certified", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    // Keys are made at the first start.
    world.start_both(&[]);
    let keys = [Host::Client, Host::Server].map(|host| world.key(host));
    world.stop_daemons();
    let [v4, v6] = world.servers();
    let folder = world.path("authority");
    fs::create_dir(&folder).expect("a folder");
    let vtl = |args: &[&str]| {
        let mut vtl = world.vtl(Host::Client, args);
        let output = vtl.current_dir(&folder).output().expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let listed = vtl(&["peer", "ca", "fleet"]);
    let address = v4.to_string();
    vtl(&["peer", "sign", "laptop", &keys[0], "--ca", "fleet.key"]);
    vtl(&[
        "peer",
        "sign",
        "web",
        &keys[1],
        "--ca",
        "fleet.key",
        "--address",
        &address,
    ]);
    let shown = vtl(&["peer", "show", "web.crt"]);
    assert!(
        shown.contains(&keys[1]) && shown.contains(&format!("{v4}/32")),
        "{shown}"
    );
    for (host, name) in [(Host::Client, "laptop"), (Host::Server, "web")] {
        world.list_peers(host, &listed);
        let state = world.testbed.daemon_state(host);
        let _ = fs::remove_file(state.join("known_peers.toml"));
        fs::copy(folder.join(format!("{name}.crt")), state.join("host.crt")).expect("copied");
    }
    world.start_both(&[]);
    world.serve("f", SIZE);
    for (run, carrier) in [(&[][..], "graft"), (&["--carrier", "quic"], "quic")] {
        let download = |server| {
            let mut download = world.start_download_run(run, server, "f");
            assert!(download.process.wait().success());
            download.check();
        };
        until("it is carried", || {
            download(v4);
            world.received(carrier, v4) > SIZE as u64 / 2
        });
        download(v6);
        let refused = format!("{v6} is refused: the certificate of web is for {v4}/32");
        until("the other address is refused", || {
            download(v6);
            world.logged(Host::Client, &refused) > 0
        });
        assert_eq!(world.received(carrier, v6), 0, "not its place");
    }
    let peers = world.known_peers(Host::Server);
    let laptop = &peers["peers"][0];
    assert_eq!(
        (&laptop["name"], &laptop["key"]),
        (&json!("laptop"), &json!(keys[0]))
    );
    assert_eq!(peers["certificate"]["name"], "web");

    // One that does not trust the authority any more, and one whose key is revoked.
    let other = listed.replace(&listed[listed.len() - 66..listed.len() - 2], &keys[1]);
    let revoked = format!("revoked = [\"{}\"]\n{listed}", keys[0]);
    for (text, why) in [(other, "which is no [[ca]]"), (revoked, "is revoked")] {
        world.list_peers(Host::Server, &text);
        world.restart(Host::Server);
        world.hook();
        let before = world.received("graft", v4);
        until("the client is refused", || {
            world.download(v4, "f");
            world.logged(Host::Server, why) > 0
        });
        assert!(world.received("graft", v4) < before + SIZE as u64 / 2);
    }
}
