//! `vtl select measure` as a command: interrupted, resumed, in shards, and twice at the same time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vtl_testing::until;

/// A directory that goes with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let name = format!("vtl-select-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn select(arguments: &[&str], file: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vtl-lab"));
    command.arg("select").args(arguments).arg(file);
    command
}

fn measure(file: &Path, arguments: &[&str]) -> Command {
    let mut command = select(&["measure", "--json"], file);
    command.args(arguments);
    command
}

fn output(mut command: Command) -> Output {
    command.output().unwrap()
}

fn summary(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rows(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |text| text.lines().count().saturating_sub(1))
}

/// A measurement that has rows, and is not at its end.
fn running(file: &Path) -> Child {
    let mut command = measure(file, &["--links", "1000", "--jobs", "2"]);
    let (out, err) = (Stdio::piped(), Stdio::piped());
    let child = command.stdout(out).stderr(err).spawn().unwrap();
    until("there are rows", || rows(file) > 5);
    child
}

#[test]
fn measure__an_interrupt_loses_no_row() {
    let directory = Directory::new("interrupt");
    let file = directory.file("rows.csv");
    let child = running(&file);
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    let added = rows(&file);
    assert_eq!(output.status.code(), Some(130), "{}", errors(&output));
    assert!(errors(&output).contains("stopped; the same command measures the rest"));
    let told = summary(&output);
    assert_eq!(told["added"], added);
    assert_eq!(told["complete"], false);
    // Rows that are refused, or were cut, would not count.
    let again = self::output(measure(&file, &["--links", "1"]));
    assert_eq!(summary(&again)["found"], added, "{}", errors(&again));
    assert_eq!(rows(&file), added);
}

#[test]
fn measure__a_file_that_is_being_written_is_refused() {
    let directory = Directory::new("twice");
    let file = directory.file("rows.csv");
    let mut child = running(&file);
    let second = output(measure(&file, &[]));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(
        errors(&second).contains("give each shard its own"),
        "{}",
        errors(&second)
    );
}

#[test]
fn measure__two_shards_are_the_whole() {
    let directory = Directory::new("shards");
    let run = |name: &str, shard: &str, jobs: &str| {
        let file = directory.file(name);
        let arguments = [
            "--links", "3", "--seed", "3", "--shard", shard, "--jobs", jobs,
        ];
        let output = output(measure(&file, &arguments));
        assert!(output.status.success(), "{}", errors(&output));
        assert_eq!(summary(&output)["complete"], true);
        file
    };
    let parts = [run("a.csv", "1/2", "1"), run("b.csv", "2/2", "2")];
    let whole = run("whole.csv", "1/1", "1");
    let sorted = |files: &[&PathBuf]| {
        let texts = files.iter().map(|file| fs::read_to_string(file).unwrap());
        let lines =
            texts.flat_map(|text| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>());
        let mut lines: Vec<String> = lines.collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(&[&whole]).len(), 21);
    assert_eq!(sorted(&[&parts[0], &parts[1]]), sorted(&[&whole]));
    let model = |files: &[&PathBuf]| {
        let mut command = select(&["train", "--json"], files[0]);
        output({
            command.args(&files[1..]);
            command
        })
        .stdout
    };
    let trained = model(&[&whole]);
    assert!(trained.starts_with(b"{\"format\":1"));
    assert_eq!(model(&[&parts[0], &parts[1]]), trained);
}
