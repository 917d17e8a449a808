//! Growing a tree (the book, chapter 2), with fractional cases for unknown values (chapter 3) and thresholds' costs (JAIR
//! 1996).

use crate::{
    DataSet, Domain, EPSILON, Error, MAX_DEPTH, MAX_NODES, MAX_TREES, Model, Result, Tree, Value,
    first_max,
};

/// The normal deviate by which an error rate's upper limit lies above the observed rate, where the exact binomial limit
/// is not taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Interpolated between eight confidence levels, as C4.5 and C5.0 do: 0.6925 for 0.25.
    Table,
    /// This one, whatever [`Options::confidence`] is. 0.674_489_750_196_082 is the exact one for 0.25, as Weka's J48
    /// takes it. Where fewer than half a case is right, J48 and this variant charge all that are, and C4.5 0.67 of them.
    Deviate(f64),
}

/// How to train. The default is C5.0's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// At least two branches of a test have this weight of cases (C4.5's `-m`): 2.
    pub min_cases: f64,
    /// The confidence level for pruning, above 0 and at most 0.5; less prunes more (C4.5's `-c`): 0.25.
    pub confidence: f64,
    /// How the limit for that confidence is computed: [`Limit::Table`].
    pub limit: Limit,
    /// Whether a threshold must pay for its choice: true.
    pub threshold_cost: bool,
    /// Whether thresholds are values of the data, and not in the middle between two: true.
    pub actual_thresholds: bool,
    /// Error-based pruning: true.
    pub prune: bool,
    /// Whether pruning may replace a test by its largest branch: true.
    pub raise: bool,
    /// C5.0's global pruning after that: true.
    pub global: bool,
    /// How many trees vote, at most: 1, which is no boosting.
    pub trials: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            min_cases: 2.0,
            confidence: 0.25,
            limit: Limit::Table,
            threshold_cost: true,
            actual_thresholds: true,
            prune: true,
            raise: true,
            global: true,
            trials: 1,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::Options(what));
        let Options {
            min_cases,
            confidence,
            ..
        } = *self;
        if !(min_cases > 0.0 && min_cases.is_finite()) {
            return refuse(format!(
                "min_cases is {min_cases}: it must be a number above 0, such as 2"
            ));
        }
        if !(confidence > 0.0 && confidence <= 0.5) {
            return refuse(format!(
                "confidence is {confidence}: it must be above 0 and at most 0.5, such as 0.25"
            ));
        }
        if let Limit::Deviate(z) = self.limit
            && !(z >= 0.0 && z.is_finite())
        {
            return refuse(format!(
                "the limit's deviate is {z}: it must be a number, and not below 0"
            ));
        }
        if self.trials == 0 || self.trials > MAX_TREES {
            let trials = self.trials;
            return refuse(format!("trials is {trials}: it must be 1 to {MAX_TREES}"));
        }
        Ok(())
    }
}

/// Learns a model from a data set.
///
/// # Errors
/// Options out of range; trees with more than [`MAX_NODES`] nodes together.
pub fn train(data: &DataSet, options: &Options) -> Result<Model> {
    options.check()?;
    model(data, crate::boost::boost(data, options), false)
}

/// A model of trees. `is_averaged`: of [`crate::bag`].
///
/// # Errors
/// More than [`MAX_NODES`] nodes together.
pub(crate) fn model(data: &DataSet, trees: Vec<Tree>, is_averaged: bool) -> Result<Model> {
    let nodes: usize = trees.iter().map(|tree| tree.nodes().len()).sum();
    if nodes > MAX_NODES {
        let what =
            format!("the trees have {nodes} nodes, and {MAX_NODES} is the most: raise min_cases");
        return Err(Error::Options(what));
    }
    Ok(Model::new(data, trees, is_averaged))
}

/// A case of a data set by its place, and its weight: less than the whole where it went several ways.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) case: usize,
    pub(crate) weight: f64,
}

/// A node while its tree grows and is pruned.
#[derive(Clone, Debug)]
pub(crate) struct Grown {
    /// For each class, the weight of the cases that came here.
    pub(crate) counts: Vec<f64>,
    /// The test and a branch for each of its outcomes; `None` for a leaf.
    pub(crate) split: Option<(Split, Vec<Grown>)>,
}

