//! How long a model takes to classify a case: trees of a thousand nodes, one and ten that vote.

use std::{hint::black_box, time::Instant};

use vtl_testing::Random;
use vtl_tree::{Attribute, Case, DataSet, Options, Value, train};

fn main() -> vtl_tree::Result<()> {
    let mut rng = Random(1);
    let mut case = |missing: f64| {
        let mut values: Vec<Value> = (0..9).map(|_| Value::Continuous(rng.unit())).collect();
        values.push(Value::Discrete((rng.unit() * 4.0) as u32));
        let noise = if rng.unit() < 0.2 { rng.unit() } else { 0.0 };
        let x = |i: usize| match values[i] {
            Value::Continuous(x) => x,
            _ => 0.0,
        };
        let class = ((x(0) * x(1) + x(2) * x(3) + noise) * 4.0) as usize % 4;
        for value in &mut values {
            if rng.unit() < missing {
                *value = Value::Missing;
            }
        }
        Case {
            values,
            class,
            weight: 1.0,
        }
    };
    let cases: Vec<Case> = (0..7000).map(|_| case(0.0)).collect();
    let mut attributes: Vec<_> = (0..9)
        .map(|i| Attribute::continuous(&format!("x{i}")))
        .collect();
    attributes.push(Attribute::discrete("y", ["a", "b", "c", "d"]));
    let classes = ["a", "b", "c", "d"].map(String::from).to_vec();
    let data = DataSet::new(attributes, classes, cases)?;
    for (trials, missing) in [(1, 0.0), (1, 0.1), (10, 0.0)] {
        let began = Instant::now();
        let model = train(
            &data,
            &Options {
                trials,
                ..Options::default()
            },
        )?;
        let trained = began.elapsed();
        let cases: Vec<Case> = (0..10_000).map(|_| case(missing)).collect();
        let began = Instant::now();
        for _ in 0..100 {
            for case in &cases {
                black_box(model.classify(black_box(&case.values)));
            }
        }
        let nanoseconds = began.elapsed().as_nanos() as f64 / 100.0 / cases.len() as f64;
        let nodes: usize = model.trees().iter().map(|tree| tree.nodes().len()).sum();
        let trees = model.trees().len();
        println!(
            "{trees} trees, {nodes} nodes, {missing} missing: {nanoseconds:.0} ns a case; trained in {trained:.1?}"
        );
    }
    Ok(())
}
