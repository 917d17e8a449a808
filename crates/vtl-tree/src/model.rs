//! Models, and what they say about a case.

use serde::{Deserialize, Serialize};

use crate::{Attribute, DataSet, Domain, EPSILON, Value, first_max, grow::Grown};

/// A test on one attribute's value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// The attribute's place in the model's list.
    pub attribute: u32,
    /// For a continuous attribute, in its unit: the first child is for values up to it, the second for those above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    /// Places of nodes in the tree: two for a threshold, else one for each value of the attribute.
    pub children: Vec<u32>,
}

impl Test {
    /// The outcome for a case; `None` if the value is missing, no number, of another kind, or not a declared one.
    fn outcome(&self, values: &[Value]) -> Option<usize> {
        match (self.threshold, values.get(self.attribute as usize)?) {
            (Some(threshold), Value::Continuous(x)) if !x.is_nan() => {
                Some(usize::from(*x > threshold))
            }
            (None, Value::Discrete(v)) if (*v as usize) < self.children.len() => Some(*v as usize),
            _ => None,
        }
    }
}

/// A node of a tree: a leaf, or a test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// For each class, the weight of the training's cases that came here.
    pub counts: Vec<f64>,
    /// `None` for a leaf.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test: Option<Test>,
    /// The class with the greatest weight here; the parent's where no case came.
    #[serde(skip)]
    pub class: u32,
    /// The sum of `counts`.
    #[serde(skip)]
    pub total: f64,
}

impl Node {
    /// Whether cases of the training came here.
    pub(crate) fn reached(&self) -> bool {
        self.total > EPSILON
    }
}

/// A decision tree. The root is its first node, and each node stands before its children.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tree {
    pub(crate) nodes: Vec<Node>,
}

/// How a condition compares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Relation {
    /// The value is at most this, in the attribute's unit.
    AtMost(f64),
    /// The value is above this.
    Above(f64),
    /// The value is this one of the attribute's list.
    Is(u32),
}

/// A step of the way through a tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Condition {
    /// The attribute's place in the model's list.
    pub attribute: usize,
    /// What holds on the branch that was taken.
    pub relation: Relation,
    /// Whether the case's value decided. If not, it is missing, and the branch is the one that most cases of the training took.
    pub known: bool,
}

impl Tree {
    pub(crate) fn new(root: &Grown) -> Self {
        let mut tree = Tree { nodes: Vec::new() };
        tree.add(root);
        tree.fill();
        tree
    }

    fn add(&mut self, grown: &Grown) -> u32 {
        let place = self.nodes.len();
        self.nodes.push(Node {
            counts: grown.counts.clone(),
            test: None,
            class: 0,
            total: 0.0,
        });
        if let Some((split, branches)) = &grown.split {
            let children = branches.iter().map(|branch| self.add(branch)).collect();
            self.nodes[place].test = Some(Test {
                attribute: split.attribute as u32,
                threshold: split.threshold,
                children,
            });
        }
        place as u32
    }

    /// Sets what follows from the rest: totals and classes.
    pub(crate) fn fill(&mut self) {
        for place in 0..self.nodes.len() {
            let node = &mut self.nodes[place];
            node.total = node.counts.iter().sum();
            if node.reached() || place == 0 {
                node.class = first_max(&node.counts) as u32;
            }
            // The children come later, and keep this where no case reached them.
            let (class, children) = (
                node.class,
                node.test.as_ref().map(|test| test.children.clone()),
            );
            for child in children.into_iter().flatten() {
                self.nodes[child as usize].class = class;
            }
        }
    }

    /// Rounds counts to thousandths, which says enough of an average, and takes half of the space in files.
    pub(crate) fn round(&mut self) {
        for place in (0..self.nodes.len()).rev() {
            let children = self.nodes[place]
                .test
                .as_ref()
                .map(|test| test.children.clone());
            let counts = match children {
                None => self.nodes[place]
                    .counts
                    .iter()
                    .map(|n| (n * 1e3).round() / 1e3)
                    .collect(),
                Some(children) => (0..self.nodes[place].counts.len())
                    .map(|class| {
                        let of = |child: &u32| self.nodes[*child as usize].counts[class];
                        (children.iter().map(of).sum::<f64>() * 1e3).round() / 1e3
                    })
                    .collect(),
            };
            self.nodes[place].counts = counts;
        }
        self.fill();
    }

    /// The nodes, each before its children.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The class of a case: its place in the model's list.
    pub fn classify(&self, values: &[Value]) -> usize {
        let mut node = &self.nodes[0];
        while let Some(test) = &node.test {
            let Some(outcome) = test.outcome(values) else {
                let mut distribution = vec![0.0; node.counts.len()];
                self.spread(node, values, 1.0, &node.counts, &mut distribution);
                return first_max(&distribution);
            };
            node = &self.nodes[test.children[outcome] as usize];
        }
        node.class as usize
    }

