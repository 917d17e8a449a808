//! Stacks of layers (`stack:NAME`, `stacks.toml`), under unmodified programs.

use std::{fs, net::UdpSocket, os::unix::fs::PermissionsExt, path::Path, process::Command};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::{
    harness::{
        Download, World, bad_link, payload, process_of_carriers, refused, repository, same, until,
        url,
    },
    kinds::udp_port,
};

const MB: usize = 1 << 20;
const UDP_PLUS: &str = "stack:udp-plus?rate=40";

#[track_caller]
fn finish(mut download: Download) {
    let status = download.process.wait();
    assert!(status.success(), "{status}");
    download.check();
}

/// Compiles the example of a layer into a directory.
fn compile(layers: &Path) -> String {
    fs::create_dir_all(layers).expect("a directory");
    let status = Command::new("clang-19")
        .args([
            "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-I",
        ])
        .arg(repository().join("include"))
        .arg("-o")
        .arg(layers.join("check.so"))
        .arg(repository().join("examples/layer_check.c"))
        .status();
    assert!(status.expect("clang-19 runs: make setup").success());
    layers.to_str().expect("UTF-8").to_owned()
}

/// A file that takes the stacks of others.
const TAKES: &str = "accept_rate = 100\n";

/// Writes a host's file of stacks, and rules beside it. Returns the rules' path.
fn files(world: &World, host: Host, stacks: &str, rules: &str) -> String {
    let dir = world.path(&format!("etc-{}", host.name()));
    fs::create_dir_all(&dir).expect("a directory");
    fs::write(dir.join("stacks.toml"), stacks).expect("written");
    let file = dir.join("rules.toml");
    fs::write(&file, rules).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

#[test]
fn udp_plus__every_byte_over_a_bad_link_whatever_dies() {
    let Some(mut world) = World::bare("layers-bad", &Link::new(10.0, 50.0)) else {
        return;
    };
    world.start_web();
    let rules = files(&world, Host::Server, TAKES, "");
    world.start_both(&["--rules", &rules]);
    world.meet_by(&["--carrier", UDP_PLUS]);
    let carriers = world.carriers(Host::Client);
    assert!(
        carriers.iter().all(|row| row["carrier"] == "stack"),
        "{carriers:?}"
    );
    assert!(
        carriers.iter().all(|row| row["encrypted"] == true),
        "{carriers:?}"
    );
    world.testbed.set(&bad_link()).expect("set");
    let server = world.servers()[0];
    world.serve("f", 4 * MB);
    let sent = payload(2 * MB, 7);
    let before = ["bytes_received", "bytes_sent"].map(|figure| world.carried(figure));
    finish(world.start_over(UDP_PLUS, server, "f"));
    world.upload_run(&["--carrier", UDP_PLUS], server, "up", &sent);
    // The stack took it, and nothing went around it.
    let after = ["bytes_received", "bytes_sent"].map(|figure| world.carried(figure));
    let [down, up] = [after[0] - before[0], after[1] - before[1]];
    assert!(down >= 4 * MB as u64 && up >= 2 * MB as u64, "{down}, {up}");
    assert!(
        world.carried("lost") > 0,
        "{:?}",
        world.carriers(Host::Client)
    );

    // What moves a stack's packets dies at either side in mid-transfer.
    world.serve("big", 24 * MB);
    let mut download = world.start_over(UDP_PLUS, server, "big");
    download.reaches(100_000);
    for host in [Host::Server, Host::Client] {
        let daemon = world.daemon(host).pid();
        let pid = process_of_carriers(daemon, "stack").expect("it runs");
        kill(Pid::from_raw(pid as i32), Signal::SIGKILL).expect("it lives");
        until("another process", || {
            process_of_carriers(daemon, "stack").is_some_and(|other| other != pid)
        });
    }
    finish(download);
}

#[test]
fn stack__is_declared_in_a_file_and_named_by_rules() {
    let Some(mut world) = World::bare("layers-file", &Link::new(5.0, 50.0)) else {
        return;
    };
    let stacks = "[[stack]]\nname = \"lte\"\nrate = 40\npeer_rate = 30\nlayers = [\"compression\", \
                  \"flow-control?window=512\", \"ordering\", \"nack?window=512\", \"fec?block=10\", \"encryption\"]\n\
                  [[stack]]\nname = \"kcp-fec\"\ncarrier = \"kcp\"\nlayers = [\"fec?block=5\"]\n\
                  [[stack]]\nname = \"own\"\nrate = 40\nlayers = [\"flow-control\", \"ordering\", \"nack\", \"check?seed=7\"]\n";
    let rules = files(&world, Host::Client, stacks, "");
    let of_server = files(&world, Host::Server, TAKES, "");
    let layers = world.path("layers");
    let layers = compile(&layers);
    world.start_web();
    world.start(Host::Server, &["--rules", &of_server, "--layers", &layers]);
    world.start(Host::Client, &["--rules", &rules, "--layers", &layers]);
    world.hook();
    let server = world.servers()[0];
    world.serve("f", MB);

    // What cannot be is refused in one sentence.
    for (carrier, about) in [
        ("stack:udp-plus", "has no congestion control: say the rate"),
        ("stack:lte?rate=0", "from 1 to 100000"),
        (
            "stack:x?rate=1",
            "there are stack:kcp-fec, stack:lte, stack:own, stack:udp-plus",
        ),
        ("stack", "there is no carrier \"stack\""),
    ] {
        let run = ["run", "--carrier", carrier, "--", "true"];
        let output = world.vtl(Host::Client, &run).output().expect("vtl runs");
        refused(&output, 1, about);
    }
    let bad = "[[stack]]\nname = \"a\"\nlayers = [\"nack\"]\n";
    for (stacks, rules, about) in [
        (
            bad,
            "",
            "stacks.toml:3:10: stack \"a\": it cannot carry TCP connections, it lacks order",
        ),
        (
            stacks,
            "[[rule]]\nname = \"r\"\ncarrier = \"stack:x\"\n",
            "no carrier stack:x",
        ),
        (
            "",
            "[[rule]]\nname = \"r\"\ncarrier = \"stack:lte\"\n",
            "no carrier stack:lte",
        ),
    ] {
        files(&world, Host::Client, stacks, rules);
        refused(&world.rule(&["reload"]), 1, about);
    }

    // By a rule, under a program that knows nothing of it. The refused files have changed nothing.
    let rule = "[[rule]]\nname = \"r\"\nport = 80\ncarrier = \"stack:lte\"\n";
    files(&world, Host::Client, stacks, rule);
    world.rule_ok(&["reload"]);
    let to = world.path("got");
    let curl = Path::new("/usr/bin/curl");
    let wanted = world.path("www").join("f");
    until("the stack carries it", || {
        let output = world.plain_curl(curl, &to, &url(server, "f")).output();
        assert!(output.expect("curl runs").status.success());
        same(&wanted, &to);
        world.carried("bytes_received") >= MB as u64
    });
    let carriers = world.carriers(Host::Client);
    assert!(
        carriers.iter().all(|row| row["carrier"] == "stack"),
        "{carriers:?}"
    );

    // Layers below KCP, and one that was compiled outside of VTL; and a flow that moves to a stack while it runs.
    for stack in ["stack:kcp-fec", "stack:own"] {
        let before = world.carried("bytes_received");
        until("the stack carries it", || {
            finish(world.start_over(stack, server, "f"));
            world.carried("bytes_received") >= before + MB as u64
        });
    }
    // Whoever could change a layer could change what everybody sends.
    let file = Path::new(&layers).join("check.so");
    fs::set_permissions(file, fs::Permissions::from_mode(0o775)).expect("ours");
    refused(&world.rule(&["reload"]), 1, "there is no layer \"check\"");
    world.serve("big", 16 * MB);
    let mut download = world.start_over("quic", server, "big");
    download.reaches(100_000);
    let list = world.call(Host::Client, &Request::FlowList { from: 0 });
    let flow = &list["flows"].as_array().expect("a list")[0];
    let id = flow["id"].to_string();
    let moved = ["flow", "move", &id, "--carrier", UDP_PLUS];
    let output = world.vtl(Host::Client, &moved).output().expect("vtl runs");
    assert!(output.status.success(), "{output:?}");
    let flow = world.call(
        Host::Client,
        &Request::FlowShow {
            id: flow["id"].as_u64().expect("a number"),
        },
    );
    assert_eq!(flow["sends_by"], "stack", "{flow}");
    finish(download);
}

#[test]
fn stack__a_peer_that_knows_none_gets_tcp() {
    let Some(mut world) = World::bare("layers-older", &Link::new(5.0, 50.0)) else {
        return;
    };
    // One that takes none answers as hosts do that do not know this kind of carrier.
    let rules = files(&world, Host::Server, "", "");
    world.start_web();
    world.start(Host::Server, &["--rules", &rules]);
    world.start(Host::Client, &[]);
    world.hook();
    let server = world.servers()[0];
    world.serve("f", MB);
    finish(world.start_over(UDP_PLUS, server, "f"));
    let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
    assert!(log.contains("carrier: refused by the peer"), "{log}");
    assert_eq!(world.carriers(Host::Client), Vec::<Value>::new());
    // Nobody is left that could be hurt by strangers; where there are stacks, they are not.
    files(&world, Host::Server, TAKES, "");
    let reload = ["rule", "reload"];
    let output = world.vtl(Host::Server, &reload).output().expect("vtl runs");
    assert!(output.status.success(), "{output:?}");
    until("the stack carries it", || {
        finish(world.start_over(UDP_PLUS, server, "f"));
        world.carried("bytes_received") >= MB as u64
    });
    let mut download = world.start_over(UDP_PLUS, server, "f");
    let port = udp_port(&world);
    let noise = move || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        for seed in 0..500 {
            let packet = payload(1 + seed as usize % 1_400, seed);
            let _ = socket.send_to(&packet, (server, port));
        }
    };
    let space = &world.testbed;
    space.in_netns(Host::Client, noise).expect("a namespace");
    assert!(download.process.wait().success());
    download.check();
    assert_eq!(world.carriers(Host::Client).len(), 1);
}

