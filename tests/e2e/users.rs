//! Who may do what: root, members of the daemon's group, everybody else; and one application from
//! another.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{
            fs::{PermissionsExt, chown},
            process::CommandExt,
        },
    },
    process::Command,
    thread,
};

use nix::unistd::{Gid, Group, Uid, setgid, setgroups, setuid};
use serde_json::Value;
use vtl::{Mode, Requirements, Services, Socket};
use vtl_control::{Client, Done, Grant, Listening, Request, RuleCount};
use vtl_testbed::{Host, Link};

use crate::harness::{
    self, Process, Spoken, World, copy_program, payload, refused, same, until, url, vtl, vtld,
    words,
};

/// An existing group that none of the system's daemons is in.
const GROUP: &str = "users";
pub(crate) const NOBODY: u32 = 65534;
const SIZE: usize = 1 << 20;

/// Makes a command run as nobody, in one group.
pub(crate) fn as_nobody(command: &mut Command, gid: Gid) -> &mut Command {
    as_user(command, NOBODY, gid)
}

/// Makes a command run as a user, in one group.
pub(crate) fn as_user(command: &mut Command, uid: u32, gid: Gid) -> &mut Command {
    // SAFETY: system calls without pointers to anything of the parent's.
    unsafe {
        command.pre_exec(move || {
            setgroups(&[])
                .and_then(|()| setgid(gid))
                .and_then(|()| setuid(Uid::from_raw(uid)))
                .map_err(io::Error::from)
        })
    }
}

impl World {
    /// The `vtl` command on a host as nobody: a copy that everybody may run.
    pub(crate) fn vtl_as(&self, host: Host, gid: Gid, args: &[&str]) -> Command {
        let copy = self.path("vtl");
        if !copy.exists() {
            copy_program(vtl(), &copy);
        }
        let mut command = self.testbed.command(host, copy).expect("a namespace");
        as_nobody(command.args(args), gid);
        command
    }
}

#[test]
fn group__members_use_vtl_and_change_nothing_for_others() {
    let Some(mut world) = World::bare("users", &Link::new(5.0, 100.0)) else {
        return;
    };
    let Ok(Some(group)) = Group::from_name(GROUP) else {
        vtl_testing::skip(&format!("needs a group \"{GROUP}\""));
        return;
    };
    world.start_web();
    world.start_both(&["--group", GROUP]);
    let wanted = world.serve("f", SIZE);
    world.meet();
    let home = world.path("home");
    fs::create_dir(&home).expect("made");
    chown(&home, Some(NOBODY), Some(group.gid.as_raw())).expect("given");
    let as_member = |args: &[&str]| world.vtl_as(Host::Client, group.gid, args);

    // Look, and run hooked.
    for look in [&["status"][..], &["rule", "list"]] {
        let output = as_member(look).output().expect("vtl runs");
        assert!(output.status.success(), "{}", words(&output));
    }
    for (i, server) in world.servers().into_iter().enumerate() {
        let (to, from) = (home.join(format!("got{i}")), url(server, "f"));
        let args = [
            "run",
            "--",
            "curl",
            "--noproxy",
            "*",
            "-sS",
            "--fail",
            "-o",
            to.to_str().unwrap(),
            &from,
        ];
        let output = Process::piped(&mut as_member(&args)).output();
        assert!(output.status.success(), "{}", words(&output));
        same(&wanted, &to);
    }
    assert!(world.sum(Host::Client, "bytes_received") >= 2 * SIZE as u64);

    // A session of one's own, at both ends.
    let file = world.path("file");
    fs::write(&file, payload(SIZE, 5)).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("ours");
    let got = home.join("received");
    let mut recv = world.vtl_as(
        Host::Server,
        group.gid,
        &["recv", "--output", got.to_str().unwrap()],
    );
    let recv = Process::piped(&mut recv);
    until("vtl recv waits", || {
        world.status(Host::Server)["listeners"]
            .as_array()
            .is_some_and(|l| !l.is_empty())
    });
    let server = world.servers()[0].to_string();
    let sent = Process::piped(&mut as_member(&["send", file.to_str().unwrap(), &server])).output();
    assert!(sent.status.success(), "{}", words(&sent));
    assert!(recv.output().status.success());
    same(&file, &got);

    // Not for members: what changes the host for others.
    let graft = world.status(Host::Client)["sessions"][0]["graft"].clone();
    let graft = graft.as_str().expect("a graft");
    for args in [
        &["hook", "add", "--port", "8080"][..],
        &["hook", "add", "--cgroup", "/sys/fs/cgroup"],
        &["hook", "remove", "--port", "80"],
        &["graft", "deploy", graft],
        &["graft", "remove", graft],
        &["rule", "add", "all", "--bypass"],
        &["rule", "remove", "all"],
        &["rule", "reload"],
        &["recv", "--port", "80"],
    ] {
        refused(&as_member(args).output().expect("vtl runs"), 77, "root");
    }
    // Outsiders: nothing.
    let outside = Gid::from_raw(NOBODY);
    for args in [
        &["status"][..],
        &["run", "--", "true"],
        &["send", file.to_str().unwrap(), &server],
    ] {
        let output = world.vtl_as(Host::Client, outside, args).output();
        refused(&output.expect("vtl runs"), 77, "members of its group");
    }
}

