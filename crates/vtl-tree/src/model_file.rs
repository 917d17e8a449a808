//! Models as JSON files.
//!
//! ```json
//! {"format":1,"attributes":[
//!   {"name":"rtt","unit":"ms","domain":{"continuous":{"range":[0.1,700.0]}}},
//!   {"name":"profile","domain":{"discrete":{"values":["bulk","web","none"],"cases":[20,30,0]}}}],
//! "classes":["a","b"],"trees":[[
//!   {"counts":[22.0,28.0],"test":{"attribute":0,"threshold":40.0,"children":[1,2]}},
//!   {"counts":[20.0,0.0]},
//!   {"counts":[2.0,28.0],"test":{"attribute":1,"children":[3,4,5]}},
//!   {"counts":[2.0,3.0]},
//!   {"counts":[0.0,25.0]},
//!   {"counts":[0.0,0.0]}]]}
//! ```

use serde::Deserialize;

use crate::{
    Attribute, Domain, Error, MAX_DEPTH, MAX_NODES, MAX_TREES, Model, Result, Test, Tree,
    data::check_schema, model::Content,
};

/// The version of the format that is written, and the only one that is read.
pub(crate) const FORMAT: u32 = 1;
/// The most bytes of a model file.
pub const MAX_FILE: usize = 8 << 20;

/// What every version has.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

impl Model {
    /// The model as a file's content.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.content).expect("numbers and strings, which JSON has")
    }

    /// Reads what [`Model::to_json`] wrote, from anybody.
    ///
    /// # Errors
    /// More than [`MAX_FILE`] bytes; another version; what is not such a file, or cut off; names that [`crate::DataSet`] would
    /// refuse; tests that do not fit the attributes; nodes that are no tree of at most [`MAX_DEPTH`] tests; counts that
    /// do not add up.
    pub fn from_json(json: &[u8]) -> Result<Model> {
        read(json).map_err(Error::Model)
    }
}

fn read(json: &[u8]) -> Result<Model, String> {
    if json.len() > MAX_FILE {
        return Err(format!("the file has more than {MAX_FILE} bytes"));
    }
    let malformed =
        |error: serde_json::Error| format!("no model file: {error}; train the model again");
    let Head { format } = serde_json::from_slice(json).map_err(malformed)?;
    if format != FORMAT {
        return Err(format!(
            "the file has format {format}, and this version reads {FORMAT}: train the model again with this version"
        ));
    }
    let mut content: Content = serde_json::from_slice(json).map_err(malformed)?;
    check_schema(&content.attributes, &content.classes)?;
    content.attributes.iter().try_for_each(check_range)?;
    let nodes: usize = content.trees.iter().map(|tree| tree.nodes.len()).sum();
    if content.trees.is_empty() || content.trees.len() > MAX_TREES || nodes > MAX_NODES {
        let trees = content.trees.len();
        return Err(format!(
            "{trees} trees with {nodes} nodes: there must be 1 to {MAX_TREES}, with at most {MAX_NODES}"
        ));
    }
    for (number, tree) in content.trees.iter_mut().enumerate() {
        let place = |(node, what)| format!("tree {number}, node {node}: {what}");
        check_nodes(tree, &content.attributes, content.classes.len()).map_err(place)?;
        tree.fill();
        check_sums(tree).map_err(place)?;
    }
    Ok(Model { content })
}

fn check_range(attribute: &Attribute) -> Result<(), String> {
    let fits = match &attribute.domain {
        Domain::Continuous { range: None } => true,
        Domain::Continuous {
            range: Some((min, max)),
        } => min.is_finite() && max.is_finite() && min <= max,
        Domain::Discrete { values, cases } => cases.len() == values.len(),
    };
    let name = &attribute.name;
    fits.then_some(()).ok_or(format!(
        "attribute \"{name}\" has no range, or no number of cases for each of its values"
    ))
}

