//! Quinlan's `.names` and `.data` files (the book, section 1.1; C5.0's tutorial).
//!
//! ```text
//! Play, Don't Play.             | classes, or the name of the attribute that is the class
//! outlook: sunny, overcast, rain.
//! temperature [F]: continuous.  | a unit
//! station: ignore.              | or label
//! case weight: continuous.      | how many cases a line stands for
//! ```
//!
//! Each entry ends with a full stop and white space. `\` makes the next character an ordinary one. Values by
//! `discrete N`, ordered ones, dates and times, and attributes defined by formulas are refused.

use crate::{
    Attribute, DataSet, Error, Result,
    rows::{Column, Rows},
};

const NAMES: &str = ".names";
const DATA: &str = ".data";

/// `HEAD: ITEM, ITEM.`
struct Entry {
    line: u64,
    head: Option<String>,
    items: Vec<String>,
}

impl DataSet {
    /// Reads a data set from the text of a `.names` file and of its `.data` file, or of a `.test` file in the same form.
    ///
    /// # Errors
    /// The first line that is not in that form, and what would be; and all of [`DataSet::new`].
    pub fn from_names(names: &str, data: &str) -> Result<DataSet> {
        let mut rows = header(names)?;
        rows.check()?;
        for (line, text) in (1..).zip(data.lines()) {
            let fields = fields(text);
            if fields.len() > 1 || !fields[0].is_empty() {
                rows.push(line, fields.iter().map(String::as_str))?;
            }
        }
        rows.finish()
    }
}

fn refuse<T>(line: u64, what: String) -> Result<T> {
    let file = NAMES;
    Err(Error::Line { file, line, what })
}

fn header(text: &str) -> Result<Rows> {
    let mut entries = entries(text)?.into_iter();
    let Some(Entry {
        items, head: None, ..
    }) = entries.next()
    else {
        return refuse(
            1,
            "the file must begin with the classes, or with the class attribute's name".into(),
        );
    };
    let target = (items.len() == 1).then(|| items[0].clone());
    let mut rows = Rows {
        file: DATA,
        columns: Vec::new(),
        attributes: Vec::new(),
        classes: if target.is_some() { Vec::new() } else { items },
        cases: Vec::new(),
        groups: Vec::new(),
    };
    for Entry { line, head, items } in entries {
        let Some(name) = head else {
            return refuse(
                line,
                format!(
                    "\"{}\" has no values: write NAME: VALUES.",
                    items.join(", ")
                ),
            );
        };
        let column = match items[0].as_str() {
            _ if Some(&name) == target.as_ref() => Column::Class,
            "continuous" if items.len() == 1 && name == "case weight" => Column::Weight,
            "ignore" | "label" if items.len() == 1 => Column::Ignored,
            _ => Column::Attribute,
        };
        match (column, items[0].as_str()) {
            (Column::Attribute, "continuous") if items.len() == 1 => {
                rows.attributes.push(Attribute::continuous(&name));
            }
            (Column::Attribute, first) if items.len() == 1 || first.starts_with('[') => {
                return refuse(
                    line,
                    format!(
                        "\"{name}\" is \"{first}\": it must be continuous, ignore, label, or a list of values"
                    ),
                );
            }
            (Column::Attribute, _) => rows.attributes.push(Attribute::discrete(&name, items)),
            (Column::Class, _) => rows.classes = items,
            _ => {}
        }
        rows.columns.push(column);
    }
    match target {
        Some(target) if !rows.columns.contains(&Column::Class) => refuse(
            1,
            format!("the class attribute \"{target}\" is not among the attributes: add it"),
        ),
        Some(_) => Ok(rows),
        None => {
            rows.columns.push(Column::Class);
            Ok(rows)
        }
    }
}

/// The characters of a line up to its comment, each with whether `\` stands before it.
fn characters(line: &str) -> impl Iterator<Item = (char, bool)> {
    let mut escaped = false;
    let marked = line.chars().filter_map(move |c| {
        let was = std::mem::take(&mut escaped);
        match c {
            '\\' if !was => {
                escaped = true;
                None
            }
            _ => Some((c, was)),
        }
    });
    marked.take_while(|c| *c != ('|', false))
}

/// White space at the ends goes, any other becomes one space.
fn tidy(field: &mut String) -> String {
    let tidied = field.split_whitespace().collect::<Vec<_>>().join(" ");
    field.clear();
    tidied
}

fn entries(text: &str) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let (mut head, mut items, mut field) = (None, Vec::new(), String::new());
    let mut begun = 1;
    for (line, text) in (1..).zip(text.lines()) {
        let mut characters = characters(text).peekable();
        while let Some(c) = characters.next() {
            let ends = characters
                .peek()
                .is_none_or(|(next, _)| next.is_whitespace());
            match c {
                (':', false) if head.is_none() && items.is_empty() => head = Some(tidy(&mut field)),
                (':', false) => {
                    return refuse(
                        line,
                        "a second colon: end the entry before it with a full stop, or write \\:"
                            .into(),
                    );
                }
                (',', false) => items.push(tidy(&mut field)),
                ('.', false) if ends => {
                    items.push(tidy(&mut field));
                    let (head, items) = (head.take(), std::mem::take(&mut items));
                    entries.push(Entry {
                        line: begun,
                        head,
                        items,
                    });
                }
                (c, _) => {
                    if field.is_empty() && items.is_empty() && head.is_none() {
                        begun = line;
                    }
                    field.push(c);
                }
            }
        }
        field.push(' ');
        if head.is_none() && items.is_empty() && field.trim().is_empty() {
            field.clear();
        }
    }
    if head.is_some() || !items.is_empty() || !field.trim().is_empty() {
        return refuse(begun, "the last entry does not end with a full stop".into());
    }
    Ok(entries)
}

