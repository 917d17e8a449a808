//! What a program's first bytes show takes part in the choice of the carrier `auto`: for the flow that runs, and for the
//! next one of that program.

use std::fs;

use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, Spoken, World, python3, until};

/// A path where a graft is better for a stream, and a file is left to TCP under BBR, as 26 packets fit onto it.
const RTT_MS: f64 = 40.0;
const LOSS_PCT: f64 = 5.0;
const MBIT: f64 = 8.0;
/// A port that tells nothing.
const PORT: u16 = 9000;

/// Reads what comes, from any number of clients.
const SINK: &str = "
import socket, threading
s = socket.create_server(('', 9000))
print('ready', flush=True)
def drain(c):
    while c.recv(1 << 16): pass
while True:
    threading.Thread(target=drain, args=(s.accept()[0],), daemon=True).start()
";
/// Says what it is, and sends at a pace: RTSP's RECORD (RFC 2326, section 10.11), with frames interleaved (10.12).
const STREAM: &str = "
import socket, sys, time
s = socket.create_connection((sys.argv[1], 9000))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
s.sendall(b'RECORD rtsp://server/live RTSP/1.0\\r\\nCSeq: 1\\r\\nSession: 1\\r\\n\\r\\n')
while True:
    s.sendall(b'$\\0\\x04\\x00' + bytes(1024))
    time.sleep(0.01)
";
/// Sends on and on, and nothing that any protocol begins with.
const FILE: &str = "
import socket, sys
s = socket.create_connection((sys.argv[1], 9000))
while True: s.sendall(bytes(1 << 16))
";

impl World {
    /// A program under the carrier `auto`.
    fn auto(&self, python: &str, script: &str) -> Process {
        let server = self.servers()[0].to_string();
        let args = ["run", "--carrier", "auto", "--", python, "-c", script];
        Process::start(&mut self.vtl(Host::Client, &[&args[..], &[&server]].concat()))
    }

    fn rows(&self, request: &Request, of: &str) -> Vec<Value> {
        let answer = self.call(Host::Client, request);
        answer[of].as_array().expect("a list").clone()
    }

    /// The association of a profile, as the choice sees it.
    fn chosen_for(&self, profile: &Value) -> Option<Value> {
        let rows = self.rows(&Request::SelectStatus { from: 0 }, "paths");
        rows.into_iter().find(|row| row["profile"] == *profile)
    }

    fn auto_flows(&self) -> Vec<Value> {
        self.rows(&Request::FlowList { from: 0 }, "flows")
    }
}

#[test]
fn profile__a_stream_by_its_bytes_moves_and_the_next_one_begins_there() {
    let link = Link {
        loss_pct: LOSS_PCT,
        ..Link::new(RTT_MS, MBIT)
    };
    let Some(world) = World::new("profile", &link) else {
        return;
    };
    let mut python = (world.testbed.command(Host::Server, python3())).expect("a namespace");
    python.args(["-u", "-c", SINK]);
    let mut sink = Spoken::start(python);
    assert!(sink.line().contains("ready"));
    world.hook_port(PORT);

    // What is chosen, not what a few explore.
    let mut learn = world.vtl(Host::Client, &["select", "learn", "off"]);
    assert!(learn.status().expect("vtl runs").success());
    // Nothing is known of the path, nor of the port; then of both.
    let _first = world.auto(python3(), STREAM);
    until("the stream goes by the graft", || {
        let flows = world.auto_flows();
        flows.iter().any(|flow| {
            flow["profile"] == "time-sensitive"
                && flow["sends_by"] == "graft"
                && flow["why"].to_string().contains("time-sensitive")
        })
    });
    let first = world.auto_flows()[0]["id"].clone();
    let stream = Value::from("time-sensitive");
    let row = world.chosen_for(&stream).expect("its association");
    assert_eq!(row["carrier"], "graft:stream", "{row}");
    // Another one of the program: expected to be a stream, so its association is that of streams, and it is by the graft as
    // soon as that is up.
    let _second = world.auto(python3(), STREAM);
    until("the second stream begins as one", || {
        let flows = world.auto_flows();
        flows.iter().any(|flow| {
            flow["id"] != first
                && flow["association"] != row["association"]
                && flow["sends_by"] == "graft"
        })
    });
    // Another program on the same path and to the same port is none.
    let other = world.path("other-python");
    fs::copy(python3(), &other).expect("copied");
    let _file = world.auto(other.to_str().expect("UTF-8"), FILE);
    until("a file stays by TCP", || {
        let flows = world.auto_flows();
        flows.iter().any(|flow| {
            let is_unsure = flow["why"].to_string().contains("not surely better");
            is_unsure && flow["sends_by"] == "tcp"
        })
    });
    // The first stream, whose profile nobody knew, shares the file's association, which goes by what has carried most.
    let flows = world.auto_flows();
    let mut streams = flows
        .iter()
        .filter(|flow| flow["association"] != row["association"]);
    assert!(streams.any(|flow| flow["sends_by"] == "graft"), "{flows:?}");
}
