//! Data sets: attributes, classes, cases.

use std::{collections::HashSet, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use crate::{Error, MAX_ATTRIBUTES, MAX_CLASSES, MAX_NAME, MAX_VALUES, Result};

/// What an attribute's values are, and which of them training has seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Domain {
    /// Numbers, tested against thresholds.
    Continuous {
        /// The least and the greatest value of the data set; `None` if all are missing. [`DataSet::new`] sets it.
        #[serde(default)]
        range: Option<(f64, f64)>,
    },
    /// One of declared values; a test has a branch for each.
    Discrete {
        /// The values' names. A case has a value's place in this list.
        values: Vec<String>,
        /// For each value, how many cases of the data set have it. [`DataSet::new`] sets it.
        #[serde(default)]
        cases: Vec<u64>,
    },
}

/// A property of cases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attribute {
    /// Unique among a data set's attributes.
    pub name: String,
    /// For people, such as "ms"; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// What its values are.
    pub domain: Domain,
}

impl Attribute {
    /// A continuous attribute. Files write it `NAME [UNIT]`, or `NAME` if it has no unit.
    pub fn continuous(name: &str) -> Self {
        let domain = Domain::Continuous { range: None };
        Attribute::new(name, domain)
    }

    /// A discrete attribute.
    pub fn discrete(name: &str, values: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let values = values.into_iter().map(Into::into).collect();
        let cases = Vec::new();
        Attribute::new(name, Domain::Discrete { values, cases })
    }

    fn new(name: &str, domain: Domain) -> Self {
        let (name, unit) = match name.strip_suffix(']').and_then(|s| s.split_once(" [")) {
            Some((name, unit)) => (name.trim(), unit.trim()),
            None => (name, ""),
        };
        Attribute {
            name: name.to_owned(),
            unit: unit.to_owned(),
            domain,
        }
    }

    /// Whether `value` fits the domain. A missing value fits any.
    fn admits(&self, value: Value) -> bool {
        match (&self.domain, value) {
            (_, Value::Missing) => true,
            (Domain::Continuous { .. }, Value::Continuous(x)) => x.is_finite(),
            (Domain::Discrete { values, .. }, Value::Discrete(v)) => (v as usize) < values.len(),
            _ => false,
        }
    }
}

/// An attribute's value in a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Unknown, `?` in files.
    Missing,
    /// Of a continuous attribute, in its unit.
    Continuous(f64),
    /// Of a discrete attribute: the place in its list of values.
    Discrete(u32),
}

/// A row of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// One for each attribute.
    pub values: Vec<Value>,
    /// The place in the list of classes.
    pub class: usize,
    /// How many cases it stands for: from 1e-3 to 1e9.
    pub weight: f64,
}

/// Cases to learn from, or to evaluate with.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSet {
    attributes: Vec<Attribute>,
    classes: Vec<String>,
    cases: Vec<Case>,
    groups: Vec<String>,
}

/// What a case may weigh: sums of such weights are exact enough.
pub(crate) const WEIGHTS: RangeInclusive<f64> = 1e-3..=1e9;

/// Refuses lists of names that are too long or ambiguous. `what` is what they name, in the plural.
fn check_names(what: &str, names: &[impl AsRef<str>], max: usize) -> Result<(), String> {
    if names.is_empty() || names.len() > max {
        return Err(format!("{} {what}: there must be 1 to {max}", names.len()));
    }
    let mut seen = HashSet::new();
    for name in names.iter().map(AsRef::as_ref) {
        if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
            let shown = name.escape_debug().take(MAX_NAME).collect::<String>();
            return Err(format!(
                "\"{shown}\", among the {what}, is no name of 1 to {MAX_NAME} bytes without control characters"
            ));
        }
        if !seen.insert(name) {
            return Err(format!(
                "\"{name}\" stands twice among the {what}: rename one"
            ));
        }
    }
    Ok(())
}

/// Refuses attributes and classes that are too many, or that have ambiguous names.
pub(crate) fn check_schema(attributes: &[Attribute], classes: &[String]) -> Result<(), String> {
    check_names("classes", classes, MAX_CLASSES)?;
    let names: Vec<_> = attributes.iter().map(|attribute| &attribute.name).collect();
    check_names("attributes", &names, MAX_ATTRIBUTES)?;
    for attribute in attributes {
        if attribute.unit.len() > MAX_NAME || attribute.unit.contains(char::is_control) {
            let name = &attribute.name;
            return Err(format!(
                "the unit of attribute \"{name}\" is longer than {MAX_NAME} bytes or has control characters"
            ));
        }
        if let Domain::Discrete { values, .. } = &attribute.domain {
            check_names(
                &format!("values of attribute \"{}\"", attribute.name),
                values,
                MAX_VALUES,
            )?;
        }
    }
    Ok(())
}

