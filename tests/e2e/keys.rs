//! Sessions whose payload is sealed.

use std::{fs, net::IpAddr};

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{Wire, World, any_payload, payload, run, same, until, url, words_of};

const SIZE: usize = 2 << 20;

impl World {
    /// With what the open sessions of a host are sealed.
    fn ciphers(&self, host: Host) -> Vec<Value> {
        let status = self.status(host);
        let sessions = status["sessions"].as_array().expect("a list");
        let open = sessions.iter().filter(|s| s["phase"] == "open");
        open.map(|session| session["cipher"].clone()).collect()
    }

    /// Uploads a file by a carrier from the first byte on.
    fn upload(&self, name: &str, server: IpAddr) {
        let from = self.path(name);
        fs::write(&from, payload(SIZE, 7)).expect("written");
        let to = url(server, name);
        let put = ["run", "--require", "--", "curl", "-sSg", "-T"];
        let put = [&put[..], &[from.to_str().expect("UTF-8"), &to]].concat();
        run(&mut self.vtl(Host::Client, &put));
        same(&from, &self.path("www").join(name));
    }
}

/// In both directions, to the first host that is met and to the one that is known.
#[test]
fn keys__nobody_on_the_path_reads_what_sessions_carry() {
    let Some(mut world) = World::new("keys", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let wanted = payload(SIZE, SIZE as u64);
    for server in world.servers() {
        let taps = [Host::Client, Host::Server].map(|at| Wire::tap(&world, at, any_payload));
        for _ in 0..2 {
            let mut download = world.start_download_run(&["--require"], server, "f");
            assert!(download.process.wait().success());
            download.check();
        }
        world.upload("up", server);
        let heard = taps.map(Wire::end).concat();
        assert_eq!(words_of(&wanted, &heard), 0);
        assert_eq!(words_of(&payload(SIZE, 7), &heard), 0);
        assert!(heard.len() > 3 * SIZE, "the taps hear: {}", heard.len());
        for host in [Host::Client, Host::Server] {
            let ciphers = world.ciphers(host);
            assert!(
                !ciphers.is_empty() && ciphers.iter().all(Value::is_string),
                "{ciphers:?}"
            );
        }
    }

    // Unless one wants it otherwise.
    world.stop_daemons();
    world.start_both(&["--no-encryption"]);
    let server = world.servers()[0];
    let tap = Wire::tap(&world, Host::Client, any_payload);
    let mut download = world.start_download_run(&["--require"], server, "f");
    assert!(download.process.wait().success());
    let clear = words_of(&wanted, &tap.end());
    assert!(clear > SIZE / 8 / 2, "the tap hears: {clear}");
    assert_eq!(world.ciphers(Host::Client), [Value::Null]);
}

/// Somebody on the path takes the question for keys out of NEGO: what the peer then answers is not believed, once it
/// is known that it has a key.
#[test]
fn keys__question_that_was_taken_out_is_noticed() {
    let Some(mut world) = World::bare("keys-strip", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    // Byte 161 is the extension's type, which becomes padding; byte 165 makes up for that in the checksum.
    world.filter(
        Host::Client,
        "table ip keys {
             chain out {
                 type filter hook output priority 0
                 ip protocol 253 @th,0,8 0x23 @th,1288,8 1 @th,1288,8 set 0 @th,1320,8 set 1 counter
                 udp dport 22100 drop
             }
         }",
    );
    world.start_both(&[]);
    world.serve("f", SIZE);
    let [v4, _] = world.servers();
    for _ in 0..3 {
        world.download(v4, "f");
    }
    until("it is noticed", || {
        let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
        log.contains("is not encrypted, though the peer has a key")
    });
    until("the session is closed", || {
        let open = world.ciphers(Host::Client);
        !open.contains(&Value::Null)
    });
    world.download(v4, "f");
}
