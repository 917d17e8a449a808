//! The Hooker with real programs in scratch network namespaces.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use libbpf_rs::query::LinkTypeInfo;

use common::{CLIENT, CLIENT_IPS, Daemon, Net, SERVER, SERVER_IPS, cannot_run, python};

/// Ends the test early, saying why, where it cannot run.
macro_rules! require_root {
    () => {
        if let Some(reason) = cannot_run() {
            println!("skipped: {reason}");
            return;
        }
    };
}

/// Not a test: the process that runs the Hooker.
#[test]
#[ignore = "started by the other tests"]
fn daemon() {
    if std::env::var_os("VTL_TEST_DAEMON").is_some() {
        common::daemon();
    }
}

/// A server that says "PEER LOCAL\n" and then sends back what it gets, until the end.
/// Reports each peer.
fn echo_server(net: &Net, ip: &str, port: u16) -> mpsc::Receiver<SocketAddr> {
    let at = SocketAddr::new(ip.parse().unwrap(), port);
    let (report, peers) = mpsc::channel();
    let (ready, is_ready) = mpsc::channel();
    net.thread(SERVER, move || {
        let listener = TcpListener::bind(at).unwrap();
        // Hundreds come at once: what happens to those that find no room is not the matter here.
        let backlog = nix::sys::socket::Backlog::new(1024).unwrap();
        nix::sys::socket::listen(&listener, backlog).unwrap();
        ready.send(()).unwrap();
        while let Ok((mut stream, peer)) = listener.accept() {
            assert_eq!(stream.peer_addr().unwrap(), peer);
            let local = stream.local_addr().unwrap();
            if report.send(peer).is_err() {
                return;
            }
            std::thread::spawn(move || {
                let _ = stream.write_all(format!("{peer} {local}\n").as_bytes());
                let mut buffer = [0; 65536];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    is_ready.recv().unwrap();
    peers
}

/// Connects, reads the greeting, says what both ends see.
const ADDRESSES: &str = "
s = connect(HOST, PORT, None)
greeting = b''
while not greeting.endswith(b'\\n'):
    greeting += s.recv(1000)
def show(a):
    return '[%s]:%d' % a[:2] if ':' in a[0] else '%s:%d' % a[:2]
print(greeting.decode().strip(), show(s.getpeername()), show(s.getsockname()))
";

fn program(body: &str, host: &str, port: u16) -> String {
    format!("HOST, PORT = '{host}', {port}\n{body}")
}

/// Both ends see each other's true addresses.
fn check_addresses(daemon: &mut Daemon, net: &Net, family: usize, port: u16) {
    let output = daemon.python(net, &program(ADDRESSES, SERVER_IPS[family], port));
    let addresses: Vec<SocketAddr> = output
        .split(' ')
        .map(|word| word.parse().unwrap())
        .collect();
    let [
        client_at_server,
        server_at_server,
        server_at_client,
        client_at_client,
    ] = addresses[..]
    else {
        panic!("{output}")
    };
    let server = SocketAddr::new(SERVER_IPS[family].parse().unwrap(), port);
    assert_eq!(server_at_server, server);
    assert_eq!(server_at_client, server);
    assert_eq!(
        client_at_server.ip(),
        CLIENT_IPS[family].parse::<std::net::IpAddr>().unwrap()
    );
    assert_eq!(client_at_client, client_at_server);
}

/// 3 MB there and back, with the end of one direction before the other.
const HALF_CLOSE: &str = "
s = connect(HOST, PORT)
import threading
data = os.urandom(3000000)
def send():
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
got = read_all(s).split(b'\\n', 1)[1]
assert got == data, (len(got), len(data))
";

/// The server's echo ends with a reset when the client aborts, and the other way round.
const ABORT: &str = "
s = connect(HOST, PORT)
s.recv(10)
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
s.close()
";

fn listen(
    net: &Net,
    ip: &str,
    port: u16,
    body: impl FnOnce(std::net::TcpStream) + Send + 'static,
) -> JoinHandle<()> {
    let at = SocketAddr::new(ip.parse().unwrap(), port);
    let (ready, is_ready) = mpsc::channel();
    let thread = net.thread(SERVER, move || {
        let listener = TcpListener::bind(at).unwrap();
        ready.send(()).unwrap();
        body(listener.accept().unwrap().0);
    });
    is_ready.recv().unwrap();
    thread
}

/// What an application may notice, over one family, toward `port` and the 9 above it.
fn behaves_like_tcp(daemon: &mut Daemon, net: &Net, family: usize, port: u16) {
    let ip = SERVER_IPS[family];
    let _echo = echo_server(net, ip, port);
    check_addresses(daemon, net, family, port);
    daemon.order(&format!(
        "forget {}",
        SocketAddr::new(ip.parse().unwrap(), port)
    ));
    daemon.python(net, &program(HALF_CLOSE, ip, port));

    let aborted = listen(net, ip, port + 1, |mut stream| {
        stream.write_all(b"0123456789").unwrap();
        let error = stream.read(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    });
    daemon.python(net, &program(ABORT, ip, port + 1));
    aborted.join().unwrap();

    let aborts = listen(net, ip, port + 2, |mut stream| {
        stream.read_exact(&mut [0]).unwrap();
        let linger = nix::libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
    });
    let reset = "
s = connect(HOST, PORT)
s.send(b'x')
try:
    print(s.recv(10))
except ConnectionResetError:
    print('reset')
";
    assert_eq!(daemon.python(net, &program(reset, ip, port + 2)), "reset");
    aborts.join().unwrap();

    let refused = format!("print(outcome('{ip}', {}))", port + 3);
    assert_eq!(daemon.python(net, &refused), "ECONNREFUSED");
    let (route, none) = if family == 0 {
        ("10.78.0.1", "10.79.0.1")
    } else {
        ("fd78::1", "fd79::1")
    };
    assert_eq!(
        daemon.python(net, &format!("print(outcome('{route}', 80))")),
        "EHOSTUNREACH"
    );
    assert_eq!(
        daemon.python(net, &format!("print(outcome('{none}', 80))")),
        "ENETUNREACH"
    );

    // A reader that does not read stops the writer.
    let (release, released) = mpsc::channel::<()>();
    let slow = listen(net, ip, port + 4, move |mut stream| {
        released.recv().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&(all.len() as u64).to_be_bytes()).unwrap();
    });
    let mut writer = daemon.run_python(net, &program(PRESSURE, ip, port + 4));
    let mut line = String::new();
    let mut stdout = BufReader::new(writer.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("stopped"), "{line}");
    release.send(()).unwrap();
    slow.join().unwrap();
    assert!(writer.wait().unwrap().success());
}

/// Writes until it blocks; later the reader has read as much.
const PRESSURE: &str = "
s = connect(HOST, PORT)
s.settimeout(0.3)
sent = 0
try:
    while sent < 1 << 30:
        sent += s.send(bytes(65536))
except TimeoutError:
    pass
assert sent < 64 << 20, sent
print('stopped at', sent, flush=True)
s.settimeout(10)
s.shutdown(socket.SHUT_WR)
assert int.from_bytes(read_all(s), 'big') == sent
";

#[test]
fn plain_peer__sees_and_shows_plain_tcp() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    behaves_like_tcp(&mut daemon, &net, 0, 8000);
    behaves_like_tcp(&mut daemon, &net, 1, 8000);
    daemon.stop();
}

#[test]
fn vtl_peer__sees_and_shows_plain_tcp() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let mut server = Daemon::start(&net, SERVER);
    for port in 8000..8010 {
        server.order(&format!("port {port}"));
    }
    behaves_like_tcp(&mut daemon, &net, 0, 8000);
    assert_steered(&server.answer(), 0, 8000);
    server.forget_answers();
    behaves_like_tcp(&mut daemon, &net, 1, 8000);
    assert_steered(&server.answer(), 1, 8000);
    daemon.stop();
    server.stop();
}

/// The server's daemon said that it got a connection, with these addresses.
fn assert_steered(answer: &str, family: usize, port: u16) {
    let words: Vec<&str> = answer.split(' ').collect();
    let ["server", client, server] = words[..] else {
        panic!("{answer}")
    };
    let [client, server] = [client, server].map(|word| word.parse::<SocketAddr>().unwrap());
    assert_eq!(client.ip().to_string(), CLIENT_IPS[family]);
    assert_eq!(
        (server.ip().to_string().as_str(), server.port()),
        (SERVER_IPS[family], port)
    );
}

/// A directory with 8 MB of noise, and a web server for it.
struct Web {
    _directory: Scratch,
    server: std::process::Child,
    noise: Vec<u8>,
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Web {
    fn new(net: &Net, port: u16) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vtl-hooker-{}-{number}", std::process::id());
        let directory = Scratch(std::env::temp_dir().join(name));
        fs::create_dir(&directory.0).unwrap();
        let mut noise = vec![0; 8 << 20];
        fs::File::open("/dev/urandom")
            .unwrap()
            .read_exact(&mut noise)
            .unwrap();
        fs::write(directory.0.join("noise"), &noise).unwrap();
        let mut server = net
            .command(SERVER, python())
            .args(["-u", "-m", "http.server", "--bind", "::"])
            .arg(port.to_string())
            .current_dir(&directory.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.starts_with("Serving"), "{line}");
        Self {
            _directory: directory,
            server,
            noise,
        }
    }

    /// What the server logged: a line per request, beginning with the client's address.
    fn log(mut self) -> String {
        self.server.kill().unwrap();
        let mut log = String::new();
        self.server
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut log)
            .unwrap();
        log
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn curl__gets_the_same_bytes() {
    require_root!();
    let net = Net::new();
    let mut client = Daemon::start(&net, CLIENT);
    let mut server = Daemon::start(&net, SERVER);
    let (plain, vtl) = (Web::new(&net, 8080), Web::new(&net, 8081));
    server.order("port 8081");
    for (port, noise) in [(8080, &plain.noise), (8081, &vtl.noise)] {
        for host in ["10.77.0.2", "[fd77::2]"] {
            let url = format!("http://{host}:{port}/noise");
            let output = client.output(&net, &["curl", "-sS", "--noproxy", "*", &url]);
            assert!(output.stdout == *noise, "{url}: wrong bytes");
        }
    }
    for log in [plain.log(), vtl.log()] {
        let clients: Vec<&str> = log
            .lines()
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(clients, ["::ffff:10.77.0.1", "fd77::1"], "{log}");
    }
    client.stop();
    server.stop();
}

#[test]
fn discovery__leaves_plain_destinations_alone() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let peers = echo_server(&net, SERVER_IPS[0], 8000);
    // A connection that goes through vtld has its first end on the loopback.
    let probe = "
s = connect(HOST, PORT)
s.recv(100)
inode = str(os.fstat(s.fileno()).st_ino)
rows = [row.split() for row in open('/proc/self/net/tcp')]
local = next(row[1] for row in rows if row[9] == inode)
print('captured' if local.startswith('0100007F') else 'native')
";
    let probe = program(probe, SERVER_IPS[0], 8000);
    assert_eq!(daemon.python(&net, &probe), "captured");
    assert_eq!(daemon.python(&net, &probe), "native");
    daemon.order("forget 10.77.0.2:8000");
    assert_eq!(daemon.python(&net, &probe), "captured");
    assert_eq!(peers.try_iter().count(), 3);
    // Outside the hook nothing changes, nor for other namespaces.
    daemon.order("forget 10.77.0.2:8000");
    let script = format!("{}\n{probe}", common::PRELUDE);
    let output = net
        .command(CLIENT, "python3")
        .args(["-c", &script])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "native");
    daemon.stop();
}

#[test]
fn discovery__survives_networks_that_drop_the_option() {
    require_root!();
    let net = Net::new();
    // Linux's own options take 20 bytes of a SYN; ours comes next, at 14 (Ethernet) + 20 (IP)
    // + 20 (TCP) + 20. 0xfd045654 is dropped (2), all else goes on (-1).
    let bytecode = "4,32 0 0 74,21 0 1 4244919892,6 0 0 2,6 0 0 4294967295";
    let filter = "filter add dev v0 ingress protocol ip bpf da bytecode";
    let tc = |args: &str, last: &[&str]| {
        let mut command = net.command(SERVER, "tc");
        let output = command.args(args.split(' ')).args(last).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !tc("qdisc add dev v0 clsact", &[]) || !tc(filter, &[bytecode]) {
        println!("skipped: needs tc with its bpf classifier");
        return;
    }
    let mut daemon = Daemon::start(&net, CLIENT);
    let _peers = echo_server(&net, SERVER_IPS[0], 8000);
    let timed = "
begin = time.monotonic()
s = connect(HOST, PORT)
assert s.recv(8) == b'10.77.0.'
print(time.monotonic() - begin)
";
    let timed = program(timed, SERVER_IPS[0], 8000);
    let first: f64 = daemon.python(&net, &timed).parse().unwrap();
    assert!((2.9..4.5).contains(&first), "{first}");
    let second: f64 = daemon.python(&net, &timed).parse().unwrap();
    assert!(second < 0.5, "{second}");
    // A host that has a session was busy, and is asked again.
    daemon.order("forget 10.77.0.2:8000");
    daemon.order("session full");
    for _ in 0..2 {
        let took: f64 = daemon.python(&net, &timed).parse().unwrap();
        assert!((2.9..4.5).contains(&took), "{took}");
    }
    daemon.stop();
}

#[test]
fn sigkill__ends_connections_with_an_error() {
    require_root!();
    let net = Net::new();
    let mut client = Daemon::start(&net, CLIENT);
    let mut server = Daemon::start(&net, SERVER);
    server.order("port 8001");
    // One connection to a server without VTL, one through both daemons.
    let (plain, vtl) = (pour(&net, 8000), pour(&net, 8001));
    let mut readers = [8000, 8001].map(|port| {
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
        let mut child = client.run_python(&net, &program(body, SERVER_IPS[0], port));
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "reads\n");
        (child, stdout)
    });
    let later = [8002, 8003].map(|port| {
        listen(&net, SERVER_IPS[0], port, |mut s| {
            s.write_all(b"late").unwrap();
        })
    });
    let groups = Daemon::groups(client.pid());
    let runs = [1, 2].map(|number| groups[0].join(format!("run-{number}")));
    let attached = |path: &Path| {
        let id = fs::metadata(path).unwrap().ino();
        libbpf_rs::query::LinkInfoIter::default()
            .filter(|link| matches!(&link.info, LinkTypeInfo::Cgroup(at) if at.cgroup_id == id))
            .count()
    };
    assert_eq!(attached(&runs[0]), 2);
    client.kill();
    assert_eq!(attached(&runs[0]), 0);
    for (child, stdout) in &mut readers {
        let (mut text, mut errors) = (String::new(), String::new());
        stdout.read_to_string(&mut text).unwrap();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut errors)
            .unwrap();
        assert_eq!(text, "reset\nb'late' 10.77.0.2\n", "{errors}");
        assert!(child.wait().unwrap().success());
    }
    for thread in later {
        thread.join().unwrap();
    }
    // The servers got an error, too: at the far end, the second daemon passed it on.
    assert!(plain.join().unwrap().is_err());
    assert!(vtl.join().unwrap().is_err());
    // The next daemon removes what the dead one could not.
    let next = Daemon::start(&net, CLIENT);
    assert!(!groups[0].exists());
    next.stop();
    server.stop();
}

/// A server that writes until it cannot.
fn pour(net: &Net, port: u16) -> JoinHandle<std::io::Result<()>> {
    let (result, outcome) = mpsc::channel();
    listen(net, SERVER_IPS[0], port, move |mut stream| {
        let end = loop {
            if let Err(error) = stream.write_all(&[7; 65536]) {
                break Err(error);
            }
        };
        let _ = result.send(end);
    });
    std::thread::spawn(move || outcome.recv().unwrap())
}

#[test]
fn capture__respects_what_the_socket_was_bound_to() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let _peers = echo_server(&net, SERVER_IPS[0], 8000);
    let body = "
s = socket.socket(FAMILY)
s.bind(BIND)
s.connect((HOST, PORT))
print(s.recv(100).split()[0].decode(), *s.getsockname()[:2], *s.getpeername()[:2])
";
    let mut run = |family: &str, bind: &str, host: &str| {
        daemon.order("forget 10.77.0.2:8000");
        let begin = format!("FAMILY, BIND = socket.{family}, {bind}\n");
        daemon.python(&net, &(begin + &program(body, host, 8000)))
    };
    assert_eq!(
        run("AF_INET", "('10.77.0.1', 5555)", "10.77.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "10.77.0.1 5555 10.77.0.2 8000"
    );
    // The server sees a privileged port.
    assert_eq!(
        run("AF_INET", "('10.77.0.1', 1023)", "10.77.0.2"),
        "10.77.0.1:1023 10.77.0.1 1023 10.77.0.2 8000"
    );
    assert_eq!(
        run("AF_INET", "('', 5556)", "10.77.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "10.77.0.1 5556 10.77.0.2 8000"
    );
    assert_eq!(
        run("AF_INET6", "('::', 5557)", "::ffff:10.77.0.2")
            .split_once(' ')
            .unwrap()
            .1,
        "::ffff:10.77.0.1 5557 ::ffff:10.77.0.2 8000"
    );
    daemon.stop();
}

#[test]
fn capture__serves_connections_of_a_host_to_itself() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
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
    for host in ["127.0.0.1", CLIENT_IPS[0]] {
        daemon.python(&net, &program(body, host, 0));
    }
    daemon.stop();
}

#[test]
fn capture__keeps_the_port_beside_one_that_lingers() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    for (client, host) in CLIENT_IPS.into_iter().zip(SERVER_IPS) {
        let _peers = [8000, 8001].map(|port| echo_server(&net, host, port));
        // The second goes past vtld, and lingers in TIME_WAIT; the third is captured.
        let body = "
LOCAL_PORT_RANGE, CHOSEN = 51, 40000
def seen_as(port):
    s = socket.socket(socket.AF_INET6 if ':' in HOST else socket.AF_INET)
    s.setsockopt(socket.IPPROTO_IP, LOCAL_PORT_RANGE, struct.pack('HH', CHOSEN, CHOSEN))
    s.settimeout(10)
    s.connect((HOST, port))
    assert s.getsockname()[1] == CHOSEN, s.getsockname()
    s.shutdown(socket.SHUT_WR)
    return read_all(s).split()[0].decode()
connect(HOST, 8000).close()
print(seen_as(8000), seen_as(8001))
";
        let address = SocketAddr::new(client.parse().unwrap(), 40_000);
        assert_eq!(
            daemon.python(&net, &program(body, host, 8000)),
            format!("{address} {address}")
        );
    }
    daemon.stop();
}

