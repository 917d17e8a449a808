//! The beginnings of real programs' flows, which `scripts/captures.py` records.

use std::{
    fs,
    path::{Path, PathBuf},
};

use vtl_core::profile::{Classifier, Profile, Verdict};

/// The beginning of one flow, and what its application is.
pub(crate) struct Capture {
    pub(crate) name: String,
    pub(crate) profile: Profile,
    pub(crate) port: u16,
    pub(crate) executable: String,
    /// Who sends (the opener?), when (ns), what.
    pub(crate) reads: Vec<(bool, u64, Vec<u8>)>,
}

fn read(path: &Path) -> Capture {
    let text = fs::read_to_string(path).expect("a capture");
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("# {name}:")));
        line.unwrap_or_else(|| panic!("{}: no {name}", path.display()))
            .trim()
    };
    let read = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let hex = words.get(3).copied().unwrap_or("").as_bytes();
        let digits = hex
            .chunks(2)
            .map(|two| std::str::from_utf8(two).expect("hex"));
        let mut bytes: Vec<_> = digits
            .map(|two| u8::from_str_radix(two, 16).expect("hex"))
            .collect();
        // What was not kept is beyond what anybody looks at.
        bytes.resize(words[2].parse().expect("a length"), 0);
        (words[0] == ">", words[1].parse().expect("a time"), bytes)
    };
    Capture {
        name: path.file_stem().expect("a name").to_string_lossy().into(),
        profile: field("profile").parse().expect("a profile"),
        port: field("port").parse().expect("a port"),
        executable: field("executable").into(),
        reads: text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(read)
            .collect(),
    }
}

/// All of a part, by name.
pub(crate) fn captures(part: &str) -> Vec<Capture> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/captures")
        .join(part);
    let entries = fs::read_dir(folder).expect("captures");
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

/// The verdict within the first ten packets; with fewer, when the flow ends.
pub(crate) fn verdict(capture: &Capture, port: u16, executable: Option<&str>) -> Option<Verdict> {
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
