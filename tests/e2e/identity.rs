//! Hosts are known by their keys.

use std::fs;

use serde_json::{Value, json};
use vtl_control::{PeerKey, Request};
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
    let state = world.testbed.daemon_state(Host::Server);
    fs::create_dir_all(&state).expect("a folder");
    fs::write(state.join("peers.toml"), "policy = \"known\"\n").expect("written");
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
    let received = |world: &World, carrier: &str, server: usize| -> u64 {
        let of_it =
            |row: &&Value| row["peer"] == servers[server].to_string() && row["carrier"] == carrier;
        let rows = world.carriers(Host::Client);
        let rows = rows.iter().filter(of_it);
        rows.filter_map(|row| row["bytes_received"].as_u64()).sum()
    };
    for (run, carrier) in runs.into_iter().zip(["graft", "quic"]) {
        until("it is carried", || {
            let mut download = world.start_download_run(run, servers[0], "f");
            assert!(download.process.wait().success());
            received(&world, carrier, 0) > 1 << 19
        });
        assert_eq!(received(&world, carrier, 1), 0, "not its place");
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
