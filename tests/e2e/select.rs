//! The carrier `auto`: the model moves running connections of unmodified programs, by what their path shows in the
//! direction that carries more bytes.

use std::{fs, path::PathBuf};

use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, Spoken, World, payload, python3, same, until, url, words};

/// A long link that loses packets, more than BBR is left alone with, and a short one that does not: the model says
/// `graft:stream` and `tcp`.
const FAR_MS: f64 = 200.0;
const LOSS_PCT: f64 = 14.0;
/// Loss at which TCP under BBR is left in a pause only.
const LITTLE_PCT: f64 = 2.0;
const NEAR_MS: f64 = 5.0;
/// Mbit/s: slow enough for what is to happen in the middle.
const CRAWL: f64 = 8.0;
const FAST: f64 = 200.0;
const SIZE: usize = 24 << 20;

fn far() -> Link {
    Link {
        loss_pct: LOSS_PCT,
        ..Link::new(FAR_MS, CRAWL)
    }
}

/// A transfer of a program whose carrier is `auto`.
struct Transfer {
    world: World,
    process: Process,
    wanted: PathBuf,
    to: PathBuf,
}

impl World {
    /// What the client says of the choice.
    fn selected(&self) -> Value {
        self.call(Host::Client, &Request::SelectStatus { from: 0 })
    }

