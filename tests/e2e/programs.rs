//! Unmodified programs of the distribution's beside curl and nginx: what they moved must be right to
//! the byte, over a bad link, and VTL must have carried it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
};

use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, python3, run, same, sha256, until, words};

const MB: usize = 1 << 20;

/// Hosts that have met, a bad link between them, and the server's port served by VTL. `None` where the
/// test is skipped.
fn hosts(name: &str, port: u16, programs: &[&str]) -> Option<World> {
    for program in programs {
        if Command::new(program).arg("--version").output().is_err() {
            vtl_testing::skip(&format!("no {program} here"));
            return None;
        }
    }
    let world = World::new(name, &Link::new(10.0, 100.0))?;
    world.hook_port(port);
    world.spoil();
    Some(world)
}

/// All addresses of either family.
const ANY: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
];

/// Starts a program on the server, and waits until it listens at these addresses.
fn serve(world: &World, at: &[IpAddr], port: u16, program: &str, args: &[&str]) -> Process {
    let mut command = world.testbed.command(Host::Server, program).expect("there");
    let log = fs::File::create(world.path("server.log")).expect("a log");
    command
        .args(args)
        .stdout(Stdio::null())
        .stderr(log)
        .current_dir(world.path(""));
    let mut server = Process::start(&mut command);
    until("the server listens", || {
        let log = || fs::read_to_string(world.path("server.log"));
        assert!(server.ended().is_none(), "{program} has ended: {:?}", log());
        let at = at.to_vec();
        // To no address in particular is to this host.
        let listens = |ip: IpAddr| TcpStream::connect(SocketAddr::new(ip, port)).is_ok();
        let connect = move || at.into_iter().all(listens);
        let connected = world.testbed.in_netns(Host::Server, connect);
        connected.expect("a namespace")
    });
    server
}

/// Runs a captured program on the client, to succeed. Returns its output.
#[track_caller]
fn client(world: &World, program: &str, args: &[&str], input: Option<&Path>) -> Vec<u8> {
    let mut command = world.vtl(Host::Client, &["run", "--", program]);
    command.args(args);
    if let Some(path) = input {
        command.stdin(fs::File::open(path).expect("a file"));
    }
    let output = command.output().expect("it runs");
    assert!(
        output.status.success(),
        "{program} {args:?}: {} {}",
        words(&output),
        String::from_utf8_lossy(&output.stdout)
    );
    output.stdout
}