/// A test on one attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Split {
    pub(crate) attribute: usize,
    /// For a continuous attribute: the first branch is `<=`, the second `>`. `None`: a branch for each discrete value.
    pub(crate) threshold: Option<f64>,
}

impl Split {
    /// The branch that a value takes; `None` if it is missing.
    fn branch(&self, value: Value) -> Option<usize> {
        match (self.threshold, value) {
            (Some(threshold), Value::Continuous(x)) => Some(usize::from(x > threshold)),
            (None, Value::Discrete(v)) => Some(v as usize),
            _ => None,
        }
    }

    /// Divides cases among the branches. One whose value is missing goes all ways, in shares as the others' weights (the
    /// book, section 3.1), equal ones if there are no others.
    pub(crate) fn divide(&self, data: &DataSet, cases: &[Share]) -> Vec<Vec<Share>> {
        let branches = match &data.attributes()[self.attribute].domain {
            Domain::Continuous { .. } => 2,
            Domain::Discrete { values, .. } => values.len(),
        };
        let value = |share: &Share| data.cases()[share.case].values[self.attribute];
        let mut weights = vec![0.0; branches];
        for share in cases {
            if let Some(branch) = self.branch(value(share)) {
                weights[branch] += share.weight;
            }
        }
        let known: f64 = weights.iter().sum();
        let mut parts = vec![Vec::new(); branches];
        for share in cases {
            if let Some(branch) = self.branch(value(share)) {
                parts[branch].push(*share);
                continue;
            }
            for (part, weight) in parts.iter_mut().zip(&weights) {
                let fraction = if known > 0.0 {
                    weight / known
                } else {
                    1.0 / branches as f64
                };
                let weight = share.weight * fraction;
                if weight > 0.0 {
                    let case = share.case;
                    part.push(Share { case, weight });
                }
            }
        }
        parts
    }
}

impl Grown {
    /// A leaf.
    pub(crate) fn leaf(counts: Vec<f64>) -> Self {
        Grown {
            counts,
            split: None,
        }
    }

    /// The weight of the cases here.
    pub(crate) fn total(&self) -> f64 {
        self.counts.iter().sum()
    }

    /// The weight of cases that a leaf would get wrong here.
    pub(crate) fn leaf_errors(&self) -> f64 {
        self.total() - self.counts[first_max(&self.counts)]
    }

    /// The weight of cases of the training that the tree below gets wrong.
    pub(crate) fn errors(&self) -> f64 {
        match &self.split {
            None => self.leaf_errors(),
            Some((_, branches)) => branches.iter().map(Grown::errors).sum(),
        }
    }
}

/// For each class, the weight of these cases.
pub(crate) fn counts(data: &DataSet, cases: &[Share]) -> Vec<f64> {
    let mut counts = vec![0.0; data.classes().len()];
    for share in cases {
        counts[data.cases()[share.case].class] += share.weight;
    }
    counts
}

/// `T log2 T - Σ n log2 n` with `T = Σ n`: the bits that tell the items of all of a distribution's parts from each other,
/// which is the entropy times the weight (the book, section 2.2).
fn info(parts: &[f64]) -> f64 {
    let bits = |n: f64| if n < EPSILON { 0.0 } else { n * n.log2() };
    bits(parts.iter().sum()) - parts.iter().map(|n| bits(*n)).sum::<f64>()
}

/// A split that could be made, and its worth.
struct Candidate {
    split: Split,
    /// Bits for each case.
    gain: f64,
    /// The gain divided by the information in the split itself.
    ratio: f64,
}

/// Weights of classes on each side of a threshold.
struct Sides {
    low: Vec<f64>,
    high: Vec<f64>,
}

/// Grows trees on one data set.
pub(crate) struct Grower<'a> {
    data: &'a DataSet,
    options: &'a Options,
    /// For each continuous attribute all values that the data set has, in order.
    values: Vec<Vec<f64>>,
    /// Of the data set's cases.
    weight: f64,
    /// Whether all attributes are discrete ones with many values.
    all_many_valued: bool,
    /// About how many leaves a tree may have for each case: boosting's bound, else infinite.
    pub(crate) leaves_per_case: f64,
}