/// A program keeps the limits of the group that it was in.
#[test]
fn run__stays_below_its_own_group() {
    let Some(world) = World::with_daemons("below", &Link::default()) else {
        return;
    };
    let group = harness::Group::new(&format!("run-below-{}", std::process::id()));
    let procs = group.0.join("cgroup.procs");
    let vtl = vtl();
    let script = format!(
        "echo $$ > {}; exec {} run -- {} run -- cat /proc/self/cgroup",
        procs.display(),
        vtl.display(),
        vtl.display(),
    );
    let mut shell = world
        .testbed
        .command(Host::Client, "sh")
        .expect("a namespace");
    shell
        .args(["-c", &script])
        .env("VTL_SOCKET", world.socket(Host::Client));
    let output = Process::piped(&mut shell).output();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", words(&output));
    let line = said.lines().find(|line| line.starts_with("0::"));
    let inside = line.expect("a group").trim_start_matches("0::");
    let below = inside.split_once(&*group.0.file_name().expect("a name").to_string_lossy());
    // Of two, the second is beside the first.
    let below = below.map(|(_, below)| below.trim_start_matches('/'));
    assert!(
        below.is_some_and(|b| b.starts_with("vtl-") && b.ends_with(".run-2") && !b.contains('/')),
        "{said}"
    );
    until("both groups are gone", || {
        std::fs::read_dir(&group.0).is_ok_and(|all| {
            !all.flatten()
                .any(|e| e.file_type().is_ok_and(|kind| kind.is_dir()))
        })
    });
}

#[test]
fn group__members_cannot_lock_root_out() {
    let Some(mut world) = World::bare("lockout", &Link::default()) else {
        return;
    };
    let Ok(Some(group)) = Group::from_name(GROUP) else {
        vtl_testing::skip(&format!("needs a group \"{GROUP}\""));
        return;
    };
    let max = 1024 + 16;
    world.start(Host::Client, &["--group", GROUP, "--max-sessions", "16"]);
    let script = "import resource, socket, sys\n\
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n\
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n\
        held = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(int(sys.argv[2]))]\n\
        for s in held: s.connect(sys.argv[1])\n\
        s = held[0]\n\
        s.send(b'{\"op\": \"status\"}')\n\
        print('ready' if s.recv(1 << 20) else 'nothing', flush=True)\n\
        sys.stdin.read()";
    let socket = world.socket(Host::Client);
    // Two of them, since one has no more than half.
    let held = [NOBODY, NOBODY - 1].map(|uid| {
        let mut python = Command::new("python3");
        python.args(["-c", script, socket.to_str().unwrap(), &max.to_string()]);
        as_user(&mut python, uid, group.gid);
        let mut held = Spoken::start(python);
        assert_eq!(held.line(), "ready");
        held
    });
    // Panics if it gets no answer.
    world.status(Host::Client);
    // A rules file that nobody ever writes to holds up nobody.
    let (pipe, _end) = nix::unistd::pipe().expect("a pipe");
    let client = Client::connect(&socket).expect("answers");
    let request = Request::RuleCheck { name: "it".into() };
    let answer = client.call_handing::<RuleCount>(&request, &[pipe.as_fd()]);
    let said = answer.unwrap_err().to_string();
    assert!(said.contains("not a regular file"), "{said}");
    drop(held);
}

