//! The daemon's answers, for people and for machines.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde_json::{Map, Value};

/// Prints an answer: as JSON, or as lines `key: value` with lists as tables.
pub(crate) fn show(answer: &Value, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, answer)?;
        writeln!(out)
    } else {
        out.write_all(text(answer).as_bytes())
    }
}

fn text(answer: &Value) -> String {
    let mut out = String::new();
    for (key, value) in answer.as_object().into_iter().flatten() {
        match value {
            // The exit status says that already.
            Value::Bool(_) if key == "ok" => {}
            Value::Array(items) if items.is_empty() => {
                let _ = writeln!(out, "{}: none", words(key));
            }
            Value::Array(items) if items.iter().all(Value::is_object) => {
                let rows: Vec<&Map<String, Value>> =
                    items.iter().filter_map(Value::as_object).collect();
                let _ = writeln!(out, "{}:\n{}", words(key), table(&rows));
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

/// One column for each key of any row, in the order of first appearance.
fn table(rows: &[&Map<String, Value>]) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for key in rows.iter().flat_map(|row| row.keys()) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let mut lines = vec![keys.iter().map(|key| words(key)).collect::<Vec<_>>()];
    for row in rows {
        lines.push(
            keys.iter()
                .map(|key| row.get(*key).map_or(String::new(), cell))
                .collect(),
        );
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
        Value::Number(number) => number.to_string(),
    }
}

fn words(key: &str) -> String {
    key.replace('_', " ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text__lists_become_tables_and_ok_is_left_out() {
        let answer = json!({ "ok": true, "grafts": [
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
        assert_eq!(text(&json!({ "ok": true, "hooks": [] })), "hooks: none\n");
    }
}