/// Each node is below exactly one that stands before it, but for the first: so it is a tree. An error has the node's place.
fn check_nodes(
    tree: &Tree,
    attributes: &[Attribute],
    classes: usize,
) -> Result<(), (usize, String)> {
    if tree.nodes.is_empty() {
        return Err((0, "there is no root".into()));
    }
    let mut depths: Vec<Option<usize>> = vec![None; tree.nodes.len()];
    depths[0] = Some(0);
    for (place, node) in tree.nodes.iter().enumerate() {
        let Some(depth) = depths[place] else {
            return Err((place, "no node before it has it as a child".into()));
        };
        if node.counts.len() != classes || !node.counts.iter().all(|n| *n >= 0.0 && *n <= 1e15) {
            return Err((
                place,
                format!("its counts are not {classes} numbers from 0 to 1e15"),
            ));
        }
        let Some(test) = &node.test else { continue };
        check_test(test, attributes).map_err(|what| (place, what))?;
        if depth == MAX_DEPTH {
            return Err((
                place,
                format!("it is a test below {MAX_DEPTH} others, and that is the most"),
            ));
        }
        for child in &test.children {
            match depths.get_mut(*child as usize) {
                Some(depth_of_child @ None) if *child as usize > place => {
                    *depth_of_child = Some(depth + 1);
                }
                _ => {
                    return Err((
                        place,
                        format!("its child {child} does not stand after it, or is another's too"),
                    ));
                }
            }
        }
    }
    Ok(())
}

fn check_test(test: &Test, attributes: &[Attribute]) -> Result<(), String> {
    let Some(attribute) = attributes.get(test.attribute as usize) else {
        return Err(format!(
            "it tests attribute {} of {}",
            test.attribute,
            attributes.len()
        ));
    };
    let fits = match (&attribute.domain, test.threshold) {
        (Domain::Continuous { .. }, Some(threshold)) => {
            threshold.is_finite() && test.children.len() == 2
        }
        (Domain::Discrete { values, .. }, None) => test.children.len() == values.len(),
        _ => false,
    };
    let name = &attribute.name;
    fits.then_some(()).ok_or(format!(
        "its test does not fit \"{name}\": a threshold and two children for a number, else a child for each value"
    ))
}

