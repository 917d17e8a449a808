//! When, and by which kernel, something was measured.

use std::time::SystemTime;

/// The time, UTC.
pub(crate) fn date() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// The kernel's release.
pub(crate) fn kernel() -> String {
    let uname = nix::sys::utsname::uname();
    uname.map_or_else(
        |_| "unknown".to_owned(),
        |uname| uname.release().to_string_lossy().into_owned(),
    )
}