impl<'a> Grower<'a> {
    pub(crate) fn new(data: &'a DataSet, options: &'a Options) -> Self {
        let values = (0..data.attributes().len()).map(|a| {
            let of_case = |case: &crate::Case| match case.values[a] {
                Value::Continuous(x) => Some(x),
                _ => None,
            };
            let mut values: Vec<f64> = data.cases().iter().filter_map(of_case).collect();
            values.sort_unstable_by(f64::total_cmp);
            values.dedup();
            values
        });
        let mut grower = Grower {
            data,
            options,
            values: values.collect(),
            weight: data.cases().iter().map(|case| case.weight).sum(),
            all_many_valued: false,
            leaves_per_case: f64::INFINITY,
        };
        grower.all_many_valued = (0..data.attributes().len()).all(|a| grower.many_valued(a));
        grower
    }

    /// Whether an attribute has so many values that its gain, which grows with them, tells little: it has no part in the
    /// average (C4.5's `MultiVal`).
    fn many_valued(&self, attribute: usize) -> bool {
        match &self.data.attributes()[attribute].domain {
            Domain::Continuous { .. } => false,
            Domain::Discrete { values, .. } => values.len() as f64 >= 0.3 * self.weight,
        }
    }

    /// How many leaves a tree for cases of this weight may have.
    fn max_leaves(&self, total: f64) -> f64 {
        (self.leaves_per_case * total).round()
    }

    /// Grows a tree for these cases, `depth` tests below the root.
    pub(crate) fn grow(&self, cases: &[Share], depth: usize) -> Grown {
        let mut node = Grown::leaf(counts(self.data, cases));
        let pure = node.leaf_errors() < EPSILON;
        let few = node.total() < 2.0 * self.options.min_cases - EPSILON
            || self.max_leaves(node.total()) < 2.0;
        if pure || few || depth >= MAX_DEPTH {
            return node;
        }
        let Some(split) = self.choose(cases, &node) else {
            return node;
        };
        let parts = split.divide(self.data, cases);
        let branches: Vec<_> = parts
            .iter()
            .map(|part| self.grow(part, depth + 1))
            .collect();
        // A tree that gets no more cases right than a leaf is none (C4.5's FormTree).
        let errors: f64 = branches.iter().map(Grown::errors).sum();
        if errors < node.leaf_errors() - 1e-3 {
            node.split = Some((split, branches));
        }
        node
    }

    /// The split with the best gain ratio among those whose gain is at least the average (the book, section 2.2); the
    /// first attribute's of equal ones.
    fn choose(&self, cases: &[Share], node: &Grown) -> Option<Split> {
        let candidates: Vec<Candidate> = (0..self.data.attributes().len())
            .filter_map(|a| match self.data.attributes()[a].domain {
                Domain::Continuous { .. } => self.threshold(a, cases, node.total()),
                Domain::Discrete { .. } => self.values(a, cases, node.total()),
            })
            .collect();
        let gains = candidates
            .iter()
            .filter(|c| self.all_many_valued || !self.many_valued(c.split.attribute))
            .map(|c| c.gain);
        let (sum, number) = gains.fold((0.0, 0), |(sum, number), gain| (sum + gain, number + 1));
        if number == 0 {
            return None;
        }
        // C4.5's Epsilon.
        let min = sum / f64::from(number) - 1e-3;
        let (mut best, mut chosen) = (0.0, None);
        for candidate in candidates.iter().filter(|c| c.gain >= min) {
            if candidate.ratio > best + EPSILON {
                (best, chosen) = (candidate.ratio, Some(candidate.split));
            }
        }
        chosen
    }

    /// The split by a discrete attribute's values.
    fn values(&self, attribute: usize, cases: &[Share], total: f64) -> Option<Candidate> {
        let split = Split {
            attribute,
            threshold: None,
        };
        let Domain::Discrete { values, .. } = &self.data.attributes()[attribute].domain else {
            return None;
        };
        let mut table = vec![vec![0.0; self.data.classes().len()]; values.len()];
        for share in cases {
            let case = &self.data.cases()[share.case];
            if let Some(v) = split.branch(case.values[attribute]) {
                table[v][case.class] += share.weight;
            }
        }
        let weights: Vec<f64> = table.iter().map(|row| row.iter().sum()).collect();
        let reasonable = |weight: &&f64| **weight >= self.options.min_cases - EPSILON;
        let leaves = weights.iter().filter(|weight| **weight > 0.5).count() as f64;
        if weights.iter().filter(reasonable).count() < 2 || leaves > self.max_leaves(total) + 1.0 {
            return None;
        }
        let mut classes = vec![0.0; self.data.classes().len()];
        for row in &table {
            classes.iter_mut().zip(row).for_each(|(sum, n)| *sum += n);
        }
        let bits = info(&classes) - table.iter().map(|row| info(row)).sum::<f64>();
        Some(candidate(split, bits / total, &weights, total))
    }

