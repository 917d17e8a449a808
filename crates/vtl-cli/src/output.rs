//! The daemon's answers, for people and for machines.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

/// Prints an answer: as JSON, with the `ok` that the daemon's message has, or as lines `key: value`
/// with lists as tables.
pub(crate) fn show(answer: &impl Serialize, json: bool) -> io::Result<()> {
    let mut answer = serde_json::to_value(answer)?;
    if json {
        answer["ok"] = true.into();
        print(&format!("{answer:#}\n"))
    } else {
        print(&text(&answer))
    }
}

/// Writes to standard output; unlike `print!`, a failure is an error and no panic.
pub fn print(text: &str) -> io::Result<()> {
    io::stdout().lock().write_all(text.as_bytes())
}

fn text(answer: &Value) -> String {
    let mut out = String::new();
    for (key, value) in answer.as_object().into_iter().flatten() {
        match value {
            Value::Array(items) if items.is_empty() => {
                let _ = writeln!(out, "{}: none", words(key));
            }
            Value::Array(items) if items.iter().all(Value::is_object) => {
                let rows: Vec<&Map<String, Value>> =
                    items.iter().filter_map(Value::as_object).collect();
                let _ = writeln!(out, "{}:\n{}", words(key), table(&rows, &keys(&rows)));
            }
            value => {
                let _ = writeln!(out, "{}: {}", words(key), cell(value));
            }
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// Every key of any row, in the order of first appearance.
fn keys<'a>(rows: &[&'a Map<String, Value>]) -> Vec<&'a str> {
    let mut keys: Vec<&str> = Vec::new();
    for key in rows.iter().flat_map(|row| row.keys()) {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    keys
}

/// A table of these columns; one that no row fills is left out.
pub(crate) fn table(rows: &[&Map<String, Value>], columns: &[&str]) -> String {
    let filled = |column: &&&str| rows.iter().any(|row| row.contains_key(**column));
    let columns: Vec<&str> = columns.iter().filter(filled).copied().collect();
    let mut lines = vec![columns.iter().map(|key| words(key)).collect::<Vec<_>>()];
    for row in rows {
        let cells = columns
            .iter()
            .map(|key| row.get(*key).map_or(String::new(), cell));
        lines.push(cells.collect());
    }
    let mut out = String::new();
    for line in &lines {
        let mut text = String::new();
        for (column, cell) in line.iter().enumerate() {
            let width = lines.iter().map(|line| line[column].chars().count()).max();
            let _ = write!(text, "  {cell:<w$}", w = width.unwrap_or(0));
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let pairs = fields
                .iter()
                .map(|(key, value)| format!("{} {}", words(key), cell(value)));
            pairs.collect::<Vec<_>>().join(", ")
        }
        // Measurements do not deserve more digits than they have.
        Value::Number(number) => match number.as_f64() {
            Some(value) if number.is_f64() => format!("{value:.1}"),
            _ => number.to_string(),
        },
    }
}

/// A key of the protocol as people write it.
pub(crate) fn words(key: &str) -> String {
    key.replace('_', " ")
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text__lists_become_tables() {
        let answer = json!({ "grafts": [
            { "gid": 1, "name": "sr", "loaded": true },
            { "gid": 12, "name": "canonical", "loaded": false },
        ]});
        assert_eq!(
            text(&answer),
            "grafts:\n  gid  loaded  name\n  1    yes     sr\n  12   no      canonical\n"
        );
    }

    #[test]
    fn text__empty_lists_say_so() {
        assert_eq!(text(&json!({ "hooks": [] })), "hooks: none\n");
    }
}