#[test]
fn capture__without_descriptors_left_waits_or_is_native() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let peers = echo_server(&net, SERVER_IPS[0], 8000);
    let pid = daemon.pid();
    let limit = |count: usize| {
        let limit = format!("--nofile={count}:");
        let mut command = std::process::Command::new("prlimit");
        let status = command.args(["--pid", &pid.to_string(), &limit]).status();
        assert!(status.unwrap().success());
    };
    // The first waits for its SYN's repetition, a second later, the other goes past vtld meanwhile.
    let body = "
import threading
time.sleep(0.5)
first = threading.Thread(target=lambda: connect(HOST, PORT).recv(1))
first.start()
time.sleep(0.2)
connect(HOST, PORT).recv(1)
assert first.is_alive()
first.join()
";
    let child = daemon.run_python(&net, &program(body, SERVER_IPS[0], 8000));
    limit(1);
    assert_eq!(
        peers.recv_timeout(Duration::from_secs(5)).unwrap().ip(),
        CLIENT_IPS[0].parse::<std::net::IpAddr>().unwrap()
    );
    limit(1024);
    let output = child.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    assert_eq!(peers.try_iter().count(), 1);
    daemon.stop();
}

#[test]
fn capture__keeps_many_connections_apart() {
    require_root!();
    let net = Net::new();
    let mut client = Daemon::start(&net, CLIENT);
    let mut server = Daemon::start(&net, SERVER);
    let servers = [8000, 8001].map(|port| echo_server(&net, SERVER_IPS[1], port));
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
        assert_eq!(
            client.python(&net, &program(body, SERVER_IPS[1], port)),
            "[]"
        );
    }
    assert_eq!(servers.map(|peers| peers.try_iter().count()), [300, 300]);
    client.stop();
    server.stop();
}

