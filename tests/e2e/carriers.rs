//! Carriers chosen by hand, under unmodified programs.

use std::{
    io::Read,
    net::{IpAddr, TcpStream},
};

use vtl_bpf::tcp;
use vtl_testbed::{Host, Link};

use crate::harness::{Download, Held, PORT, Spoken, World, refused, until, words};

const SIZE: usize = 4 << 20;

impl World {
    /// `vtl hook` on a host, to succeed. Returns what it says.
    #[track_caller]
    pub(crate) fn vtl_hook(&self, host: Host, args: &[&str]) -> String {
        let mut command = self.vtl(host, &[&["hook"], args].concat());
        let output = command.output().expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Daemons and a web server, whose port is not hooked.
    pub(crate) fn unhooked(name: &str, link: &Link) -> Option<Self> {
        // Congestion controls are the whole kernel's.
        let mut world = Self::alone(name, link)?;
        world.start_web();
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
        Some(world)
    }

    /// Begins a download by a curl that `vtl run --carrier` starts.
    pub(crate) fn start_over(&self, carrier: &str, server: IpAddr, name: &str) -> Download {
        self.start_download_run(&["--carrier", carrier], server, name)
    }

    /// The congestion controls that a host's connections with the web server use.
    pub(crate) fn controls(&self, host: Host) -> Vec<String> {
        let web = |c: &vtl_testbed::CongestionControl| match host {
            Host::Server => c.local.port() == PORT,
            _ => c.peer.port() == PORT,
        };
        let all = self.testbed.congestion_controls(host).expect("ss runs");
        all.into_iter().filter(web).map(|c| c.name).collect()
    }

    /// Waits until the only connection with the web server has these at client and server.
    #[track_caller]
    pub(crate) fn expect_controls(&self, client: &str, server: &str) {
        until(
            &format!("{client} at the client, {server} at the server"),
            || self.controls(Host::Client) == [client] && self.controls(Host::Server) == [server],
        );
    }
}

/// Mbit/s: downloads that are looked at while they go on, and for their rest.
const SLOW: f64 = 2.0;
const FAST: f64 = 200.0;

fn finish(mut download: Download) {
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
}

#[test]
fn tcp__under_the_kernels_own_controls() {
    let Some(world) = World::unhooked("carrier-tcp", &Link::new(5.0, SLOW)) else {
        return;
    };
    world.serve("f", SIZE);
    let port = PORT.to_string();
    for (server, (own, other)) in world
        .servers()
        .into_iter()
        .zip([("cubic", "reno"), ("reno", "cubic")])
    {
        let theirs = format!("tcp:{other}");
        world.vtl_hook(
            Host::Server,
            &["add", "--port", &port, "--carrier", &theirs],
        );
        let download = world.start_over(&format!("tcp:{own}"), server, "f");
        // No proxy: the application's own socket goes to the server's.
        world.expect_controls(own, other);
        let listed = world.vtl_hook(Host::Server, &["list"]);
        assert!(listed.contains(&theirs), "{listed}");
        let status = world.status(Host::Client);
        assert_eq!(status["hooks"][0]["connections"], 1, "{status}");
        // The hook goes, the connection stays as it is.
        world.vtl_hook(Host::Server, &["remove", "--port", &port]);
        world.expect_controls(own, other);
        world.set_rate(FAST);
        finish(download);
        world.set_rate(SLOW);
    }
    let default = world.start_over("tcp", world.servers()[0], "f");
    until("a connection", || world.controls(Host::Client).len() == 1);
    let at_server = world.controls(Host::Server);
    assert_eq!(world.controls(Host::Client), at_server, "the system's");
    world.set_rate(FAST);
    finish(default);
    assert_eq!(
        world.status(Host::Client)["sessions"][0],
        serde_json::Value::Null
    );
}

#[test]
fn tcp__hybla_comes_with_vtl_and_goes_with_it() {
    let Some(mut world) = World::unhooked("carrier-hybla", &Link::new(20.0, SLOW)) else {
        return;
    };
    world.serve("f", SIZE);
    let [server, server6] = world.servers();
    let before = tcp::of_kernel();
    let port = PORT.to_string();
    let add = ["add", "--port", &port, "--carrier", "tcp:hybla"];
    world.vtl_hook(Host::Server, &add);
    let controls = |before: &[String]| {
        let mut now = tcp::of_kernel();
        now.retain(|name| !before.contains(name));
        now
    };
    let registered = controls(&before);
    assert_eq!(registered.len(), 1, "{registered:?}");
    let theirs = registered[0].clone();
    let download = world.start_over("tcp:hybla", server, "f");
    until("the client's", || controls(&before).len() == 2);
    let own = controls(&before).into_iter().find(|name| *name != theirs);
    let own = own.expect("each daemon has one of its own");
    world.expect_controls(&own, &theirs);
    // Killed: nothing is left that a new connection could use, and this one goes on.
    for host in [Host::Server, Host::Client] {
        let daemon = world.take_daemon(host);
        let held = Held::by(daemon.pid());
        daemon.kill();
        until("the congestion control is gone", || {
            let gone = if host == Host::Server { &theirs } else { &own };
            !tcp::of_kernel().contains(gone)
        });
        if host == Host::Client {
            world.set_rate(FAST);
            finish(download);
            held.assert_gone();
            break;
        }
        assert_eq!(world.controls(Host::Server), [theirs.as_str()]);
    }
    world.start(Host::Client, &[]);
    finish(world.start_over("tcp:hybla", server6, "f"));
}

impl World {
    /// The web server's connections, of the application and of vtld: whether they come from another
    /// host, and their congestion controls.
    fn served(&self) -> Vec<(bool, String)> {
        let all = self.testbed.congestion_controls(Host::Server);
        let web = all.expect("ss runs").into_iter();
        let web = web.filter(|c| c.local.port() == PORT);
        web.map(|c| {
            let ip = c.peer.ip().to_canonical();
            (
                !ip.is_loopback() && ip != c.local.ip().to_canonical(),
                c.name,
            )
        })
        .collect()
    }
}

/// A port that says how TCP to clients without VTL is sent: those with VTL come by sessions
/// nevertheless, and what vtld hands to the server inside this host is left alone.
#[test]
fn others__are_sent_as_the_port_says() {
    let Some(mut world) = World::unhooked("carrier-others", &Link::new(20.0, SLOW)) else {
        return;
    };
    world.serve("f", SIZE);
    let port = PORT.to_string();
    let add = ["add", "--port", &port, "--others", "tcp:stream"];
    world.vtl_hook(Host::Server, &add);
    let listed = world.vtl_hook(Host::Server, &["list"]);
    assert!(listed.contains("best, others tcp:stream"), "{listed}");
    let is_ours = |control: &str| control.starts_with("vtl_stream");
    for again in [false, true] {
        if again {
            world.take_over(Host::Server);
            until("the port is hooked again", || {
                world.vtl_hook(Host::Server, &["list"]).contains("others")
            });
        }
        for server in world.servers() {
            let download = world.start_over("tcp", server, "f");
            until(
                "it is sent as stream sends",
                || matches!(&world.served()[..], [(true, control)] if is_ours(control)),
            );
            world.set_rate(FAST);
            world.set_loss(2.0);
            finish(download);
            world.set_loss(0.0);
            world.set_rate(SLOW);
        }
        until("nothing is under way", || world.served().is_empty());
        assert_eq!(world.sum(Host::Client, "bytes_received"), 0);
    }
    world.meet();
    let carried = world.sum(Host::Client, "bytes_received");
    let download = world.start_download(world.servers()[0], "f");
    until("both connections of a flow", || {
        let served = world.served();
        let local = served.iter().find(|(remote, _)| !remote);
        // Of the flow's own connection some bytes are sent, too.
        let remote = served.iter().find(|(remote, _)| *remote);
        local.is_some_and(|(_, c)| !is_ours(c)) && remote.is_some_and(|(_, c)| is_ours(c))
    });
    world.set_rate(FAST);
    finish(download);
    let carried = world.sum(Host::Client, "bytes_received") - carried;
    assert!(carried > SIZE as u64 / 2, "{carried}");

    world.set_rate(SLOW);
    for (others, about) in [
        ("tcp", "takes tcp:CONTROL"),
        ("graft:stream", "takes tcp:CONTROL"),
        ("tcp:nothing", "tcp:stream"),
        ("pigeon", "there is no carrier \"pigeon\""),
    ] {
        let hook = ["hook", "add", "--port", "81", "--others", others];
        let output = world.vtl(Host::Server, &hook).output().expect("vtl runs");
        refused(&output, 1, about);
    }
    world.vtl_hook(Host::Server, &["remove", "--port", &port]);
    let download = world.start_over("tcp", world.servers()[0], "f");
    // Beside it are the daemons' own connections, which keep what they have.
    until("it is sent as the system has it", || {
        let served = world.served();
        served
            .iter()
            .any(|(remote, used)| *remote && !is_ours(used))
    });
    world.set_rate(FAST);
    finish(download);
}

/// A rule may say so, too, and say something else while the port stays hooked.
#[test]
fn others__of_rules_change_while_the_port_stays_hooked() {
    let Some(mut world) = World::alone("carrier-others-rules", &Link::new(20.0, SLOW)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    let file = world.path("rules.toml");
    let write = |others: &str| {
        let rule = format!("[[rule]]\nname = \"web\"\nlisten = {PORT}\n{others}\n");
        std::fs::write(&file, rule).expect("written");
    };
    write("others = \"tcp:stream\"");
    world.start(Host::Server, &["--rules", file.to_str().expect("UTF-8")]);
    world.start(Host::Client, &[]);
    for (others, control) in [
        ("others = \"tcp:stream\"", "vtl_stream"),
        ("others = \"tcp:reno\"", "reno"),
        ("", ""),
        ("others = \"tcp:vegas\"", "vtl_vegas"),
    ] {
        write(others);
        let reload = world.vtl(Host::Server, &["rule", "reload"]).output();
        let reload = reload.expect("vtl runs");
        assert!(reload.status.success(), "{}", words(&reload));
        let download = world.start_over("tcp", world.servers()[0], "f");
        // Beside it is the daemons' own connection, which keeps what it has.
        until(&format!("{others}: it is sent so"), || {
            let remote = world.served().into_iter().filter(|(remote, _)| *remote);
            let mut controls = remote.map(|(_, used)| used);
            match control {
                "" => controls.any(|used| !used.starts_with("vtl_") && used != "reno"),
                control => controls.any(|used| used.starts_with(control)),
            }
        });
        world.set_rate(FAST);
        finish(download);
        // The port is steered as ever.
        let carried = world.sum(Host::Client, "bytes_received");
        world.meet();
        world.download(world.servers()[0], "f");
        let carried = world.sum(Host::Client, "bytes_received") - carried;
        assert!(carried > SIZE as u64 / 2, "{others}: {carried}");
        world.set_rate(SLOW);
    }
    // Rules that cannot be change nothing.
    write("others = \"tcp:nothing\"");
    let reload = world.vtl(Host::Server, &["rule", "reload"]).output();
    refused(
        &reload.expect("vtl runs"),
        1,
        "there is no carrier tcp:nothing",
    );
    let download = world.start_over("tcp", world.servers()[0], "f");
    until("it is sent as before", || {
        let served = world.served();
        served
            .iter()
            .any(|(remote, used)| *remote && used.starts_with("vtl_vegas"))
    });
    world.set_rate(FAST);
    finish(download);
    let carried = world.sum(Host::Client, "bytes_received");
    world.download(world.servers()[0], "f");
    let carried = world.sum(Host::Client, "bytes_received") - carried;
    assert!(carried > SIZE as u64 / 2, "{carried}");
}

/// Sends `SIZE` bytes to who connects, and every 64 KiB by another of the two congestion controls that it is
/// told.
const SWITCHING: &str = r#"
import socket, sys
data = open(sys.argv[3], "rb").read()
listener = socket.create_server(("", 7777))
print("ready", flush=True)
peer, _ = listener.accept()
for turn, at in enumerate(range(0, len(data), 65536)):
    control = sys.argv[1 + turn % 2].encode()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)
    peer.sendall(data[at:at + 65536])
peer.close()
"#;

/// An application may take another control in the middle of a connection, and take `stream` again.
#[test]
fn stream__is_left_and_taken_again_in_mid_connection() {
    let Some(world) = World::unhooked("carrier-switch", &Link::new(10.0, 100.0)) else {
        return;
    };
    let file = world.serve("f", SIZE);
    let before = tcp::of_kernel();
    let port = PORT.to_string();
    let add = ["add", "--port", &port, "--others", "tcp:stream"];
    world.vtl_hook(Host::Server, &add);
    let mut now = tcp::of_kernel();
    now.retain(|name| !before.contains(name));
    assert_eq!(now.len(), 1, "{now:?}");
    world.set_loss(2.0);
    let mut server = world
        .testbed
        .command(Host::Server, "python3")
        .expect("a namespace");
    server.args(["-c", SWITCHING, &now[0], "reno"]).arg(&file);
    let mut server = Spoken::start(server);
    assert_eq!(server.line(), "ready");
    let address = world.servers()[0];
    let got = world.testbed.in_netns(Host::Client, || {
        let mut got = Vec::new();
        let mut stream = TcpStream::connect((address, 7777))?;
        stream.read_to_end(&mut got).map(|_| got)
    });
    let got = got.expect("in the namespace").expect("no error");
    assert_eq!(got.len(), SIZE);
    assert!(got == std::fs::read(&file).expect("there"), "other bytes");
}

#[test]
fn carriers__that_cannot_be_are_refused() {
    let Some(world) = World::unhooked("carrier-bad", &Link::new(5.0, 100.0)) else {
        return;
    };
    for (name, about) in [
        ("tcp:nothing", "tcp:hybla"),
        ("tcp:nothing", "tcp:cubic"),
        ("pigeon", "there is no carrier \"pigeon\""),
        ("tcp:../x", "there is no carrier"),
        ("tcp:vtl_hybla", "there is no carrier tcp:vtl_hybla"),
    ] {
        let run = ["run", "--carrier", name, "--", "true"];
        let output = world.vtl(Host::Client, &run).output().expect("vtl runs");
        refused(&output, 1, about);
    }
    let hook = ["hook", "add", "--port", "80", "--carrier", "tcp"];
    let output = world.vtl(Host::Server, &hook).output().expect("vtl runs");
    refused(&output, 1, "plain TCP already");
    let listed = world.vtl_hook(Host::Server, &["list"]);
    assert!(listed.contains("none"), "{listed}");
}

#[test]
fn graft__carries_what_its_hook_carries() {
    let Some(world) = World::new("carrier-graft", &Link::new(5.0, 50.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let grafts = |host| -> Vec<String> {
        let status = world.status(host);
        let sessions = status["sessions"].as_array().expect("a list");
        // One that is being opened has none.
        let name = |s: &serde_json::Value| s["graft"].as_str().map(str::to_owned);
        sessions.iter().filter_map(name).collect()
    };
    let [server, server6] = world.servers();
    // The first opens the session, the second finds it, each family is a peer of its own.
    world.meet_by(&["--carrier", "graft:cubic"]);
    for server in [server, server, server6] {
        finish(world.start_over("graft:cubic", server, "f"));
    }
    for host in [Host::Client, Host::Server] {
        until("two sessions", || grafts(host) == ["cubic", "cubic"]);
    }
    // Neither those of another hook nor those of none travel by it.
    finish(world.start_over("graft:newreno", server, "f"));
    world.download(server, "f");
    until("sessions of other grafts", || {
        let mut all = grafts(Host::Client);
        all.sort();
        all == ["cubic", "cubic", "newreno", "stream"]
    });
    // The other two may have been over before their grafts were loaded.
    let carried = world.sum(Host::Client, "bytes_received");
    assert!(carried >= 3 * SIZE as u64, "{carried}");
    finish(world.start_over("graft:newreno", server, "f"));
    let more = world.sum(Host::Client, "bytes_received") - carried;
    assert!(more >= SIZE as u64 / 2, "{more}");
    // What is no stream of bytes carries none.
    for (name, about) in [
        ("graft:udp", "it lacks"),
        ("graft:selective-repeat", "congestion"),
        ("graft:none", "graft:stream"),
    ] {
        let run = ["run", "--carrier", name, "--", "true"];
        let output = world.vtl(Host::Client, &run).output().expect("vtl runs");
        refused(&output, 1, about);
    }
    let hook = ["hook", "add", "--port", "81", "--carrier", "graft:cubic"];
    let output = world.vtl(Host::Server, &hook).output().expect("vtl runs");
    refused(&output, 1, "who connects chooses");
}

#[test]
fn graft__that_the_peer_lacks_means_tcp() {
    let Some(world) = World::new("carrier-lack", &Link::new(5.0, 50.0)) else {
        return;
    };
    world.serve("f", SIZE / 4);
    for verb in ["deploy", "remove"] {
        let mut command = world.vtl(Host::Server, &["graft", verb, "cubic"]);
        let output = command.output().expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
    }
    finish(world.start_over("graft:cubic", world.servers()[0], "f"));
    assert_eq!(world.sum(Host::Client, "bytes_received"), 0);
}

#[test]
fn carriers__of_the_nearest_hook_count() {
    let Some(world) = World::new("carrier-nested", &Link::new(5.0, SLOW)) else {
        return;
    };
    world.serve("f", SIZE);
    let grafts = || -> Vec<String> {
        let status = world.status(Host::Client);
        let sessions = status["sessions"].as_array().expect("a list");
        // One that is being opened has none.
        let name = |s: &serde_json::Value| s["graft"].as_str().map(str::to_owned);
        sessions.iter().filter_map(name).collect()
    };
    // All programs of the host, and in a group below that one program with a carrier of its own.
    world.vtl_hook(Host::Client, &["add", "--cgroup", "/"]);
    let server = world.servers()[0];
    let download = world.start_over("tcp:reno", server, "f");
    until("a connection", || world.controls(Host::Client) == ["reno"]);
    world.set_rate(FAST);
    finish(download);
    assert_eq!(grafts(), Vec::<String>::new());
    finish(world.start_over("graft:newreno", server, "f"));
    until("its session", || grafts() == ["newreno"]);
    let mut curl = world
        .testbed
        .command(Host::Client, "curl")
        .expect("a namespace");
    let url = crate::harness::url(server, "f");
    let status = curl.args(["-sS", "--noproxy", "*", "-o", "/dev/null", &url]);
    assert!(status.status().expect("curl runs").success());
    until("both sessions", || {
        let mut all = grafts();
        all.sort();
        all == ["newreno", "stream"]
    });
    world.vtl_hook(Host::Client, &["remove", "--cgroup", "/"]);
}
