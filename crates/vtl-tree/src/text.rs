//! Models in words: trees drawn as C4.5, C5.0 and Weka's J48 draw them.
//!
//! ```text
//! rtt <= 40 ms: a (20.0)
//! rtt > 40 ms
//! |   profile = bulk: b (25.0/1.0)
//! |   profile = web: a (5.0)
//! ```
//!
//! At a leaf: its class, the weight of the training's cases there, and of those that have another class.

use std::fmt;

use crate::{Condition, Domain, EPSILON, Model, Node, Relation, Test, Tree};

impl Model {
    /// A condition of this model's [`Model::path`] in words, such as `rtt <= 40 ms`.
    ///
    /// # Panics
    /// If the attribute or its value is none of this model's.
    pub fn words(&self, condition: &Condition) -> String {
        let attribute = &self.content.attributes[condition.attribute];
        let (name, unit) = (&attribute.name, &attribute.unit);
        let space = if unit.is_empty() { "" } else { " " };
        let words = match (condition.relation, &attribute.domain) {
            (Relation::AtMost(threshold), _) => {
                format!("{name} <= {}{space}{unit}", rounded(threshold))
            }
            (Relation::Above(threshold), _) => {
                format!("{name} > {}{space}{unit}", rounded(threshold))
            }
            (Relation::Is(v), Domain::Discrete { values, .. }) => {
                format!("{name} = {}", values[v as usize])
            }
            (Relation::Is(v), _) => format!("{name} = {v}"),
        };
        match condition.known {
            true => words,
            false => format!("{words} (missing: most cases)"),
        }
    }

    fn draw(
        &self,
        f: &mut fmt::Formatter<'_>,
        tree: &Tree,
        test: &Test,
        depth: usize,
    ) -> fmt::Result {
        for (outcome, child) in test.children.iter().enumerate() {
            let relation = match test.threshold {
                None => Relation::Is(outcome as u32),
                Some(threshold) if outcome == 0 => Relation::AtMost(threshold),
                Some(threshold) => Relation::Above(threshold),
            };
            let (attribute, known) = (test.attribute as usize, true);
            let words = self.words(&Condition {
                attribute,
                relation,
                known,
            });
            write!(f, "{}{words}", "|   ".repeat(depth))?;
            let node = &tree.nodes[*child as usize];
            match &node.test {
                None => writeln!(f, ": {}", self.leaf(node))?,
                Some(test) => {
                    writeln!(f)?;
                    self.draw(f, tree, test, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    fn leaf(&self, node: &Node) -> String {
        let class = &self.content.classes[node.class as usize];
        let errors = node.total - node.counts[node.class as usize];
        let hundredths = |x: f64| (x * 100.0).round() / 100.0;
        match errors > EPSILON {
            true => format!(
                "{class} ({:?}/{:?})",
                hundredths(node.total),
                hundredths(errors)
            ),
            false => format!("{class} ({:?})", hundredths(node.total)),
        }
    }
}

/// To nine significant digits: without the noise of a middle between two values.
fn rounded(x: f64) -> f64 {
    format!("{x:.8e}").parse().unwrap_or(x)
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trees = self.trees();
        for (number, tree) in trees.iter().enumerate() {
            if trees.len() > 1 {
                writeln!(f, "{}tree {number}:", if number > 0 { "\n" } else { "" })?;
            }
            match &tree.nodes[0].test {
                None => writeln!(f, ": {}", self.leaf(&tree.nodes[0]))?,
                Some(test) => self.draw(f, tree, test, 0)?,
            }
        }
        Ok(())
    }
}