/// The fields of a line of data. A full stop at the end does not belong to the last.
fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut field) = (Vec::new(), String::new());
    let mut stop = false;
    for (c, escaped) in characters(line) {
        if !c.is_whitespace() {
            stop = (c, escaped) == ('.', false);
        }
        match (c, escaped) {
            (',', false) => fields.push(tidy(&mut field)),
            _ => field.push(c),
        }
    }
    let mut last = tidy(&mut field);
    if stop {
        last.pop();
    }
    fields.push(last);
    fields
}

#[cfg(test)]
mod tests {
    use crate::{Case, DataSet, Domain, Value};

    const GOLF: &str = "\
| Quinlan's golf
Play, Don't Play.       | classes

outlook: sunny, overcast,
    rain.
temperature [F]: continuous.
station: ignore.
\"high, or not\\, at 10\\:30\": yes, \\?.
case weight: continuous.
";

    #[test]
    fn from_names__reads() {
        let data = "sunny, 85, x, yes, 1, Don't Play\n\n rain,?,?,  \\?,2.5,Play.\n";
        let names = GOLF.replace("\"high, or not", "high");
        let data = DataSet::from_names(&names, data).unwrap();
        assert_eq!(data.classes(), ["Play", "Don't Play"]);
        let names: Vec<_> = data
            .attributes()
            .iter()
            .map(|a| (a.name.as_str(), a.unit.as_str()))
            .collect();
        assert_eq!(
            names,
            [
                ("outlook", ""),
                ("temperature", "F"),
                ("high, at 10:30\"", "")
            ]
        );
        let outlook = Domain::Discrete {
            values: ["sunny", "overcast", "rain"].map(Into::into).into(),
            cases: vec![1, 0, 1],
        };
        assert_eq!(data.attributes()[0].domain, outlook);
        assert_eq!(
            data.attributes()[1].domain,
            Domain::Continuous {
                range: Some((85.0, 85.0))
            }
        );
        let first = vec![
            Value::Discrete(0),
            Value::Continuous(85.0),
            Value::Discrete(0),
        ];
        assert_eq!(
            data.cases()[0],
            Case {
                values: first,
                class: 1,
                weight: 1.0
            }
        );
        assert_eq!(
            data.cases()[1].values[..2],
            [Value::Discrete(2), Value::Missing]
        );
        assert_eq!((data.cases()[1].class, data.cases()[1].weight), (0, 2.5));
    }

    #[test]
    fn from_names__class_may_be_an_attribute() {
        let data =
            DataSet::from_names("c.\nx: continuous.\nc: a, b.\ny: d, e.", "1.5,b,e\n").unwrap();
        assert_eq!(data.classes(), ["a", "b"]);
        assert_eq!(
            data.cases()[0].values,
            [Value::Continuous(1.5), Value::Discrete(1)]
        );
        assert_eq!(data.cases()[0].class, 1);
    }

    #[test]
    fn from_names__refuses() {
        let good = "a, b.\nx: continuous.\ny: d, e.\n";
        let refused = [
            (
                "",
                "",
                ".names, line 1: the file must begin with the classes, or with the class attribute's name",
            ),
            (
                "a, b.\nx",
                "",
                ".names, line 2: the last entry does not end with a full stop",
            ),
            (
                "a, b.\nx: continuous\ny: d, e.\n",
                "",
                ".names, line 3: a second colon: end the entry before it with a full stop, or write \\:",
            ),
            (
                "a, b.\nx.\n",
                "",
                ".names, line 2: \"x\" has no values: write NAME: VALUES.",
            ),
            (
                "a, b.\nx: date.\n",
                "",
                ".names, line 2: \"x\" is \"date\": it must be continuous, ignore, label, or a list of values",
            ),
            (
                "a, b.\nx: [ordered] d, e.\n",
                "",
                ".names, line 2: \"x\" is \"[ordered] d\": it must be continuous, ignore, label, or a list of values",
            ),
            (
                "c.\nx: d, e.\n",
                "",
                ".names, line 1: the class attribute \"c\" is not among the attributes: add it",
            ),
            (
                "a, b.\nx: d, d.\n",
                "d,a",
                "data set: \"d\" stands twice among the values of attribute \"x\": rename one",
            ),
            (
                "a, b.\nx: d, e.\nx: continuous.\n",
                "d,1,a",
                "data set: \"x\" stands twice among the attributes: rename one",
            ),
            (good, "", "data set: there is no case: add some"),
            (
                good,
                "\n1,d\n",
                ".data, line 2: there are 2 fields for 3 columns",
            ),
            (
                good,
                "1,f,a",
                ".data, line 1: \"f\" is no declared value of \"y\": declare it, or write ? for a missing one",
            ),
            (
                good,
                "inf,d,a",
                ".data, line 1: \"inf\", as \"x\", is no finite number, nor ? for a missing one",
            ),
            (good, "1,d,?", ".data, line 1: \"?\" is none of the classes"),
            (
                "a, b.\nx: d, e.\ncase weight: continuous.\n",
                "d,0,a",
                ".data, line 1: the weight \"0\" is no number from 1e-3 to 1e9",
            ),
        ];
        for (names, data, error) in refused {
            let refused = DataSet::from_names(names, data).map_err(|error| error.to_string());
            assert_eq!(refused, Err(error.into()), "{names}{data}");
        }
    }
}
