//! Our trees are those of Weka's J48, which is C4.5 release 8: line for line.

mod common;

use common::{data, golden, names, read};
use vtl_tree::{Limit, Options, train};

/// What J48 runs with: no global pruning, and the exact normal deviate.
fn j48() -> Options {
    Options {
        global: false,
        limit: Limit::Deviate(0.674_489_750_196_082),
        ..Options::default()
    }
}

fn compare(kind: &str, options: Options) {
    let names = names();
    assert!(names.len() >= 7, "{names:?}");
    let mut differing = Vec::new();
    for name in names {
        let text = read(&golden("j48").join(format!("{name}.{kind}.txt")));
        let (_, text) = text
            .split_once("------------------\n")
            .expect("J48's heading");
        let (theirs, _) = text.split_once("\nNumber of Leaves").expect("J48's end");
        let ours = train(&data(&name), &options)
            .expect("valid options")
            .to_string();
        if ours.trim() != theirs.trim() {
            differing.push(format!("{name}:\nours:\n{ours}\ntheirs:\n{theirs}"));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn j48__pruned() {
    compare("pruned", j48());
}

#[test]
fn j48__unpruned() {
    compare(
        "unpruned",
        Options {
            prune: false,
            ..j48()
        },
    );
}

#[test]
fn j48__without_subtree_raising() {
    compare(
        "no-raising",
        Options {
            raise: false,
            ..j48()
        },
    );
}

#[test]
fn j48__thresholds_in_the_middle() {
    compare(
        "middle",
        Options {
            actual_thresholds: false,
            ..j48()
        },
    );
}

#[test]
fn j48__thresholds_without_cost() {
    compare(
        "no-cost",
        Options {
            threshold_cost: false,
            ..j48()
        },
    );
}

#[test]
fn j48__confidence_of_5_percent() {
    let limit = Limit::Deviate(1.644_853_626_951_473);
    compare(
        "confidence-5",
        Options {
            confidence: 0.05,
            limit,
            ..j48()
        },
    );
}

#[test]
fn j48__ten_cases_a_branch() {
    compare(
        "cases-10",
        Options {
            min_cases: 10.0,
            ..j48()
        },
    );
}
