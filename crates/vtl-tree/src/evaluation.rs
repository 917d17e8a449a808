//! How good classifiers are: confusion matrices, cross-validation, hold-out.

use std::{collections::BTreeMap, fmt};

use crate::{DataSet, Error, Model, Options, Result, train};

/// How often each class was taken for each.
#[derive(Clone, Debug, PartialEq)]
pub struct Confusion {
    classes: Vec<String>,
    /// By true class, then by predicted one: weights of cases.
    counts: Vec<Vec<f64>>,
}

impl Confusion {
    /// A matrix of no cases.
    pub fn new(classes: &[String]) -> Self {
        Confusion {
            classes: classes.to_vec(),
            counts: vec![vec![0.0; classes.len()]; classes.len()],
        }
    }

    /// What a model makes of a data set.
    ///
    /// # Errors
    /// The data set has other classes or attributes than the model.
    pub fn of(model: &Model, data: &DataSet) -> Result<Self> {
        let names = |attributes: &[crate::Attribute]| {
            attributes
                .iter()
                .map(|a| a.name.clone())
                .collect::<Vec<_>>()
        };
        if model.classes() != data.classes()
            || names(model.attributes()) != names(data.attributes())
        {
            return Err(Error::Data(
                "its classes or attributes are not the model's: evaluate with data in its form"
                    .into(),
            ));
        }
        let mut confusion = Confusion::new(data.classes());
        for case in data.cases() {
            confusion.add(case.class, model.classify(&case.values), case.weight);
        }
        Ok(confusion)
    }

    /// Adds cases of the class `truth` that were taken for `predicted`, both below the number of classes.
    pub fn add(&mut self, truth: usize, predicted: usize, weight: f64) {
        self.counts[truth][predicted] += weight;
    }

    /// The weight of cases of the class `truth` that were taken for `predicted`.
    pub fn count(&self, truth: usize, predicted: usize) -> f64 {
        self.counts[truth][predicted]
    }

    /// The weight of all cases.
    pub fn total(&self) -> f64 {
        self.counts.iter().flatten().sum()
    }

    /// The share of cases that were taken for what they are; `None` without cases.
    pub fn accuracy(&self) -> Option<f64> {
        let right = (0..self.classes.len())
            .map(|class| self.counts[class][class])
            .sum();
        share(right, self.total())
    }

    /// Of the cases that were taken for this class, the share that is of it; `None` if there is none.
    pub fn precision(&self, class: usize) -> Option<f64> {
        share(
            self.counts[class][class],
            self.counts.iter().map(|row| row[class]).sum(),
        )
    }

    /// Of the cases of this class, the share that was taken for it; `None` if there is none.
    pub fn recall(&self, class: usize) -> Option<f64> {
        share(self.counts[class][class], self.counts[class].iter().sum())
    }
}

fn share(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

impl fmt::Display for Confusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self
            .classes
            .iter()
            .map(|class| class.chars().count())
            .max()
            .unwrap_or(0)
            .max(9);
        write!(f, "{:name$}", "true \\ as")?;
        for class in &self.classes {
            write!(f, " {class:>9}")?;
        }
        writeln!(f, "    recall")?;
        let percent = |x: Option<f64>| x.map_or("–".into(), |x| format!("{:.1} %", 100.0 * x));
        for (truth, row) in self.counts.iter().enumerate() {
            write!(f, "{:name$}", self.classes[truth])?;
            for (n, class) in row.iter().zip(&self.classes) {
                write!(
                    f,
                    " {:>1$}",
                    (n * 10.0).round() / 10.0,
                    class.chars().count().max(9)
                )?;
            }
            writeln!(f, " {:>9}", percent(self.recall(truth)))?;
        }
        write!(f, "{:name$}", "precision")?;
        for (predicted, class) in self.classes.iter().enumerate() {
            write!(
                f,
                " {:>1$}",
                percent(self.precision(predicted)),
                class.chars().count().max(9)
            )?;
        }
        writeln!(f, " {:>9}", percent(self.accuracy()))
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014): `vtl_link::Random`, whose crate, the links' emulator, would come into
/// vtld with this one.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fisher and Yates. The bias of the remainder is below 2^-32 for any list that fits into memory here.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}

