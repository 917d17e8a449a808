//! Checks of what is installed and running beside the kernel.

use std::io;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::check::{Check, Need, Spec};
use crate::programs::find_program;

/// All checks of this module.
pub(super) fn checks() -> Vec<Check> {
    vec![memlock(), web_server(), curl(), clang()]
}

fn memlock() -> Check {
    let spec = Spec {
        name: "memlock",
        used_for: "memory for eBPF maps",
        need: Need::Optional,
        advice: "raise the limit for the daemon: ulimit -l unlimited, or LimitMEMLOCK=infinity",
    };
    spec.outcome(
        getrlimit(Resource::RLIMIT_MEMLOCK)
            .map_err(io::Error::from)
            .map(|(soft, _)| {
                // Since Linux 5.11 maps count against the cgroup's memory, not against this limit.
                match soft {
                    RLIM_INFINITY => "unlimited".to_owned(),
                    bytes => format!("{} KiB, which maps do not count against", bytes / 1024),
                }
            }),
    )
}

fn web_server() -> Check {
    let spec = Spec {
        name: "nginx",
        used_for: "the unmodified web server of the demo",
        need: Need::Development,
        advice: "the demo does not run: apt install nginx (or `make setup`)",
    };
    spec.outcome(find_program("nginx").map(|path| path.display().to_string()))
}

fn curl() -> Check {
    let spec = Spec {
        name: "curl",
        used_for: "the unmodified client of the demo",
        need: Need::Development,
        advice: "the demo does not run: apt install curl (or `make setup`)",
    };
    spec.outcome(find_program("curl").map(|path| path.display().to_string()))
}

fn clang() -> Check {
    let spec = Spec {
        name: "clang-19",
        used_for: "compiling grafts (running them needs no compiler)",
        need: Need::Development,
        advice: "VTL cannot be built here: apt install clang-19 (or `make setup`)",
    };
    spec.outcome(find_program("clang-19").map(|path| path.display().to_string()))
}