    /// `vtl select` on the client, to succeed.
    #[track_caller]
    fn select(&self, args: &[&str]) -> String {
        let mut command = self.vtl(Host::Client, &[&["select"], args].concat());
        let output = command.output().expect("vtl runs");
        assert!(output.status.success(), "{args:?}: {}", words(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Another web server, hooked, at a port of another profile: port 9000.
    fn start_other_web(&self) -> Spoken {
        let mut python = (self.testbed.command(Host::Server, python3())).expect("a namespace");
        python
            .args(["-u", "-m", "http.server", "--directory"])
            .arg(self.path("www"))
            .arg("9000");
        let mut server = Spoken::start(python);
        assert!(server.line().contains("9000"));
        self.hook_port(9000);
        server
    }

    /// curl with the carrier `auto`.
    fn auto_curl(&self, args: &[&str]) -> Process {
        let curl = ["run", "--carrier", "auto", "--", "curl", "--noproxy", "*"];
        let mut command = self.vtl(
            Host::Client,
            &[&curl[..], &["-sS", "--fail"], args].concat(),
        );
        Process::start(&mut command)
    }
}

impl Transfer {
    fn download(world: World) -> Self {
        let wanted = world.serve("big", SIZE);
        let to = world.path("got");
        let url = url(world.servers()[0], "big");
        let process = world.auto_curl(&["-o", to.to_str().expect("UTF-8"), &url]);
        Self::begin(world, process, wanted, to)
    }

    fn upload(world: World) -> Self {
        let wanted = world.path("from");
        fs::write(&wanted, payload(SIZE, 7)).expect("written");
        let to = world.path("www").join("upload");
        let url = url(world.servers()[0], "upload");
        let process = world.auto_curl(&["-T", wanted.to_str().expect("UTF-8"), &url]);
        Self::begin(world, process, wanted, to)
    }

    fn begin(world: World, process: Process, wanted: PathBuf, to: PathBuf) -> Self {
        let mut transfer = Self {
            world,
            process,
            wanted,
            to,
        };
        // Nothing is known of the path: it begins by TCP.
        until("the flow", || {
            assert!(transfer.process.ended().is_none());
            !transfer.flows(Host::Client).is_empty()
        });
        transfer
    }

    fn flows(&self, host: Host) -> Vec<Value> {
        let list = self.world.call(host, &Request::FlowList { from: 0 });
        list["flows"].as_array().expect("a list").clone()
    }

    /// Waits until the flow goes by a carrier in both directions, for the reason: the model has one once it has seen
    /// enough.
    #[track_caller]
    fn goes_by(&mut self, carrier: &str, because: &str) {
        until(&format!("{carrier} at both hosts"), || {
            assert!(self.process.ended().is_none(), "it has ended before");
            let [client, server] = [Host::Client, Host::Server].map(|host| self.flows(host));
            let is_by = |flows: &[Value]| flows.len() == 1 && flows[0]["sends_by"] == carrier;
            let is_for = |flow: &Value| flow["why"].to_string().contains(because);
            is_by(&client) && is_by(&server) && is_for(&client[0])
        });
    }

    /// Bytes of the flow so far, both directions.
    fn moved(&self) -> u64 {
        let flows = self.flows(Host::Client);
        let bytes = |key: &str| {
            flows
                .first()
                .and_then(|flow| flow[key].as_u64())
                .unwrap_or(0)
        };
        bytes("bytes_sent") + bytes("bytes_received")
    }

    #[track_caller]
    fn goes_on(&mut self, more: u64) {
        let wanted = self.moved() + more;
        until("the transfer goes on", || {
            assert!(self.process.ended().is_none(), "it has ended before");
            self.moved() >= wanted
        });
    }

    /// The carrier that the model has chosen for the only path.
    fn chosen(&self) -> Value {
        self.world.selected()["paths"][0].clone()
    }

    /// Its end, with the very bytes, over a path that is short by now.
    #[track_caller]
    fn ends(self) -> World {
        let link = Link::new(NEAR_MS, FAST);
        self.world.testbed.set(&link).expect("set");
        self.ends_there()
    }

    /// Its end, over the path as it is.
    #[track_caller]
    fn ends_there(mut self) -> World {
        assert!(self.process.wait().success());
        same(&self.wanted, &self.to);
        self.world
    }
}

/// The model moves a transfer from TCP to a graft, by the figures of the direction that has the bytes.
fn moves(mut transfer: Transfer, direction: &str) {
    transfer.goes_by("graft", "auto: graft:stream for rtt");
    let chosen = transfer.chosen();
    assert_eq!(chosen["carrier"], "graft:stream", "{chosen}");
    assert_eq!(chosen["direction"], direction, "{chosen}");
    // What the bytes have shown, as it is more than the port tells.
    let shown = transfer.flows(Host::Client)[0]["profile"].clone();
    assert!(shown.is_string() && chosen["profile"] == shown, "{chosen}");
    for figure in ["min_rtt_ms", "loss_pct", "packets", "since_s"] {
        assert!(chosen[figure].as_f64().is_some_and(|x| x > 0.0), "{chosen}");
    }
    let log = fs::read_to_string(transfer.world.log_path(Host::Client)).expect("a log");
    let said = "select: flows change their carrier";
    assert!(log.contains(said), "{log}");
    transfer.goes_on(200_000);
    let text = transfer.world.select(&["status"]);
    assert!(text.starts_with("select: on\n"), "{text}");
    assert!(text.contains("carrier: graft:stream"), "{text}");
    // Over the short path the model may choose anew.
    transfer.ends();
}

#[test]
fn select__an_upload_over_a_lossy_path_moves_to_the_graft() {
    if let Some(world) = World::new("select-up", &far()) {
        moves(Transfer::upload(world), "sends");
    }
}

/// Its client sees no losses: the server tells.
#[test]
fn select__a_download_over_a_lossy_path_moves_to_the_graft() {
    if let Some(world) = World::new("select-down", &far()) {
        moves(Transfer::download(world), "receives");
    }
}

#[test]
fn select__over_a_short_clean_path_it_stays() {
    let Some(world) = World::new("select-near", &Link::new(NEAR_MS, CRAWL)) else {
        return;
    };
    let mut transfer = Transfer::download(world);
    until("a decision", || {
        assert!(transfer.process.ended().is_none(), "it has ended before");
        transfer.chosen()["explanation"].is_string()
    });
    transfer.goes_by("tcp", "auto: tcp for");
    transfer.goes_on(1 << 20);
    transfer.goes_by("tcp", "auto: tcp for");
    let world = transfer.ends();
    assert_eq!(world.sum(Host::Client, "bytes_received"), 0, "no carrier");
}

/// The hosts' TCP is CUBIC, and nothing is known of the path: `tcp:stream` takes over the server's end once packets are lost.
/// The graft that the model chooses has to wait for a pause.
#[test]
fn select__stream_takes_over_and_the_graft_waits_for_a_pause() {
    let link = Link {
        loss_pct: LITTLE_PCT,
        ..far()
    };
    let Some(world) = World::new("select-stream", &link) else {
        return;
    };
    for host in [Host::Client, Host::Server] {
        world.testbed.tune_tcp(host, "cubic").expect("tuned");
    }
    let mut transfer = Transfer::download(world);
    let has_stream = |transfer: &Transfer| {
        transfer
            .world
            .controls(Host::Server)
            .iter()
            .any(|of| of.starts_with("vtl_stream"))
    };
    until("tcp:stream", || has_stream(&transfer));
    transfer.goes_by("tcp", "auto: graft:stream for rtt");
    assert_eq!(transfer.chosen()["carrier"], "tcp:bbr");
    let socket = transfer.world.socket(Host::Client);
    let id = transfer.flows(Host::Client)[0]["id"].to_string();
    let socket = ["--socket", socket.to_str().expect("UTF-8")];
    let explain = ["select", "explain", "--flow", &id];
    let mut command = (transfer.world).vtl(Host::Client, &[&socket[..], &explain].concat());
    let output = command.output().expect("vtl runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.starts_with("graft:stream\n"),
        "{said}{}",
        words(&output)
    );
    // The connection's own control again, and tcp:stream at once, as the path is known to lose packets.
    transfer.world.select(&["off"]);
    until("CUBIC", || !has_stream(&transfer));
    transfer.world.select(&["on"]);
    until("tcp:stream again", || has_stream(&transfer));
    transfer.world.set_rate(FAST);
    let world = transfer.ends_there();
    until("the graft", || {
        world.selected()["paths"][0]["carrier"] == "graft:stream"
    });
}

/// The kill switch: what runs and what is new goes by TCP, also after a restart.
#[test]
fn select__off_is_tcp_for_all_and_stays() {
    let Some(world) = World::new("select-off", &far()) else {
        return;
    };
    let mut transfer = Transfer::download(world);
    transfer.goes_by("graft", "auto: graft:stream");
    transfer.goes_on(200_000);
    transfer.world.select(&["off"]);
    let status = transfer.world.selected();
    assert_eq!(status["on"], false);
    assert_eq!(status["paths"][0]["carrier"], "tcp");
    transfer.goes_by("tcp", "vtl select is off");
    transfer.goes_on(100_000);
    // A new one, with an association of its own, over a path that is known.
    let _server = transfer.world.start_other_web();
    transfer.world.serve("little", 100_000);
    let to = transfer.world.path("little");
    let url = format!("http://{}:9000/little", transfer.world.servers()[0]);
    let mut little = transfer
        .world
        .auto_curl(&["-o", to.to_str().expect("UTF-8"), &url]);
    let by = |transfer: &Transfer| -> Vec<Value> {
        let flows = transfer.flows(Host::Client);
        flows
            .into_iter()
            .map(|flow| flow["sends_by"].clone())
            .collect()
    };
    until("a second flow", || by(&transfer).len() == 2);
    assert!(by(&transfer).iter().all(|by| *by == "tcp"));
    assert!(little.wait().success());
    same(&transfer.world.path("www").join("little"), &to);
    transfer.world.take_over(Host::Client);
    assert_eq!(transfer.world.selected()["on"], false);
    transfer.goes_on(100_000);
    transfer.goes_by("tcp", "vtl select is off");
    // And back.
    transfer.world.select(&["on"]);
    transfer.goes_by("graft", "auto: graft:stream");
    transfer.ends();
}

/// A path that is clean at first, and then far and lossy.
#[test]
fn select__a_path_that_turns_bad_and_a_known_one() {
    let Some(world) = World::new("select-turns", &Link::new(NEAR_MS, CRAWL)) else {
        return;
    };
    // Else the kernel takes a longer path for a queue for five minutes: the window is per network namespace.
    let shorter = "echo 1 > /proc/sys/net/ipv4/tcp_min_rtt_wlen";
    let mut shell = (world.testbed.command(Host::Server, "sh")).expect("a namespace");
    assert!(shell.args(["-c", shorter]).status().expect("sh").success());
    let mut transfer = Transfer::download(world);
    transfer.goes_by("tcp", "auto: tcp for");
    transfer.world.testbed.set(&far()).expect("set");
    transfer.goes_by("graft", "auto: graft:stream");
    transfer.goes_on(200_000);
    transfer.world.set_rate(FAST);
    let world = transfer.ends_there();
    // Connections of another profile have an association of their own, which begins with what is known.
    let _server = world.start_other_web();
    world.serve("little", 1000);
    let address = world.servers()[0].to_string();
    let other = format!("http://{address}:9000/little");
    assert!(
        world
            .auto_curl(&["-o", "/dev/null", &other])
            .wait()
            .success()
    );
    until("the choice of the other one", || {
        let selected = world.selected();
        let mut paths = selected["paths"].as_array().into_iter().flatten();
        let other = paths.find(|path| path["profile"].is_null());
        other.is_some_and(|path| path["carrier"] == "graft:stream")
    });
}

/// What the command says of a path, by the daemon's figures.
#[test]
fn select__explains_a_path() {
    let Some(world) = World::new("select-explain", &Link::new(NEAR_MS, FAST)) else {
        return;
    };
    world.serve("file", 1 << 20);
    let client = world.testbed.addr4(Host::Client).to_string();
    // Connections are read once a second: a short one may end in between.
    until("something is known of the path", || {
        world.download(world.servers()[0], "file");
        let shown = world.vtl(Host::Server, &["path", "show", &client]).output();
        shown.is_ok_and(|shown| shown.status.success())
    });
    let socket = world.socket(Host::Server);
    let socket = socket.to_str().expect("UTF-8");
    let explain = ["--socket", socket, "select", "explain", "--path", &client];
    let profile = ["--profile", "loss-sensitive"];
    let mut command = world.vtl(Host::Server, &[&explain[..], &profile].concat());
    let output = command.output().expect("vtl runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", words(&output));
    assert!(said.contains("The path through one of the trees"), "{said}");
    // Nobody has told of a path there.
    let nobody = ["select", "explain", "--path", "192.0.2.7"];
    let output = world.vtl(Host::Server, &nobody).output().expect("vtl runs");
    assert!(!output.status.success(), "{}", words(&output));
}

/// What connections have taught the client.
fn listed(world: &World) -> Value {
    let text = world.select(&["learn", "list", "--json"]);
    serde_json::from_str(&text).expect("JSON")
}

/// What connections have taught is shown, forgotten, and not learnt any more, by command.
#[test]
fn select__connections_teach() {
    let Some(mut world) = World::new("select-learn", &Link::new(NEAR_MS, 50.0)) else {
        return;
    };
    world.serve("file", 1 << 20);
    let url = url(world.servers()[0], "file");
    // The first ones are over before the model has decided.
    until("an outcome", || {
        assert!(world.auto_curl(&["-o", "/dev/null", &url]).wait().success());
        listed(&world)["lessons"][0]["outcomes"][0].is_object()
    });
    let lessons = listed(&world);
    let outcome = &lessons["lessons"][0]["outcomes"][0];
    assert_eq!(lessons["on"], true, "{lessons}");
    assert_eq!(outcome["bytes_from"], 1 << 20, "{lessons}");
    assert!(
        outcome["rate_mbit"].as_f64().is_some_and(|rate| rate > 0.1),
        "{lessons}"
    );
    let server = world.servers()[0].to_string();
    let socket = world.socket(Host::Client);
    let socket = socket.to_str().expect("UTF-8");
    let explain = ["--socket", socket, "select", "explain", "--path", &server];
    let output = world.vtl(Host::Client, &explain).output();
    let output = output.expect("vtl runs");
    let explained = String::from_utf8_lossy(&output.stdout).into_owned() + &words(&output);
    assert!(explained.contains("Learnt of connections"), "{explained}");
    world.select(&["learn", "off"]);
    world.select(&["learn", "reset"]);
    assert!(world.auto_curl(&["-o", "/dev/null", &url]).wait().success());
    let text = world.select(&["learn", "list"]);
    assert!(text.starts_with("learning: off\nlearnt: nothing"), "{text}");
    world.take_over(Host::Client);
    assert_eq!(listed(&world)["on"], false);
    world.select(&["learn", "on"]);
    assert_eq!(listed(&world)["on"], true);
}
