//! A small bench, from plan to rows and pictures.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::world::{VTL, cannot_run};

const PLAN: &str = "transports = [\"tcp-bbr\", \"graft:stream\"]\n\
    [link]\nrtt_ms = 10\nrate_mbit = 100\nloss_pct = [0, 1]\n\
    [workload]\nkind = \"file\"\nbytes = 20_000\n";

#[test]
fn bench__from_plan_to_rows_and_pictures() {
    if let Some(why) = cannot_run() {
        println!("bench__from_plan_to_rows_and_pictures: skipped: {why}");
        return;
    }
    let directory = std::env::temp_dir().join(format!("vtl-bench-e2e-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let path = |name: &str| directory.join(name);
    fs::write(path("tiny.toml"), PLAN).expect("written");
    let output = Command::new(VTL)
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

#[test]
fn bench__a_wrong_plan_is_refused_before_anything_runs() {
    let path = std::env::temp_dir().join(format!("vtl-bench-wrong-{}.toml", std::process::id()));
    fs::write(&path, PLAN.replace("bytes", "size")).expect("written");
    let output = Command::new(VTL)
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
