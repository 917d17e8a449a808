//! Hooks that come and go while programs run.

use std::{io::Write, time::Instant};

use vtl_testbed::{Host, Link};
use vtl_testing::until;

use crate::harness::{Group, Spoken, World, python3, source};

const PORT: &str = "7000";

/// Has `hooks.py` do something.
#[track_caller]
fn tell(program: &mut Spoken, order: &str) {
    writeln!(program.told, "{order}").expect("it runs");
    assert_eq!(program.line(), "ok");
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
        let program = format!("{} {}", python3(), source("programs/hooks.py").display());
        let serve = format!("exec {program} serve {server} {PORT}");
        let mut at_server = Spoken::start(command(Host::Server, &serve));
        assert_eq!(at_server.line(), "ok");
        // Before there is a daemon.
        let group = group.0.display();
        let call = format!("echo 0 >{group}/cgroup.procs && exec {program} call {server} {PORT}");
        let mut talk = Spoken::start(command(Host::Client, &call));
        tell(&mut talk, "open before");
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
        hook(&world, Host::Server, &["add", "--port", PORT]);
        hook(
            &world,
            Host::Client,
            &["add", "--cgroup", &group.to_string()],
        );
        tell(&mut talk, "talk before");
        // Each host moves its direction once it has heard of the carrier: turns may go by TCP before.
        let carried = |count: u64| {
            for host in [Host::Client, Host::Server] {
                until(&format!("{host:?} carries {count}"), || {
                    let flows = world.sum(host, "flows");
                    assert!(flows <= count, "{host:?} carries {flows}");
                    flows == count
                });
            }
        };
        carried(0);
        tell(&mut talk, "open carried");
        tell(&mut talk, "talk carried");
        carried(1);
        hook(
            &world,
            Host::Client,
            &["remove", "--cgroup", &group.to_string()],
        );
        tell(&mut talk, "open after");
        for name in ["before", "carried", "after"] {
            tell(&mut talk, &format!("talk {name}"));
        }
        carried(1);
        hook(&world, Host::Server, &["remove", "--port", PORT]);
        hook(
            &world,
            Host::Client,
            &["add", "--cgroup", &group.to_string()],
        );
        tell(&mut talk, "open unheard");
        for name in ["before", "carried", "after", "unheard"] {
            tell(&mut talk, &format!("talk {name}"));
        }
        carried(1);
        for name in ["before", "carried", "after", "unheard"] {
            tell(&mut talk, &format!("end {name}"));
        }
    }
}
