//! Skips a test aloud: a green result must not hide what did not run.

use std::{
    env, fs,
    io::{self, Write},
    thread,
};

/// What may be skipped in continuous integration: see the file itself.
const LISTED: &str = include_str!("../../../tests/skips.txt");

/// Skips the calling test, which returns next: it cannot run on this machine.
///
/// The reason goes to standard error, past the test runner's capture, and into the file that `VTL_SKIPPED`
/// names, which `make test` prints at its end.
///
/// # Panics
/// With `CI` set, unless `tests/skips.txt` has the test with this reason.
pub fn skip(reason: &str) {
    // The test runner names the thread of a test after it.
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    let line = format!("{test}: {reason}\n");
    assert!(
        env::var_os("CI").is_none() || is_listed(LISTED, test, reason),
        "skipped: {reason}; with CI set that is a failure, unless tests/skips.txt lists it"
    );
    // Not by eprintln, which the test runner captures. Nobody to tell is no reason to fail.
    let _ = io::stderr().write_all(format!("skipped: {line}").as_bytes());
    if let Some(path) = env::var_os("VTL_SKIPPED") {
        let file = fs::File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("VTL_SKIPPED names a file that can be written");
    }
}

/// Whether the calling test may do what only root may; if not, it is skipped.
pub fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skip("needs root");
    }
    root
}

fn is_listed(list: &str, test: &str, reason: &str) -> bool {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let mut entries = lines.filter_map(|line| line.split_once(": "));
    entries.any(|entry| entry == (test, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_listed__by_test_and_reason() {
        let list = "# why\n# a::b: commented out\na::c: no such thing\n";
        assert!(is_listed(list, "a::c", "no such thing"));
        assert!(!is_listed(list, "a::c", "no other thing"));
        assert!(!is_listed(list, "a::d", "no such thing"));
        assert!(!is_listed(list, "# a::b", "commented out"));
    }
}
