//! The Hooker with real programs in scratch network namespaces.

mod common;

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener},
    process::Stdio,
    sync::mpsc,
    time::{Duration, Instant},
};

use common::{CLIENT, CLIENT_IPS, Daemon, Net, SERVER, SERVER_IPS, cannot_run};

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
        ready.send(()).unwrap();
        while let Ok((mut stream, peer)) = listener.accept() {
            assert_eq!(stream.peer_addr().unwrap(), peer);
            let local = stream.local_addr().unwrap();
            if report.send(peer).is_err() {
                return;
            }
            std::thread::spawn(move || {
                let _ = writeln!(stream, "{peer} {local}");
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
s = connect(HOST, PORT)
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
) -> std::thread::JoinHandle<()> {
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
        stream.shutdown(Shutdown::Write).unwrap();
    });
    let pressure = "
s = connect(HOST, PORT)
s.settimeout(1)
sent = 0
try:
    while sent < 1 << 30:
        sent += s.send(bytes(65536))
except TimeoutError:
    pass
assert sent < 64 << 20, sent
print(sent, flush=True)
s.settimeout(10)
sys.stdin.readline()
s.shutdown(socket.SHUT_WR)
assert int.from_bytes(read_all(s), 'big') == sent
";
    let script = program(pressure, ip, port + 4);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(2500));
        let _ = release.send(());
    });
    daemon.python(net, &script);
    slow.join().unwrap();
}

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
    let steered = server.answer();
    assert!(
        steered.starts_with("server 10.77.0.1:") && steered.ends_with(" 10.77.0.2:8000"),
        "{steered}"
    );
    behaves_like_tcp(&mut daemon, &net, 1, 8000);
    daemon.stop();
    server.stop();
}
