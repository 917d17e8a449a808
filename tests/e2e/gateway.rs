//! Gateways: hosts without VTL behind routers that carry their connections (`vtl gateway`).

mod chain;
mod hop;

use std::{fs, net::IpAddr, path::PathBuf, process::Command};

use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, Spoken, World, bad_link, python3, run, source, until, words};

/// A host without VTL, behind one of the testbed's hosts, which is its router. Gone when dropped.
struct Behind {
    name: String,
    addresses: [IpAddr; 2],
}

impl Drop for Behind {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}

/// The name of a testbed's host, as of `ip netns`.
fn netns(world: &World, host: Host) -> String {
    let path = world.testbed.netns_path(host);
    let name = path.file_name().and_then(|name| name.to_str());
    name.expect("UTF-8").to_owned()
}

/// Runs `ip` with these words.
fn ip(line: &str) {
    run(Command::new("ip").args(line.split(' ')));
}

/// The networks behind a router with this number, and their first part.
fn networks(number: u32) -> [(String, &'static str, &'static str); 2] {
    [
        (format!("10.98.{number}."), "0", "24"),
        (format!("fd98:{number}::"), "", "64"),
    ]
}

impl Behind {
    fn new(world: &World, router: Host) -> Self {
        let (number, other) = match router {
            Host::Client => (1, Host::Server),
            _ => (2, Host::Client),
        };
        let name = format!("{}-behind-{}", world.testbed.name(), router.name());
        let behind = Self::of(&netns(world, router), name, number);
        let router = [
            world.testbed.addr4(router).into(),
            world.testbed.addr6(router).into(),
        ];
        route(&netns(world, other), number, router);
        behind
    }