#[test]
fn run__takes_nobody_out_of_another_pid_namespace() {
    let Some(mut world) = World::bare("elsewhere", &Link::default()) else {
        return;
    };
    world.start(Host::Client, &[]);
    let pid = world.daemon(Host::Client).pid();
    let group = || fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
    let before = group();
    let mut command = world
        .testbed
        .command(Host::Client, "unshare")
        .expect("a namespace");
    command
        .args(["--pid", "--fork"])
        .arg(vtl())
        .args(["run", "--", "true"]);
    refused(&command.output().expect("it runs"), 1, "PID namespace");
    assert_eq!(group(), before);
}

#[test]
fn vtld__needs_root() {
    let Some(world) = World::bare("not-root", &Link::default()) else {
        return;
    };
    let copy = world.path("vtld");
    copy_program(vtld(), &copy);
    let mut command = world
        .testbed
        .command(Host::Client, copy)
        .expect("a namespace");
    let output = as_nobody(&mut command, Gid::from_raw(NOBODY)).output();
    refused(&output.expect("it runs"), 77, "sudo");
}

/// A session between two applications of the library.
pub(crate) fn session(world: &World, port: u16) -> (Socket, Socket) {
    let at = SocketAddr::new(world.servers()[0], port);
    let mut responder =
        Socket::init(Mode::Responder, at, &world.socket(Host::Server)).expect("a socket");
    let accepting = thread::spawn(move || {
        responder.validate().expect("a session");
        responder
    });
    let mut initiator =
        Socket::init(Mode::Initiator, at, &world.socket(Host::Client)).expect("a socket");
    let services = Services::RELIABLE.union(Services::ORDERED);
    let wanted = Requirements {
        services,
        ..Default::default()
    };
    initiator.negotiate(&wanted).expect("a session");
    (initiator, accepting.join().expect("no panic"))
}

/// Sends from one end to the other until the end, and compares.
#[track_caller]
pub(crate) fn transfer((mut from, mut to): (Socket, Socket), wanted: &[u8]) {
    // The receiver belongs to the closure: should it fail, the sender's session ends with it.
    let (got, _to) = thread::scope(move |scope| {
        scope.spawn(move || {
            let mut rest = wanted;
            while !rest.is_empty() {
                rest = &rest[from.send_data(rest).expect("sent")..];
            }
            from.close().expect("delivered");
        });
        let mut got = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            match to.recv_data(&mut buffer).expect("received") {
                0 => return (got, to),
                n => got.extend_from_slice(&buffer[..n]),
            }
        }
    });
    assert!(got == wanted, "{} of {} bytes", got.len(), wanted.len());
}

#[test]
fn applications__cannot_touch_each_other() {
    let Some(world) = World::with_daemons("apart", &Link::new(5.0, 100.0)) else {
        return;
    };
    let (ours, theirs) = session(&world, 40);
    // Another connection to the same daemons: it owns nothing, so nothing happens.
    let strangers =
        [Host::Client, Host::Server].map(|h| Client::connect(&world.socket(h)).expect("answers"));
    let other = session(&world, 41);
    for stranger in &strangers {
        for aborted in [false, true] {
            let close = Request::Close { aborted };
            stranger.call::<Done>(&close).expect("closes nothing");
        }
        let error = stranger.call::<Grant>(&Request::Accept { key: None });
        assert!(error.unwrap_err().to_string().contains("without listen"));
    }
    let taken = strangers[1].call::<Listening>(&Request::Listen { port: 40 });
    assert!(taken.unwrap_err().to_string().contains("taken"));
    // Nonsense is answered and harms nobody.
    let socket = strangers[0].as_fd().as_raw_fd();
    for request in [
        "{}",
        "[1, 2]",
        r#"{ "op": 7 }"#,
        r#"{ "op": "connect", "host": "x" }"#,
        r#"{ "op": "connect", "host": "10.73.0.2", "port": 70000 }"#,
        r#"{ "op": "listen", "port": -1 }"#,
    ] {
        let message: Value = serde_json::from_str(request).expect("JSON");
        vtl_control::send(socket, &message, &[]).expect("sent");
        let answer = vtl_control::receive(socket).expect("JSON");
        let (answer, _) = answer.expect("an answer");
        assert_eq!(answer["ok"], false, "{request}: {answer}");
    }
    // One application ends at once: its session, and no other.
    drop(other);
    transfer((ours, theirs), &payload(3 * SIZE, 9));
}
