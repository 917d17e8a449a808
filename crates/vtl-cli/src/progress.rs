//! Progress on stderr: a bar on a terminal, a line every few seconds elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// The distance between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The progress of one transfer of bytes.
pub struct Progress {
    label: String,
    size: Option<u64>,
    /// Absent where there is no terminal.
    bar: Option<ProgressBar>,
    started: Instant,
    next_line: Duration,
}

impl Progress {
    /// Shows the start of a transfer; the size may be unknown.
    pub fn start(label: impl Into<String>, size: Option<u64>) -> Self {
        let label = label.into();
        let bar = io::stderr().is_terminal().then(|| bar(&label, size));
        Self {
            label,
            size,
            bar,
            started: Instant::now(),
            next_line: LINE_EVERY,
        }
    }

    /// Shows that `bytes` have been transferred in all.
    pub fn update(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            return;
        }
        let elapsed = self.started.elapsed();
        if elapsed >= self.next_line {
            self.next_line = elapsed + LINE_EVERY;
            let percent = match self.size {
                Some(size) if size > 0 => format!("{:.0} %", bytes as f64 / size as f64 * 100.0),
                _ => format!("{:.1} MB", bytes as f64 / 1e6),
            };
            eprintln!(
                "{}: {percent} after {:.0} s",
                self.label,
                elapsed.as_secs_f64()
            );
        }
    }

    /// Replaces the bar by one last line.
    pub fn finish(self, result: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("{}: {result}", self.label);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(label: &str, size: Option<u64>) -> ProgressBar {
    let (bar, template) = match size {
        Some(size) => (
            ProgressBar::new(size),
            "{prefix:>12} [{bar:32}] {decimal_bytes:>10} of {decimal_total_bytes}, \
             {decimal_bytes_per_sec}, {elapsed}",
        ),
        None => (
            ProgressBar::no_length(),
            "{prefix:>12} {spinner} {decimal_bytes:>10}, {decimal_bytes_per_sec}, {elapsed}",
        ),
    };
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    bar.with_style(style).with_prefix(label.to_owned())
}