    /// A host behind the router in a namespace, which has no other network of this number.
    fn of(router: &str, name: String, number: u32) -> Self {
        // A run that was killed could not take its own away.
        let _ = Command::new("ip").args(["netns", "del", &name]).output();
        ip(&format!("netns add {name}"));
        ip(&format!(
            "-n {router} link add inside type veth peer name out netns {name}"
        ));
        let addresses = networks(number).map(|(network, _, bits)| {
            ip(&format!(
                "-n {router} addr add {network}1/{bits} dev inside{}",
                nodad(&network)
            ));
            ip(&format!(
                "-n {name} addr add {network}2/{bits} dev out{}",
                nodad(&network)
            ));
            format!("{network}2").parse().expect("an address")
        });
        ip(&format!("-n {router} link set inside up"));
        ip(&format!("-n {name} link set lo up"));
        ip(&format!("-n {name} link set out up"));
        for (network, ..) in networks(number) {
            ip(&format!("-n {name} route add default via {network}1"));
        }
        run(Command::new("ip")
            .args(["netns", "exec", router, "sysctl", "-qw"])
            .args(["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]));
        Self { name, addresses }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    fn python(&self, what: &str, address: IpAddr, port: u16) -> Command {
        let mut command = self.command(python3());
        command.arg(source("programs/behind.py"));
        command.args([what, &address.to_string(), &port.to_string()]);
        command
    }

    /// What a client here says of a connection.
    fn says(&self, what: &str, address: IpAddr, port: u16) -> String {
        let output = Process::piped(&mut self.python(what, address, port)).output();
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        format!("{said}{}", words(&output))
    }

    /// A server of `behind.py` here.
    fn serve(&self, address: IpAddr, port: u16) -> Spoken {
        let mut server = Spoken::start(self.python("serve", address, port));
        assert_eq!(server.line(), "ready");
        server
    }
}

/// How addresses of this network are added: at once.
fn nodad(network: &str) -> &'static str {
    if network.contains(':') { " nodad" } else { "" }
}

/// Has a namespace reach the networks of this number by a router.
fn route(from: &str, number: u32, router: [IpAddr; 2]) {
    for ((network, host, bits), router) in networks(number).into_iter().zip(router) {
        ip(&format!(
            "-n {from} route replace {network}{host}/{bits} via {router}"
        ));
    }
}

/// Has a host carry what it forwards over the link.
fn add_gateway(world: &World, host: Host, more: &[&str]) {
    let device = world.testbed.device(host);
    let mut add = world.vtl(host, &[&["gateway", "add", device], more].concat());
    run(&mut add);
}

/// A row of `vtl gateway list`.
fn connections(world: &World, host: Host) -> u64 {
    let output = world.vtl(host, &["gateway", "list", "--json"]).output();
    let list: Value = serde_json::from_slice(&output.expect("vtl runs").stdout).expect("JSON");
    list["gateways"][0]["connections"]
        .as_u64()
        .expect("a number")
}

/// Bytes that a host's grafts have sent and received for flows.
fn by_grafts(world: &World, host: Host) -> u64 {
    let rows = world.carriers(host).into_iter();
    let grafts = rows.filter(|row| row["carrier"] == "graft");
    let of = |row: &Value, way: &str| row[way].as_u64().unwrap_or(0);
    let bytes = |row: Value| of(&row, "bytes_sent") + of(&row, "bytes_received");
    grafts.map(bytes).sum()
}

/// A stateful firewall, as routers have it: what it forwards is decided by port; nothing reaches the router itself but
/// answers, and what VTL hosts say to each other. Counts packets that a gateway takes together with their socket.
const FIREWALL: &str = "table inet router {
    counter found { }
    chain prerouting {
        type filter hook prerouting priority 0;
        meta mark 0x56544c47 meta skuid 0 counter name found
    }
    chain input {
        type filter hook input priority 0; policy drop;
        ct state invalid drop
        ct state established,related accept
        iif lo accept
        meta l4proto { icmp, ipv6-icmp } accept
        meta l4proto 253 accept
        udp dport 22100 accept
    }
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state invalid drop
        ct state established,related accept
        tcp dport { 80, 81 } accept
        tcp dport 83 reject with tcp reset
        meta l4proto { icmp, ipv6-icmp } accept
    }
    chain output {
        type filter hook output priority 0; policy accept;
        ct state invalid drop
    }
}";

/// Two hosts without VTL, each behind a gateway: they get TCP, each with the other's address, and grafts carry it.
#[test]
fn gateway__between_hosts_without_vtl() {
    let Some(mut world) = World::with_daemons("gateway", &bad_link()) else {
        return;
    };
    let client = Behind::new(&world, Host::Client);
    let server = Behind::new(&world, Host::Server);
    for host in [Host::Client, Host::Server] {
        add_gateway(&world, host, &[]);
    }
    for (i, address) in server.addresses.into_iter().enumerate() {
        let mut served = server.serve(address, 80);
        if i == 1 {
            // From now on the routers' firewalls track connections.
            for host in [Host::Client, Host::Server] {
                world.filter(host, FIREWALL);
            }
        }
        // The same port, too, unless it would confuse the trackers.
        let names = if i == 1 { "another port" } else { "same" };
        assert_eq!(client.says("names", address, 80), names, "{address}");
        assert_eq!(client.says("half", address, 80), "whole", "{address}");
        assert_eq!(client.says("again", address, 80), "again", "{address}");
        until("grafts carry", || {
            assert_eq!(client.says("half", address, 80), "whole", "{address}");
            by_grafts(&world, Host::Client) > (i as u64 + 1) << 21
        });
        assert_eq!(
            client.says("reset", address, 80),
            "before ECONNRESET",
            "{address}"
        );
        assert_eq!(client.says("abort", address, 80), "aborted", "{address}");
        assert_eq!(served.line(), "end: ECONNRESET");
        // What was marked as urgent at the server, and at the client.
        assert_eq!(
            client.says("urgent", address, 80),
            "some!more 4rest 11 ?",
            "{address}"
        );
        // The truth of what does not come about: nobody listens; nobody is there.
        assert_eq!(
            client.says("connect", address, 81),
            "ECONNREFUSED",
            "{address}"
        );
        if i == 1 {
            assert_eq!(
                client.says("connect", address, 83),
                "ECONNREFUSED",
                "by the firewall"
            );
        }
    }
    assert!(connections(&world, Host::Server) > 0);
    for host in [Host::Client, Host::Server] {
        // Else the kernel looks for it once more, and may miss it.
        let mut nft = world.testbed.command(host, "nft").expect("there");
        let output = nft
            .args(["list", "counter", "inet", "router", "found"])
            .output();
        let shown = String::from_utf8(output.expect("nft runs").stdout).expect("UTF-8");
        assert!(
            shown.contains("packets") && !shown.contains("packets 0 "),
            "{shown}"
        );
    }
    world.stop_daemons();
}

/// How many routing rules the client's host has.
fn rules(world: &World) -> usize {
    let mut ip = world.testbed.command(Host::Client, "ip").expect("there");
    let output = ip.args(["rule"]).output().expect("ip runs");
    String::from_utf8_lossy(&output.stdout).lines().count()
}

/// How many sockets of ended connections the client's host keeps that have the address of the host behind it.
fn lingering(world: &World, behind: &Behind) -> usize {
    let mut ss = world.testbed.command(Host::Client, "ss").expect("there");
    let of = behind.addresses[0].to_string();
    ss.args(["-Htn", "state", "time-wait"]);
    let output = ss.args(["src", &of, "or", "dst", &of]).output();
    let output = output.expect("ss runs");
    assert!(output.status.success(), "{}", words(&output));
    String::from_utf8_lossy(&output.stdout).lines().count()
}

/// One gateway, to a server that speaks VTL; the gateway is taken over, and killed.
#[test]
fn gateway__is_taken_over_and_killed() {
    let Some(mut world) = World::new("gatewaykill", &Link::new(10.0, 20.0)) else {
        return;
    };
    let client = Behind::new(&world, Host::Client);
    add_gateway(&world, Host::Client, &[]);
    let wanted = world.serve("file", 8 << 20);
    let [server, _] = world.servers();
    let folder = world.path("");
    let got = |name: &str| folder.join(name);
    // Takes the link half a minute.
    let long = fs::File::create(world.path("www/long")).expect("a file");
    long.set_len(64 << 20).expect("a long file");
    let start = |to: &PathBuf, name: &str| {
        let mut curl = client.command("curl");
        curl.args(["--noproxy", "*", "-sSfo"]).arg(to);
        Process::piped(curl.arg(format!("http://{server}/{name}")))
    };
    let arrived = |to: &PathBuf, min: u64| {
        until("bytes", || {
            to.metadata().is_ok_and(|meta| meta.len() >= min)
        });
    };
    assert_eq!(rules(&world), 7);
    let to = got("first");
    let first = start(&to, "file");
    arrived(&to, 1 << 20);
    until("a graft carries", || by_grafts(&world, Host::Client) > 0);
    // A connect that waits while the daemon changes: nobody has refused it.
    let mut listens = world
        .testbed
        .command(Host::Server, python3())
        .expect("there");
    listens.arg(source("programs/behind.py"));
    listens.args(["serve", &server.to_string(), "9"]);
    let mut listens = Spoken::start(listens);
    assert_eq!(listens.line(), "ready");
    world.filter(
        Host::Server,
        "table ip silent {
            chain input {
                type filter hook input priority 0;
                tcp dport 9 drop
            }
        }",
    );
    let waiting = Process::piped(&mut client.python("connect", server, 9));
    until("its SYN", || {
        let mut ss = world.testbed.command(Host::Client, "ss").expect("there");
        let ss = ss.args(["-Htn", "state", "syn-sent", "dport", "=", ":9"]);
        !ss.output().expect("ss runs").stdout.is_empty()
    });
    let mut former = world.take_daemon(Host::Client);
    world.start(Host::Client, &["--take-over"]);
    assert!(former.wait().success());
    world.filter(Host::Server, "delete table ip silent");
    let output = waiting.output();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), "connected", "{}", words(&output));
    let output = first.output();
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(
        fs::read(&wanted).expect("a file"),
        fs::read(&to).expect("a file")
    );

    let to = got("second");
    let mut second = start(&to, "long");
    arrived(&to, 1 << 20);
    assert_eq!(client.says("again", server, 9), "again");
    world.take_daemon(Host::Client).kill();
    let broke = second.wait().code();
    assert!(
        [18, 52, 56].iter().any(|code| broke == Some(*code)),
        "{broke:?}"
    );
    // Forwarded, by whatever was left.
    let to = got("third");
    let mut third = start(&to, "file");
    assert!(third.wait().success());
    assert_eq!(
        fs::read(&wanted).expect("a file"),
        fs::read(&to).expect("a file")
    );
    // The next daemon removes it, and so does an orderly end.
    assert!(lingering(&world, &client) > 0);
    world.start(Host::Client, &[]);
    assert_eq!((rules(&world), lingering(&world, &client)), (3, 0));
    add_gateway(&world, Host::Client, &[]);
    assert_eq!(client.says("again", server, 9), "again");
    assert_eq!(rules(&world), 7);
    assert!(lingering(&world, &client) > 0);
    world.stop_daemons();
    assert_eq!((rules(&world), lingering(&world, &client)), (3, 0));
}