/// What came to a node went to its children.
fn check_sums(tree: &Tree) -> Result<(), (usize, String)> {
    if !tree.nodes[0].reached() {
        return Err((0, "the root has no cases".into()));
    }
    for (place, node) in tree.nodes.iter().enumerate() {
        let Some(test) = &node.test else { continue };
        let children = test
            .children
            .iter()
            .map(|child| tree.nodes[*child as usize].total);
        let tolerance = 1e-6 * node.total.max(1.0);
        if (children.sum::<f64>() - node.total).abs() > tolerance {
            return Err((place, "its cases are not those of its children".into()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Value, model::Condition};

    const FILE: &str = r#"{"format":1,"attributes":[{"name":"rtt","unit":"ms","domain":{"continuous":{"range":[0.1,700.0]}}},{"name":"profile","domain":{"discrete":{"values":["bulk","web","none"],"cases":[20,30,0]}}}],"classes":["a","b"],"trees":[[{"counts":[22.0,28.0],"test":{"attribute":0,"threshold":40.0,"children":[1,2]}},{"counts":[20.0,0.0]},{"counts":[2.0,28.0],"test":{"attribute":1,"children":[3,4,5]}},{"counts":[2.0,3.0]},{"counts":[0.0,25.0]},{"counts":[0.0,0.0]}]]}"#;

    fn model() -> Model {
        Model::from_json(FILE.as_bytes()).unwrap()
    }

    #[test]
    fn json__as_documented() {
        assert_eq!(model().to_json(), FILE);
    }

    #[test]
    fn model__answers() {
        let model = model();
        let (near, far) = (Value::Continuous(40.0), Value::Continuous(40.1));
        let [bulk, web, none] = [0, 1, 2].map(Value::Discrete);
        let classes =
            [[near, web], [far, web], [far, bulk], [far, none]].map(|case| model.classify(&case));
        assert_eq!(classes, [0, 1, 1, 1]);
        assert_eq!(model.distribution(&[far, bulk]), [0.4, 0.6]);
        // No case came there: as its parent.
        assert_eq!(model.distribution(&[far, none]), [2.0 / 30.0, 28.0 / 30.0]);
        // Missing, of the wrong kind, not declared, or not there at all.
        for profile in [Value::Missing, near, Value::Discrete(3)] {
            let distribution = model.distribution(&[far, profile]);
            assert!(
                (distribution[0] - 2.0 / 30.0).abs() < 1e-12,
                "{distribution:?}"
            );
        }
        for rtt in [
            &[Value::Missing, bulk][..],
            &[Value::Continuous(f64::NAN), bulk],
            &[bulk, bulk],
        ] {
            let distribution = model.distribution(rtt);
            assert!(
                (distribution[0] - (0.4 + 0.6 * 0.4)).abs() < 1e-12,
                "{distribution:?}"
            );
            assert_eq!(model.classify(rtt), 0);
        }
        assert!((model.distribution(&[])[0] - 22.0 / 50.0).abs() < 1e-12);
        assert_eq!(
            (model.counts(), model.classes().len()),
            (&[22.0, 28.0][..], 2)
        );
    }

    #[test]
    fn model__explains() {
        let model = model();
        let words = |values: &[Value]| -> Vec<String> {
            model
                .path(values)
                .iter()
                .map(|condition: &Condition| model.words(condition))
                .collect()
        };
        assert_eq!(words(&[Value::Continuous(1.0)]), ["rtt <= 40 ms"]);
        assert_eq!(
            words(&[Value::Continuous(50.0), Value::Discrete(0)]),
            ["rtt > 40 ms", "profile = bulk"]
        );
        assert_eq!(
            words(&[]),
            [
                "rtt > 40 ms (missing: most cases)",
                "profile = web (missing: most cases)"
            ]
        );
        let drawn = "\
rtt <= 40 ms: a (20.0)
rtt > 40 ms
|   profile = bulk: b (5.0/2.0)
|   profile = web: b (25.0)
|   profile = none: b (0.0)
";
        assert_eq!(model.to_string(), drawn);
    }

    #[test]
    fn model__tells_what_lies_outside() {
        let outside = |rtt, profile| model().outside(&[Value::Continuous(rtt), profile]);
        assert_eq!(outside(0.1, Value::Discrete(1)), [0; 0]);
        assert_eq!(outside(700.0, Value::Missing), [0; 0]);
        assert_eq!(outside(f64::NAN, Value::Missing), [0; 0]);
        assert_eq!(outside(0.09, Value::Discrete(2)), [0, 1]);
        assert_eq!(outside(f64::INFINITY, Value::Discrete(9)), [0, 1]);
        assert_eq!(model().outside(&[]), [0; 0]);
    }

    fn refuses(edits: &[(&str, &str, &str)]) {
        for (from, to, error) in edits {
            let file = FILE.replacen(from, to, 1);
            assert_ne!(file, FILE, "{from}");
            let refused = Model::from_json(file.as_bytes()).map_err(|error| error.to_string());
            assert_eq!(refused, Err(format!("model: {error}")), "{to}");
        }
    }

    #[test]
    fn from_json__refuses_nodes() {
        let bounds = "tree 0, node 0: its child 9 does not stand after it, or is another's too";
        let sums = "tree 0, node 0: its cases are not those of its children";
        refuses(&[
            (
                "\"format\":1",
                "\"format\":2",
                "the file has format 2, and this version reads 1: train the model again with this version",
            ),
            ("\"children\":[1,2]", "\"children\":[1,9]", bounds),
            (
                "\"children\":[1,2]",
                "\"children\":[1,1]",
                "tree 0, node 0: its child 1 does not stand after it, or is another's too",
            ),
            (
                "\"children\":[1,2]",
                "\"children\":[0,2]",
                "tree 0, node 0: its child 0 does not stand after it, or is another's too",
            ),
            (
                "[3,4,5]",
                "[3,5,4]},\"x\":{",
                "no model file: unknown field `x`, expected `counts` or `test` at line 1 column 390; train the model again",
            ),
            (
                "\"children\":[1,2]",
                "\"children\":[1]",
                "tree 0, node 0: its test does not fit \"rtt\": a threshold and two children for a number, else a child for each value",
            ),
            (
                "\"threshold\":40.0,",
                "",
                "tree 0, node 0: its test does not fit \"rtt\": a threshold and two children for a number, else a child for each value",
            ),
            (
                "\"attribute\":1",
                "\"attribute\":2",
                "tree 0, node 2: it tests attribute 2 of 2",
            ),
            (
                ",{\"counts\":[0.0,0.0]}]",
                ",{\"counts\":[0.0,0.0]},{\"counts\":[0.0,0.0]}]",
                "tree 0, node 6: no node before it has it as a child",
            ),
            ("[22.0,28.0]", "[22.0,29.0]", sums),
            (
                "[22.0,28.0]",
                "[22.0,1e16]",
                "tree 0, node 0: its counts are not 2 numbers from 0 to 1e15",
            ),
            (
                "[22.0,28.0]",
                "[50.0]",
                "tree 0, node 0: its counts are not 2 numbers from 0 to 1e15",
            ),
            (
                "[20.0,0.0]",
                "[20.0,-1.0]",
                "tree 0, node 1: its counts are not 2 numbers from 0 to 1e15",
            ),
        ]);
    }

    #[test]
    fn from_json__refuses_attributes() {
        refuses(&[
            (
                "[0.1,700.0]",
                "[700.0,0.1]",
                "attribute \"rtt\" has no range, or no number of cases for each of its values",
            ),
            (
                "[20,30,0]",
                "[20]",
                "attribute \"profile\" has no range, or no number of cases for each of its values",
            ),
            (
                "\"rtt\"",
                "\"profile\"",
                "\"profile\" stands twice among the attributes: rename one",
            ),
            (
                "\"rtt\"",
                "\"r\\n\"",
                "\"r\\n\", among the attributes, is no name of 1 to 100 bytes without control characters",
            ),
            (
                "\"ms\"",
                "\"\\u001b[2J\"",
                "the unit of attribute \"rtt\" is longer than 100 bytes or has control characters",
            ),
            (
                "\"trees\":[[",
                "\"trees\":[[],[",
                "tree 0, node 0: there is no root",
            ),
        ]);
    }

    #[test]
    fn from_json__refuses_what_is_cut_off() {
        for end in 0..FILE.len() {
            assert!(Model::from_json(&FILE.as_bytes()[..end]).is_err(), "{end}");
        }
        let long = vec![b' '; MAX_FILE + 1];
        assert_eq!(
            Model::from_json(&long).unwrap_err().to_string(),
            "model: the file has more than 8388608 bytes"
        );
        let deep = "[".repeat(100_000);
        assert!(Model::from_json(deep.as_bytes()).is_err());
    }

    /// A chain of tests: as deep as may be, and deeper.
    #[test]
    fn from_json__depth() {
        let chain = |tests: usize| {
            let node = |i: usize| {
                let children = (2 * i + 1, 2 * i + 2);
                let test = format!(
                    "\"test\":{{\"attribute\":0,\"threshold\":1.0,\"children\":[{},{}]}}",
                    children.0, children.1
                );
                format!("{{\"counts\":[0.0]}},{{\"counts\":[1.0],{test}}}")
            };
            let nodes: Vec<String> = (0..tests).map(node).collect();
            let nodes = nodes.join(",").replacen("{\"counts\":[0.0]},", "", 1);
            let end = "{\"counts\":[0.0]},{\"counts\":[1.0]}";
            format!(
                "{{\"format\":1,\"attributes\":[{{\"name\":\"x\",\"domain\":{{\"continuous\":{{}}}}}}],\"classes\":[\"a\"],\"trees\":[[{nodes},{end}]]}}"
            )
        };
        let model = Model::from_json(chain(MAX_DEPTH).as_bytes()).unwrap();
        assert_eq!(model.distribution(&[]), [1.0]);
        assert_eq!(model.path(&[]).len(), MAX_DEPTH);
        assert!(model.to_string().lines().count() > MAX_DEPTH);
        let error = Model::from_json(chain(MAX_DEPTH + 1).as_bytes())
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "model: tree 0, node 256: it is a test below 128 others, and that is the most"
        );
    }
}
