//! Pruning: by pessimistic error estimates (the book, chapter 4), then by cost complexity (Breiman et al., chapter 3;
//! C5.0's global pruning).

use crate::{
    DataSet, EPSILON, Limit, Options,
    grow::{Grown, Share, counts},
};

/// Confidence levels, and the normal deviates of their upper limits: C4.5's, from the Geigy Scientific Tables.
const LEVELS: [(f64, f64); 9] = [
    (0.0, 4.0),
    (0.001, 3.09),
    (0.005, 2.58),
    (0.01, 2.33),
    (0.05, 1.65),
    (0.10, 1.28),
    (0.20, 0.84),
    (0.40, 0.25),
    (1.00, 0.0),
];
/// A replacement may look worse by this many errors (C4.5's Prune).
const SLACK: f64 = 0.1;

/// How many errors more than the `errors` among `n` cases of the training a leaf will make on `n` others: `n U(errors, n) -
/// errors`, with `U` the upper limit of the error rate at the given confidence (the book, section 4.2; C4.5's AddErrs).
pub(crate) fn extra_errors(n: f64, errors: f64, options: &Options) -> f64 {
    let (deviate, at_end) = match options.limit {
        Limit::Table => (interpolate(options.confidence), 0.67),
        Limit::Deviate(deviate) => (deviate, 1.0),
    };
    if n < EPSILON {
        return 0.0;
    }
    // No errors: the exact limit, (1 - U)^n = confidence. Between none and one: interpolated.
    if errors < 0.9999 {
        let none = n * (1.0 - options.confidence.powf(1.0 / n));
        if errors < EPSILON {
            return none;
        }
        return none + errors * (extra_errors(n, 1.0, options) - none);
    }
    if errors + 0.5 >= n {
        return at_end * (n - errors).max(0.0);
    }
    // The normal approximation, with a correction for continuity.
    let (squared, observed) = (deviate * deviate, errors + 0.5);
    let spread = (squared * (observed * (1.0 - observed / n) + squared / 4.0)).sqrt();
    n * (observed + squared / 2.0 + spread) / (n + squared) - errors
}

fn interpolate(confidence: f64) -> f64 {
    let above = LEVELS.iter().position(|(level, _)| *level >= confidence);
    let above = above.unwrap_or(LEVELS.len() - 1).max(1);
    let ((l0, d0), (l1, d1)) = (LEVELS[above - 1], LEVELS[above]);
    d0 + (d1 - d0) * (confidence - l0) / (l1 - l0)
}

/// Prunes trees of one data set.
pub(crate) struct Pruner<'a> {
    pub(crate) data: &'a DataSet,
    pub(crate) options: &'a Options,
}

impl Pruner<'_> {
    /// Replaces, from the leaves upwards, each subtree by a leaf or by its largest branch, where that is expected to make no
    /// more errors (the book, section 4.2). `cases`: those that `node` was grown from.
    pub(crate) fn prune(&self, node: &mut Grown, cases: &[Share]) {
        let Some((split, branches)) = &mut node.split else {
            return;
        };
        for (branch, part) in branches.iter_mut().zip(split.divide(self.data, cases)) {
            self.prune(branch, &part);
        }
        let weights: Vec<f64> = branches.iter().map(Grown::total).collect();
        let largest = crate::first_max(&weights);
        let tree: f64 = branches.iter().map(|branch| self.estimate(branch)).sum();
        let raised = match self.options.raise {
            true => self.estimate_for(&branches[largest], cases),
            false => f64::INFINITY,
        };
        let leaf = self.leaf(&node.counts);
        let within = |errors: f64, of: f64| errors <= of + SLACK + EPSILON;
        if within(leaf, tree) && within(leaf, raised) {
            node.split = None;
        } else if within(raised, tree) {
            *node = branches.swap_remove(largest);
            self.refill(node, cases);
            self.prune(node, cases);
        }
    }

    /// The errors that a leaf with these cases of the training is expected to make on as many others.
    fn leaf(&self, counts: &[f64]) -> f64 {
        let (n, errors) = (
            counts.iter().sum(),
            Grown::leaf(counts.to_vec()).leaf_errors(),
        );
        errors + extra_errors(n, errors, self.options)
    }

    /// The errors that a tree is expected to make: its leaves'.
    pub(crate) fn estimate(&self, node: &Grown) -> f64 {
        match &node.split {
            None => self.leaf(&node.counts),
            Some((_, branches)) => branches.iter().map(|branch| self.estimate(branch)).sum(),
        }
    }

    /// The same if these cases, and not its own, came to the tree.
    fn estimate_for(&self, node: &Grown, cases: &[Share]) -> f64 {
        match &node.split {
            None => self.leaf(&counts(self.data, cases)),
            Some((split, branches)) => branches
                .iter()
                .zip(split.divide(self.data, cases))
                .map(|(branch, part)| self.estimate_for(branch, &part))
                .sum(),
        }
    }

    /// Has these cases, and not its own, in a tree.
    fn refill(&self, node: &mut Grown, cases: &[Share]) {
        node.counts = counts(self.data, cases);
        if let Some((split, branches)) = &mut node.split {
            for (branch, part) in branches.iter_mut().zip(split.divide(self.data, cases)) {
                self.refill(branch, &part);
            }
        }
    }
}

/// A subtree that could become a leaf.
struct Subtree {
    /// Its nodes' numbers when counted from the root, before their branches.
    nodes: std::ops::Range<usize>,
    /// Errors more on the training than now.
    extra: f64,
    /// These for each leaf fewer.
    cost: f64,
}

