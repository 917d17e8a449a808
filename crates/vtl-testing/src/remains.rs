//! What testbeds leave behind.

use std::fs;

use crate::until;

/// Namespaces and state files of testbeds whose names begin with `name`.
pub fn remains(name: &str) -> Vec<String> {
    let of = |directory: &str| {
        let entries = fs::read_dir(directory).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names
            .filter(|file| file.starts_with(name))
            .collect::<Vec<_>>()
    };
    [of("/run/netns"), of("/run/vtl/testbed")].concat()
}

/// Waits until nothing is left of a testbed.
///
/// # Panics
/// As [`until`].
#[track_caller]
pub fn gone(name: &str) {
    until(&format!("nothing is left of {name}"), || {
        remains(name).is_empty()
    });
}
