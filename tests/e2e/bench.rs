//! A small bench, from plan to rows and pictures.

use std::fs;
use std::process::Command;

use serde_json::Value;
use vtl_testing::turn;

use crate::harness::{repository, vtl};

const PLAN: &str = "transports = [\"tcp-bbr\", \"graft:stream\"]\n\
    [link]\nrtt_ms = 10\nrate_mbit = 100\nloss_pct = [0, 1]\n\
    [workload]\nkind = \"file\"\nbytes = 20_000\n";

#[test]
fn bench__from_plan_to_rows_and_pictures() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    let directory = std::env::temp_dir().join(format!("vtl-bench-e2e-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let path = |name: &str| directory.join(name);
    fs::write(path("tiny.toml"), PLAN).expect("written");
    let output = Command::new(vtl())
        .args(["bench", "run"])
        .arg(path("tiny.toml"))
        .arg("--json")
        .arg(path("rows.json"))
        .arg("--csv")
        .arg(path("rows.csv"))
        .arg("--plot")
        .arg(path("plots"))
        .env("VTL_TESTBED", format!("bench-e2e-{}", std::process::id()))
        .output()
        .expect("vtl runs");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    assert!(words.contains("[4/4]"), "{words}");
    let text = fs::read_to_string(path("rows.json")).expect("rows");
    let rows: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    assert_eq!(rows.len(), 4);
    for row in &rows {
        assert_eq!(
            (&row["ok"], &row["bytes"]),
            (&true.into(), &20_000.into()),
            "{row}"
        );
        let ratio = row["utilisation"].as_f64().expect("a rate");
        assert!(ratio > 0.0 && ratio < 1.0, "{row}");
        let first = row["first_byte_s"].as_f64().expect("a time");
        assert!(first >= 0.01, "a round trip at least: {row}");
        assert!(
            row["memory_peak_kb"].as_u64().expect("a figure") > 1_000,
            "{row}"
        );
    }
    assert!(
        rows[0]["settings"]
            .as_str()
            .expect("text")
            .starts_with("bbr, SACK on")
    );
    let csv = fs::read_to_string(path("rows.csv")).expect("rows");
    assert_eq!(csv.lines().count(), 5);
    assert!(path("plots/tiny-custom-100mbit-10ms-loss.svg").exists());
    fs::remove_dir_all(&directory).expect("removed");
}

/// One link of the campaign, campus without loss, by real kernels; then the same in virtual time.
#[test]
fn select__by_real_kernels() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    let name = format!("vtl-select-e2e-{}.csv", std::process::id());
    let rows = std::env::temp_dir().join(name);
    let select = |arguments: &[&str]| {
        let mut command = Command::new(vtl());
        command.arg("select").args(arguments).arg(&rows);
        let name = format!("select-e2e-{}", std::process::id());
        let output = command.env("VTL_TESTBED", name).output().expect("vtl runs");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words}");
        serde_json::from_slice::<Value>(&output.stdout).expect(&words)
    };
    let measure = [
        "measure",
        "--testbed",
        "--shard",
        "13/1000",
        "--jobs",
        "2",
        "--json",
    ];
    let first = select(&measure);
    assert_eq!((&first["added"], &first["without"]), (&5.into(), &0.into()));
    let again = select(&measure);
    assert_eq!((&again["found"], &again["added"]), (&5.into(), &0.into()));
    let compared = select(&["compare", "--json"]);
    assert_eq!(compared["cases"], 5);
    let ratios = compared["ratios"].as_array().expect("a list");
    let tcp = ratios.iter().filter(|r| r["carrier"] == "tcp");
    // Nothing is random there: a transfer takes what it takes, and no second more or less.
    for ratio in tcp {
        let median = ratio["median"].as_f64().expect("a number");
        assert!((0.1..10.0).contains(&median), "{ratio}");
    }
    fs::remove_file(&rows).expect("removed");
}

#[test]
fn bench__a_wrong_plan_is_refused_before_anything_runs() {
    let path = std::env::temp_dir().join(format!("vtl-bench-wrong-{}.toml", std::process::id()));
    fs::write(&path, PLAN.replace("bytes", "size")).expect("written");
    let output = Command::new(vtl())
        .args(["bench", "run"])
        .arg(&path)
        .output()
        .expect("vtl runs");
    fs::remove_file(&path).expect("removed");
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        words.contains(".toml:8: unknown field `size`, expected one of"),
        "{words}"
    );
}

#[test]
fn bench_deploy__prints_steps_sizes_and_aims() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    let path = std::env::temp_dir().join(format!("vtl-bench-deploy-{}.json", std::process::id()));
    let output = Command::new(vtl())
        .args(["bench", "deploy", "--loads", "2", "--sessions", "1"])
        .args(["--graft", "canonical", "--graft", "stream", "--sources"])
        .arg(repository().join("bpf"))
        .arg("--json")
        .arg(&path)
        .env(
            "VTL_TESTBED",
            format!("bench-deploy-{}", std::process::id()),
        )
        .output()
        .expect("vtl runs");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    let text = fs::read_to_string(&path).expect("figures");
    fs::remove_file(&path).expect("removed");
    let figures: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let value = |table: &str, place: &str, what: &str| {
        let is = |f: &&Value| f["table"] == table && f["place"] == place && f["what"] == what;
        let found = figures.iter().find(is);
        let figure = found.unwrap_or_else(|| panic!("{table}, {place}, {what}: {text}"));
        figure["value"].as_f64().expect("a number")
    };
    for graft in ["canonical", "stream"] {
        for what in ["lines", "source", "object", "compile ms", "load ms"] {
            assert!(value("graft", graft, what) > 0.0, "{graft}, {what}");
        }
        assert!(value("graft", graft, "instructions") > 1_000.0);
        assert!(value("graft", graft, "and vtl") > value("graft", graft, "and tf"));
        // Only `total` has all of it.
        let steps = ["package", "open", "prepare", "verify", "fill"];
        let total = value("deployment", graft, "total");
        for step in steps {
            let time = value("deployment", graft, step);
            assert!(time > 0.0 && time < total, "{graft}, {step}");
        }
        assert!(value("program", graft, "ingress_tc") > 0.0);
    }
    for place in ["TCP: handshake", "stream: cold", "canonical: loaded for it"] {
        assert!(value("set-up", place, "median") > 0.0, "{place}");
    }
    assert!(value("set-up", "TCP: handshake", "least") >= 10.0);
    assert!(value("set-up", "stream: known peer", "most") > 0.0);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!table.contains("Not measured"), "{table}");
    for words in [
        "Deployment, aim: median under 5 ms: ",
        "Set-up, cold, aim: median under 15 ms: ",
        "Set-up, known peer, aim: median under 5 ms: ",
    ] {
        assert!(table.contains(words), "{table}");
    }
}

#[test]
fn bench_deploy__an_unknown_graft_is_refused() {
    if !vtl_testing::is_root() {
        return;
    }
    let output = Command::new(vtl())
        .args(["bench", "deploy", "--graft", "no-such"])
        .output()
        .expect("vtl runs");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(
        words.contains("no graft \"no-such\" comes with VTL"),
        "{words}"
    );
}