/// What VTL carries, both directions, while `act` is done. At the first contact it is not all: what is
/// sent until the association is up goes by TCP, and how much that is a busy machine decides. Half is
/// asked for.
fn carried(world: &World, act: impl FnOnce()) -> u64 {
    let all = || world.sum(Host::Client, "bytes_sent") + world.sum(Host::Client, "bytes_received");
    let before = all();
    act();
    all() - before
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A server that speaks first, and a dialogue of lines.
#[test]
fn mail__arrives_as_it_was_sent() {
    const PORT: u16 = 2525;
    let Some(world) = hosts("mail", PORT, &["aiosmtpd", "python3"]) else {
        return;
    };
    let boxes = world.path("boxes");
    let handler = ["-c", "aiosmtpd.handlers.Mailbox", text(&boxes)];
    // It listens at one address.
    let _servers = ANY.map(|any| {
        let listen = format!("{any}:{PORT}");
        let args = ["-n", "-s", "33554432", "-l", &listen];
        serve(
            &world,
            &[any],
            PORT,
            "aiosmtpd",
            &[&args[..], &handler].concat(),
        )
    });
    let body: String = payload(3 * MB, 9)
        .chunks(30)
        .map(|chunk| {
            chunk
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
                + "\n"
        })
        .collect();
    let letter = world.path("letter");
    fs::write(&letter, format!("Subject: bytes\n\n{body}")).expect("written");
    let send = "import smtplib, sys\n\
                server = smtplib.SMTP(sys.argv[1], sys.argv[2], timeout=170)\n\
                letter = open(sys.argv[3]).read()\n\
                server.sendmail('a@example.org', ['b@example.org'], letter)\n\
                server.quit()\n";
    for server in world.servers() {
        let (host, port) = (server.to_string(), PORT.to_string());
        let moved = carried(&world, || {
            let args = ["-c", send, &host, &port, text(&letter)];
            client(&world, python3(), &args, None);
        });
        assert!(moved > body.len() as u64 / 2, "{moved} bytes");
    }
    let letters: Vec<_> = fs::read_dir(boxes.join("new"))
        .expect("a mailbox")
        .collect();
    assert_eq!(letters.len(), 2);
    for letter in letters {
        let got = fs::read_to_string(letter.expect("a letter").path()).expect("text");
        let (_, got) = got.split_once("\n\n").expect("a header and a body");
        assert_eq!(
            sha256(got.trim_end().as_bytes()),
            sha256(body.trim_end().as_bytes())
        );
    }
}

/// Both sides speak at once, then one of them for long.
#[test]
fn ssh__copies_files_both_ways() {
    const PORT: u16 = 2222;
    let Some(world) = hosts("ssh", PORT, &["/usr/sbin/sshd", "ssh", "scp", "ssh-keygen"]) else {
        return;
    };
    for name in ["host", "user"] {
        let key = world.path(name);
        run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", text(&key)]));
    }
    let dir = world.path("");
    let dir = text(&dir);
    fs::copy(world.path("user.pub"), world.path("authorized")).expect("copied");
    let config = format!(
        "Port {PORT}\nHostKey {dir}/host\nAuthorizedKeysFile {dir}/authorized\nStrictModes no\n\
         UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n\
         Subsystem sftp internal-sftp\n"
    );
    fs::write(world.path("sshd.conf"), config).expect("written");
    fs::create_dir_all("/run/sshd").expect("sshd's directory");
    let conf = world.path("sshd.conf");
    let _server = serve(
        &world,
        &ANY,
        PORT,
        "/usr/sbin/sshd",
        &["-D", "-e", "-f", text(&conf)],
    );
    let key = fs::read_to_string(world.path("host.pub")).expect("a key");
    let known: String = world
        .servers()
        .iter()
        .map(|server| format!("[{server}]:{PORT} {key}\n"))
        .collect();
    fs::write(world.path("known"), known).expect("written");
    let there = world.path("there");
    fs::create_dir(&there).expect("a directory");
    let file = world.path("file");
    fs::write(&file, payload(4 * MB, 3)).expect("written");
    let (user, known) = (
        format!("IdentityFile={dir}/user"),
        format!("UserKnownHostsFile={dir}/known"),
    );
    let port = format!("Port={PORT}");
    let options = [
        "-F",
        "none",
        "-o",
        &user,
        "-o",
        &known,
        "-o",
        &port,
        "-o",
        "BatchMode=yes",
    ];
    for (number, server) in world.servers().into_iter().enumerate() {
        let name = match server {
            IpAddr::V4(v4) => format!("root@{v4}"),
            IpAddr::V6(v6) => format!("root@[{v6}]"),
        };
        let copy = there.join(number.to_string());
        let remote = format!("{name}:{}", text(&copy));
        let back = world.path(&format!("back-{number}"));
        let login = format!("root@{server}");
        let moved = carried(&world, || {
            client(
                &world,
                "scp",
                &[&options[..], &[text(&file), &remote]].concat(),
                None,
            );
            client(
                &world,
                "scp",
                &[&options[..], &[&remote, text(&back)]].concat(),
                None,
            );
            let sum = ["sha256sum", text(&copy)];
            let sum = client(
                &world,
                "ssh",
                &[&options[..], &[&login], &sum].concat(),
                None,
            );
            let wanted = sha256(&fs::read(&file).expect("the file"));
            assert!(sum.starts_with(wanted.as_bytes()));
        });
        same(&file, &copy);
        same(&file, &back);
        assert!(moved > 4 * MB as u64, "{moved} bytes");
    }
}

/// A database with large values, and then a thousand clients at once.
#[test]
fn database__keeps_values_and_serves_a_thousand_clients() {
    const PORT: u16 = 6379;
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some(world) = hosts("redis", PORT, &programs) else {
        return;
    };
    let args = [
        "--port",
        "6379",
        "--protected-mode",
        "no",
        "--save",
        "",
        "--bind",
        "0.0.0.0",
        "::",
    ];
    let _server = serve(&world, &ANY, PORT, "redis-server", &args);
    let value = world.path("value");
    fs::write(&value, payload(4 * MB, 5)).expect("written");
    for server in world.servers() {
        let host = server.to_string();
        let moved = carried(&world, || {
            client(
                &world,
                "redis-cli",
                &["-h", &host, "-x", "set", "key"],
                Some(&value),
            );
            let got = client(
                &world,
                "redis-cli",
                &["-h", &host, "--raw", "get", "key"],
                None,
            );
            // It ends what it prints with a line's end.
            let wanted = fs::read(&value).expect("the value");
            assert_eq!(sha256(&got[..got.len() - 1]), sha256(&wanted));
        });
        assert!(moved > 4 * MB as u64, "{moved} bytes");
    }
    let [server, _] = world.servers().map(|server| server.to_string());
    let load = [
        "-h", &server, "-c", "1000", "-n", "20000", "-t", "set,get", "-d", "100", "-q",
    ];
    let moved = carried(&world, || {
        client(&world, "redis-benchmark", &load, None);
    });
    assert!(moved > 20_000 * 100, "{moved} bytes");
    let info = client(&world, "redis-cli", &["-h", &server, "info", "stats"], None);
    let info = String::from_utf8(info).expect("text");
    let served = info
        .lines()
        .find_map(|line| line.strip_prefix("total_connections_received:"))
        .and_then(|count| count.trim().parse::<u64>().ok());
    assert!(served >= Some(2_000), "{served:?} connections");
    until("the flows end", || {
        world.sum(Host::Client, "flows") == 0 && world.sum(Host::Server, "flows") == 0
    });
}
