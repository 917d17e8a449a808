//! Profiles of real programs' flows, by captures that `scripts/captures.py` made: precision and recall. Rules were tuned on
//! those under `captures/tuned`; those under `captures/held-out` were set apart before any was made.

use std::{fs, path::PathBuf};

use vtl_core::profile::{Classifier, Profile, Verdict};

/// The beginning of one flow, and what its application is.
struct Capture {
    name: String,
    protocol: String,
    profile: Profile,
    port: u16,
    executable: String,
    /// Who sends (the opener?), when (ns), what.
    reads: Vec<(bool, u64, Vec<u8>)>,
}

fn read(path: &std::path::Path) -> Capture {
    let text = fs::read_to_string(path).expect("a capture");
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("# {name}:")));
        line.unwrap_or_else(|| panic!("{}: no {name}", path.display())).trim()
    };
    let read = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let hex = words.get(3).copied().unwrap_or("").as_bytes();
        let digits = hex.chunks(2).map(|two| std::str::from_utf8(two).expect("hex"));
        let mut bytes: Vec<_> = digits.map(|two| u8::from_str_radix(two, 16).expect("hex")).collect();
        // What was not kept is beyond what anybody looks at.
        bytes.resize(words[2].parse().expect("a length"), 0);
        (words[0] == ">", words[1].parse().expect("a time"), bytes)
    };
    Capture {
        name: path.file_stem().expect("a name").to_string_lossy().into(),
        protocol: field("protocol").into(),
        profile: field("profile").parse().expect("a profile"),
        port: field("port").parse().expect("a port"),
        executable: field("executable").into(),
        reads: text.lines().filter(|line| !line.starts_with('#')).map(read).collect(),
    }
}

fn captures(part: &str) -> Vec<Capture> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(part);
    let entries = fs::read_dir(folder).expect("captures");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

/// The verdict within the first ten packets; with fewer, when the flow ends.
fn verdict(capture: &Capture, port: u16, executable: Option<&str>) -> Option<Verdict> {
    let mut classifier = Classifier::new(executable, port);
    for (opener, now, bytes) in &capture.reads {
        match opener {
            true => classifier.sent(*now, bytes),
            false => classifier.received(*now, bytes),
        }
    }
    classifier.conclude();
    classifier.verdict().cloned()
}

/// Prints precision and recall of each profile; how many are right.
fn score(title: &str, captures: &[Capture], tell: impl Fn(&Capture) -> Option<Profile>) -> usize {
    let told: Vec<_> = captures.iter().map(|capture| (capture.profile, tell(capture))).collect();
    let right = told.iter().filter(|(is, told)| Some(*is) == *told).count();
    println!("{title}: {right} of {} right", told.len());
    for profile in Profile::ALL {
        let right = told.iter().filter(|(is, told)| *is == profile && *told == Some(profile)).count();
        let [are, said] = [
            told.iter().filter(|(is, _)| *is == profile).count(),
            told.iter().filter(|(_, told)| *told == Some(profile)).count(),
        ];
        println!("  {:<24} precision {right}/{said}, recall {right}/{are}", profile.name());
    }
    right
}

fn full(capture: &Capture) -> Option<Verdict> {
    verdict(capture, capture.port, Some(&capture.executable))
}

fn print(captures: &[Capture]) {
    for capture in captures {
        let full = full(capture);
        let mark = if full.as_ref().map(|v| v.profile) == Some(capture.profile) { ' ' } else { '!' };
        let said = full.map_or("none".to_owned(), |verdict| verdict.to_string());
        println!("{mark} {:<24} {:<24} {said}", capture.name, capture.profile.name());
    }
}

#[test]
fn tuned__are_all_right() {
    let captures = captures("tuned");
    print(&captures);
    score("tuned", &captures, |capture| full(capture).map(|v| v.profile));
}

#[test]
fn held_out__precision_and_recall() {
    let captures = captures("held-out");
    print(&captures);
    score("held out: bytes, executable, port", &captures, |c| full(c).map(|v| v.profile));
    score("held out: bytes and shape only", &captures, |c| verdict(c, 0, None).map(|v| v.profile));
    score("held out: port only", &captures, |c| Profile::of(c.port));
}
