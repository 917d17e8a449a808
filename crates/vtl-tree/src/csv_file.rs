//! CSV files with a header (RFC 4180).

use std::collections::HashSet;

use crate::{
    Attribute, DataSet, Error, Result,
    rows::{Column, Rows},
};

const FILE: &str = "CSV";

/// What the columns of a CSV file are, by their names in its header. All others are attributes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CsvColumns<'a> {
    /// The class.
    pub class: &'a str,
    /// The group that a row belongs to, for [`crate::evaluation::hold_out`].
    pub group: Option<&'a str>,
    /// How many cases a row stands for.
    pub weight: Option<&'a str>,
    /// What is no attribute.
    pub ignored: &'a [&'a str],
}

impl DataSet {
    /// Reads a data set from CSV with a header. A column all of whose fields are numbers is a continuous attribute, any
    /// other a discrete one, with its values in alphabetical order, as the classes are. An empty field or `?` is a missing
    /// value. `rtt [ms]` in the header is the attribute `rtt` in ms.
    ///
    /// # Errors
    /// Malformed CSV, a column that is not there, and all of [`DataSet::new`].
    pub fn from_csv(text: &str, columns: &CsvColumns<'_>) -> Result<DataSet> {
        let mut reader = csv::ReaderBuilder::new()
            .trim(csv::Trim::All)
            .from_reader(text.as_bytes());
        let header = reader.headers().map_err(|error| malformed(&error))?.clone();
        let records: Vec<_> = reader
            .records()
            .collect::<Result<_, _>>()
            .map_err(|error| malformed(&error))?;
        let kinds = kinds(&header, columns)?;
        let mut rows = Rows {
            file: FILE,
            attributes: Vec::new(),
            classes: Vec::new(),
            cases: Vec::new(),
            groups: Vec::new(),
            columns: kinds,
        };
        for (place, name) in header.iter().enumerate() {
            let fields = || {
                records
                    .iter()
                    .map(|record| blank(&record[place]))
                    .filter(|field| *field != "?")
            };
            match rows.columns[place] {
                Column::Attribute if fields().all(|field| field.parse::<f64>().is_ok()) => {
                    rows.attributes.push(Attribute::continuous(name));
                }
                Column::Attribute => rows
                    .attributes
                    .push(Attribute::discrete(name, sorted(fields()))),
                Column::Class => rows.classes = sorted(fields()),
                _ => {}
            }
        }
        rows.check()?;
        for record in &records {
            let line = record.position().map_or(0, csv::Position::line);
            rows.push(
                line,
                record.iter().map(blank).collect::<Vec<_>>().into_iter(),
            )?;
        }
        rows.finish()
    }
}

fn blank(field: &str) -> &str {
    if field.is_empty() { "?" } else { field }
}

fn sorted<'a>(fields: impl Iterator<Item = &'a str>) -> Vec<String> {
    let distinct: HashSet<&str> = fields.collect();
    let mut values: Vec<String> = distinct.into_iter().map(str::to_owned).collect();
    values.sort_unstable();
    values
}

fn kinds(header: &csv::StringRecord, columns: &CsvColumns<'_>) -> Result<Vec<Column>> {
    let mut kinds = vec![Column::Attribute; header.len()];
    let special = [
        (Some(columns.class), Column::Class),
        (columns.group, Column::Group),
        (columns.weight, Column::Weight),
    ];
    let special = special
        .into_iter()
        .filter_map(|(name, kind)| Some((name?, kind)));
    let ignored = columns.ignored.iter().map(|name| (*name, Column::Ignored));
    for (name, kind) in special.chain(ignored) {
        let Some(place) = header.iter().position(|column| column == name) else {
            let what = format!("there is no column \"{name}\": name one of the header's");
            return Err(Error::Line {
                file: FILE,
                line: 1,
                what,
            });
        };
        kinds[place] = kind;
    }
    Ok(kinds)
}

fn malformed(error: &csv::Error) -> Error {
    let line = error.position().map_or(1, csv::Position::line);
    let what = match error.kind() {
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => {
            format!("there are {len} fields for {expected_len} columns")
        }
        _ => error.to_string(),
    };
    Error::Line {
        file: FILE,
        line,
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Domain, Value};

    const FILE: &str = "link,rtt [ms],profile,best,n,note\na,10,\"web, small\",tcp,1,x\nb,,bulk,vtl,2.5,y\na,7.5,?,tcp,1,z\n";
    const COLUMNS: CsvColumns<'_> = CsvColumns {
        class: "best",
        group: Some("link"),
        weight: Some("n"),
        ignored: &["note"],
    };

    #[test]
    fn from_csv__reads() {
        let data = DataSet::from_csv(FILE, &COLUMNS).unwrap();
        assert_eq!(data.classes(), ["tcp", "vtl"]);
        assert_eq!(data.groups(), ["a", "b", "a"]);
        assert_eq!(
            (
                data.attributes()[0].name.as_str(),
                data.attributes()[0].unit.as_str()
            ),
            ("rtt", "ms")
        );
        assert_eq!(
            data.attributes()[0].domain,
            Domain::Continuous {
                range: Some((7.5, 10.0))
            }
        );
        let profile = Domain::Discrete {
            values: vec!["bulk".into(), "web, small".into()],
            cases: vec![1, 1],
        };
        assert_eq!(data.attributes()[1].domain, profile);
        assert_eq!(
            data.cases()[0].values,
            [Value::Continuous(10.0), Value::Discrete(1)]
        );
        assert_eq!(data.cases()[1].values, [Value::Missing, Value::Discrete(0)]);
        assert_eq!((data.cases()[1].class, data.cases()[1].weight), (1, 2.5));
    }

    #[test]
    fn from_csv__refuses() {
        let refused = [
            (
                FILE.replace("best", "worst"),
                "CSV, line 1: there is no column \"best\": name one of the header's",
            ),
            (
                FILE.replace(",x\n", "\n"),
                "CSV, line 2: there are 5 fields for 6 columns",
            ),
            (
                FILE.replace("2.5", "-1"),
                "CSV, line 3: the weight \"-1\" is no number from 1e-3 to 1e9",
            ),
            (
                FILE.replace("7.5", "inf"),
                "CSV, line 4: \"inf\", as \"rtt\", is no finite number, nor ? for a missing one",
            ),
            (
                FILE.replace("tcp", ""),
                "CSV, line 2: \"?\" is none of the classes",
            ),
            (
                FILE[..34].to_owned(),
                "data set: 0 classes: there must be 1 to 256",
            ),
        ];
        for (text, error) in refused {
            let refused = DataSet::from_csv(&text, &COLUMNS).map_err(|error| error.to_string());
            assert_eq!(refused, Err(error.into()), "{text}");
        }
    }
}