    /// The best split by a threshold on a continuous attribute.
    fn threshold(&self, attribute: usize, cases: &[Share], total: f64) -> Option<Candidate> {
        let mut known: Vec<(f64, usize, f64)> = cases
            .iter()
            .filter_map(
                |share| match self.data.cases()[share.case].values[attribute] {
                    Value::Continuous(x) => {
                        Some((x, self.data.cases()[share.case].class, share.weight))
                    }
                    _ => None,
                },
            )
            .collect();
        known.sort_by(|a, b| a.0.total_cmp(&b.0));
        let classes = self.data.classes().len();
        let mut sides = Sides {
            low: vec![0.0; classes],
            high: vec![0.0; classes],
        };
        for (_, class, weight) in &known {
            sides.high[*class] += weight;
        }
        let weight: f64 = sides.high.iter().sum();
        let before = info(&sides.high);
        // No few cases at an end: min_cases, or a tenth of the cases for each class if that is more, up to 25 (C4.5's
        // MinSplit).
        let min = (0.1 * weight / classes as f64)
            .min(25.0)
            .max(self.options.min_cases)
            - EPSILON;
        let (mut tries, mut low, mut best) = (0_u32, 0.0, 0.0);
        let mut chosen: Option<(f64, f64, f64)> = None;
        for pair in known.windows(2) {
            let (value, class, w) = pair[0];
            sides.low[class] += w;
            sides.high[class] -= w;
            low += w;
            if value == pair[1].0 || low < min || weight - low < min {
                continue;
            }
            tries += 1;
            let gain = (before - info(&sides.low) - info(&sides.high)) / total;
            if gain > best + EPSILON {
                (best, chosen) = (gain, Some((value, pair[1].0, low)));
            }
        }
        let (below, above, low) = chosen?;
        // What it costs to say which of the thresholds (JAIR 1996).
        if self.options.threshold_cost {
            best -= f64::from(tries).log2() / total;
        }
        if best <= EPSILON {
            return None;
        }
        let split = Split {
            attribute,
            threshold: Some(self.place(attribute, below, above)),
        };
        Some(candidate(split, best, &[low, weight - low], total))
    }

    /// A threshold between two values that follow each other among the cases of a node: the middle, or the greatest value of
    /// the whole data set that is not above it (the book, section 2.4).
    fn place(&self, attribute: usize, below: f64, above: f64) -> f64 {
        let middle = below / 2.0 + above / 2.0;
        let middle = if middle >= above || middle < below {
            below
        } else {
            middle
        };
        if !self.options.actual_thresholds {
            return middle;
        }
        let values = &self.values[attribute];
        values[values.partition_point(|value| *value <= middle) - 1]
    }
}

