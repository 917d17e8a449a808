//! Model files that the user names.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use vtl_core::select::Selector;
use vtl_tree::MAX_FILE;

/// Reads a model of `vtl select train`.
///
/// # Errors
/// It cannot be read, or is no model that this version can choose by: one sentence, with the file's name.
pub(super) fn read(path: &Path) -> Result<Selector> {
    let name = || path.display().to_string();
    let mut json = Vec::new();
    // One byte more is refused with the reason.
    let file = File::open(path).with_context(name)?;
    let read = file.take(MAX_FILE as u64 + 1).read_to_end(&mut json);
    read.with_context(name)?;
    Selector::from_json(&json).with_context(name)
}
