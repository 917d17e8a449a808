//! Rules, under unmodified programs: `vtl rule`, `/etc/vtl/rules.toml`.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use nix::{sys::signal::Signal, unistd::Gid};
use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::{
    harness::{
        Group, Held, PORT, Process, World, copy_program, refused, same, until, url, vtld, words,
    },
    users::{NOBODY, as_nobody, as_user},
};

const SIZE: usize = 1 << 20;

impl World {
    /// `vtl rule` on the client.
    pub(crate) fn rule(&self, args: &[&str]) -> std::process::Output {
        let mut command = self.vtl(Host::Client, &[&["rule"], args].concat());
        command.output().expect("vtl runs")
    }

    /// The same, to succeed. Returns what it says.
    #[track_caller]
    pub(crate) fn rule_ok(&self, args: &[&str]) -> String {
        let output = self.rule(args);
        assert!(output.status.success(), "{args:?}: {}", words(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// How many connections each rule has matched.
    #[track_caller]
    fn matched(&self) -> Vec<(String, u64)> {
        let listed: Value = serde_json::from_str(&self.rule_ok(&["list", "--json"])).expect("JSON");
        let rules = listed["rules"].as_array().expect("a list");
        let row = |rule: &Value| {
            let name = rule["name"].as_str().expect("a name").to_owned();
            (name, rule["connections"].as_u64().unwrap_or(0))
        };
        rules.iter().map(row).collect()
    }

    /// Has this program download a file, which must be the very bytes, and says which rule it was
    /// that matched. `explain` must say the same.
    #[track_caller]
    fn decides(&self, mut command: Command, to: &Path, wanted: &Path, explain: &[&str]) -> String {
        let before = self.matched();
        let output = Process::piped(&mut command).output();
        assert!(output.status.success(), "{command:?}: {}", words(&output));
        same(wanted, to);
        fs::remove_file(to).expect("there");
        let mut moved = before.iter().zip(self.matched()).filter(|(b, a)| **b != *a);
        let decided = moved.next().map(|((name, _), _)| name.clone());
        assert_eq!(moved.next(), None, "one rule decides");
        let text = self.rule_ok(&[&["explain"], explain].concat());
        let last = text.lines().last().expect("a line");
        match &decided {
            Some(name) => assert!(last.contains(&format!("\"{name}\" decides")), "{text}"),
            None => assert!(last.contains("no rule matches"), "{text}"),
        }
        decided.unwrap_or_default()
    }

    /// An unmodified, unhooked curl on the client.
    pub(crate) fn plain_curl(&self, program: &Path, to: &Path, url: &str) -> Command {
        let mut command = self
            .testbed
            .command(Host::Client, program)
            .expect("a namespace");
        let to = to.to_str().expect("UTF-8");
        command.args(["-sS", "--noproxy", "*", "--fail", "-o", to, url]);
        command
    }
}

#[test]
fn rules__match_what_they_say_and_nothing_else() {
    let Some(mut world) = World::bare("rules", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start_web();
    let file = world.path("rules.toml");
    fs::write(
        &file,
        "# The server's.\n[[rule]]\nname = \"web\"\nlisten = 80\n",
    )
    .expect("written");
    world.start(Host::Server, &["--rules", file.to_str().unwrap()]);
    let file = world.path("etc").join("rules.toml");
    world.start(Host::Client, &["--rules", file.to_str().unwrap()]);
    let wanted = world.serve("f", SIZE);
    let group = Group::new("rules-e2e");
    let curl = Path::new("/usr/bin/curl");
    // A program of its own.
    let copy = world.path("fetch");
    copy_program(curl, &copy);
    let home = world.path("home");
    fs::create_dir(&home).expect("made");
    fs::set_permissions(&home, fs::Permissions::from_mode(0o777)).expect("ours");
    let to = home.join("got");
    let [server, server6] = world.servers();
    let addresses = [server.to_string(), server6.to_string()];
    let port = PORT.to_string();

    // The file comes with its directory.
    assert!(world.rule_ok(&["list"]).contains("no rules"));
    for args in [
        &[
            "add",
            "user",
            "--user",
            "nobody",
            "--port",
            "1-99",
            "--carrier",
            "graft:cubic",
        ][..],
        &[
            "add",
            "group",
            "--cgroup",
            "/rules-e2e",
            "--carrier",
            "tcp:reno",
        ],
        &[
            "add",
            "exe",
            "--exe",
            copy.to_str().unwrap(),
            "--to",
            &addresses[1],
            "--carrier",
            "best",
        ],
        &[
            "add",
            "v4",
            "--to",
            "10.0.0.0/8",
            "--profile",
            "time-and-loss-sensitive",
            "--bypass",
        ],
    ] {
        world.rule_ok(args);
    }
    let written = fs::read_to_string(&file).expect("there");
    fs::write(&file, format!("# Ours.\n{written}")).expect("written");
    world.rule_ok(&["reload"]);

    let urls = [url(server, "f"), url(server6, "f")];
    let dest = [format!("{server}:{port}"), format!("[{server6}]:{port}")];
    for (url, dest) in urls.iter().zip(&dest) {
        let mut command = world.plain_curl(curl, &to, url);
        as_nobody(&mut command, Gid::from_raw(NOBODY));
        let explain = ["--to", dest, "--user", "nobody", "--exe", "/usr/bin/curl"];
        assert_eq!(world.decides(command, &to, &wanted, &explain), "user");
    }
    let grafts = |world: &World| -> Vec<String> {
        let status = world.status(Host::Client);
        let sessions = status["sessions"].as_array().expect("a list");
        // One that is being opened has none.
        let name = |s: &Value| s["graft"].as_str().map(str::to_owned);
        sessions.iter().filter_map(name).collect()
    };
    until("sessions of both families", || {
        grafts(&world) == ["cubic", "cubic"]
    });
    let sorted = |world: &World| {
        let mut all = grafts(world);
        all.sort();
        all
    };

    let within = |program: &Path, url: &str| {
        let mut command = world
            .testbed
            .command(Host::Client, "sh")
            .expect("a namespace");
        let script = format!(
            "echo 0 >{}/cgroup.procs && exec {} -sS --noproxy '*' --fail -o {} {url}",
            group.0.display(),
            program.display(),
            to.display()
        );
        command.args(["-c", &script]);
        command
    };
    let explain = ["--to", &dest[0], "--user", "root", "--cgroup", "/rules-e2e"];
    let command = within(curl, &urls[0]);
    assert_eq!(world.decides(command, &to, &wanted, &explain), "group");

    let script = format!(
        "echo 0 >{}/cgroup.procs && exec bash -c 'exec 3<>/dev/tcp/{server}/{port}; sleep infinity'",
        group.0.display()
    );
    let mut open = world
        .testbed
        .command(Host::Client, "sh")
        .expect("a namespace");
    let open = Process::start(open.args(["-c", &script]));
    until("the application's own socket goes there", || {
        world.controls(Host::Client).contains(&"reno".to_owned())
    });
    drop(open);

    // What sessions are to provide: one of its own.
    let add = ["add", "services", "--user", "1", "--max-delay-ms", "900"];
    world.rule_ok(&[&add[..], &["--prefer", "encryption", "--before", "v4"]].concat());
    let mut command = world.plain_curl(curl, &to, &urls[0]);
    as_user(&mut command, 1, Gid::from_raw(NOBODY));
    let explain = ["--to", &dest[0], "--user", "1"];
    assert_eq!(world.decides(command, &to, &wanted, &explain), "services");
    until("its session", || {
        sorted(&world) == ["cubic", "cubic", "stream"]
    });
    world.rule_ok(&["remove", "services"]);

    let command = world.plain_curl(&copy, &to, &urls[1]);
    let explain = ["--to", &dest[1], "--exe", copy.to_str().unwrap()];
    assert_eq!(world.decides(command, &to, &wanted, &explain), "exe");
    until("its session", || {
        sorted(&world) == ["cubic", "cubic", "stream", "stream"]
    });
    // Replaced by another file of that name: as soon as it is noticed.
    fs::remove_file(&copy).expect("there");
    copy_program(curl, &copy);
    let matched = |name: &str| {
        let all = world.matched();
        all.iter().find(|(n, _)| n == name).expect("there").1
    };
    until("the new file is known", || {
        let before = matched("exe");
        let status = world.plain_curl(&copy, &to, &urls[1]).status();
        assert!(status.expect("it runs").success());
        matched("exe") == before + 1
    });

    let command = world.plain_curl(curl, &to, &urls[0]);
    let explain = ["--to", &dest[0], "--user", "root", "--exe", "/usr/bin/curl"];
    assert_eq!(world.decides(command, &to, &wanted, &explain), "v4");
    let command = world.plain_curl(curl, &to, &urls[1]);
    let explain = ["--to", &dest[1], "--user", "root", "--exe", "/usr/bin/curl"];
    assert_eq!(world.decides(command, &to, &wanted, &explain), "");

    // By hand before rules, whoever the user is; and a process that runs is explained by its number.
    let mut command = world.vtl(
        Host::Client,
        &[
            "run",
            "--carrier",
            "graft:newreno",
            "--",
            "curl",
            "-sS",
            "--noproxy",
            "*",
            "-o",
        ],
    );
    command.arg(&to).arg(&urls[0]);
    let before = world.matched();
    assert!(command.status().expect("vtl runs").success());
    assert_eq!(world.matched(), before);
    until("its session", || {
        grafts(&world).contains(&"newreno".to_owned())
    });
    let mut sleeper = world.vtl(Host::Client, &["run", "--", "sleep", "infinity"]);
    let sleeper = Process::start(&mut sleeper);
    let pid = sleeper.pid().to_string();
    until("it is hooked", || {
        let text = world.rule_ok(&["explain", "--to", &dest[0], "--pid", &pid]);
        text.starts_with("hook ")
    });
    drop(sleeper);

    // Also at the topmost group, where rules were first.
    world.vtl_hook(Host::Client, &["add", "--cgroup", "/", "--carrier", "tcp"]);
    for hooked in [true, false] {
        let before = world.matched();
        let mut command = world.plain_curl(curl, &to, &urls[0]);
        assert!(command.status().expect("it runs").success());
        assert_eq!(world.matched() == before, hooked);
        if hooked {
            world.vtl_hook(Host::Client, &["remove", "--cgroup", "/"]);
        }
    }
    // What a rule serves is its own.
    for verb in ["add", "remove"] {
        let hook = ["hook", verb, "--port", &port];
        let output = world.vtl(Host::Server, &hook).output().expect("vtl runs");
        refused(&output, 1, "rule \"web\" serves port 80");
    }

    // A host's connections to itself are nobody's business.
    let own = world.testbed.addr4(Host::Client).to_string();
    world.rule_ok(&["add", "all", "--carrier", "best", "--before", "user"]);
    for to in ["127.0.0.1", &own] {
        let text = world.rule_ok(&["explain", "--to", &format!("{to}:80")]);
        assert!(text.contains("is local"), "{text}");
        let mut command = world
            .testbed
            .command(Host::Client, "curl")
            .expect("a namespace");
        let status = command.args(["-s", "--noproxy", "*", &format!("http://{to}:80/")]);
        // Refused: 7.
        assert_eq!(status.status().expect("curl runs").code(), Some(7));
    }
    assert_eq!(world.matched()[0], ("all".to_owned(), 0));
    world.rule_ok(&["remove", "all"]);

    // Until their time has come.
    let last = ["--before", "user", "--bypass", "--expires"];
    world.rule_ok(&[&["add", "later"], &last[..], &["1h"]].concat());
    let is_there = || world.matched()[0].0 == "soon";
    // The first one may be over before a busy machine has looked.
    let seen = ["2s", "40s"].iter().any(|time| {
        let _ = world.rule(&["remove", "soon"]);
        world.rule_ok(&[
            "add",
            "soon",
            "--before",
            "later",
            "--bypass",
            "--expires",
            time,
        ]);
        is_there()
    });
    assert!(seen, "it is in force");
    until("it is over", || !is_there());
    let explain = ["--to", &dest[1], "--user", "root"];
    let command = world.plain_curl(curl, &to, &urls[1]);
    assert_eq!(world.decides(command, &to, &wanted, &explain), "later");
    assert!(world.rule_ok(&["list"]).contains("expires"));
    for name in ["soon", "later"] {
        world.rule_ok(&["remove", name]);
    }
    let text = fs::read_to_string(&file).expect("there");
    assert_eq!(text, format!("# Ours.\n{written}"), "as it was");
}

/// Downloads a file twice over one connection: once at once, once when there is a file to say so.
const TWICE: &str = r"
import os, socket, sys, time
host, first, go, second = sys.argv[1:]
s = socket.create_connection((host, 80))
f = s.makefile('rb')
def get(to):
    s.sendall(b'GET /f HTTP/1.1\r\nHost: x\r\n\r\n')
    length = 0
    while (line := f.readline()) != b'\r\n':
        name, _, value = line.partition(b':')
        if name.lower() == b'content-length':
            length = int(value)
    with open(to, 'wb') as out:
        out.write(f.read(length))
get(first)
while not os.path.exists(go):
    time.sleep(0.05)
get(second)
";

#[test]
fn rules__change_under_flows_and_are_refused_whole() {
    let Some(mut world) = World::bare("rules-reload", &Link::new(20.0, 100.0)) else {
        return;
    };
    world.start_web();
    let empty = world.path("none.toml");
    world.start(Host::Server, &["--rules", empty.to_str().unwrap()]);
    world.hook();
    let file = world.path("rules.toml");
    let good = "[[rule]]\nname = \"all\"\ncarrier = \"best\"\n";
    fs::write(&file, good).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("ours");
    world.start(Host::Client, &["--rules", file.to_str().unwrap()]);
    let wanted = world.serve("f", SIZE);
    let (first, second, go) = (world.path("first"), world.path("second"), world.path("go"));
    let mut command = world
        .testbed
        .command(Host::Client, "python3")
        .expect("a namespace");
    command
        .args(["-c", TWICE])
        .arg(world.servers()[0].to_string());
    let mut running = Process::start(command.args([&first, &go, &second]));
    until("the connection is there", || {
        first.metadata().is_ok_and(|m| m.len() == SIZE as u64)
    });

    // Bad in the last rule: nothing of it counts.
    let daemon = world.daemon(Host::Client).pid();
    for (bad, line, column, about) in [
        (
            "\n[[rule]]\nname = \"b\"\nport = 70000\nbypass = true\n",
            7,
            8,
            "1 to 65535",
        ),
        (
            "\n[[rule]]\nname = \"b\"\ncarrier = \"tcp:nothing\"\n",
            7,
            11,
            "tcp:hybla",
        ),
        (
            "\n[[rule]]\nname = \"b\"\ncarrier = \"graft:udp\"\n",
            7,
            11,
            "it lacks",
        ),
        (
            "\n[[rule]]\nname = \"b\"\nuser = \"x y\"\nbypass = true\n",
            7,
            8,
            "no user",
        ),
        ("\n[[rule]\n", 5, 1, ""),
    ] {
        fs::write(
            &file,
            format!("[[rule]]\nname = \"c\"\nbypass = true\n{bad}"),
        )
        .expect("written");
        let output = world.rule(&["reload"]);
        let place = format!("{}:{line}:", file.display());
        refused(&output, 1, &place);
        if !about.is_empty() {
            refused(&output, 1, &format!("{place}{column}: "));
            refused(&output, 1, about);
        }
        // Nor is it changed further.
        assert!(!world.rule(&["add", "d", "--bypass"]).status.success());
        assert_eq!(world.matched(), [("all".to_owned(), 1)]);
    }
    // The daemon goes on after a signal as well, and says why in its log.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon as i32), Signal::SIGHUP)
        .expect("signalled");
    let log = world.log_path(Host::Client);
    until("it says so", || {
        fs::read_to_string(&log).is_ok_and(|log| log.contains("rules: stay as they were"))
    });

    // Changed, and changed again, while the flow goes on.
    fs::write(&file, good).expect("written");
    world.rule_ok(&["add", "b", "--port", "1-9", "--bypass", "--before", "all"]);
    assert_eq!(world.matched()[1], ("all".to_owned(), 1), "it counts on");
    world.rule_ok(&["remove", "all"]);
    let mode = file.metadata().expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    let listed = world.rule_ok(&["list"]);
    assert!(
        listed.contains("bypass") && !listed.contains("all"),
        "{listed}"
    );
    assert!(running.ended().is_none(), "the connection is open");
    fs::write(&go, "").expect("written");
    assert!(running.wait().success());
    same(&wanted, &first);
    same(&wanted, &second);
    // The beginning went by TCP.
    assert!(world.sum(Host::Client, "bytes_received") >= SIZE as u64);

    // Not for others.
    let group = Gid::from_raw(NOBODY);
    let copy = |args: &[&str]| world.vtl_as(Host::Client, group, args);
    refused(
        &copy(&["rule", "list"]).output().expect("vtl runs"),
        77,
        "members",
    );

    // At the start a bad file is no file to start with.
    fs::write(&file, "[[rule]]\nnmae = \"x\"\n").expect("written");
    let daemon = world.take_daemon(Host::Client);
    let held = Held::by(daemon.pid());
    daemon.kill();
    held.assert_gone();
    let mut command = world
        .testbed
        .command(Host::Client, vtld())
        .expect("a namespace");
    command.arg("--rules").arg(&file).env("VTL_LOG", "error");
    let output = Process::piped(&mut command).output();
    refused(&output, 1, &format!("{}:2:1: ", file.display()));
}
