//! How far a long command is, for people: a bar on a terminal, else a line from time to time.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(15);

/// Shows how many of some things are done, and about how long the rest takes.
pub(super) struct Progress {
    total: u64,
    what: &'static str,
    start: Instant,
    bar: Option<ProgressBar>,
    /// How many are done, and when a line was written last.
    done: Mutex<(u64, Instant)>,
}

impl Progress {
    /// Of `total` things, `what` in the plural.
    pub(super) fn new(total: usize, what: &'static str) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(&format!(
                "{{wide_bar}} {{pos}} of {{len}} {what} in {{elapsed}}, about {{eta}} left"
            ));
            let style = style.expect("a valid template");
            let bar = ProgressBar::new(total as u64).with_style(style);
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        let start = Instant::now();
        Self {
            total: total as u64,
            what,
            start,
            bar,
            done: Mutex::new((0, start)),
        }
    }

    /// One more is done.
    pub(super) fn add_one(&self) {
        let mut done = self.done.lock().expect("nobody panics with it");
        done.0 += 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        } else if done.1.elapsed() >= BETWEEN_LINES {
            done.1 = Instant::now();
            let left = self.start.elapsed().as_secs_f64() / done.0 as f64;
            let left = Duration::from_secs((left * (self.total - done.0) as f64) as u64);
            eprintln!(
                "{} of {} {}, about {} left",
                done.0,
                self.total,
                self.what,
                humantime::format_duration(left)
            );
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