/// Deals the cases of a data set out to `k` folds by chance, each class as evenly as it can be: for each case, its fold.
///
/// # Errors
/// `k` is not between 2 and the number of cases.
pub fn folds(data: &DataSet, k: usize, seed: u64) -> Result<Vec<usize>> {
    let n = data.cases().len();
    if k < 2 || k > n {
        return Err(Error::Options(format!(
            "{k} folds of {n} cases: there must be 2 to {n}"
        )));
    }
    let mut order: Vec<usize> = (0..n).collect();
    Rng(seed).shuffle(&mut order);
    order.sort_by_key(|place| data.cases()[*place].class);
    let mut folds = vec![0; n];
    for (turn, place) in order.into_iter().enumerate() {
        folds[place] = turn % k;
    }
    Ok(folds)
}

/// Trains on all folds but one and evaluates on that, for each fold.
///
/// # Errors
/// As [`folds`] and [`train`].
pub fn cross_validate(data: &DataSet, options: &Options, k: usize, seed: u64) -> Result<Confusion> {
    let folds = folds(data, k, seed)?;
    let mut confusion = Confusion::new(data.classes());
    for fold in 0..k {
        let places: Vec<usize> = (0..folds.len())
            .filter(|place| folds[*place] != fold)
            .collect();
        let model = train(&data.subset(&places)?, options)?;
        for (case, _) in data
            .cases()
            .iter()
            .zip(&folds)
            .filter(|(_, of)| **of == fold)
        {
            confusion.add(case.class, model.classify(&case.values), case.weight);
        }
    }
    Ok(confusion)
}

