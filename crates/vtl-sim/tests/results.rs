//! The committed tables of results: a change of behaviour shows in their diff.
#![allow(missing_docs, non_snake_case)]

use std::{env, fs, path::Path};

use vtl_sim::change::{self, Change};

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn results__are_those_committed() {
    compare("results/stream.txt", &vtl_sim::report::table());
}

#[test]
#[cfg_attr(debug_assertions, ignore = "as above")]
fn results__of_changes_are_those_committed() {
    compare("results/changes.txt", &vtl_sim::report::changes());
}

/// One link; the others: below.
#[test]
#[cfg_attr(debug_assertions, ignore = "as above")]
fn results__beside_neighbours_are_those_committed() {
    let committed = include_str!("../results/fairness.txt");
    let now = vtl_sim::fairness::section(0);
    assert!(
        committed.contains(&now),
        "other shares than in results/fairness.txt:\n{now}"
    );
}

#[test]
#[ignore = "takes a minute: make soak"]
fn results__beside_all_neighbours_are_those_committed() {
    compare("results/fairness.txt", &vtl_sim::fairness::table());
}

/// Many random changes; SEEDS=FROM..TO: other ones.
#[test]
#[ignore = "takes minutes: make soak"]
fn results__of_thousands_of_changes() {
    let seeds = env::var("SEEDS").unwrap_or_else(|_| "1..401".into());
    let (from, to) = seeds.split_once("..").expect("SEEDS=FROM..TO");
    let [from, to] = [from, to].map(|n| n.parse().expect("a number"));
    let changes: Vec<_> = (from..to).map(Change::random).collect();
    let all = change::measure_all(&changes);
    let mut rows: Vec<_> = changes.iter().zip(all).collect();
    rows.sort_by(|(_, a), (_, b)| a.share().total_cmp(&b.share()));
    let slow: Vec<_> = (rows.iter()).take_while(|(_, a)| a.share() < 0.9).collect();
    for (change, a) in &slow {
        println!(
            "{:.2} of fresh, {:.2} of BBR: {change}",
            a.share(),
            a.stream.rate / a.bbr.rate
        );
    }
    println!(
        "{} of {} below 0.9 of what is fresh",
        slow.len(),
        changes.len()
    );
    // The aim is none; detecting a change takes seven round trips, and a long path has few in 30 s.
    assert!(slow.len() * 7 <= changes.len(), "one in seven, at most");
}

/// Compares a table with the committed one, or writes it (UPDATE_RESULTS).
fn compare(file: &str, now: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
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