/// Stacks over carriers that move messages, with a layer that was compiled outside of VTL, each by its name.
const OVER_MESSAGES: [(&str, &str, &str); 4] = [
    ("over-quic", "quic", "\"compression\", \"check?seed=7\""),
    (
        "over-graft",
        "graft",
        "\"ordering\", \"check?seed=7\", \"compression\", \"encryption\"",
    ),
    (
        "over-sctp",
        "sctp",
        "\"check\", \"ordering\", \"encryption\"",
    ),
    ("over-mptcp", "mptcp", "\"compression\", \"check?seed=7\""),
];

/// Bytes that a host's carriers have sent and received, without frames about them.
fn moved(world: &World, host: Host) -> [u64; 2] {
    let carriers = world.carriers(host);
    let sum = |figure: &str| carriers.iter().filter_map(|row| row[figure].as_u64()).sum();
    ["bytes_sent", "bytes_received"].map(sum)
}

#[test]
fn layers__over_every_carrier_by_one_that_was_compiled_outside() {
    let link = Link {
        loss_pct: 1.0,
        reorder_pct: 1.0,
        ..Link::new(10.0, 100.0)
    };
    let Some(mut world) = World::bare("layers-all", &link) else {
        return;
    };
    let stack = |(name, carrier, layers)| {
        format!("[[stack]]\nname = \"{name}\"\ncarrier = \"{carrier}\"\nlayers = [{layers}]\n")
    };
    let stacks = OVER_MESSAGES.map(stack).concat();
    let rules = files(&world, Host::Client, &stacks, "");
    // What others may send without congestion control is another matter.
    let of_server = files(&world, Host::Server, "", "");
    let layers = compile(&world.path("layers"));
    world.start_web();
    world.start(Host::Server, &["--rules", &of_server, "--layers", &layers]);
    world.start(Host::Client, &["--rules", &rules, "--layers", &layers]);
    world.hook();
    let server = world.servers()[0];
    world.serve("f", 2 * MB);
    for (number, (name, ..)) in OVER_MESSAGES.into_iter().enumerate() {
        let stack = format!("stack:{name}");
        let carrier = ["--carrier", &stack];
        world.meet_by(&carrier);
        until(&format!("{stack} is up at both hosts"), || {
            // One to each address of the server's.
            let are = |host| world.carriers(host).len() == 2 * (number + 1);
            are(Host::Client) && are(Host::Server)
        });
        let before = [Host::Client, Host::Server].map(|host| moved(&world, host));
        finish(world.start_over(&stack, server, "f"));
        world.upload_run(&carrier, server, "up", &payload(MB, 7));
        let after = [Host::Client, Host::Server].map(|host| moved(&world, host));
        for (host, [to, from]) in [(0, [1, 2]), (1, [2, 1])] {
            let [sent, received] = [0, 1].map(|i| after[host][i] - before[host][i]);
            let min = [to, from].map(|mb| (mb * MB) as u64);
            assert!(
                sent >= min[0] && received >= min[1],
                "{stack}: {sent}, {received}"
            );
        }
    }
    let carriers = world.carriers(Host::Client);
    let are_stacks = carriers
        .iter()
        .all(|row| row["carrier"] == "stack" && row["encrypted"] == true);
    assert!(are_stacks, "{carriers:?}");

    // The process with the layers dies in mid-transfer, at either host: no byte is lost.
    world.serve("big", 12 * MB);
    let mut download = world.start_over("stack:over-quic", server, "big");
    download.reaches(100_000);
    for host in [Host::Server, Host::Client] {
        let daemon = world.daemon(host).pid();
        let pid = process_of_carriers(daemon, "stack").expect("it runs");
        kill(Pid::from_raw(pid as i32), Signal::SIGKILL).expect("it lives");
    }
    finish(download);
}

#[test]
fn layers__a_peer_that_lacks_one_gets_tcp() {
    let Some(mut world) = World::bare("layers-lack", &Link::new(5.0, 100.0)) else {
        return;
    };
    let stacks = "[[stack]]\nname = \"own\"\ncarrier = \"graft\"\nlayers = [\"check\"]\n";
    let rules = files(&world, Host::Client, stacks, "");
    let layers = compile(&world.path("layers"));
    world.start_web();
    world.start(Host::Server, &[]);
    world.start(Host::Client, &["--rules", &rules, "--layers", &layers]);
    world.hook();
    world.serve("f", MB);
    finish(world.start_over("stack:own", world.servers()[0], "f"));
    until("the refusal", || {
        let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
        log.contains("the peer refuses the stack: there is no layer \\\"check\\\"")
    });
    assert_eq!(world.carriers(Host::Client), Vec::<Value>::new());
}
