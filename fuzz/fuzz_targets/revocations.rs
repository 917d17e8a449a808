//! `revoked.toml` and a key's file beside it: whatever they say, they are read, or no package is taken.
#![no_main]

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use vtl_pool::key::Trust;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("vtl-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a directory");
    for name in ["revoked.toml", "one.pub"] {
        fs::write(folder.join(name), "").expect("a file");
        let mode = fs::Permissions::from_mode(0o644);
        fs::set_permissions(folder.join(name), mode).expect("a file");
    }
    folder
});

fuzz_target!(|data: &[u8]| {
    fs::write(FOLDER.join("revoked.toml"), data).expect("a file");
    fs::write(FOLDER.join("one.pub"), data).expect("a file");
    let trust = Trust::read(&FOLDER).expect("a directory");
    assert_eq!(trust.keys().count() + trust.left_out.len(), 1);
    trust.revocations().unusable();
});
