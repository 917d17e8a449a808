//! The examples, as their comments say how to run them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use vtl_testbed::Host;

use crate::{
    harness::{Process, World, bad_link, example, library, payload, ready, repository, run, until},
    python::python,
};

fn world(name: &str) -> Option<World> {
    World::with_daemons(name, &bad_link())
}

/// An example on a host, with its daemon.
fn on(world: &World, host: Host, program: &Path) -> Command {
    let mut command = world.testbed.command(host, program).expect("there");
    command.env("VTL_SOCKET", world.socket(host));
    command
}

#[test]
fn async_echo__many_sessions_at_once() {
    let Some(world) = world("x-async") else {
        return;
    };
    let program = example("async_echo");
    let mut server = on(&world, Host::Server, &program);
    let mut serving = Process::start(server.args(["serve", "8"]).stdout(Stdio::piped()));
    ready(serving.child());
    let mut client = on(&world, Host::Client, &program);
    let address = world.servers()[0].to_string();
    let mut client = Process::start(client.args([&address, "8", "1000000"]));
    assert!(client.wait().success());
    assert!(serving.wait().success());
}

#[test]
fn echo__measures_round_trips() {
    let Some(world) = world("x-echo") else {
        return;
    };
    let program = example("echo");
    let mut serving = Process::start(on(&world, Host::Server, &program).arg("serve"));
    let address = world.servers()[1].to_string();
    until("the echo serves", || {
        world.status(Host::Server)["listeners"][0].is_number()
    });
    let client = on(&world, Host::Client, &program)
        .args(["ping", &address, "50"])
        .output()
        .expect("it runs");
    let line = String::from_utf8_lossy(&client.stdout);
    assert!(
        client.status.success() && line.contains("\"count\":50"),
        "{line}"
    );
    serving.wait();
}

/// A program of `examples/`, compiled with the flags that pkg-config knows.
fn compile(world: &World, name: &str) -> PathBuf {
    let program = world.path(name);
    let library = library();
    let flags = Command::new("pkg-config")
        .args(["--cflags", "--libs", "vtl"])
        .env("PKG_CONFIG_PATH", library)
        .output()
        .expect("pkg-config runs");
    let flags = String::from_utf8_lossy(&flags.stdout).into_owned();
    assert!(flags.contains("-lvtl"), "{flags}");
    run(Command::new("cc")
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-o",
        ])
        .arg(&program)
        .arg(repository().join(format!("examples/{name}.c")))
        // It is not where it will be installed.
        .arg("-I")
        .arg(repository().join("include"))
        .arg("-L")
        .arg(library)
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .args(flags.split_whitespace()));
    program
}

#[test]
fn streaming__text_image_and_video() {
    let Some(world) = world("x-stream") else {
        return;
    };
    let [server, client] = ["stream_server", "stream_client"].map(|name| compile(&world, name));
    for (name, size, exact) in [
        ("letter.txt", 4 << 10, true),
        ("picture.png", 300 << 10, true),
        ("film.mp4", 2 << 20, false),
    ] {
        let (file, got) = (world.path(name), world.path(&format!("got-{name}")));
        let bytes = payload(size, 3);
        std::fs::write(&file, &bytes).expect("written");
        let mut receive = on(&world, Host::Server, &client);
        receive.arg("7001").arg(&got).stdout(Stdio::piped());
        let mut receiving = Process::start(&mut receive);
        ready(receiving.child());
        let mut send = on(&world, Host::Client, &server);
        let to = world.servers()[usize::from(exact)];
        let to = std::net::SocketAddr::new(to, 7001).to_string();
        let sent = Process::piped(send.arg(&file).arg(to)).output();
        let words = String::from_utf8_lossy(&sent.stderr);
        assert!(sent.status.success(), "{name}: {words}");
        assert!(receiving.wait().success(), "{name}");
        let got = std::fs::read(&got).expect("written");
        if exact {
            assert!(got == bytes, "{name} is not what was sent");
            continue;
        }
        let here = got.iter().zip(&bytes).filter(|(a, b)| a == b).count();
        assert!(here * 100 >= size * 94, "{name}: {here} of {size} bytes");
    }
}

/// Who chats; gone with the test.
struct Talker(std::process::Child);

impl Drop for Talker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn chat__everybody_hears_everybody_in_order() {
    use std::io::Write;
    let Some(world) = world("x-chat") else {
        return;
    };
    let python = python();
    let script = repository().join("examples/chat.py");
    let chat = |host: Host, args: &[&str]| {
        let mut command = on(&world, host, python);
        command.arg(&script).args(args).stdout(Stdio::piped());
        command
    };
    let mut serving = Process::start(&mut chat(Host::Server, &["serve"]));
    ready(serving.child());
    let address = world.servers()[0].to_string();
    let mut talkers = Vec::new();
    for (name, host) in [("ann", Host::Client), ("bob", Host::Client)] {
        let output = std::fs::File::create(world.path(name)).expect("a file");
        let mut command = chat(host, &[name, &address]);
        command.stdin(Stdio::piped()).stdout(output);
        talkers.push((name, Talker(command.spawn().expect("it runs"))));
    }
    let said = |name: &str| std::fs::read_to_string(world.path(name)).unwrap_or_default();
    for (name, _) in &talkers {
        until("a session", || said(name).contains("over "));
    }
    // Whoever has sent something is known to have been accepted.
    for i in 0..20 {
        for (name, talker) in &mut talkers {
            let mut input = talker.0.stdin.as_ref().expect("piped");
            writeln!(input, "{i} of {name}").expect("it listens");
        }
    }
    for (listener, _) in &talkers {
        for (speaker, _) in &talkers {
            let last = format!("{speaker}: 19 of {speaker}");
            until(&last, || said(listener).contains(&last));
            let mut at = 0;
            let text = said(listener);
            for line in text.lines().filter(|l| l.starts_with(*speaker)) {
                let number: usize = line
                    .split([' ', ':'])
                    .find_map(|w| w.parse().ok())
                    .expect("a number");
                assert!(number >= at, "{text}");
                at = number + 1;
            }
        }
    }
    for (_, mut talker) in talkers {
        drop(talker.0.stdin.take());
        assert!(talker.0.wait().expect("it ends").success());
    }
}
