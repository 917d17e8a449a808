//! The committed data sets and what other programs made of them (`golden/README.md`).

use std::{
    fs,
    path::{Path, PathBuf},
};

use vtl_tree::DataSet;

pub(crate) fn golden(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(folder)
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn data(name: &str) -> DataSet {
    let file = |ending: &str| read(&golden("data").join(format!("{name}.{ending}")));
    DataSet::from_names(&file("names"), &file("data"))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The names of the data sets.
pub(crate) fn names() -> Vec<String> {
    let files = fs::read_dir(golden("data")).expect("the folder is committed");
    let name = |file: fs::DirEntry| {
        Some(
            file.file_name()
                .to_str()?
                .strip_suffix(".names")?
                .to_owned(),
        )
    };
    let mut names: Vec<String> = files
        .filter_map(|file| name(file.expect("a file")))
        .collect();
    names.sort();
    names
}
