//! Bagging: trees on as many cases as there are, drawn with replacement, whose class distributions are averaged
//! (L. Breiman: *Bagging Predictors*, Machine Learning 24, 1996; Quinlan: *Bagging, Boosting, and C4.5*, AAAI 1996).
//! One tree's thresholds depend on chance; the average of several depends on it less.

use crate::{
    DataSet, Error, MAX_TREES, Model, Options, Result,
    boost::induce,
    grow::{Grower, model},
};

/// Learns a model of `trees` trees. `draw(n)` draws a number below n.
///
/// # Errors
/// As [`crate::train`]; no tree, more than [`MAX_TREES`], or boosting besides.
pub fn bag(
    data: &DataSet,
    trees: usize,
    options: &Options,
    mut draw: impl FnMut(usize) -> usize,
) -> Result<Model> {
    options.check()?;
    let refuse = |what: String| Err(Error::Options(what));
    if trees == 0 || trees > MAX_TREES {
        return refuse(format!("{trees} trees: it must be 1 to {MAX_TREES}"));
    }
    if options.trials != 1 {
        return refuse("trials must be 1 where trees are bagged".to_owned());
    }
    let grower = Grower::new(data, options);
    let cases = data.cases();
    let tree = |_| {
        let mut weights = vec![0.0; cases.len()];
        for _ in cases {
            let drawn = draw(cases.len());
            weights[drawn] += cases[drawn].weight;
        }
        let mut tree = induce(&grower, data, &weights, options);
        tree.round();
        tree
    };
    model(data, (0..trees).map(tree).collect(), true)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;
    use crate::{Attribute, Case, Value, train};

    /// Of two classes divided at 50, one case in ten wrong.
    fn data() -> DataSet {
        let case = |n: u32| {
            let is_high = n >= 50;
            Case {
                values: vec![Value::Continuous(f64::from(n))],
                class: usize::from(is_high != n.is_multiple_of(10)),
                weight: 1.0,
            }
        };
        let classes = ["low", "high"].map(str::to_owned).into();
        let attributes = vec![Attribute::continuous("n")];
        DataSet::new(attributes, classes, (0..100).map(case).collect()).unwrap()
    }

    fn draw() -> impl FnMut(usize) -> usize {
        let mut state = 1_u64;
        move |n| {
            // Knuth's multiplier for linear congruences.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % n
        }
    }

    #[test]
    fn bag__averages_trees_on_drawn_cases() {
        let options = Options {
            min_cases: 5.0,
            ..Options::default()
        };
        let bagged = bag(&data(), 20, &options, draw()).unwrap();
        assert_eq!(bagged.trees().len(), 20);
        assert_ne!(bagged.trees()[0], bagged.trees()[1]);
        let of = |n: f64| bagged.distribution(&[Value::Continuous(n)]);
        for n in 0..100 {
            let shares = of(f64::from(n));
            assert!(
                (shares.iter().sum::<f64>() - 1.0).abs() < 1e-9,
                "{shares:?}"
            );
            if !(40..60).contains(&n) {
                let class = bagged.classify(&[Value::Continuous(f64::from(n))]);
                assert_eq!(class, usize::from(n >= 50), "{n}");
            }
        }
        // Where the classes meet, trees differ, and one tree is sure.
        let steps = |share: &dyn Fn(f64) -> f64| {
            let mut all: Vec<u64> = (40..60)
                .map(|n| (share(f64::from(n)) * 1e6) as u64)
                .collect();
            all.dedup();
            all.len()
        };
        let one = train(&data(), &options).unwrap();
        let of_one = |n: f64| one.distribution(&[Value::Continuous(n)])[1];
        assert!(steps(&|n| of(n)[1]) > steps(&of_one));
        // The path is one that leads to the class.
        let path = bagged.path(&[Value::Continuous(90.0)]);
        assert!(!path.is_empty());
        let again = Model::from_json(bagged.to_json().as_bytes()).unwrap();
        assert_eq!(again, bagged);
    }

    #[test]
    fn bag__refuses() {
        let options = Options::default();
        assert!(bag(&data(), 0, &options, draw()).is_err());
        assert!(bag(&data(), MAX_TREES + 1, &options, draw()).is_err());
        let boosted = Options {
            trials: 2,
            ..options
        };
        assert!(bag(&data(), 2, &boosted, draw()).is_err());
    }
}
