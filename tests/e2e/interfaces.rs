//! Interfaces that come and go while the daemons run.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    process::Command,
    time::Duration,
};

use serde_json::Value;
use vtl_control::{FlowList, Request};
use vtl_proto::intf;
use vtl_testbed::{Host, Link};
use vtl_testing::PATIENCE;

use crate::{
    attacks::stranger::Stranger,
    harness::{World, payload, run, same, until},
};

const SIZE: usize = 1 << 20;
const SERVER: &str = "10.99.7.2";

impl World {
    /// A second cable between client and server.
    fn add_cable(&self) {
        let server = format!("{}-{}", self.testbed.name(), Host::Server.name());
        let ends = [
            (Host::Client, "10.99.7.1/24"),
            (Host::Server, &format!("{SERVER}/24")),
        ];
        let words = "link add late type veth peer name late netns";
        self.ip(Host::Client, &format!("{words} {server}"));
        for (host, address) in ends {
            self.ip(host, &format!("address add {address} dev late"));
            self.ip(host, "link set late up");
        }
    }

    fn ip(&self, host: Host, words: &str) {
        let mut ip: Command = self.testbed.command(host, "ip").expect("a namespace");
        run(ip.args(words.split(' ')));
    }

    /// What a host's daemon says of the cable, if it uses it.
    fn cable(&self, host: Host) -> Option<Value> {
        let status = self.status(host);
        let interfaces = status["interfaces"].as_array().expect("a list");
        interfaces.iter().find(|i| i["name"] == "late").cloned()
    }

    /// The addresses of peers to which a host has carriers.
    fn peers(&self, host: Host) -> Vec<IpAddr> {
        let rows = self.carriers(host);
        let peer = |row: &Value| row["peer"].as_str().expect("text").parse();
        let peers = rows.iter().map(peer).collect::<Result<Vec<_>, _>>();
        peers.expect("addresses")
    }

    /// Connects from the client to a port of VTL's.
    fn connect(&self, to: IpAddr) -> io::Result<()> {
        let to = SocketAddr::new(to, intf::VTL_TCP_PORT as u16);
        let connect = || TcpStream::connect_timeout(&to, PATIENCE);
        let connected = self.testbed.in_netns(Host::Client, connect);
        connected.expect("a namespace").map(drop)
    }

    /// Sends a datagram from the client to VTL's port; what the network says to it.
    fn ask_by_udp(&self, to: IpAddr) -> io::Result<()> {
        let ask = || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect((to, intf::VTL_UDP_PORT as u16))?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            socket.send(b"who is there?")?;
            match socket.recv(&mut [0; 64]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
                result => result.map(drop),
            }
        };
        let asked = self.testbed.in_netns(Host::Client, ask);
        asked.expect("a namespace")
    }

    /// A download that is one plain connection at the client.
    fn download_plain(&self, server: IpAddr) {
        self.download(server, "f");
        let list = self.call(Host::Client, &Request::FlowList { from: 0 });
        let list: FlowList = serde_json::from_value(list).expect("a list");
        let has = |peer: &SocketAddr| peer.ip() == server;
        assert!(!list.flows.iter().any(|flow| has(&flow.peer)), "{list:?}");
        assert!(!self.peers(Host::Client).contains(&server));
    }
}

#[test]
fn interfaces__come_and_go() {
    let Some(world) = World::new("interfaces", &Link::new(2.0, 100.0)) else {
        return;
    };
    let (file, got) = (world.path("file"), world.path("got"));
    fs::write(&file, payload(SIZE, 3)).expect("written");
    // Twice: the second one has other indexes and the same name.
    for _ in 0..2 {
        world.add_cable();
        for host in [Host::Client, Host::Server] {
            until("the cable is used", || world.cable(host).is_some());
        }
        let recv = world.start_recv(&got, &[]);
        let sent = world.start_send(&file, SERVER).output();
        assert!(sent.status.success(), "{sent:?}");
        assert!(recv.output().status.success());
        same(&file, &got);
        for host in [Host::Client, Host::Server] {
            assert!(world.cable(host).expect("there")["driver"].is_string());
        }
        fs::remove_file(&got).expect("there");
        world.ip(Host::Client, "link del late");
        for host in [Host::Client, Host::Server] {
            until("the cable is let go of", || world.cable(host).is_none());
        }
    }
}

/// VTL on one of two interfaces: on the other one it is as if it were not there.
#[test]
fn interfaces__of_other_names_are_plain_tcp() {
    let Some(mut world) = World::bare("names", &Link::new(2.0, 100.0)) else {
        return;
    };
    let main = world.servers()[0];
    let late: IpAddr = SERVER.parse().expect("an address");
    world.start_web();
    world.serve("f", 1 << 20);
    world.add_cable();
    world.start(Host::Client, &[]);
    world.start(Host::Server, &["--interface", "eth0"]);
    world.hook();
    assert!(world.cable(Host::Server).is_none());
    // At the server: it answers to nothing there, and to everything here.
    for (server, is_there) in [(main, true), (late, false)] {
        let refused = |result: io::Result<()>| match result {
            Ok(()) => false,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
                true
            }
        };
        assert_eq!(refused(world.connect(server)), !is_there, "TCP at {server}");
        assert_eq!(
            refused(world.ask_by_udp(server)),
            !is_there,
            "UDP at {server}"
        );
        let mut stranger = Stranger::new(&world, server);
        assert_eq!(stranger.is_answered(3000), is_there, "253 at {server}");
    }
    world.download_plain(late);
    world.download(main, "f");
    until("a carrier", || world.peers(Host::Client).contains(&main));
    world.download_plain(late);
    // At the client: the interface comes later than the daemon.
    world.ip(Host::Client, "link del late");
    world.take_daemon(Host::Server).kill();
    world.take_daemon(Host::Client).kill();
    let both = ["--interface", "eth0", "--interface", "late"];
    world.start(Host::Server, &both);
    world.start(Host::Client, &["--interface", "late"]);
    world.hook();
    for host in [Host::Client, Host::Server] {
        let log = fs::read_to_string(world.log_path(host)).expect("a log");
        assert_eq!(
            log.matches("names one that does not exist").count(),
            1,
            "{log}"
        );
    }
    world.download_plain(main);
    world.add_cable();
    for host in [Host::Client, Host::Server] {
        until("the cable is used", || world.cable(host).is_some());
    }
    world.download(late, "f");
    until("a carrier", || world.peers(Host::Client) == [late]);
    world.download(late, "f");
    world.download_plain(main);
    // Applications that are aware of VTL are told why not.
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 3)).expect("written");
    let sent = world.start_send(&file, &main.to_string()).output();
    let said = String::from_utf8_lossy(&sent.stderr);
    assert!(
        !sent.status.success() && said.contains("--interface"),
        "{said}"
    );
}
