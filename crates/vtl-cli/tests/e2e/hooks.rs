//! Hooks that come and go while programs run.

use std::{
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use vtl_testbed::{Host, Link};

use crate::{
    process::{Group, Process},
    world::World,
};

const PORT: &str = "7000";
const TALK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/hooks.py");

/// `hooks.py`.
struct Talk {
    _process: Process,
    told: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Talk {
    fn start(mut command: Command) -> Self {
        let both = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start_reading(both);
        let told = process.child().stdin.take().expect("piped");
        let says = BufReader::new(process.child().stdout.take().expect("piped"));
        Self {
            _process: process,
            told,
            says,
        }
    }

    #[track_caller]
    fn is_ok(&mut self) {
        let mut line = String::new();
        self.says.read_line(&mut line).expect("a pipe");
        assert_eq!(line, "ok\n");
    }

    #[track_caller]
    fn told(&mut self, order: &str) {
        writeln!(self.told, "{order}").expect("it runs");
        self.is_ok();
    }
}

/// `vtl hook` at one of the hosts, and how long it took.
#[track_caller]
fn hook(world: &World, host: Host, args: &[&str]) {
    let begin = Instant::now();
    world.vtl_hook(host, args);
    println!("vtl hook {args:?}: {:?}", begin.elapsed());
}

#[test]
fn hooks__leave_open_connections_alone() {
    let group = Group::new("hooks-e2e");
    for family in [0, 1] {
        let Some(mut world) = World::bare("hooks", &Link::new(0.0, 0.0)) else {
            return;
        };
        let server = world.servers()[family].to_string();
        let command = |host, script: &str| {
            let mut command = world.testbed.command(host, "sh").expect("a namespace");
            command.args(["-c", script]);
            command
        };
        let serve = format!("exec python3 {TALK} serve {server} {PORT}");
        let mut at_server = Talk::start(command(Host::Server, &serve));
        at_server.is_ok();
        // Before there is a daemon.
        let group = group.0.display();
        let call =
            format!("echo 0 >{group}/cgroup.procs && exec python3 {TALK} call {server} {PORT}");
        let mut talk = Talk::start(command(Host::Client, &call));
        talk.told("open before");
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
        hook(&world, Host::Server, &["add", "--port", PORT]);
        hook(
            &world,
            Host::Client,
            &["add", "--cgroup", &group.to_string()],
        );
        talk.told("talk before");
        let carried = |count: u64| {
            for host in [Host::Client, Host::Server] {
                assert_eq!(world.sum(host, "flows"), count, "{host:?}");
            }
        };
        carried(0);
        talk.told("open carried");
        talk.told("talk carried");
        carried(1);
        hook(
            &world,
            Host::Client,
            &["remove", "--cgroup", &group.to_string()],
        );
        talk.told("open after");
        for name in ["before", "carried", "after"] {
            talk.told(&format!("talk {name}"));
        }
        carried(1);
        hook(&world, Host::Server, &["remove", "--port", PORT]);
        hook(
            &world,
            Host::Client,
            &["add", "--cgroup", &group.to_string()],
        );
        talk.told("open unheard");
        for name in ["before", "carried", "after", "unheard"] {
            talk.told(&format!("talk {name}"));
        }
        carried(1);
        for name in ["before", "carried", "after", "unheard"] {
            talk.told(&format!("end {name}"));
        }
    }
}
