//! `vtl testbed` as its users meet it: what it prints, how it exits, and that nothing stays behind.

#![allow(non_snake_case, reason = "tests are named `function__case`")]

use std::process::{Command, Output};

use vtl_testbed::{Error, Host, Testbed};
use vtl_testing::{gone, remains, turn_alone, until};

fn vtl(name: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vtl-lab"))
        .args(["testbed", "--name", name])
        .args(args)
        .output()
        .expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn command_line__up_exec_set_status_down() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn_alone();
    let name = "t-life-cli";
    vtl(name, &["down"]);
    let missing = vtl(name, &["exec", "client", "--", "true"]);
    assert_eq!(
        text(&missing.stderr),
        format!("vtl: there is no testbed \"{name}\": run `vtl testbed up --name {name}` first\n")
    );

    let up = vtl(name, &["up", "--profile", "campus", "--loss", "1"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let again = vtl(name, &["up"]);
    assert!(!again.status.success());
    assert_eq!(
        text(&again.stderr),
        format!(
            "vtl: the testbed \"{name}\" is already up: run `vtl testbed down --name {name}` first\n"
        )
    );

    assert_eq!(
        vtl(name, &["exec", "server", "--", "sh", "-c", "exit 7"])
            .status
            .code(),
        Some(7)
    );
    let env = vtl(
        name,
        &[
            "exec",
            "client",
            "--",
            "sh",
            "-c",
            "echo $VTL_TESTBED $VTL_SOCKET",
        ],
    );
    assert_eq!(
        text(&env.stdout),
        format!("{name} /run/vtl/{name}-client.sock\n")
    );

    assert!(vtl(name, &["set", "--rtt", "30"]).status.success());
    let status: serde_json::Value =
        serde_json::from_slice(&vtl(name, &["status", "--json"]).stdout).expect("JSON");
    assert_eq!(status["link"]["rtt_ms"], 30.0);
    assert_eq!(status["link"]["loss_pct"], 1.0);
    assert!(status["stats"]["up"]["rx_packets"].is_u64());
    let wrong = vtl(name, &["set", "--loss", "120"]);
    assert_eq!(
        text(&wrong.stderr),
        "vtl: bad link: loss of 120 % is not between 0 and 100\n"
    );

    // A process left inside is ended, too.
    let mut inside = Testbed::attach(name)
        .and_then(|t| t.command(Host::Server, "sleep"))
        .expect("a command")
        .arg("1000")
        .spawn()
        .expect("runs");
    assert!(vtl(name, &["down"]).status.success());
    assert!(!inside.wait().expect("ended").success());
    gone(name);
    assert_eq!(
        text(&vtl(name, &["down"]).stdout),
        format!("{name}: there was none\n")
    );
}

#[test]
fn up__sweeps_what_a_dead_emulator_left() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn_alone();
    let name = "t-life-sweep";
    vtl(name, &["down"]);
    assert!(vtl(name, &["up"]).status.success());
    let record: serde_json::Value = serde_json::from_slice(
        &std::fs::read(format!("/run/vtl/testbed/{name}.json")).expect("a record"),
    )
    .expect("JSON");
    let pid = record["process"]["pid"].as_i64().expect("a pid") as i32;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    )
    .expect("killed");
    until("a dead emulator makes a dead testbed", || {
        matches!(Testbed::attach(name), Err(Error::NotUp(_)))
    });
    let other = "t-life-other";
    assert!(vtl(other, &["up"]).status.success());
    assert!(remains(name).is_empty(), "another testbed sweeps");
    assert!(vtl(other, &["down"]).status.success());
    // A namespace without a record is half a testbed.
    assert!(
        Command::new("ip")
            .args(["netns", "add", &format!("{name}-router")])
            .status()
            .expect("runs")
            .success()
    );
    assert_eq!(
        text(&vtl(name, &["down"]).stdout),
        format!("{name}: removed\n")
    );
    assert!(remains(name).is_empty());
}

#[test]
fn exec__of_a_program_that_is_not_there() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn_alone();
    let name = "t-life-exec";
    assert!(vtl(name, &["up"]).status.success());
    let output = vtl(name, &["exec", "client", "--", "/nonesuch"]);
    assert!(vtl(name, &["down"]).status.success());
    assert!(
        text(&output.stderr).starts_with("vtl: cannot run /nonesuch: No such file"),
        "{output:?}"
    );
    assert_eq!(output.status.code(), Some(127));
}
