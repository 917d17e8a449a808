//! How a Hooker finds out who speaks VTL, and what becomes of its connections when it dies.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::mpsc,
};

use libbpf_rs::query::{LinkInfoIter, LinkTypeInfo};
use vtl_testbed::Host;

use super::net::{Hooker, echo_server, hosts, native_python, program, serve_one, server_ips};
use crate::harness::{World, run_group, until};

#[test]
fn discovery__leaves_plain_destinations_alone() {
    let Some(world) = hosts("plain") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let [server, _] = server_ips(&world);
    let peers = echo_server(&world, &server, 8000);
    // A connection that goes through vtld has its first end on the loopback.
    let probe = "
s = connect(HOST, PORT)
s.recv(100)
inode = str(os.fstat(s.fileno()).st_ino)
rows = [row.split() for row in open('/proc/self/net/tcp')]
local = next(row[1] for row in rows if row[9] == inode)
print('captured' if local.startswith('0100007F') else 'native')
";
    let probe = program(probe, &server, 8000);
    let forget = format!("forget {server}:8000");
    assert_eq!(hooker.python(&probe), "captured");
    assert_eq!(hooker.python(&probe), "native");
    hooker.order(&forget);
    assert_eq!(hooker.python(&probe), "captured");
    assert_eq!(peers.try_iter().count(), 3);
    // Outside the hook nothing changes, nor for other namespaces.
    hooker.order(&forget);
    assert_eq!(native_python(&world, &probe), "native");
    hooker.stop();
}

/// SYNs with the option of discovery that the server's network has dropped, and those without it.
fn syns(world: &World) -> [u64; 2] {
    ["asking", "plain"].map(|name| {
        let nft = world.testbed.command(Host::Server, "nft");
        let list = ["list", "counter", "inet", "deaf", name];
        let output = nft.expect("a namespace").args(list).output();
        let text = String::from_utf8(output.expect("nft runs").stdout).expect("text");
        let count = text
            .split_once("packets ")
            .and_then(|(_, rest)| rest.split(' ').next());
        count
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| panic!("{text}"))
    })
}

#[test]
fn discovery__survives_networks_that_drop_the_option() {
    let Some(world) = hosts("deaf") else {
        return;
    };
    world.filter(
        Host::Server,
        "table inet deaf {
            counter asking {}
            counter plain {}
            chain in {
                type filter hook input priority 0;
                tcp flags & (syn | ack) != syn accept
                tcp option 253 exists counter name asking drop
                counter name plain
            }
        }",
    );
    let mut hooker = Hooker::start(&world, Host::Client);
    let [server, _] = server_ips(&world);
    let _peers = echo_server(&world, &server, 8000);
    let greeted = "
s = connect(HOST, PORT)
print(s.recv(8).decode())
";
    let greeted = program(greeted, &server, 8000);
    let mut before = [0, 0];
    let mut asked = |hooker: &mut Hooker<'_>| {
        assert_eq!(hooker.python(&greeted), "10.73.0.");
        let now = syns(&world);
        let [asking, plain] = [0, 1].map(|i| now[i] - before[i]);
        before = now;
        assert_eq!(plain, 1, "one connection");
        asking
    };
    let first = asked(&mut hooker);
    assert!(first > 1, "one SYN may have been lost: {first}");
    assert_eq!(asked(&mut hooker), 0, "now it is known");
    // A host with which there is an association was busy, and is asked again.
    hooker.order(&format!("forget {server}:8000"));
    hooker.order("knows");
    for _ in 0..2 {
        assert!(asked(&mut hooker) > 1);
    }
    hooker.stop();
}

/// A server that writes until it cannot; why it ended.
fn pour(world: &World, ip: &str, port: u16) -> mpsc::Receiver<std::io::Error> {
    let (result, outcome) = mpsc::channel();
    serve_one(world, ip, port, move |mut stream: TcpStream| {
        loop {
            if let Err(error) = stream.write_all(&[7; 65536]) {
                let _ = result.send(error);
                return;
            }
        }
    });
    outcome
}

#[test]
fn sigkill__ends_connections_with_an_error() {
    let Some(world) = hosts("sigkill") else {
        return;
    };
    let mut client = Hooker::start(&world, Host::Client);
    let mut server = Hooker::start(&world, Host::Server);
    server.order("port 8001");
    let [ip, _] = server_ips(&world);
    // One connection to a server without VTL, one through both daemons.
    let ends = [8000, 8001].map(|port| pour(&world, &ip, port));
    let readers = [8000, 8001].map(|port| {
        let body = "
s = connect(HOST, PORT)
s.recv(1000)
print('reads', flush=True)
try:
    while s.recv(65536):
        pass
    print('EOF')
except ConnectionResetError:
    print('reset')
s = connect(HOST, PORT + 2)
print(s.recv(4), s.getpeername()[0])
";
        let mut process = client.run_python(&program(body, &ip, port));
        let mut stdout = BufReader::new(process.child().stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        assert_eq!(line, "reads\n");
        (process, stdout)
    });
    let later = [8002, 8003].map(|port| {
        serve_one(&world, &ip, port, |mut s| {
            s.write_all(b"late").unwrap();
        })
    });
    let attached = |path: &Path| {
        let id = fs::metadata(path).expect("a group").ino();
        LinkInfoIter::default()
            .filter(|link| matches!(&link.info, LinkTypeInfo::Cgroup(at) if at.cgroup_id == id))
            .count()
    };
    let hook = run_group(client.pid(), 1).expect("a group");
    assert_eq!(attached(&hook), 2);
    client.kill();
    until("the programs are gone", || attached(&hook) == 0);
    for (mut process, mut stdout) in readers {
        let mut text = String::new();
        stdout.read_to_string(&mut text).expect("text");
        assert_eq!(text, format!("reset\nb'late' {ip}\n"));
        assert!(process.wait().success());
    }
    for thread in later {
        thread.join().expect("no panic");
    }
    // The servers got an error, too: at the far end, the second daemon passed it on.
    for end in ends {
        end.recv().expect("an error");
    }
    // The next Hooker removes what the dead one could not.
    let next = Hooker::start(&world, Host::Client);
    assert!(!hook.exists());
    next.stop();
    server.stop();
}
