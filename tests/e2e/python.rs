//! The Python package: built as a wheel, installed by pip into an environment of its own, and used
//! by `python/tests/check.py`.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use vtl_testbed::Host;

use crate::harness::{Process, World, archive, bad_link, ready, repository, run};

/// The interpreter of an environment with the wheel.
pub(crate) fn python() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
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
                .arg(path)
                .env("VTL_ARCHIVE", archive()));
        };
        let to = wheels.to_str().expect("UTF-8");
        let package = repository().join("python");
        pip(&["wheel", "--no-index", "--wheel-dir", to], &package);
        let wheel = std::fs::read_dir(&wheels).expect("made").next();
        let wheel = wheel.expect("one").expect("readable").path();
        pip(&["install", "--no-index"], &wheel);
        python
    })
}

fn check(name: &str, server: &str) {
    let Some(world) = World::with_daemons(name, &bad_link()) else {
        return;
    };
    let python = python();
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
        let client = Process::piped(&mut on(Host::Client, &address.to_string())).output();
        let words = String::from_utf8_lossy(&client.stderr);
        assert!(client.status.success(), "{address}: {words}");
        // It may have to find out by itself that a client is gone.
        assert!(serving.wait().success(), "the server, of {address}");
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