#[test]
fn held_connect__is_answered_by_the_broker() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let _peers = echo_server(&net, SERVER_IPS[0], 8000);
    daemon.order("session accept");
    let body = "
s = connect(HOST, PORT)
src, dest = read_all(s).decode().rsplit(' ', 1)
assert src.rsplit(':', 1)[1] == str(s.getsockname()[1]), (src, s.getsockname())
assert src.rsplit(':', 1)[0].strip('[]') == s.getsockname()[0]
print(dest)
";
    // Nothing is there, nor need it be: the broker says that the connect succeeds.
    assert_eq!(
        daemon.python(&net, &program(body, "10.77.0.77", 99)),
        "10.77.0.77:99"
    );
    assert_eq!(
        daemon.python(&net, &program(body, "fd77::77", 99)),
        "[fd77::77]:99"
    );
    for host in ["10.77.0.77", "fd77::77"] {
        for (session, outcome) in [
            ("refuse", "ECONNREFUSED"),
            ("drop", "ECONNREFUSED"),
            ("unreachable", "EHOSTUNREACH"),
        ] {
            daemon.order(&format!("session {session}"));
            let program = format!("print(outcome('{host}', 99))");
            assert_eq!(daemon.python(&net, &program), outcome, "{session}, {host}");
        }
    }
    daemon.order("session timeout");
    let waits = "
