//! What peers can have a host keep: no more than it was told to, and what it has accepted still arrives.

use std::io::Write;

use vtl_testbed::{Host, Link};

use crate::harness::{Spoken, World, memory_kib, python3, repository, run, until};

const PORT: u16 = 7000;
/// MiB of `vtld --flow-memory`, which lets one association have a quarter.
const MEMORY: &str = "64";
/// KiB that a daemon may grow by: that quarter, twice, as allocators round up.
const GROWTH: u64 = (2 * 16) << 10;

/// Fills connections that a server does not read, and looks what its daemon holds of them; then it reads.
fn fill(name: &str, carrier: &str, is_bounded: bool) -> u64 {
    let Some(mut world) = World::bare(name, &Link::new(2.0, 1000.0)) else {
        return 0;
    };
    let memory = if is_bounded { MEMORY } else { "65536" };
    // Small rings, whose memory counts as resident.
    world.start_both(&["--flow-memory", memory, "--ring-slots", "64"]);
    world.hook_port(PORT);
    // The kernel shall keep little in the daemon's place.
    for (host, buffer) in [
        (Host::Client, "rmem"),
        (Host::Client, "wmem"),
        (Host::Server, "rmem"),
        (Host::Server, "wmem"),
    ] {
        let setting = format!("net.ipv4.tcp_{buffer}=4096 65536 131072");
        let sysctl = world.testbed.command(host, "sysctl");
        run(sysctl.expect("a namespace").args(["-qw", &setting]));
    }
    let program = repository().join("tests/e2e/attacks/memory.py");
    let program = program.to_str().expect("UTF-8");
    let [server, _] = world.servers();
    let mut serve = world
        .testbed
        .command(Host::Server, python3())
        .expect("a namespace");
    serve.args([program, "serve", &PORT.to_string()]);
    let mut serving = Spoken::start(serve);
    assert_eq!(serving.line(), "ready");
    let before = memory_kib(world.daemon(Host::Server).pid());
    let send = [
        "run",
        "--carrier",
        carrier,
        "--",
        python3(),
        program,
        "send",
        &server.to_string(),
        &PORT.to_string(),
    ];
    let mut sending = Spoken::start(world.vtl(Host::Client, &send));
    assert_eq!(serving.line(), "accepted");
    assert_eq!(sending.line(), "stuck");
    let grown = memory_kib(world.daemon(Host::Server).pid()).saturating_sub(before);
    println!("{carrier}: {grown} KiB");
    if is_bounded {
        assert!(grown < GROWTH, "{grown} KiB");
        until("it says so", || {
            let log = std::fs::read_to_string(world.log_path(Host::Server));
            log.is_ok_and(|log| log.contains("memory limit reached"))
        });
    }
    // Nothing that was taken is lost.
    writeln!(serving.told).expect("a pipe");
    assert_eq!(serving.line(), "good 60");
    assert_eq!(sending.line(), "sent");
    until("every flow has ended", || {
        world.sum(Host::Server, "flows") == 0
    });
    grown
}

#[test]
fn memory__of_applications_that_do_not_read_is_bounded() {
    for carrier in ["graft", "quic", "sctp"] {
        fill("memory", carrier, true);
    }
}

#[test]
#[ignore = "what memory.rs is about: without a bound"]
fn memory__without_bound() {
    for carrier in ["graft", "quic", "sctp"] {
        assert!(fill("memory", carrier, false) > GROWTH);
    }
}