/// Divides a data set into one to train with and one to test with, which has whole groups, chosen by chance, until it has
/// at least `share` of the cases. So nothing is tested that something of its group was trained with.
///
/// # Errors
/// No groups; a share that is not between 0 and 1; fewer than two groups, or nothing left to train with.
pub fn hold_out(data: &DataSet, share: f64, seed: u64) -> Result<(DataSet, DataSet)> {
    if !(share > 0.0 && share < 1.0) {
        let what =
            format!("the share to hold out is {share}: it must be between 0 and 1, such as 0.333");
        return Err(Error::Options(what));
    }
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, group) in data.groups().iter().enumerate() {
        groups.entry(group).or_default().push(place);
    }
    let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
    Rng(seed).shuffle(&mut groups);
    let wanted = share * data.cases().len() as f64;
    let (mut train, mut test) = (Vec::new(), Vec::new());
    for group in groups {
        let to = if (test.len() as f64) < wanted {
            &mut test
        } else {
            &mut train
        };
        to.extend(group);
    }
    if train.is_empty() || test.is_empty() {
        let what = "its groups cannot be divided: name a column with at least two, none of them nearly all";
        return Err(Error::Data(what.into()));
    }
    train.sort_unstable();
    test.sort_unstable();
    Ok((data.subset(&train)?, data.subset(&test)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attribute, Case, Value};

    #[test]
    fn rng__has_the_sequence_of_the_projects_random_numbers() {
        let (mut ours, mut theirs) = (Rng(7), vtl_testing::Random(7));
        for _ in 0..100 {
            assert_eq!(ours.next(), theirs.bits());
        }
    }

    /// Thirty cases in ten groups of three, of two classes that x tells.
    fn data() -> DataSet {
        let case = |i: usize| Case {
            values: vec![Value::Continuous(i as f64)],
            class: usize::from(i >= 10),
            weight: 1.0,
        };
        let classes = vec!["low".into(), "high".into()];
        let groups = (0..30).map(|i| format!("group {}", i / 3)).collect();
        let cases = (0..30).map(case).collect();
        DataSet::with_groups(vec![Attribute::continuous("x")], classes, cases, groups).unwrap()
    }

    #[test]
    fn confusion__counts() {
        let mut confusion = Confusion::new(&["a", "b", "c"].map(String::from));
        assert_eq!(
            (
                confusion.accuracy(),
                confusion.precision(0),
                confusion.recall(0)
            ),
            (None, None, None)
        );
        for (truth, predicted, weight) in [(0, 0, 6.0), (0, 1, 2.0), (1, 1, 3.0), (1, 0, 1.5)] {
            confusion.add(truth, predicted, weight);
        }
        assert_eq!((confusion.total(), confusion.count(0, 1)), (12.5, 2.0));
        assert_eq!(confusion.accuracy(), Some(0.72));
        assert_eq!(
            (confusion.precision(0), confusion.recall(0)),
            (Some(0.8), Some(0.75))
        );
        assert_eq!((confusion.precision(2), confusion.recall(2)), (None, None));
        let drawn = "\
true \\ as         a         b         c    recall
a                 6         2         0    75.0 %
b               1.5         3         0    66.7 %
c                 0         0         0         –
precision    80.0 %    60.0 %         –    72.0 %
";
        assert_eq!(confusion.to_string(), drawn);
    }

    #[test]
    fn confusion__refuses_data_of_another_form() {
        let model = train(&data(), &Options::default()).unwrap();
        assert_eq!(
            Confusion::of(&model, &data()).unwrap().accuracy(),
            Some(1.0)
        );
        let other = DataSet::new(
            data().attributes().to_vec(),
            vec!["low".into(), "top".into()],
            data().cases().to_vec(),
        );
        let error = Confusion::of(&model, &other.unwrap())
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "data set: its classes or attributes are not the model's: evaluate with data in its form"
        );
    }

    #[test]
    fn folds__are_even_and_by_seed() {
        let data = data();
        let dealt = folds(&data, 5, 7).unwrap();
        for fold in 0..5 {
            let places: Vec<_> = (0..30).filter(|place| dealt[*place] == fold).collect();
            let low = places
                .iter()
                .filter(|place| data.cases()[**place].class == 0)
                .count();
            assert_eq!((places.len(), low), (6, 2));
        }
        assert_eq!(folds(&data, 5, 7).unwrap(), dealt);
        assert_ne!(folds(&data, 5, 8).unwrap(), dealt);
        assert_eq!(
            folds(&data, 31, 7).unwrap_err().to_string(),
            "options: 31 folds of 30 cases: there must be 2 to 30"
        );
    }

    #[test]
    fn cross_validate__tests_each_case_once() {
        let confusion = cross_validate(&data(), &Options::default(), 10, 1).unwrap();
        assert_eq!(confusion.total(), 30.0);
        // Only those next to the threshold can be wrong.
        assert!(
            confusion.count(0, 1) + confusion.count(1, 0) <= 2.0,
            "{confusion}"
        );
    }

    #[test]
    fn hold_out__divides_no_group() {
        let data = data();
        let (train, test) = hold_out(&data, 0.333, 3).unwrap();
        assert_eq!((train.cases().len(), test.cases().len()), (18, 12));
        assert!(
            train
                .groups()
                .iter()
                .all(|group| !test.groups().contains(group))
        );
        assert_eq!(hold_out(&data, 0.333, 3).unwrap().1, test);
        assert_ne!(hold_out(&data, 0.333, 4).unwrap().1, test);
        let one = data.subset(&[0, 1, 2]).unwrap();
        // Its range is its own: what is tested may lie outside of the training's.
        let range = Some((0.0, 2.0));
        assert_eq!(
            one.attributes()[0].domain,
            crate::Domain::Continuous { range }
        );
        let error = "data set: its groups cannot be divided: name a column with at least two, none of them nearly all";
        assert_eq!(hold_out(&one, 0.5, 1).unwrap_err().to_string(), error);
        let error =
            "options: the share to hold out is 1: it must be between 0 and 1, such as 0.333";
        assert_eq!(hold_out(&data, 1.0, 1).unwrap_err().to_string(), error);
    }
}
