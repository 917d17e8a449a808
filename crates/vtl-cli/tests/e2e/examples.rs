//! The examples, as their comments say how to run them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use vtl_testbed::Host;

use crate::{
    api::ready,
    process::Process,
    world::{VTL, World, bad_link},
};

/// An example in Rust; `None` if it is not built, as by `cargo test -p vtl-cli`.
fn example(name: &str) -> Option<PathBuf> {
    let path = Path::new(VTL).with_file_name("examples").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("{name}: skipped: not built: cargo build --release --workspace --examples");
    None
}

fn world(name: &str) -> Option<World> {
    let mut world = World::bare(name, &bad_link())?;
    world.start(Host::Server, &[]);
    world.start(Host::Client, &[]);
    Some(world)
}

/// An example on a host, with its daemon.
fn on(world: &World, host: Host, program: &Path) -> Command {
    let mut command = world.testbed.command(host, program).expect("there");
    command.env("VTL_SOCKET", world.socket(host));
    command
}

#[test]
fn async_echo__many_sessions_at_once() {
    let (Some(program), Some(world)) = (example("async_echo"), world("x-async")) else {
        return;
    };
    let mut server = on(&world, Host::Server, &program);
    let mut serving = Process::start(server.args(["serve", "8"]).stdout(Stdio::piped()));
    ready(serving.child());
    let mut client = on(&world, Host::Client, &program);
    let address = world.servers()[0].to_string();
    let mut client = Process::start(client.args([&address, "8", "1000000"]));
    assert!(client.wait(120).success());
    assert!(serving.wait(30).success());
}