/// What a gateway leaves alone: hosts without VTL, other destinations and ports, translated connections.
#[test]
fn gateway__forwards_the_rest() {
    let Some(mut world) = World::bare("gatewayrest", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start(Host::Client, &[]);
    let client = Behind::new(&world, Host::Client);
    let server = Behind::new(&world, Host::Server);
    let [address, _] = server.addresses;
    let _served = server.serve(address, 80);
    let _others = server.serve(address, 81);
    let prefix = format!("{address}/32");
    add_gateway(&world, Host::Client, &["--to", &prefix, "--port", "80"]);
    // Another port: not even asked.
    assert_eq!(client.says("names", address, 81), "same");
    assert_eq!(connections(&world, Host::Client), 0);
    // The first connection is by the gateway, the next are the client's own.
    assert_eq!(client.says("names", address, 80), "same");
    assert_eq!(connections(&world, Host::Client), 1);
    assert_eq!(client.says("many", address, 80), "same");
    assert_eq!(connections(&world, Host::Client), 1);
    run(&mut world.vtl(
        Host::Client,
        &["gateway", "remove", world.testbed.device(Host::Client)],
    ));
    add_gateway(&world, Host::Client, &[]);
    // Also by a port whose former connection ended here, or has been forwarded since.
    let _anew = server.addresses.map(|address| {
        let served = server.serve(address, 82);
        assert_eq!(client.says("again", address, 82), "again", "{address}");
        served
    });
    // What vtld cannot read takes nobody's place.
    for address in server.addresses {
        assert_eq!(client.says("malformed", address, 9), "sent", "{address}");
    }
    let before = connections(&world, Host::Client);
    let _last = server.serve(address, 83);
    assert_eq!(client.says("names", address, 83), "same");
    assert_eq!(connections(&world, Host::Client), before + 1);
    // Behind NAT.
    world.filter(
        Host::Client,
        "table ip nat {
            chain out {
                type nat hook postrouting priority 100;
                masquerade
            }
        }",
    );
    let before = connections(&world, Host::Client);
    assert_eq!(client.says("half", address, 81), "whole");
    assert_eq!(connections(&world, Host::Client), before);
    world.stop_daemons();
}
