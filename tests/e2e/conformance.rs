//! Applications see TCP to the letter: `tests/conformance`, a program that knows nothing of VTL,
//! says what every socket call returned, and must say the same over TCP and carried by VTL.

mod known;

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{Read, Write as _},
    net::{IpAddr, SocketAddr},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use vtl_control::Request;
use vtl_testbed::{Host, Link};

use self::known::KNOWN;
use crate::harness::{Process, World, run, source, until};

/// `PORT`, `OTHER_PORT`, `CLOSED_PORT` and `DEVICE_PORT` of the program.
const PORTS: [u16; 4] = [7100, 7101, 7102, 7103];
/// For all cases of one family, over one transport: nothing is decided by it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Compiles the program.
fn compile(world: &World, name: &str, flags: &[&str]) -> PathBuf {
    let program = world.path(name);
    let sources = source("conformance");
    let mut files: Vec<PathBuf> = fs::read_dir(&sources)
        .expect("the sources")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    files.sort();
    run(Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
        ])
        .args(["-pthread", "-o"])
        .arg(&program)
        .args(files)
        .args(flags));
    program
}

/// A case's name, and whether it reaches the server.
struct Case {
    name: String,
    carried: bool,
}

fn cases(program: &Path) -> Vec<Case> {
    let output = Command::new(program).arg("list").output().expect("it runs");
    let only = std::env::var("CONFORMANCE_CASE").ok();
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines()
        .map(|line| Case {
            name: line.split(' ').next().expect("a name").to_owned(),
            carried: !line.ends_with(" elsewhere"),
        })
        .filter(|case| only.as_ref().is_none_or(|only| case.name.contains(only)))
        .collect()
}

/// Routes to destinations that refuse and that stay silent, as the program expects them.
fn make_places(world: &World) {
    let ip = |host, args: &str| {
        let mut ip = world.testbed.command(host, "ip").expect("a namespace");
        run(ip.args(args.split(' ')));
    };
    let write = |host, name: &str, value: &str| {
        let (name, value) = (format!("/proc/sys/net/{name}"), value.to_owned());
        let write = move || fs::write(name, value);
        let done = world.testbed.in_netns(host, write).expect("a namespace");
        done.expect("a switch of the kernel's");
    };
    let kinds = ["unreachable", "prohibit", "blackhole"];
    for (number, kind) in (1..).zip(kinds) {
        ip(
            Host::Client,
            &format!("route add {kind} 198.51.100.{number}"),
        );
        ip(
            Host::Server,
            &format!("route add {kind} 203.0.113.{number}"),
        );
        ip(
            Host::Client,
            &format!("-6 route add {kind} 2001:db8:2::{number}"),
        );
        ip(
            Host::Server,
            &format!("-6 route add {kind} 2001:db8:3::{number}"),
        );
    }
    let [v4, v6] = world.servers();
    ip(Host::Client, &format!("route add 203.0.113.0/24 via {v4}"));
    ip(
        Host::Client,
        &format!("-6 route add 2001:db8:3::/64 via {v6}"),
    );
    for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        write(Host::Server, name, "1");
    }
    for name in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
        write(Host::Server, name, "0");
    }
}

/// What both roles said, case by case.
struct Transcripts {
    client: Vec<(String, Vec<String>)>,
    server: Vec<(String, Vec<String>)>,
    /// Bytes that VTL had carried after each case.
    carried: Vec<u64>,
}

fn by_case(path: &Path) -> Vec<(String, Vec<String>)> {
    let mut cases: Vec<(String, Vec<String>)> = Vec::new();
    for line in fs::read_to_string(path).expect("a transcript").lines() {
        match (line.strip_prefix("== "), cases.last_mut()) {
            (Some(name), _) => cases.push((name.to_owned(), Vec::new())),
            (None, Some((_, lines))) => lines.push(line.to_owned()),
            (None, None) => panic!("a line before the first case: {line}"),
        }
    }
    cases
}

/// Bytes of all the client's sessions and carriers, in both directions.
fn carried(world: &World) -> u64 {
    let status = world.call(Host::Client, &Request::Status { from: 0 });
    let rows = ["sessions", "carriers"].map(|name| status[name].as_array().expect("a list"));
    let figures = ["bytes_sent", "bytes_received"];
    let of = |name: &str| {
        rows.iter()
            .flat_map(|rows| rows.iter())
            .filter_map(|row| row[name].as_u64())
            .sum::<u64>()
    };
    figures.into_iter().map(of).sum()
}

