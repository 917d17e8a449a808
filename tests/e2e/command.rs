//! The `vtl` command as its users meet it: what it prints and how it exits.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use vtl_testing::turn;

use crate::harness::{copy_program, until, vtl as program};

fn vtl(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(args)
        .env_remove("VTL_SOCKET")
        .stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    vtl(args).output().expect("vtl starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A directory of this test's own, empty.
fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("directory made");
    path
}

#[test]
fn daemon_commands__without_daemon_say_so_and_exit_69() {
    for args in [
        &["status"][..],
        &["graft", "list"],
        &["hook", "add", "--port", "80"],
        &["run", "--", "true"],
    ] {
        let out = output(&[&["--socket", "/nonexistent/vtld.sock"], args].concat());
        assert_eq!(out.status.code(), Some(69), "{args:?}");
        let words = stderr(&out);
        assert!(words.contains("/nonexistent/vtld.sock"), "{words}");
        assert_eq!(words.lines().count(), 1, "{words}");
    }
}

#[test]
fn usage__errors_exit_2() {
    for args in [
        &["hook", "add"][..],
        &["hook", "add", "--port", "0"],
        &["run"],
        &["no-such"],
    ] {
        assert_eq!(output(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn doctor__json_names_every_check() {
    let out = output(&["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let verdict = report["verdict"].as_str().expect("verdict");
    let status = match verdict {
        "ready" => 0,
        "unfit" => 1,
        _ => 77,
    };
    assert_eq!(out.status.code(), Some(status), "{verdict}");
    let checks = report["checks"].as_array().expect("checks");
    for name in [
        "kernel",
        "tcx",
        "connect-hook",
        "xdp-live-frames",
        "clang-19",
    ] {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}");
    }
}

#[test]
fn man__writes_a_page_for_each_subcommand() {
    let dir = scratch("man");
    assert!(
        output(&["man", dir.to_str().expect("UTF-8")])
            .status
            .success()
    );
    for page in ["vtl.1", "vtl-hook-add.1", "vtl-demo.1", "vtl-bench-run.1"] {
        assert!(dir.join(page).exists(), "{page}");
    }
}

#[test]
fn lab__is_found_in_the_path_and_missed_in_one_sentence() {
    let directory = scratch("lab");
    copy_program(program(), directory.join("vtl"));
    let run = |path: &std::path::Path, args: &[&str]| {
        let mut command = Command::new(directory.join("vtl"));
        command.args(args).env("PATH", path).stdin(Stdio::null());
        command.output().expect("vtl starts")
    };
    for args in [
        &["bench", "--help"][..],
        &["help", "testbed", "up"],
        &["demo"],
    ] {
        let out = run(&directory, args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        let words = stderr(&out);
        assert!(
            words.contains("vtl-lab") && words.contains("make install"),
            "{words}"
        );
        assert_eq!(words.lines().count(), 1, "{words}");
    }
    // What can be said without it is.
    assert!(run(&directory, &["completions", "bash"]).status.success());
    let built = program();
    let out = run(
        built.parent().expect("a directory"),
        &["bench", "run", "--help"],
    );
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("Usage: vtl bench run"), "{text}");
    for socket in [&["--socket", "s"][..], &["--socket=s"], &[]] {
        let args = [socket, &["help", "bench", "run"]].concat();
        let out = run(built.parent().expect("a directory"), &args);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("Usage: vtl bench run"), "{args:?}: {text}");
    }
    // Arguments pass as they are, and a wrong one is what it was.
    let out = run(
        built.parent().expect("a directory"),
        &["testbed", "exec", "client", "--"],
    );
    assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
}

#[test]
fn demo__without_root_names_the_cure() {
    // Below root's home, say, nobody else may run it.
    let copy = std::env::temp_dir().join(format!("vtl-demo-test-{}", std::process::id()));
    std::fs::create_dir(&copy).expect("a directory");
    for name in ["vtl", "vtl-lab"] {
        copy_program(program().with_file_name(name), copy.join(name));
    }
    let mut command = Command::new(copy.join("vtl"));
    command.arg("demo").stdin(Stdio::null());
    if nix::unistd::geteuid().is_root() {
        use std::os::unix::process::CommandExt;
        command.uid(65534).gid(65534);
    }
    let out = command.output().expect("vtl starts");
    std::fs::remove_dir_all(copy).expect("ours");
    assert_eq!(out.status.code(), Some(77));
    assert!(stderr(&out).contains("sudo"), "{}", stderr(&out));
}

#[test]
fn demo__downloads_intact_and_leaves_nothing_behind() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    for family in ["--ipv6", "--seed=2"] {
        let dir = scratch("demo");
        let json = dir.join("rows.json");
        let out = vtl(&[
            "demo",
            "--only=tcp-bbr",
            "--size=2000000",
            family,
            "--rtt=20",
            "--out",
        ])
        .arg(&dir)
        .arg("--json")
        .arg(&json)
        .output()
        .expect("vtl starts");
        assert!(out.status.success(), "{}", stderr(&out));
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let last = text.lines().next_back().unwrap_or_default();
        assert!(last.starts_with("demo: tcp-bbr "), "{last}");
        assert!(last.ends_with(" Mbit/s, sha256 ok"), "{last}");
        assert!(dir.join("goodput.png").exists());
        let report: Value =
            serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
        assert_eq!(report["rows"][0]["intact"], true);
        assert_eq!(report["rows"][0]["bytes"], 2_000_000);
    }
}

#[test]
fn demo__interrupted_leaves_nothing_behind() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    let dir = scratch("interrupted");
    let child = vtl(&["demo", "--only=tcp-cubic", "--out"])
        .arg(&dir)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("vtl starts");
    let pid = child.id();
    let namespace = PathBuf::from(format!("/run/netns/demo-{pid}-client"));
    until("the demo's testbed is there", || namespace.exists());
    // Somewhere in the middle: no moment may matter.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let target = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGINT).expect("signalled");
    let out = child.wait_with_output().expect("ends");
    assert_eq!(out.status.code(), Some(130), "{}", stderr(&out));
    assert!(!namespace.exists());
    assert!(
        !std::env::temp_dir()
            .join(format!("vtl-demo-{pid}"))
            .exists()
    );
}
