//! Hooks that come and go while programs run.

use std::{io::Write, time::Instant};

use vtl_testbed::{Host, Link};
use vtl_testing::until;

use crate::harness::{Group, Spoken, World, python3, run, source};

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

/// Connects to a destination that says nothing, which the application gives up, end soon.
#[test]
fn hooks__given_up_connects_end() {
    let Some(mut world) = World::bare("given-up", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_both(&[]);
    let silent = "table inet silent {
        chain in {
            type filter hook input priority 0;
            tcp dport 7000 drop
        }
    }";
    world.filter(Host::Server, silent);
    // By itself the kernel would repeat SYNs for longer than the test waits.
    let retries = world.testbed.command(Host::Client, "sysctl");
    run((retries.expect("a namespace")).args(["-qw", "net.ipv4.tcp_syn_retries=20"]));
    let script = "import socket, sys
for server in sys.argv[1:]:
    for _ in range(3):
        try:
            socket.create_connection((server, 7000), timeout=0.5)
        except TimeoutError:
            pass";
    let servers = world.servers().map(|server| server.to_string());
    let args = ["run", "--", python3(), "-c", script];
    run(world.vtl(Host::Client, &args).args(servers));
    let waiting = || {
        let mut ss = (world.testbed.command(Host::Client, "ss")).expect("a namespace");
        let filter = ["-Htn", "state", "syn-sent"];
        let output = ss.args(filter).output().expect("ss runs");
        String::from_utf8_lossy(&output.stdout).lines().count()
    };
    assert_ne!(waiting(), 0, "vtld connects for them");
    until("they end", || waiting() == 0);
}

/// Sockets that may have another host's address, as those of transparent proxies, are left to TCP.
#[test]
fn hooks__leave_addresses_of_others_alone() {
    let Some(mut world) = World::bare("transparent", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start_both(&[]);
    let count = "table inet seen {
        counter foreign { }
        chain in {
            type filter hook prerouting priority -300;
            ip saddr 192.0.2.9 tcp dport 7000 counter name foreign
        }
    }";
    world.filter(Host::Server, count);
    let script = "import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
s.bind(('192.0.2.9', 0))
s.settimeout(1)
try:
    s.connect((sys.argv[1], 7000))
except TimeoutError:
    pass";
    let server = world.servers()[0].to_string();
    run(&mut world.vtl(
        Host::Client,
        &["run", "--", python3(), "-c", script, &server],
    ));
    let mut nft = world
        .testbed
        .command(Host::Server, "nft")
        .expect("a namespace");
    let output = nft
        .args(["list", "counter", "inet", "seen", "foreign"])
        .output();
    let text = String::from_utf8(output.expect("nft runs").stdout).expect("UTF-8");
    let has_come = text.contains("packets ") && !text.contains("packets 0 ");
    assert!(has_come, "its SYN went elsewhere: {text}");
}