/// The same once nothing is on its way any more, or after a while.
fn settled(world: &World) -> u64 {
    let mut before = carried(world);
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(50));
        let now = carried(world);
        if now == before {
            break;
        }
        before = now;
    }
    before
}

/// What the cases are played over.
#[derive(Clone, Copy)]
enum Over {
    Tcp,
    /// VTL, with these options of `vtl run`.
    Vtl(&'static [&'static str]),
}

/// Sessions.
const VTL: Over = Over::Vtl(&[]);

fn client_address(world: &World, family: usize) -> IpAddr {
    match family {
        0 => world.testbed.addr4(Host::Client).into(),
        _ => world.testbed.addr6(Host::Client).into(),
    }
}

/// A program at a host, captured there if it is the client of what VTL carries.
fn on(world: &World, host: Host, program: &Path, over: Over) -> Command {
    if let (Over::Vtl(options), Host::Client) = (over, host) {
        let mut vtl = world.vtl(host, &[&["run"], options, &["--"]].concat());
        vtl.arg(program);
        return vtl;
    }
    world.testbed.command(host, program).expect("a namespace")
}

/// Runs cases at both hosts, one after the other.
fn play(world: &World, program: &Path, family: usize, over: Over, cases: &[Case]) -> Transcripts {
    let names = cases.iter().map(|case| &case.name);
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let control = world.path(&format!("control-{number}"));
    let after = UnixListener::bind(control.with_added_extension("after")).expect("a socket");
    after.set_nonblocking(true).expect("ours");
    let server: IpAddr = world.servers()[family];
    let client = client_address(world, family);
    let start = |host: Host| {
        let mut command = on(world, host, program, over);
        let path = world.path(&format!("transcript-{number}-{}", host.name()));
        command
            .arg(host.name())
            .arg(&control)
            .args([server.to_string(), client.to_string()])
            .args(names.clone())
            .stdout(File::create(&path).expect("a file"));
        (Process::start(&mut command), path)
    };
    let (mut serving, at_server) = start(Host::Server);
    let (mut asking, at_client) = start(Host::Client);
    let mut figures = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok((mut referee, _)) = after.accept() {
            let mut name = String::new();
            referee.set_nonblocking(false).expect("ours");
            referee.read_to_string(&mut name).expect("a name");
            let is_next_elsewhere = cases.get(figures.len() + 1).is_some_and(|c| !c.carried);
            figures.push(match over {
                Over::Vtl(_) if is_next_elsewhere => settled(world),
                Over::Vtl(_) => carried(world),
                Over::Tcp => 0,
            });
            let _ = referee.write_all(b".");
        } else if asking.ended().is_some() {
            break;
        } else {
            assert!(Instant::now() < deadline, "it takes too long");
            thread::sleep(Duration::from_millis(1));
        }
    }
    let ended = [asking.wait(), serving.wait()];
    assert!(
        ended.iter().all(std::process::ExitStatus::success),
        "{ended:?}"
    );
    Transcripts {
        client: by_case(&at_client),
        server: by_case(&at_server),
        carried: figures,
    }
}