impl DataSet {
    /// A data set of these cases. Sets the attributes' ranges from them.
    ///
    /// # Errors
    /// No class, attribute or case; too many of them; two of the same name; a case whose values do not fit the
    /// attributes, or whose weight is out of range.
    pub fn new(attributes: Vec<Attribute>, classes: Vec<String>, cases: Vec<Case>) -> Result<Self> {
        DataSet::with_groups(attributes, classes, cases, Vec::new())
    }

    /// [`DataSet::new`] with a group for each case, for [`crate::evaluation::hold_out`].
    ///
    /// # Errors
    /// As [`DataSet::new`], and another number of groups than of cases or 0.
    pub fn with_groups(
        attributes: Vec<Attribute>,
        classes: Vec<String>,
        cases: Vec<Case>,
        groups: Vec<String>,
    ) -> Result<Self> {
        check_schema(&attributes, &classes).map_err(Error::Data)?;
        if cases.is_empty() {
            return Err(Error::Data("there is no case: add some".into()));
        }
        if !groups.is_empty() && groups.len() != cases.len() {
            let (groups, cases) = (groups.len(), cases.len());
            return Err(Error::Data(format!(
                "{cases} cases have {groups} groups: give each case one"
            )));
        }
        for (number, case) in (1..).zip(&cases) {
            check_case(&attributes, classes.len(), case)
                .map_err(|what| Error::Data(format!("case {number} {what}")))?;
        }
        let mut data = DataSet {
            attributes,
            classes,
            cases,
            groups,
        };
        data.set_ranges();
        Ok(data)
    }

    /// The attributes, with the ranges of this data set.
    pub fn attributes(&self) -> &[Attribute] {
        &self.attributes
    }

    /// The classes' names.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The cases; at least one.
    pub fn cases(&self) -> &[Case] {
        &self.cases
    }

    /// For each case the group that it belongs to, or nothing.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// The cases at these places, in this order, with ranges of their own.
    ///
    /// # Errors
    /// No place, or one past the end.
    pub fn subset(&self, places: &[usize]) -> Result<DataSet> {
        if let Some(place) = places.iter().find(|place| **place >= self.cases.len()) {
            let n = self.cases.len();
            return Err(Error::Data(format!(
                "place {place} is past the last of {n} cases"
            )));
        }
        let groups = match self.groups.is_empty() {
            true => Vec::new(),
            false => places
                .iter()
                .map(|place| self.groups[*place].clone())
                .collect(),
        };
        let cases = places
            .iter()
            .map(|place| self.cases[*place].clone())
            .collect();
        DataSet::with_groups(self.attributes.clone(), self.classes.clone(), cases, groups)
    }

    fn set_ranges(&mut self) {
        for (a, attribute) in self.attributes.iter_mut().enumerate() {
            let values = self.cases.iter().map(|case| case.values[a]);
            match &mut attribute.domain {
                Domain::Continuous { range } => {
                    *range = None;
                    for value in values {
                        let Value::Continuous(x) = value else {
                            continue;
                        };
                        let (min, max) = range.unwrap_or((x, x));
                        *range = Some((min.min(x), max.max(x)));
                    }
                }
                Domain::Discrete {
                    values: names,
                    cases,
                } => {
                    *cases = vec![0; names.len()];
                    for value in values {
                        if let Value::Discrete(v) = value {
                            cases[v as usize] += 1;
                        }
                    }
                }
            }
        }
    }
}

fn check_case(attributes: &[Attribute], classes: usize, case: &Case) -> Result<(), String> {
    if case.values.len() != attributes.len() {
        let (values, attributes) = (case.values.len(), attributes.len());
        return Err(format!("has {values} values for {attributes} attributes"));
    }
    for (attribute, value) in attributes.iter().zip(&case.values) {
        if !attribute.admits(*value) {
            let name = &attribute.name;
            return Err(format!(
                "has {value:?} as \"{name}\", which is not in that attribute's domain"
            ));
        }
    }
    if case.class >= classes {
        return Err(format!("has class {}, and there are {classes}", case.class));
    }
    if !WEIGHTS.contains(&case.weight) {
        return Err(format!(
            "has the weight {}, which must be from 1e-3 to 1e9",
            case.weight
        ));
    }
    Ok(())
}
