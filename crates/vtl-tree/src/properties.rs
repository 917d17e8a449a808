//! What holds for any data, options and files.

use proptest::prelude::*;

use crate::{
    Attribute, Case, Condition, DataSet, Limit, Model, Options, Value,
    grow::{Grower, Grown, Share},
    prune::{Pruner, prune_globally},
    train,
};

/// Up to 60 cases of up to three classes, with two continuous attributes and a discrete one.
pub(crate) fn data() -> impl Strategy<Value = DataSet> {
    let number = || prop_oneof![1 => Just(Value::Missing), 6 => (0..12_u8).prop_map(|x| Value::Continuous(f64::from(x) / 7.0))];
    let item = prop_oneof![1 => Just(Value::Missing), 6 => (0..4_u32).prop_map(Value::Discrete)];
    let weight = prop_oneof![3 => Just(1.0), 1 => 0.1..5.0];
    // The class follows from the values, but for noise: trees of one leaf show nothing.
    let case = (number(), number(), item, 0..10_u8, weight).prop_map(|(x, y, z, noise, weight)| {
        let class = match (x, y, z) {
            _ if noise < 2 => usize::from(noise),
            (Value::Continuous(x), _, Value::Discrete(z)) if x > 0.9 => z as usize % 3,
            (_, Value::Continuous(y), _) => usize::from(y > 0.5),
            _ => 2,
        };
        let values = vec![x, y, z];
        Case {
            values,
            class,
            weight,
        }
    });
    prop::collection::vec(case, 1..60).prop_map(|cases| {
        let attributes = vec![
            Attribute::continuous("x [ms]"),
            Attribute::continuous("y"),
            Attribute::discrete("z", ["a", "b", "c", "d"]),
        ];
        let classes = ["p", "q", "r"].map(String::from).to_vec();
        DataSet::new(attributes, classes, cases).expect("valid")
    })
}

fn options() -> impl Strategy<Value = Options> {
    let limit = prop_oneof![Just(Limit::Table), (0.0..3.0).prop_map(Limit::Deviate)];
    let flags = prop::array::uniform5(any::<bool>());
    (0.5..5.0, 0.01..0.5, limit, flags, 1..6_usize).prop_map(
        |(min_cases, confidence, limit, flags, trials)| {
            let [threshold_cost, actual_thresholds, prune, raise, global] = flags;
            Options {
                min_cases,
                confidence,
                limit,
                threshold_cost,
                actual_thresholds,
                prune,
                raise,
                global,
                trials,
            }
        },
    )
}

fn values() -> impl Strategy<Value = Vec<Value>> {
    let value = prop_oneof![
        Just(Value::Missing),
        any::<f64>().prop_map(Value::Continuous),
        Just(Value::Continuous(f64::NAN)),
        (0.0..2.0_f64).prop_map(Value::Continuous),
        (0..6_u32).prop_map(Value::Discrete),
    ];
    prop::collection::vec(value, 0..5)
}

fn shares(data: &DataSet) -> Vec<Share> {
    let share = |(case, of): (usize, &Case)| Share {
        case,
        weight: of.weight,
    };
    data.cases().iter().enumerate().map(share).collect()
}

/// How many tests a tree has.
fn tests(node: &Grown) -> usize {
    let below = |(_, branches): &(_, Vec<Grown>)| 1 + branches.iter().map(tests).sum::<usize>();
    node.split.as_ref().map_or(0, below)
}

/// The deepest way from the root: how many tests.
fn depth(node: &Grown) -> usize {
    let below = |(_, branches): &(_, Vec<Grown>)| 1 + branches.iter().map(depth).max().unwrap_or(0);
    node.split.as_ref().map_or(0, below)
}

