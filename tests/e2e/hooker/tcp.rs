//! What an application notices: nothing, towards hosts with and without a Hooker.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::SocketAddr,
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use vtl_testbed::Host;

use super::net::{
    Hooker, PRELUDE, add_unreachable, client_ips, echo_server, hosts, program, serve_one,
    server_ips,
};
use crate::harness::{Process, World, payload, python3, words};

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

/// Both ends see each other's true addresses.
pub(super) fn check_addresses(hooker: &mut Hooker<'_>, world: &World, family: usize, port: u16) {
    let [server_ip, client_ip] =
        [server_ips(world), client_ips(world)].map(|ips| ips[family].clone());
    let output = hooker.python(&program(ADDRESSES, &server_ip, port));
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
    let server = SocketAddr::new(server_ip.parse().unwrap(), port);
    assert_eq!(server_at_server, server);
    assert_eq!(server_at_client, server);
    assert_eq!(
        client_at_server.ip(),
        client_ip.parse::<std::net::IpAddr>().unwrap()
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

/// What an application may notice, over one family, toward `port` and the 9 above it.
fn behaves_like_tcp(hooker: &mut Hooker<'_>, world: &World, family: usize, port: u16) {
    let ip = &server_ips(world)[family];
    let _echo = echo_server(world, ip, port);
    check_addresses(hooker, world, family, port);
    hooker.order(&format!(
        "forget {}",
        SocketAddr::new(ip.parse().unwrap(), port)
    ));
    hooker.python(&program(HALF_CLOSE, ip, port));

    let aborted = serve_one(world, ip, port + 1, |mut stream| {
        stream.write_all(b"0123456789").unwrap();
        let error = stream.read(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    });
    hooker.python(&program(ABORT, ip, port + 1));
    aborted.join().unwrap();

    let aborts = serve_one(world, ip, port + 2, |mut stream| {
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
    assert_eq!(hooker.python(&program(reset, ip, port + 2)), "reset");
    aborts.join().unwrap();

    let refused = format!("print(outcome('{ip}', {}))", port + 3);
    assert_eq!(hooker.python(&refused), "ECONNREFUSED");
    let (route, none) = if family == 0 {
        ("10.78.0.1", "10.79.0.1")
    } else {
        ("fd78::1", "fd79::1")
    };
    assert_eq!(
        hooker.python(&format!("print(outcome('{route}', 80))")),
        "EHOSTUNREACH"
    );
    assert_eq!(
        hooker.python(&format!("print(outcome('{none}', 80))")),
        "ENETUNREACH"
    );

    // A reader that does not read stops the writer.
    let (release, released) = mpsc::channel::<()>();
    let slow = serve_one(world, ip, port + 4, move |mut stream| {
        released.recv().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&(all.len() as u64).to_be_bytes()).unwrap();
    });
    let mut writer = hooker.run_python(&program(PRESSURE, ip, port + 4));
    let mut line = String::new();
    let mut stdout = BufReader::new(writer.child().stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("stopped"), "{line}");
    release.send(()).unwrap();
    slow.join().unwrap();
    assert!(writer.wait().success());
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
s.settimeout(None)
s.shutdown(socket.SHUT_WR)
assert int.from_bytes(read_all(s), 'big') == sent
";

#[test]
fn plain_peer__sees_and_shows_plain_tcp() {
    let Some(world) = hosts("plain-peer") else {
        return;
    };
    add_unreachable(&world);
    let mut hooker = Hooker::start(&world, Host::Client);
    for family in [0, 1] {
        behaves_like_tcp(&mut hooker, &world, family, 8000);
    }
    hooker.stop();
}

#[test]
fn vtl_peer__sees_and_shows_plain_tcp() {
    let Some(world) = hosts("vtl-peer") else {
        return;
    };
    add_unreachable(&world);
    let mut hooker = Hooker::start(&world, Host::Client);
    let mut server = Hooker::start(&world, Host::Server);
    for port in 8000..8010 {
        server.order(&format!("port {port}"));
    }
    for family in [0, 1] {
        behaves_like_tcp(&mut hooker, &world, family, 8000);
        assert_steered(&world, &server.line(), family, 8000);
        server.forget_answers();
    }
    hooker.stop();
    server.stop();
}

/// As nobody, and from the given end: says whom the other end is connected to.
const IMPOSTOR: &str = "
os.setgid(65534)
os.setuid(65534)
s = socket.socket(socket.AF_INET6 if ':' in FROM[0] else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(FROM)
s.connect((HOST, PORT))
line = b''
while not line.endswith(b'\\n'):
    line += s.recv(1000)
print(line.decode().split(' ')[0])
s.close()
";

/// The kernel's addresses of vtld's connection to the application at the server's port.
fn behind(world: &World, port: u16) -> SocketAddr {
    let mut ss = world.testbed.command(Host::Server, "ss").expect("there");
    let output = ss
        .args([
            "-Htn",
            "state",
            "established",
            "sport",
            "=",
            &format!(":{port}"),
        ])
        .output()
        .expect("ss runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut ends = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.parse::<SocketAddr>().ok());
    // The other one is the flow's own connection.
    ends.find(|end| !client_ips(world).contains(&end.ip().to_string()))
        .unwrap_or_else(|| panic!("{text}"))
}

/// Whoever takes vtld's end of a connection to an application is not taken for the client.
#[test]
fn vtl_peer__is_nobody_elses_name() {
    let Some(world) = hosts("impostor") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let mut server = Hooker::start(&world, Host::Server);
    server.order("port 8000");
    for (ip, client) in server_ips(&world).iter().zip(client_ips(&world)) {
        let _first = echo_server(&world, ip, 8000);
        let _second = echo_server(&world, ip, 8001);
        let mut victim = hooker.run_python(&program(
            "s = connect(HOST, PORT)\nprint(s.recv(1000).decode(), flush=True)\ntime.sleep(1000)",
            ip,
            8000,
        ));
        let mut line = String::new();
        let mut stdout = BufReader::new(victim.child().stdout.take().expect("piped"));
        stdout.read_line(&mut line).expect("a line");
        assert!(line.contains(&client), "{line}");
        let end = behind(&world, 8000);
        let text = format!("FROM = ('{}', {})\n{IMPOSTOR}", end.ip(), end.port());
        let seen = |port: u16| {
            let text = format!("{PRELUDE}\n{}", program(&text, ip, port));
            let mut python = world
                .testbed
                .command(Host::Server, python3())
                .expect("there");
            let output = python.args(["-SEc", &text]).output().expect("it runs");
            assert!(output.status.success(), "{}", words(&output));
            let said = String::from_utf8_lossy(&output.stdout);
            said.trim().parse::<SocketAddr>().expect("an address")
        };
        // While vtld has it, to another destination; and to the same one when it has gone.
        assert_eq!(seen(8001), end);
        victim.signal(Signal::SIGKILL);
        victim.wait();
        // The kernel gives its end again after a second.
        thread::sleep(Duration::from_secs(3));
        assert_eq!(seen(8000), end);
    }
    hooker.stop();
    server.stop();
}

/// The server's hooker said that it got a connection, with these addresses.
fn assert_steered(world: &World, answer: &str, family: usize, port: u16) {
    let words: Vec<&str> = answer.split(' ').collect();
    let ["server", client, server] = words[..] else {
        panic!("{answer}")
    };
    let [client, server] = [client, server].map(|word| word.parse::<SocketAddr>().unwrap());
    assert_eq!(client.ip().to_string(), client_ips(world)[family]);
    assert_eq!(
        (server.ip().to_string().as_str(), server.port()),
        (server_ips(world)[family].as_str(), port)
    );
}

/// A web server of Python's, and what it serves.
struct Web {
    server: Process,
    noise: Vec<u8>,
}

impl Web {
    fn new(world: &World, port: u16) -> Self {
        let noise = payload(8 << 20, port.into());
        fs::write(world.path("www/noise"), &noise).expect("written");
        let command = world.testbed.command(Host::Server, python3());
        let mut command = command.expect("a namespace");
        let mut server = Process::piped(
            command
                .args(["-u", "-m", "http.server", "--bind", "::"])
                .arg(port.to_string())
                .current_dir(world.path("www")),
        );
        let mut line = String::new();
        let mut stdout = BufReader::new(server.child().stdout.take().expect("piped"));
        stdout.read_line(&mut line).expect("a line");
        assert!(line.starts_with("Serving"), "{line}");
        Self { server, noise }
    }

    /// What the server logged: a line per request, beginning with the client's address.
    fn log(self) -> String {
        self.server.signal(Signal::SIGKILL);
        words(&self.server.output())
    }
}

#[test]
fn curl__gets_the_same_bytes() {
    let Some(world) = hosts("curl") else {
        return;
    };
    let mut client = Hooker::start(&world, Host::Client);
    let mut server = Hooker::start(&world, Host::Server);
    let [v4, v6] = server_ips(&world);
    server.order("port 8081");
    // Without VTL, and with it.
    for port in [8080, 8081] {
        let web = Web::new(&world, port);
        for host in [&v4, &format!("[{v6}]")] {
            let url = format!("http://{host}:{port}/noise");
            let output = client.output(&["curl", "-sS", "--noproxy", "*", &url]);
            assert!(output.stdout == web.noise, "{url}: wrong bytes");
        }
        let log = web.log();
        let clients: Vec<&str> = log
            .lines()
            .filter_map(|line| line.split(' ').next())
            .collect();
        let [v4, v6] = client_ips(&world);
        assert_eq!(clients, [format!("::ffff:{v4}"), v6], "{log}");
    }
    client.stop();
    server.stop();
}
