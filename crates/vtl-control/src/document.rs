//! The document of the management interface, which has to have all that requests and answers have.

use serde_json::Value;

/// `docs/management.md`.
pub(crate) const DOCUMENT: &str = include_str!("../../../docs/management.md");

/// The document must have the names of all fields.
#[track_caller]
pub(crate) fn has_fields(message: &Value) {
    match message {
        Value::Object(fields) => {
            for (field, value) in fields {
                let is_named = field == "newer" || DOCUMENT.contains(&format!("`{field}`"));
                assert!(is_named, "docs/management.md lacks `{field}`: {message}");
                // What a client names itself.
                if field != "params" {
                    has_fields(value);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(has_fields),
        _ => {}
    }
}