/// All that can be asked of a model.
fn ask(model: &Model, values: &[Value]) -> Vec<f64> {
    assert!(model.classify(values) < model.classes().len());
    assert!(
        model
            .outside(values)
            .iter()
            .all(|a| *a < model.attributes().len())
    );
    let words = |condition: Condition| assert!(!model.words(&condition).is_empty());
    model.path(values).into_iter().for_each(words);
    assert!(!model.to_string().is_empty());
    model.distribution(values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Each replacement may look worse by C4.5's 0.1 errors, and there is at most one for each test.
    #[test]
    fn pruning__raises_no_estimate(data in data(), options in options()) {
        let all = shares(&data);
        let pruner = Pruner { data: &data, options: &options };
        let grown = Grower::new(&data, &options).grow(&all, 0);
        let mut pruned = grown.clone();
        pruner.prune(&mut pruned, &all);
        let gone = (tests(&grown) - tests(&pruned)) as f64;
        prop_assert!(pruner.estimate(&pruned) <= pruner.estimate(&grown) + 0.101 * gone);
        prop_assert!(depth(&pruned) <= depth(&grown));
        prop_assert!((pruned.total() - grown.total()).abs() < 1e-3);
    }

    #[test]
    fn global_pruning__stays_within_one_standard_error(data in data(), options in options()) {
        let all = shares(&data);
        let mut root = Grower::new(&data, &options).grow(&all, 0);
        let (errors, n, before) = (root.errors(), root.total(), tests(&root));
        prune_globally(&mut root, errors);
        prop_assert!(root.errors() <= errors + (errors * (1.0 - errors / n)).max(0.0).sqrt() + 1e-3);
        prop_assert!(tests(&root) <= before);
    }

    #[test]
    fn counts__of_children_sum_up(data in data(), options in options()) {
        let model = train(&data, &options).unwrap();
        for tree in model.trees() {
            for node in tree.nodes() {
                let Some(test) = &node.test else { continue };
                for class in 0..data.classes().len() {
                    let below: f64 = test.children.iter().map(|c| tree.nodes()[*c as usize].counts[class]).sum();
                    prop_assert!((below - node.counts[class]).abs() < 1e-3);
                }
            }
        }
    }

    #[test]
    fn distribution__sums_up(data in data(), options in options(), values in values()) {
        let model = train(&data, &options).unwrap();
        let distribution = ask(&model, &values);
        prop_assert!((distribution.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(distribution.iter().all(|share| *share >= 0.0));
        // What was trained with lies inside.
        prop_assert!(data.cases().iter().all(|case| model.outside(&case.values).is_empty()));
    }

    #[test]
    fn json__round_trip(data in data(), options in options()) {
        let model = train(&data, &options).unwrap();
        prop_assert_eq!(&train(&data, &options).unwrap(), &model);
        prop_assert_eq!(Model::from_json(model.to_json().as_bytes()), Ok(model));
    }

    /// A case of weight 2 is two cases.
    #[test]
    fn weights__count_as_cases(data in data()) {
        let unit = |weight: f64| weight.round().max(1.0) as usize;
        let mut cases = data.cases().to_vec();
        cases.iter_mut().for_each(|case| case.weight = unit(case.weight) as f64);
        let of = |cases| DataSet::new(data.attributes().to_vec(), data.classes().to_vec(), cases).unwrap();
        let weighted = of(cases);
        let repeated = of(weighted.cases().iter().flat_map(|case| {
            let one = Case { weight: 1.0, ..case.clone() };
            std::iter::repeat_n(one, unit(case.weight))
        }).collect());
        let options = Options::default();
        let (weighted, repeated) = (train(&weighted, &options).unwrap(), train(&repeated, &options).unwrap());
        let (weighted, repeated) = (weighted.trees()[0].nodes(), repeated.trees()[0].nodes());
        prop_assert_eq!(weighted.len(), repeated.len());
        for (one, other) in weighted.iter().zip(repeated) {
            prop_assert_eq!(&one.test, &other.test);
            prop_assert!(one.counts.iter().zip(&other.counts).all(|(n, m)| (n - m).abs() < 1e-4));
        }
    }

    /// Whatever a file holds, it is refused in a sentence, or can be asked anything.
    #[test]
    fn json__hostile(data in data(), edits in prop::collection::vec((any::<prop::sample::Index>(), "[-0-9a-z\\[\\]{},.\":]{0,4}"), 1..4), values in values()) {
        let mut json = train(&data, &Options::default()).unwrap().to_json();
        for (place, text) in edits {
            let place = place.index(json.len());
            json.replace_range(place..(place + text.len()).min(json.len()), &text);
        }
        match Model::from_json(json.as_bytes()) {
            Ok(model) => drop(ask(&model, &values)),
            Err(error) => prop_assert!(error.to_string().starts_with("model: ")),
        }
    }
}
