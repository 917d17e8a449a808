//! The committed table of results: a change of behaviour shows in its diff.
#![allow(missing_docs, non_snake_case)]

use std::{env, fs, path::Path};

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn results__are_those_committed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/stream.txt");
    let now = vtl_sim::report::table();
    if env::var_os("UPDATE_RESULTS").is_some() {
        fs::write(&path, now).expect("the source tree is writable");
        println!("{} written: look at its diff", path.display());
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    for (old, new) in committed.lines().zip(now.lines()).filter(|(a, b)| a != b) {
        println!("- {old}\n+ {new}");
    }
    assert!(
        committed == now,
        "the transport functions behave differently. If that is what you want:\n  \
         UPDATE_RESULTS=1 cargo test -p vtl-sim --test results\nand commit the table."
    );
}