try:
    connect(HOST, PORT, 1.5)
except TimeoutError:
    print('nothing')
";
    assert_eq!(
        daemon.python(&net, &program(waits, "10.77.0.77", 99)),
        "nothing"
    );
    daemon.order("session fall back");
    check_addresses(&mut daemon, &net, 0, 8000);
    daemon.stop();
}

#[test]
fn hooks__come_and_go() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start(&net, CLIENT);
    let pid = daemon.pid();
    let mut child = daemon.run(&net, &["sleep", "100"]);
    let group = Daemon::groups(pid)[0].join("run-1");
    assert!(group.exists());
    assert!(daemon.order("list").contains("processes: 1"));
    // Leaving the hook is no harm to the program.
    daemon.order("unhook 1");
    assert!(!group.exists());
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
    // The group of a program that ended goes away by itself.
    daemon.output(&net, &["true"]);
    let begin = Instant::now();
    while Daemon::groups(pid)[0].join("run-2").exists() {
        assert!(begin.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(
        daemon.refused("unhook 77"),
        "there is no hook 77: `vtl hook list` shows those there are"
    );
    daemon.order("port 80");
    assert_eq!(daemon.refused("port 80"), "port 80 is hooked already");
    assert!(
        daemon
            .refused("cgroup /no/such/group")
            .contains("/no/such/group")
    );
    let mut child = daemon.run(&net, &["sleep", "100"]);
    daemon.stop();
    assert!(Daemon::groups(pid).is_empty());
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn hooks__need_no_visible_hierarchy() {
    require_root!();
    let net = Net::new();
    let mut daemon = Daemon::start_without_sys(&net, CLIENT);
    let _peers = echo_server(&net, SERVER_IPS[0], 8000);
    check_addresses(&mut daemon, &net, 0, 8000);
    let pid = daemon.pid();
    assert!(!Daemon::groups(pid).is_empty());
    daemon.stop();
    assert!(Daemon::groups(pid).is_empty());
}
