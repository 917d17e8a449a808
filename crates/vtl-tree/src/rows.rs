//! What the readers of text files share: fields become cases.

use crate::{
    Attribute, Case, DataSet, Domain, Error, Result, Value,
    data::{WEIGHTS, check_schema},
};

/// What a column of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// The next attribute.
    Attribute,
    Class,
    Weight,
    Group,
    Ignored,
}

/// Rows of a file on their way into a data set.
pub(crate) struct Rows {
    /// The kind of file, for errors.
    pub(crate) file: &'static str,
    pub(crate) columns: Vec<Column>,
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) classes: Vec<String>,
    pub(crate) cases: Vec<Case>,
    pub(crate) groups: Vec<String>,
}

impl Rows {
    /// Adds a line's case.
    pub(crate) fn push<'a>(
        &mut self,
        line: u64,
        fields: impl ExactSizeIterator<Item = &'a str>,
    ) -> Result<()> {
        let (has, columns) = (fields.len(), self.columns.len());
        if has != columns {
            return self.refuse(
                line,
                format!("there are {has} fields for {columns} columns"),
            );
        }
        let mut case = Case {
            values: Vec::with_capacity(self.attributes.len()),
            class: 0,
            weight: 1.0,
        };
        for (column, field) in self.columns.clone().into_iter().zip(fields) {
            match column {
                Column::Attribute => match value(&self.attributes[case.values.len()], field) {
                    Ok(value) => case.values.push(value),
                    Err(what) => return self.refuse(line, what),
                },
                Column::Class => match self.classes.iter().position(|class| class == field) {
                    Some(class) => case.class = class,
                    None => {
                        return self.refuse(line, format!("\"{field}\" is none of the classes"));
                    }
                },
                Column::Weight => match field.parse::<f64>() {
                    Ok(weight) if WEIGHTS.contains(&weight) => case.weight = weight,
                    _ => {
                        return self.refuse(
                            line,
                            format!("the weight \"{field}\" is no number from 1e-3 to 1e9"),
                        );
                    }
                },
                Column::Group => self.groups.push(field.to_owned()),
                Column::Ignored => {}
            }
        }
        self.cases.push(case);
        Ok(())
    }

    /// Checks what the header says, before cases are looked up in it.
    pub(crate) fn check(&self) -> Result<()> {
        check_schema(&self.attributes, &self.classes).map_err(Error::Data)
    }

    pub(crate) fn finish(self) -> Result<DataSet> {
        DataSet::with_groups(self.attributes, self.classes, self.cases, self.groups)
    }

    fn refuse(&self, line: u64, what: String) -> Result<()> {
        let file = self.file;
        Err(Error::Line { file, line, what })
    }
}

fn value(attribute: &Attribute, field: &str) -> Result<Value, String> {
    if field == "?" {
        return Ok(Value::Missing);
    }
    let name = &attribute.name;
    match &attribute.domain {
        Domain::Continuous { .. } => match field.parse::<f64>() {
            Ok(x) if x.is_finite() => Ok(Value::Continuous(x)),
            _ => Err(format!(
                "\"{field}\", as \"{name}\", is no finite number, nor ? for a missing one"
            )),
        },
        Domain::Discrete { values, .. } => match values.iter().position(|value| value == field) {
            Some(v) => Ok(Value::Discrete(v as u32)),
            None => Err(format!(
                "\"{field}\" is no declared value of \"{name}\": declare it, or write ? for a missing one"
            )),
        },
    }
}