    /// Adds `share` times the class distribution of a case below `node` to `sums`. Where a value is missing, all branches
    /// count, each as many cases of the training as took it (the book, section 3.1). `counts`: of the last node that
    /// cases of the training reached.
    fn spread<'a>(
        &'a self,
        node: &'a Node,
        values: &[Value],
        share: f64,
        counts: &'a [f64],
        sums: &mut [f64],
    ) {
        let counts = if node.reached() { &node.counts } else { counts };
        let child = |place: &u32| &self.nodes[*place as usize];
        let is_reached = |place: &&u32| child(place).reached();
        let test = (node.test.as_ref()).filter(|test| test.children.iter().any(|c| is_reached(&c)));
        let Some(test) = test else {
            let total: f64 = counts.iter().sum();
            if total > 0.0 {
                sums.iter_mut()
                    .zip(counts)
                    .for_each(|(sum, n)| *sum += share * n / total);
            }
            return;
        };
        match test.outcome(values) {
            Some(outcome) => {
                self.spread(child(&test.children[outcome]), values, share, counts, sums);
            }
            None => {
                let reached = || test.children.iter().filter(is_reached).map(child);
                let total: f64 = reached().map(|child| child.total).sum();
                for child in reached() {
                    self.spread(child, values, share * child.total / total, counts, sums);
                }
            }
        }
    }

    /// The class distribution of a case: the share of each class, 1 in total.
    pub fn distribution(&self, values: &[Value]) -> Vec<f64> {
        let root = &self.nodes[0];
        let mut distribution = vec![0.0; root.counts.len()];
        self.spread(root, values, 1.0, &root.counts, &mut distribution);
        distribution
    }

    /// The class of a case, and the share of it at the leaves that the case reaches.
    pub(crate) fn vote(&self, values: &[Value]) -> (usize, f64) {
        let distribution = self.distribution(values);
        let class = first_max(&distribution);
        (class, distribution[class])
    }

    /// How many leaves cases of the training reached.
    pub(crate) fn leaves(&self) -> usize {
        self.nodes
            .iter()
            .filter(|node| node.test.is_none() && node.reached())
            .count()
    }

    /// The tests that a case meets, from the root on.
    pub fn path(&self, values: &[Value]) -> Vec<Condition> {
        let mut path = Vec::new();
        let mut node = &self.nodes[0];
        while let Some(test) = &node.test {
            let outcome = test.outcome(values);
            let totals = test
                .children
                .iter()
                .map(|place| self.nodes[*place as usize].total);
            let chosen = outcome.unwrap_or_else(|| first_max(&totals.collect::<Vec<_>>()));
            let relation = match test.threshold {
                None => Relation::Is(chosen as u32),
                Some(threshold) if chosen == 0 => Relation::AtMost(threshold),
                Some(threshold) => Relation::Above(threshold),
            };
            let (attribute, known) = (test.attribute as usize, outcome.is_some());
            path.push(Condition {
                attribute,
                relation,
                known,
            });
            node = &self.nodes[test.children[chosen] as usize];
        }
        path
    }
}

/// What a model file holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Content {
    /// [`crate::model_file::FORMAT`].
    pub(crate) format: u32,
    /// With the ranges of the training.
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) classes: Vec<String>,
    /// Whether the trees' distributions are averaged, as of bagging; if not, each votes for one class.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) averaged: bool,
    pub(crate) trees: Vec<Tree>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// A trained classifier: a tree, or several that vote.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub(crate) content: Content,
}

impl Model {
    pub(crate) fn new(data: &DataSet, trees: Vec<Tree>, averaged: bool) -> Self {
        let content = Content {
            format: crate::model_file::FORMAT,
            attributes: data.attributes().to_vec(),
            classes: data.classes().to_vec(),
            averaged,
            trees,
        };
        Model { content }
    }

    /// The attributes, with the ranges that training saw. A case has its values in this order.
    pub fn attributes(&self) -> &[Attribute] {
        &self.content.attributes
    }

    /// The classes' names.
    pub fn classes(&self) -> &[String] {
        &self.content.classes
    }

    /// The trees; at least one.
    pub fn trees(&self) -> &[Tree] {
        &self.content.trees
    }

    /// For each class, the weight of the training's cases.
    pub fn counts(&self) -> &[f64] {
        &self.content.trees[0].nodes[0].counts
    }

    /// The class of a case: its place in the list of classes. A value that is not there, of the wrong kind or not declared
    /// counts as missing, here and below.
    pub fn classify(&self, values: &[Value]) -> usize {
        match self.trees() {
            [tree] => tree.classify(values),
            _ => first_max(&self.distribution(values)),
        }
    }

    /// The share of each class at the leaves that a case reaches, on the average of several bagged trees, or in the votes
    /// of several boosted ones; 1 in total.
    pub fn distribution(&self, values: &[Value]) -> Vec<f64> {
        if let [tree] = self.trees() {
            return tree.distribution(values);
        }
        let mut votes = vec![0.0; self.classes().len()];
        for tree in self.trees() {
            if self.content.averaged {
                let root = &tree.nodes[0];
                tree.spread(root, values, 1.0, &root.counts, &mut votes);
            } else {
                let (class, confidence) = tree.vote(values);
                votes[class] += confidence;
            }
        }
        let total: f64 = votes.iter().sum();
        votes.iter_mut().for_each(|vote| *vote /= total);
        votes
    }

    /// The tests that a case meets, from the root on, of the first tree that gives it the same class as all together;
    /// [`Model::words`] has one in words.
    pub fn path(&self, values: &[Value]) -> Vec<Condition> {
        let class = self.classify(values);
        let mut trees = self.trees().iter();
        let tree = trees.find(|tree| tree.classify(values) == class);
        tree.unwrap_or(&self.content.trees[0]).path(values)
    }

    /// The attributes whose values lie outside what training saw: below the least or above the greatest, or a discrete
    /// value that no case had. A missing value lies in no range, nor outside.
    pub fn outside(&self, values: &[Value]) -> Vec<usize> {
        let outside = |(attribute, value): (&Attribute, &Value)| match (&attribute.domain, *value) {
            (Domain::Continuous { range }, Value::Continuous(x)) => {
                !x.is_nan() && range.is_none_or(|(min, max)| x < min || x > max)
            }
            (Domain::Discrete { cases, .. }, Value::Discrete(v)) => {
                cases.get(v as usize).is_none_or(|cases| *cases == 0)
            }
            _ => false,
        };
        let pairs = self.attributes().iter().zip(values).enumerate();
        pairs
            .filter(|(_, pair)| outside(*pair))
            .map(|(a, _)| a)
            .collect()
    }
}