/// A split with its gain ratio. `weights`: of the branches, without the unknown, which count as one more.
fn candidate(split: Split, gain: f64, weights: &[f64], total: f64) -> Candidate {
    let mut parts = weights.to_vec();
    parts.push((total - weights.iter().sum::<f64>()).max(0.0));
    let split_info = info(&parts) / total;
    let ratio = if split_info > EPSILON {
        gain / split_info
    } else {
        0.0
    };
    Candidate { split, gain, ratio }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golf() -> DataSet {
        let names = include_str!("../tests/golden/data/weather.nominal.names");
        DataSet::from_names(
            names,
            include_str!("../tests/golden/data/weather.nominal.data"),
        )
        .unwrap()
    }

    fn shares(data: &DataSet) -> Vec<Share> {
        (0..data.cases().len())
            .map(|case| Share { case, weight: 1.0 })
            .collect()
    }

    /// The book, section 2.2: outlook gains 0.246 bits (0.247 without rounding in between), divided by 1.577.
    #[test]
    fn values__gain_of_the_book() {
        let data = golf();
        let options = Options::default();
        let grower = Grower::new(&data, &options);
        let outlook = grower.values(0, &shares(&data), 14.0).unwrap();
        let thousandths = |x: f64| (x * 1000.0).round() / 1000.0;
        assert_eq!(
            (thousandths(outlook.gain), thousandths(outlook.ratio)),
            (0.247, 0.156)
        );
        assert_eq!(thousandths(info(&[5.0, 4.0, 5.0]) / 14.0), 1.577);
    }

    /// The book, section 3.2: the same with outlook missing in the overcast case: 13/14 of 0.214 bits, divided by 1.809.
    #[test]
    fn values__gain_of_the_book_with_a_missing_value() {
        let data = golf();
        let overcast = (0..14)
            .find(|i| data.cases()[*i].values[0] == Value::Discrete(1))
            .unwrap();
        let mut cases = data.cases().to_vec();
        cases[overcast].values[0] = Value::Missing;
        let data =
            DataSet::new(data.attributes().to_vec(), data.classes().to_vec(), cases).unwrap();
        let options = Options::default();
        let outlook = Grower::new(&data, &options)
            .values(0, &shares(&data), 14.0)
            .unwrap();
        let thousandths = |x: f64| (x * 1000.0).round() / 1000.0;
        assert_eq!(thousandths(outlook.gain), 0.199);
        assert_eq!(thousandths(info(&[5.0, 3.0, 5.0, 1.0]) / 14.0), 1.809);
        // It goes all ways, as 5, 3 and 5 of 13 do.
        let parts = outlook.split.divide(&data, &shares(&data));
        let weights: Vec<f64> = parts
            .iter()
            .map(|part| thousandths(part.iter().map(|s| s.weight).sum()))
            .collect();
        assert_eq!(weights, [5.385, 3.231, 5.385]);
    }

    #[test]
    fn train__refuses_options() {
        let refused = [
            (
                Options {
                    min_cases: 0.0,
                    ..Options::default()
                },
                "options: min_cases is 0: it must be a number above 0, such as 2",
            ),
            (
                Options {
                    confidence: 0.6,
                    ..Options::default()
                },
                "options: confidence is 0.6: it must be above 0 and at most 0.5, such as 0.25",
            ),
            (
                Options {
                    confidence: f64::NAN,
                    ..Options::default()
                },
                "options: confidence is NaN: it must be above 0 and at most 0.5, such as 0.25",
            ),
            (
                Options {
                    limit: Limit::Deviate(-1.0),
                    ..Options::default()
                },
                "options: the limit's deviate is -1: it must be a number, and not below 0",
            ),
            (
                Options {
                    trials: 0,
                    ..Options::default()
                },
                "options: trials is 0: it must be 1 to 100",
            ),
        ];
        for (options, error) in refused {
            assert_eq!(
                train(&golf(), &options).map_err(|error| error.to_string()),
                Err(error.into())
            );
        }
    }

    /// Differences that C4.5 does not see, and thresholds between neighbours among the numbers.
    #[test]
    fn threshold__small_differences() {
        for step in [1e-9, f64::EPSILON] {
            let case = |i: usize| crate::Case {
                values: vec![Value::Continuous(1.0 + step * f64::from(i >= 5))],
                class: usize::from(i >= 5),
                weight: 1.0,
            };
            let attribute = crate::Attribute::continuous("x");
            let classes = vec!["a".into(), "b".into()];
            let data = DataSet::new(vec![attribute], classes, (0..10).map(case).collect()).unwrap();
            for actual_thresholds in [true, false] {
                let options = Options {
                    actual_thresholds,
                    ..Options::default()
                };
                let model = train(&data, &options).unwrap();
                let right = data
                    .cases()
                    .iter()
                    .filter(|case| model.classify(&case.values) == case.class);
                assert_eq!(right.count(), 10);
            }
        }
    }

    /// Grown no deeper than a model may be: each test splits off one case of 400.
    #[test]
    fn grow__bounded_depth() {
        let case = |i: usize| crate::Case {
            values: vec![Value::Continuous(i as f64)],
            class: i % 2,
            weight: 1.0,
        };
        let classes = vec!["a".into(), "b".into()];
        let attribute = crate::Attribute::continuous("x");
        let data = DataSet::new(vec![attribute], classes, (0..400).map(case).collect()).unwrap();
        let options = Options {
            min_cases: 1.0,
            threshold_cost: false,
            prune: false,
            ..Options::default()
        };
        let model = train(&data, &options).unwrap();
        assert_eq!(
            crate::Model::from_json(model.to_json().as_bytes()),
            Ok(model)
        );
    }
}
