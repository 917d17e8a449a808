//! Whose connects a Hooker captures, under which circumstances, and how they are answered.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::Command,
    thread,
    time::Duration,
};

use vtl_testbed::Host;

use super::net::{Hooker, client_ips, echo_server, hosts, native_python, program, server_ips};
use crate::harness::{run, words};

const CLIENT: &str = "10.73.0.1";
const SERVER: &str = "10.73.0.2";

#[test]
fn capture__respects_what_the_socket_was_bound_to() {
    let Some(world) = hosts("bound") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let _peers = echo_server(&world, SERVER, 8000);
    let body = "
s = socket.socket(FAMILY)
s.bind(BIND)
s.connect((HOST, PORT))
print(s.recv(100).split()[0].decode(), *s.getsockname()[:2], *s.getpeername()[:2])
";
    let mut run = |family: &str, bind: &str, host: &str| {
        hooker.order("forget 10.73.0.2:8000");
        let begin = format!("FAMILY, BIND = socket.{family}, {bind}\n");
        hooker.python(&(begin + &program(body, host, 8000)))
    };
    assert_eq!(
        run("AF_INET", "('10.73.0.1', 5555)", "10.73.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "10.73.0.1 5555 10.73.0.2 8000"
    );
    // The server sees a privileged port.
    assert_eq!(
        run("AF_INET", "('10.73.0.1', 1023)", "10.73.0.2"),
        "10.73.0.1:1023 10.73.0.1 1023 10.73.0.2 8000"
    );
    assert_eq!(
        run("AF_INET", "('', 5556)", "10.73.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "10.73.0.1 5556 10.73.0.2 8000"
    );
    assert_eq!(
        run("AF_INET6", "('::', 5557)", "::ffff:10.73.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "::ffff:10.73.0.1 5557 ::ffff:10.73.0.2 8000"
    );
    hooker.stop();
}

#[test]
fn capture__serves_connections_of_a_host_to_itself() {
    let Some(world) = hosts("itself") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let body = "
listener = socket.create_server((HOST, 0))
for i in range(3):
    s = connect(HOST, listener.getsockname()[1])
    other, peer = listener.accept()
    assert peer == s.getsockname(), (peer, s.getsockname())
    assert s.getpeername() == listener.getsockname()
    other.close()
    assert read_all(s) == b''
";
    for host in ["127.0.0.1", CLIENT] {
        hooker.python(&program(body, host, 0));
    }
    hooker.stop();
}

#[test]
fn capture__keeps_the_port_beside_one_that_lingers() {
    let Some(world) = hosts("lingers") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    for (client, host) in client_ips(&world).iter().zip(&server_ips(&world)) {
        let _peers = [8000, 8001].map(|port| echo_server(&world, host, port));
        // The second goes past vtld, and lingers in TIME_WAIT; the third is captured.
        let body = "
LOCAL_PORT_RANGE, CHOSEN = 51, 40000
def seen_as(port):
    s = socket.socket(socket.AF_INET6 if ':' in HOST else socket.AF_INET)
    s.setsockopt(socket.IPPROTO_IP, LOCAL_PORT_RANGE, struct.pack('HH', CHOSEN, CHOSEN))
    s.connect((HOST, port))
    assert s.getsockname()[1] == CHOSEN, s.getsockname()
    s.shutdown(socket.SHUT_WR)
    return read_all(s).split()[0].decode()
connect(HOST, 8000).close()
print(seen_as(8000), seen_as(8001))
";
        let address = SocketAddr::new(client.parse().unwrap(), 40_000);
        assert_eq!(
            hooker.python(&program(body, host, 8000)),
            format!("{address} {address}")
        );
    }
    hooker.stop();
}

#[test]
fn capture__shows_the_port_that_the_peer_sees() {
    let Some(world) = hosts("ports") else {
        return;
    };
    let body = "
LOCAL_PORT_RANGE, CHOSEN = 51, 40000
s = socket.socket(socket.AF_INET6 if ':' in HOST else socket.AF_INET)
s.setsockopt(socket.IPPROTO_IP, LOCAL_PORT_RANGE, struct.pack('HH', CHOSEN, CHOSEN))
s.connect((HOST, PORT))
own = s.getsockname()[1]
s.shutdown(socket.SHUT_WR)
print(own, read_all(s).split()[0].decode().rsplit(':', 1)[1])
";
    for host in &server_ips(&world) {
        let mut hooker = Hooker::start(&world, Host::Client);
        let _peers = echo_server(&world, host, 8000);
        let body = program(body, host, 8000);
        // Past vtld; it lingers in TIME_WAIT.
        assert_eq!(native_python(&world, &body), "40000 40000");
        let ports = hooker.python(&body);
        let (own, seen) = ports.split_once(' ').expect("two");
        assert_eq!(own, seen);
        assert_ne!(own, "40000");
        hooker.stop();
    }
}

#[test]
fn capture__without_descriptors_left_waits_or_is_native() {
    let Some(world) = hosts("descriptors") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let peers = echo_server(&world, SERVER, 8000);
    let pid = hooker.pid().to_string();
    let limit = |count: usize| {
        let limit = format!("--nofile={count}:");
        run(Command::new("prlimit").args(["--pid", &pid, &limit]));
    };
    // A connect that meets the shortage waits for its SYN's repetition, and for what the next one meets;
    // those behind it go past vtld.
    let body = "
import threading
waiting = []
while not os.path.exists(GO): time.sleep(0.01)
while True:
    native = threading.Event()
    def one(): connect(HOST, PORT).recv(1); native.set()
    thread = threading.Thread(target=one)
    thread.start()
    if native.wait(0.1): break
    waiting.append(thread)
print(len(waiting), flush=True)
for thread in waiting: thread.join()
";
    let go = world.path("go");
    let body = format!("GO = {go:?}\n{body}");
    let mut connecting = hooker.run_python(&program(&body, SERVER, 8000));
    limit(1);
    // Housekeeping, once a second, must not take the program for gone.
    thread::sleep(Duration::from_millis(1500));
    fs::write(&go, "").expect("written");
    let mut said = BufReader::new(connecting.child().stdout.take().expect("piped"));
    let mut waiting = String::new();
    said.read_line(&mut waiting).expect("a line");
    let waiting: usize = waiting.trim().parse().expect("a number");
    assert!(waiting >= 1, "the first one found descriptors");
    let native = peers.try_iter().count();
    assert!(native >= 1, "none went past vtld");
    limit(1024);
    let output = connecting.output();
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(native + peers.try_iter().count(), waiting + 1);
    hooker.stop();
}

#[test]
fn capture__keeps_many_connections_apart() {
    let Some(world) = hosts("many") else {
        return;
    };
    let mut client = Hooker::start(&world, Host::Client);
    let mut server = Hooker::start(&world, Host::Server);
    let [_, server_ip] = server_ips(&world);
    let servers = [8000, 8001].map(|port| echo_server(&world, &server_ip, port));
    server.order("port 8001");
    let body = "
import threading
failed = []
def one(i):
    try:
        s = connect(HOST, PORT)
        data = b'%d,' % i * 5000
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        greeting, echo = read_all(s).split(b'\\n', 1)
        assert echo == data, ('echo', len(echo))
        assert greeting.split()[0] == ('[%s]:%d' % s.getsockname()[:2]).encode(), (greeting, s.getsockname())
    except BaseException as e:
        failed.append((i, repr(e)))
threads = [threading.Thread(target=one, args=(i,)) for i in range(300)]
for t in threads: t.start()
for t in threads: t.join()
print(failed)
";
    for port in [8000, 8001] {
        assert_eq!(client.python(&program(body, &server_ip, port)), "[]");
    }
    assert_eq!(servers.map(|peers| peers.try_iter().count()), [300, 300]);
    client.stop();
    server.stop();
}
