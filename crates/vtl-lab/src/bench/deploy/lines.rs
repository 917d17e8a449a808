//! How many lines of code a graft is.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Lines that hold code, by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lines {
    /// The composition, with what it shares with others of its kind.
    pub(super) graft: usize,
    /// Transport functions.
    pub(super) functions: usize,
    /// All else of VTL.
    pub(super) rest: usize,
}

/// Counts a graft's source and what it includes of `sources`, VTL's directory `bpf`.
pub(super) fn count(sources: &Path, graft: &Path) -> anyhow::Result<Lines> {
    let mut lines = Lines::default();
    let mut seen = BTreeSet::new();
    let mut open = vec![graft.to_owned()];
    while let Some(path) = open.pop() {
        let path = path.canonicalize().unwrap_or(path);
        if !seen.insert(path.clone()) {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let folder = path.parent().expect("a file lies in a directory");
        let part = match folder.file_name().and_then(|name| name.to_str()) {
            Some("grafts") => &mut lines.graft,
            Some("tf") => &mut lines.functions,
            _ => &mut lines.rest,
        };
        *part += code_lines(&text);
        let places = [
            folder.to_owned(),
            sources.to_owned(),
            sources.join("include"),
        ];
        open.extend(includes(&text).filter_map(|name| {
            let mut candidates = places.iter().map(|place: &PathBuf| place.join(name));
            candidates.find(|path| path.exists())
        }));
    }
    Ok(lines)
}

/// What a source includes in quotes; `<…>` is not VTL's.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next())
}

/// Lines that are neither empty nor comment only.
fn code_lines(text: &str) -> usize {
    let mut commented = false;
    let mut count = 0;
    for line in text.lines() {
        let mut rest = line.trim();
        let mut code = false;
        while !rest.is_empty() {
            if commented {
                let Some((_, after)) = rest.split_once("*/") else {
                    break;
                };
                (commented, rest) = (false, after.trim_start());
            } else if rest.starts_with("//") {
                break;
            } else if let Some(after) = rest.strip_prefix("/*") {
                (commented, rest) = (true, after);
            } else {
                code = true;
                let end = [rest.find("//"), rest.find("/*")];
                let end = end.into_iter().flatten().min().unwrap_or(rest.len());
                rest = &rest[end..];
            }
        }
        count += usize::from(code);
    }
    count
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn code_lines__leave_out_comments_and_blanks() {
        let text = "// a\n\n/* b\n * c */\nint d; // e\n/* f */ int g; /* h\n */ int i;\n\t\n}\n";
        assert_eq!(code_lines(text), 4);
    }

    #[test]
    fn count__tells_composition_functions_and_the_rest_apart() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf");
        let lines = count(&sources, &sources.join("grafts/selective-repeat.bpf.c")).unwrap();
        let few = 10..150;
        assert!(few.contains(&lines.graft), "{lines:?}");
        assert!(lines.functions > 100 && lines.rest > 100, "{lines:?}");
        assert!(count(&sources, Path::new("/nonexistent.c")).is_err());
    }
}