/// Makes leaves of the subtrees that cost the fewest errors for each leaf that goes, while the tree makes no more
/// errors on the training than one standard error above `errors`. Subtrees that cost the same go together or
/// not at all.
pub(crate) fn prune_globally(root: &mut Grown, errors: f64) {
    let n = root.total();
    let mut allowed = (errors * (1.0 - errors / n)).max(0.0).sqrt();
    loop {
        let mut subtrees = Vec::new();
        list(root, 0, &mut subtrees);
        subtrees.retain(|subtree| subtree.extra <= allowed + EPSILON);
        let min = subtrees
            .iter()
            .map(|s| s.cost)
            .fold(f64::INFINITY, f64::min);
        subtrees.retain(|subtree| subtree.cost <= min + EPSILON);
        // A subtree stands before those inside it, which go with it.
        subtrees.sort_by_key(|subtree| subtree.nodes.start);
        let mut end = 0;
        subtrees.retain(|subtree| {
            let outside = subtree.nodes.start >= end;
            end = end.max(subtree.nodes.end);
            outside
        });
        let extra: f64 = subtrees.iter().map(|subtree| subtree.extra).sum();
        if subtrees.is_empty() || extra > allowed + EPSILON {
            return;
        }
        allowed -= extra;
        cut(root, 0, &subtrees);
    }
}

/// Lists the subtrees below a node with that number. Returns the number after theirs, their errors, and their leaves.
fn list(node: &Grown, number: usize, subtrees: &mut Vec<Subtree>) -> (usize, f64, f64) {
    let Some((_, branches)) = &node.split else {
        let reached = if node.total() > 1e-3 { 1.0 } else { 0.0 };
        return (number + 1, node.leaf_errors(), reached);
    };
    let (mut next, mut errors, mut leaves) = (number + 1, 0.0, 0.0);
    for branch in branches {
        let below = list(branch, next, subtrees);
        (next, errors, leaves) = (below.0, errors + below.1, leaves + below.2);
    }
    let extra = (node.leaf_errors() - errors).max(0.0);
    subtrees.push(Subtree {
        nodes: number..next,
        extra,
        cost: extra / f64::max(leaves - 1.0, 1.0),
    });
    (next, errors, leaves)
}

/// Makes leaves of these subtrees, by the numbers that [`list`] gave.
fn cut(node: &mut Grown, number: usize, subtrees: &[Subtree]) -> usize {
    if let Some(subtree) = subtrees
        .iter()
        .find(|subtree| subtree.nodes.start == number)
    {
        node.split = None;
        return subtree.nodes.end;
    }
    let mut next = number + 1;
    if let Some((_, branches)) = &mut node.split {
        for branch in branches {
            next = cut(branch, next, subtrees);
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    /// U(E, N) of the book's example, section 4.2.
    #[test]
    fn extra_errors__of_the_book() {
        let options = Options::default();
        let limit = |errors: f64, n: f64| {
            ((errors + extra_errors(n, errors, &options)) / n * 1000.0).round() / 1000.0
        };
        assert_eq!(
            [limit(0.0, 6.0), limit(0.0, 9.0), limit(0.0, 1.0)],
            [0.206, 0.143, 0.75]
        );
        assert_eq!(limit(1.0, 16.0), 0.157);
    }

    #[test]
    fn extra_errors__join() {
        for limit in [Limit::Table, Limit::Deviate(0.674_489_750_196_082)] {
            let options = Options {
                limit,
                ..Options::default()
            };
            let extra = |errors| extra_errors(10.0, errors, &options);
            assert!((extra(0.9998) - extra(1.0)).abs() < 1e-3);
            assert!((extra(1e-5) - extra(0.0)).abs() < 1e-3);
            assert_eq!(extra(10.0), 0.0);
        }
        assert_eq!(extra_errors(0.0, 0.0, &Options::default()), 0.0);
    }

    #[test]
    fn interpolate__between_levels() {
        let at = |confidence| (interpolate(confidence) * 1e4_f64).round() / 1e4;
        assert_eq!(
            [at(0.25), at(0.4), at(0.5), at(1e-9)],
            [0.6925, 0.25, 0.2083, 4.0]
        );
    }

    fn node(counts: [f64; 2], branches: Vec<Grown>) -> Grown {
        let split = crate::grow::Split {
            attribute: 0,
            threshold: None,
        };
        let counts = counts.to_vec();
        let split = (!branches.is_empty()).then_some((split, branches));
        Grown { counts, split }
    }

    /// The inner test costs 1 error for the leaf that it has more, the outer one 10: one goes, and then the rest stays.
    #[test]
    fn prune_globally__cheapest_first() {
        let inner = node(
            [3.0, 40.0],
            vec![node([2.0, 0.0], vec![]), node([1.0, 40.0], vec![])],
        );
        let mut root = node([43.0, 47.0], vec![node([40.0, 7.0], vec![]), inner]);
        let before = root.errors();
        assert_eq!(before, 8.0);
        prune_globally(&mut root, before);
        assert_eq!(root.errors(), 10.0);
        assert!(
            root.split
                .is_some_and(|(_, branches)| branches.iter().all(|branch| branch.split.is_none()))
        );
    }

    /// Two that cost 2 each, and one standard error is 2.6: neither goes.
    #[test]
    fn prune_globally__equals_go_together() {
        let inner = || {
            node(
                [3.0, 40.0],
                vec![node([2.0, 0.0], vec![]), node([1.0, 40.0], vec![])],
            )
        };
        let mut root = node([6.0, 80.0], vec![inner(), inner()]);
        prune_globally(&mut root, 7.0);
        assert_eq!(root.errors(), 2.0);
        prune_globally(&mut root, 40.0);
        assert!(root.split.is_none());
    }
}
