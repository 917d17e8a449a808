//! Boosting: trees that vote, each grown with more weight on what the one before got wrong.
//!
//! By the scheme of C5.0, a change of AdaBoost.M1 (Freund and Schapire 1996; Quinlan 1996):
//! - The weight of what a tree gets right is multiplied, but what it gets wrong has the same weight *added* to each case,
//!   so that no single case, maybe a mislabelled one, takes over. The weight of all errors moves to the middle
//!   between what it is and half of the total (AdaBoost.M1: to half).
//! - A case that the trees to come cannot put right is dropped, from the middle of the trials on.
//! - A tree has about as many leaves for each case as the first, at most.
//! - A tree votes with the share of the class that it chooses at the leaf that it reaches.

use crate::{
    DataSet, Options, Tree, first_max,
    grow::{Grower, Grown, Share},
    prune::{Pruner, prune_globally},
};

/// Grows and prunes as many trees as the options say, or fewer if more are of no use.
pub(crate) fn boost(data: &DataSet, options: &Options) -> Vec<Tree> {
    let mut grower = Grower::new(data, options);
    let mut weights: Vec<f64> = data.cases().iter().map(|case| case.weight).collect();
    let mut votes = vec![vec![0.0; data.classes().len()]; weights.len()];
    let mut trees: Vec<Tree> = Vec::new();
    while trees.len() < options.trials {
        let tree = induce(&grower, data, &weights, options);
        let mut wrong = vec![false; weights.len()];
        for (place, case) in data.cases().iter().enumerate() {
            let (class, confidence) = tree.vote(&case.values);
            votes[place][class] += confidence;
            wrong[place] = class != case.class;
            // Beyond the first half: what the trees to come cannot put right is given up.
            let left = options.trials - trees.len() - 1;
            let lead = votes[place][first_max(&votes[place])] - votes[place][case.class];
            if 2 * (trees.len() + 1) > options.trials && lead > left as f64 {
                weights[place] = 0.0;
            }
        }
        let weigh = |of: bool| -> f64 {
            let chosen = wrong
                .iter()
                .zip(&weights)
                .filter(|(wrong, _)| **wrong == of);
            chosen.map(|(_, weight)| weight).sum()
        };
        let (errors, right) = (weigh(true), weigh(false));
        let useless = errors >= 0.49 * (errors + right) || tree.nodes.len() == 1;
        if trees.is_empty() {
            grower.leaves_per_case = 1.1 * tree.leaves() as f64 / tree.nodes[0].total;
        }
        if trees.is_empty() || !useless {
            trees.push(tree);
        }
        if useless || errors < 0.1 {
            // Two trees outvote nobody.
            trees.truncate(if trees.len() == 2 { 1 } else { trees.len() });
            break;
        }
        reweigh(&mut weights, &wrong, errors, right);
        // As much weight as the cases have that are left.
        let left = data
            .cases()
            .iter()
            .zip(&weights)
            .filter(|(_, weight)| **weight > 0.0);
        let factor = left.map(|(case, _)| case.weight).sum::<f64>() / weights.iter().sum::<f64>();
        weights.iter_mut().for_each(|weight| *weight *= factor);
    }
    trees
}

/// Moves weight from what a tree got right to what it got wrong.
fn reweigh(weights: &mut [f64], wrong: &[bool], errors: f64, right: f64) {
    let moved = 0.25 * (right - errors);
    let active = weights
        .iter()
        .zip(wrong)
        .filter(|(weight, wrong)| **wrong && **weight > 0.0);
    let added = moved / active.count() as f64;
    let kept = (right - moved) / right;
    for (weight, wrong) in weights
        .iter_mut()
        .zip(wrong)
        .filter(|(weight, _)| **weight > 0.0)
    {
        *weight = match wrong {
            true => *weight + added,
            false => (*weight * kept).max(1e-3),
        };
    }
}

/// A tree of the cases whose weight is above 0, grown and pruned.
pub(crate) fn induce(
    grower: &Grower<'_>,
    data: &DataSet,
    weights: &[f64],
    options: &Options,
) -> Tree {
    let shares = (0..).zip(weights).map(|(case, weight)| Share {
        case,
        weight: *weight,
    });
    let shares: Vec<Share> = shares.filter(|share| share.weight > 0.0).collect();
    let mut root: Grown = grower.grow(&shares, 0);
    if options.prune {
        Pruner { data, options }.prune(&mut root, &shares);
        if options.global {
            let tree = Tree::new(&root);
            // Not the leaves' errors: a case of which parts come to several leaves is right or wrong as a whole.
            let wrong = |share: &&Share| {
                let case = &data.cases()[share.case];
                tree.classify(&case.values) != case.class
            };
            let errors: f64 = shares.iter().filter(wrong).map(|share| share.weight).sum();
            prune_globally(&mut root, errors);
        }
    }
    Tree::new(&root)
}
