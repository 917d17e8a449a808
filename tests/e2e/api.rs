//! The C library, as programs in C use it: `crates/vtl-c/tests/api.c`, compiled and linked in the
//! ways that there are.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, bad_link, library, ready, repository, run};

/// Sessions that the client opens.
const SESSIONS: &str = "4";

/// How a program is made.
#[derive(Clone, Copy)]
pub(crate) enum Build {
    /// gcc, the static library, and sanitizers.
    Checked,
    /// clang, the shared library.
    Shared,
}

pub(crate) fn compile(world: &World, build: Build) -> PathBuf {
    let library = library();
    let (name, compiler) = match build {
        Build::Checked => ("api-checked", "gcc"),
        Build::Shared => ("api-shared", "clang-19"),
    };
    let program = world.path(name);
    let mut command = Command::new(compiler);
    command
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-g",
            "-I",
        ])
        .arg(repository().join("include"))
        .arg(repository().join("crates/vtl-c/tests/api.c"))
        .arg("-o")
        .arg(&program);
    match build {
        Build::Checked => command
            .arg("-fsanitize=address,undefined")
            .arg(library.join("libvtl.a"))
            .args(["-lgcc_s", "-lpthread", "-lm", "-ldl"]),
        Build::Shared => command
            .arg("-L")
            .arg(library)
            .arg("-lvtl")
            .arg("-lpthread")
            .arg(format!("-Wl,-rpath,{}", library.display())),
    };
    run(&mut command);
    program
}

/// Four sessions of a client with a server.
fn check(name: &str, server: (Build, &str), client: Build, link: &Link, under: &[&str]) {
    let Some(world) = World::with_daemons(name, link) else {
        return;
    };
    let serving = compile(&world, server.0);
    let using = compile(&world, client);
    for address in world.servers() {
        let mut command = world
            .testbed
            .command(Host::Server, &serving)
            .expect("there");
        command
            .args([server.1, SESSIONS])
            .env("VTL_SOCKET", world.socket(Host::Server))
            .stdout(Stdio::piped());
        let mut serving = Process::start(&mut command);
        ready(serving.child());
        let program = under.first().map_or(using.as_path(), Path::new);
        let mut command = world.testbed.command(Host::Client, program).expect("there");
        if let Some((_, args)) = under.split_first() {
            command.args(args).arg(&using);
        }
        command
            .arg(address.to_string())
            .env("VTL_SOCKET", world.socket(Host::Client));
        if !under.is_empty() {
            // Valgrind takes what AES-GCM in assembly computes on its stack for uninitialised.
            command.env("CLEAR", "1");
        }
        let client = Process::piped(&mut command).output();
        let words = String::from_utf8_lossy(&client.stderr);
        assert!(client.status.success(), "{address}: {words}");
        assert!(serving.wait().success(), "the server, of {address}");
    }
}

#[test]
fn c__blocking_server_and_clients_in_every_way() {
    let server = (Build::Shared, "serve-blocking");
    check("c-blocking", server, Build::Checked, &bad_link(), &[]);
}

#[test]
fn c__polled_server_and_clients_in_every_way() {
    let server = (Build::Checked, "serve-polled");
    check("c-polled", server, Build::Shared, &bad_link(), &[]);
}

#[test]
fn c__valgrind_finds_nothing() {
    let server = (Build::Shared, "serve-blocking");
    let valgrind = [
        "valgrind",
        "--quiet",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
        "--error-exitcode=9",
    ];
    let link = Link::new(2.0, 100.0);
    check("c-valgrind", server, Build::Shared, &link, &valgrind);
}

#[test]
fn header__is_c_plus_plus_too() {
    let mut command = Command::new("clang-19");
    command.args(["-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror"]);
    run(command
        .args(["-fsyntax-only", "-nostdinc++"])
        .arg(repository().join("include/vtl.h")));
}

#[test]
fn library__exports_versioned_symbols_and_nothing_else() {
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--with-symbol-versions"])
        .arg(library().join("libvtl.so"))
        .output()
        .expect("nm runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let header = std::fs::read_to_string(repository().join("include/vtl.h")).expect("there");
    let mut count = 0;
    for name in text.lines().filter_map(|line| line.split(' ').nth(2)) {
        let Some(function) = name.strip_suffix("@@VTL_0.1") else {
            assert!(name.starts_with("VTL_0.1"), "{name}");
            continue;
        };
        assert!(header.contains(&format!("{function}(")), "{function}");
        count += 1;
    }
    assert_eq!(count, 21, "{text}");
}
