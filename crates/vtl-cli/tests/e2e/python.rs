//! The Python package: built as a wheel, installed by pip into an environment of its own, and used
//! by `python/tests/check.py`.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use vtl_testbed::Host;

use crate::{
    api::{ready, repository, run},
    process::Process,
    world::{World, bad_link},
};

/// The interpreter of an environment with the wheel; `None` where there cannot be one.
pub(crate) fn python() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let venv = Command::new("python3")
            .args(["-c", "import venv, ensurepip"])
            .output();
        if !venv.is_ok_and(|output| output.status.success()) {
            return None;
        }
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
        let _ = std::fs::remove_dir_all(&directory);
        let wheels = directory.join("wheels");
        let python = directory.join("venv/bin/python");
        run(Command::new("python3")
            .args(["-m", "venv"])
            .arg(directory.join("venv")));
        let pip = |args: &[&str], path: &Path| {
            run(Command::new(&python)
                .args(["-m", "pip", "--quiet", "--disable-pip-version-check"])
                .args(args)
                .arg(path));
        };
        let to = wheels.to_str().expect("UTF-8");
        let package = repository().join("python");
        pip(&["wheel", "--no-index", "--wheel-dir", to], &package);
        let wheel = std::fs::read_dir(&wheels).expect("made").next();
        let wheel = wheel.expect("one").expect("readable").path();
        pip(&["install", "--no-index"], &wheel);
        Some(python)
    });
    if made.is_none() {
        println!("skipped: python3 has no venv (apt install python3-venv)");
    }
    made.as_deref()
}

fn check(name: &str, server: &str) {
    let Some(python) = python() else {
        return;
    };
    let Some(mut world) = World::bare(name, &bad_link()) else {
        return;
    };
    world.start(Host::Server, &[]);
    world.start(Host::Client, &[]);
    let program = repository().join("python/tests/check.py");
    for address in world.servers() {
        let on = |host: Host, what: &str| {
            let mut command = world.testbed.command(host, python).expect("there");
            command
                .args(["-X", "dev", "-W", "error"])
                .arg(&program)
                .arg(what)
                .env("VTL_SOCKET", world.socket(host));
            command
        };
        let mut serving = Process::start(on(Host::Server, server).stdout(Stdio::piped()));
        ready(serving.child());
        let client = Process::piped(&mut on(Host::Client, &address.to_string())).output(120);
        let words = String::from_utf8_lossy(&client.stderr);
        assert!(client.status.success(), "{address}: {words}");
        // It may have to find out by itself that a client is gone.
        assert!(serving.wait(60).success(), "the server, of {address}");
    }
}

#[test]
fn python__blocking_server_and_clients_in_every_way() {
    check("py-blocking", "serve-blocking");
}

#[test]
fn python__asyncio_server_and_clients_in_every_way() {
    check("py-asyncio", "serve-asyncio");
}