/// The lines of both, with `-` before those that only the first has, and `+` before the others.
fn difference(first: &[String], second: &[String]) -> String {
    let (n, m) = (first.len(), second.len());
    // The longest common subsequence of what is behind each pair of places.
    let mut common = vec![vec![0_usize; m + 1]; n + 1];
    for i in (0..n).rev() {
        for j in (0..m).rev() {
            common[i][j] = if first[i] == second[j] {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut text = String::new();
    while i < n || j < m {
        let (mark, line) = if i < n && j < m && first[i] == second[j] {
            (i, j) = (i + 1, j + 1);
            (' ', &first[i - 1])
        } else if i < n && (j == m || common[i + 1][j] >= common[i][j + 1]) {
            i += 1;
            ('-', &first[i - 1])
        } else {
            j += 1;
            ('+', &second[j - 1])
        };
        let _ = writeln!(text, "  {mark} {line}");
    }
    text
}

/// What is expected where VTL carries: the same as over TCP, but for the known differences.
fn expected(
    case: &str,
    host: Host,
    [tcp, vtl]: [&[String]; 2],
    unused: &mut Vec<String>,
) -> Vec<String> {
    let mut lines = tcp.to_vec();
    for known in KNOWN {
        if known.case != case || known.host != host {
            continue;
        }
        let said = |lines: &&&[&str]| vtl.windows(lines.len()).any(|w| w == **lines);
        let instead = match known.vtl.iter().find(said) {
            Some(instead) => instead,
            None if known.sometimes => continue,
            None => &known.vtl[0],
        };
        let at = lines.windows(known.tcp.len()).position(|w| w == known.tcp);
        if let Some(at) = at {
            let instead = instead.iter().map(|&line| line.to_owned());
            lines.splice(at..at + known.tcp.len(), instead);
        } else {
            unused.push(format!("TCP does not say {:?}", known.tcp));
        }
    }
    lines
}

/// Whatever is not the same in both runs, and where VTL did not carry what it seems to have
/// carried. Each flow has a TCP connection of its own, which may carry all of it.
fn compare(cases: &[Case], tcp: &Transcripts, vtl: &Transcripts) -> Vec<String> {
    let mut faults = Vec::new();
    let mut wrong = |case: &str, what: String| faults.push(format!("{case}: {what}"));
    let sides = [
        (Host::Client, &tcp.client, &vtl.client),
        (Host::Server, &tcp.server, &vtl.server),
    ];
    for (host, tcp, vtl) in sides {
        assert_eq!(tcp.len(), cases.len(), "cases over TCP");
        assert_eq!(vtl.len(), cases.len(), "cases over VTL");
        for ((name, tcp), (_, vtl)) in tcp.iter().zip(vtl) {
            for line in tcp {
                let broken = ["given up", "hung", "killed by"];
                if broken.iter().any(|start| line.starts_with(start)) {
                    wrong(name, format!("{}, over TCP: {line}", host.name()));
                }
            }
            let mut unused = Vec::new();
            let expected = expected(name, host, [tcp, vtl], &mut unused);
            unused.into_iter().for_each(|line| wrong(name, line));
            if expected != *vtl {
                let text = difference(&expected, vtl);
                wrong(name, format!("{}, - TCP, + VTL:\n{text}", host.name()));
            }
        }
    }
    let mut before = 0;
    let mut by_tcp = Vec::new();
    for (case, &after) in cases.iter().zip(&vtl.carried) {
        // A flow that opens and ends is four frames, 85 bytes, at least; two of an earlier case may be late.
        let carried = after.saturating_sub(before);
        let right = match case.carried {
            true => carried > 0,
            false => carried < 64,
        };
        if !right && case.carried {
            by_tcp.push(&case.name);
        } else if !right {
            wrong(&case.name, format!("VTL carried {carried} bytes"));
        }
        before = after;
    }
    assert_eq!(vtl.carried.len(), cases.len(), "a figure for each");
    // TCP itself refuses connections; and a SYN from a port that lingers in TIME_WAIT is the kernel's.
    if by_tcp.len() > cases.len() / 8 {
        faults.push(format!("VTL did not carry {by_tcp:?}"));
    }
    faults
}

/// Plays all cases carried, and between other hosts over TCP, at the same time: they wait for most of
/// theirs.
fn check(world: &mut World, program: &Path, family: usize, over: Over, cases: &[Case]) {
    let plain = world.beside(&link());
    make_places(&plain);
    let [tcp, vtl] = thread::scope(|scope| {
        let tcp = scope.spawn(|| play(&plain, program, family, Over::Tcp, cases));
        carry(world, program, family, over);
        let vtl = play(world, program, family, over, cases);
        [tcp.join().expect("it does not panic"), vtl]
    });
    for (case, lines) in &tcp.client {
        let skipped = lines.iter().find_map(|line| line.strip_prefix("skipped: "));
        if let Some(why) = skipped {
            vtl_testing::skip(&format!("{case}: {why}"));
        }
    }
    let faults = compare(cases, &tcp, &vtl);
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

fn link() -> Link {
    Link::new(2.0, 200.0)
}

fn hosts(name: &str) -> Option<World> {
    let world = World::bare(name, &link())?;
    make_places(&world);
    Some(world)
}

/// Starts the daemons, if they do not run, and has the hosts meet.
fn carry(world: &mut World, program: &Path, family: usize, over: Over) {
    if !world.has_daemons() {
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
        for port in PORTS {
            world.hook_port(port);
        }
    }
    let cases = [Case {
        name: "connect_device_of_server".to_owned(),
        carried: true,
    }];
    let before = carried(world);
    // At a port that had one connection so far: a SYN that meets the TIME_WAIT of an earlier
    // connection from the same port is TCP's, and its destination counts as one without VTL.
    until("the hosts have met", || {
        play(world, program, family, over, &cases);
        // A carrier may come too late for its first flow.
        carried(world) > before
    });
}

/// Cases that a statically linked program runs, too: whatever stands between a program and the
/// kernel must not matter.
const STATIC: [&str; 8] = [
    "connect_refused",
    "connect_not_blocking",
    "connect_names",
    "end_half_close_by_client",
    "end_reset_by_server",
    "move_splice",
    "wait_epoll_edge",
    "process_forked",
];

fn all_cases(name: &str, family: usize, over: Over) {
    let Some(mut world) = hosts(name) else {
        return;
    };
    let program = compile(&world, "conform", &[]);
    let cases = cases(&program);
    check(&mut world, &program, family, over, &cases);
}

#[test]
fn sockets__behave_as_over_tcp_ipv4() {
    all_cases("conform4", 0, VTL);
}

#[test]
fn sockets__behave_as_over_tcp_ipv6() {
    all_cases("conform6", 1, VTL);
}

/// By another carrier than QUIC where `CONFORMANCE_CARRIER` says so.
#[test]
fn sockets__behave_as_over_tcp_by_a_kind() {
    let carrier = std::env::var("CONFORMANCE_CARRIER").unwrap_or_else(|_| "quic".into());
    let options: &'static [&'static str] = vec!["--carrier", carrier.leak()].leak();
    all_cases("conform-kinds", 0, Over::Vtl(options));
}

#[test]
fn programs__without_a_dynamic_linker_or_libc() {
    let Some(mut world) = hosts("conform-static") else {
        return;
    };
    let program = compile(&world, "conform-static", &["-static"]);
    let mut cases = cases(&program);
    cases.retain(|case| STATIC.contains(&case.name.as_str()));
    let gopher = build_gopher(&world);
    let go = |world: &World, over| {
        let program = gopher.as_deref()?;
        Some([0, 1].map(|family| play_gopher(world, program, family, over)))
    };
    let tcp = go(&world, Over::Tcp);
    for family in [0, 1] {
        check(&mut world, &program, family, VTL, &cases);
    }
    let before = carried(&world);
    let vtl = go(&world, VTL);
    assert!(vtl.is_none() || carried(&world) > before + 10_000_000);
    assert_eq!(tcp, vtl, "a Go program, over TCP and carried by VTL");
}

/// A program that does its own system calls; `None` where there is no Go.
fn build_gopher(world: &World) -> Option<PathBuf> {
    if Command::new("go").arg("version").output().is_err() {
        vtl_testing::skip("no Go here");
        return None;
    }
    let program = world.path("gopher");
    run(Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(source("programs/gopher.go"))
        .env("CGO_ENABLED", "0"));
    Some(program)
}

/// What its client and its server say.
fn play_gopher(world: &World, program: &Path, family: usize, over: Over) -> [String; 2] {
    let [at, closed] =
        [PORTS[0], PORTS[2]].map(|port| SocketAddr::new(world.servers()[family], port));
    let from = client_address(world, family);
    let paths = ["gopher-client", "gopher-server"].map(|name| world.path(name));
    let start = |host: Host, args: &[String], path: &Path| {
        let mut command = on(world, host, program, over);
        command
            .args(args)
            .stdout(File::create(path).expect("a file"));
        Process::start(&mut command)
    };
    let words = |words: &[&dyn ToString]| words.iter().map(|w| w.to_string()).collect::<Vec<_>>();
    let mut serving = start(Host::Server, &words(&[&"server", &at, &from]), &paths[1]);
    let said = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    until("the Go server listens", || {
        said(&paths[1]).contains("listening")
    });
    let args = words(&[&"client", &at, &from, &closed]);
    let mut asking = start(Host::Client, &args, &paths[0]);
    let ended = [asking.wait(), serving.wait()];
    let said = [said(&paths[0]), said(&paths[1])];
    assert!(
        ended.iter().all(std::process::ExitStatus::success),
        "{said:?}"
    );
    said
}
