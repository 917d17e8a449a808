//! One download: an unmodified curl writes into a pipe; what comes out is checked and timed.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::child::{Background, peak_kb};
use crate::interrupt::Interrupt;
use crate::nginx;

/// The distance between two samples of the progress.
const SAMPLE: Duration = Duration::from_millis(100);
/// Bytes that may wait in the pipe, so that checking never holds curl up.
const PIPE: i32 = 1024 * 1024;

/// What a download came to.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Bytes received.
    pub(crate) bytes: u64,
    /// From starting curl to the last byte, or to the cut.
    pub(crate) time: Duration,
    /// From starting curl to the first byte.
    pub(crate) first_byte: Duration,
    /// From starting curl to the middle of the file, if it came that far.
    pub(crate) half_time: Option<Duration>,
    /// Whether it was cut.
    pub(crate) cut: bool,
    /// The most memory that curl had resident, KiB, as far as it was seen.
    pub(crate) peak_kb: u64,
    /// Bytes received by then, every 100 ms.
    pub(crate) samples: Vec<(Duration, u64)>,
}

/// Adds curl's arguments to download [`nginx::FILE`] from a host: the user's configuration and proxies have no say.
pub(crate) fn arguments(command: &mut Command, server: IpAddr) {
    let server = SocketAddr::new(server, nginx::PORT);
    command
        .args(["--disable", "--noproxy", "*", "--silent", "--show-error"])
        .args(["--fail", "--output", "-"])
        .arg(format!("http://{server}/{}", nginx::FILE));
}

/// Runs `command`, which writes `size` bytes to its standard output, for at most `limit`. `take` gets
/// what it writes; `watch` is called with the elapsed time and the bytes so far about every 100 ms.
///
/// # Errors
/// It cannot be run, or fails: then with its own words.
pub(crate) fn run(
    command: &mut Command,
    size: u64,
    limit: Duration,
    interrupt: &Interrupt,
    mut take: impl FnMut(&[u8]),
    mut watch: impl FnMut(Duration, u64) -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let start = Instant::now();
    let mut curl = Background::start("curl", command)?;
    let mut pipe = curl.child().stdout.take().context("curl has no output")?;
    fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(PIPE)).context("cannot enlarge curl's pipe")?;

    let mut peak = 0;
    let mut buffer = vec![0u8; 256 * 1024];
    let mut bytes = 0u64;
    let mut last_byte = Duration::ZERO;
    let mut first_byte = None;
    let mut half_time = None;
    let mut samples = vec![(Duration::ZERO, 0)];
    let mut next_sample = SAMPLE;
    let mut cut = false;
    loop {
        let elapsed = start.elapsed();
        if elapsed >= next_sample {
            samples.push((elapsed, bytes));
            next_sample = elapsed + SAMPLE;
            interrupt.check()?;
            peak = peak_kb(curl.pid()).max(peak);
            watch(elapsed, bytes)?;
        }
        if elapsed >= limit {
            cut = true;
            break;
        }
        let wait = next_sample.min(limit).saturating_sub(elapsed);
        if !readable(&pipe, wait)? {
            continue;
        }
        let n = pipe
            .read(&mut buffer)
            .context("cannot read curl's output")?;
        if n == 0 {
            break;
        }
        if first_byte.is_none() {
            peak = peak_kb(curl.pid());
        }
        let now = start.elapsed();
        take(&buffer[..n]);
        bytes += n as u64;
        last_byte = now;
        first_byte.get_or_insert(now);
        if bytes >= size / 2 {
            half_time.get_or_insert(now);
        }
    }
    if !cut {
        finish(&mut curl)?;
    }
    drop(curl);
    let time = if cut { limit } else { last_byte };
    samples.push((time, bytes));
    Ok(Outcome {
        bytes,
        time,
        first_byte: first_byte.unwrap_or(time),
        half_time,
        cut,
        peak_kb: peak,
        samples,
    })
}

/// Waits until the pipe has data or its end, at most for `wait`.
fn readable(pipe: &impl AsFd, wait: Duration) -> anyhow::Result<bool> {
    let millis = wait.as_millis() as u16 + 1;
    let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::from(millis)) {
        Ok(ready) => Ok(ready > 0),
        // A signal: the caller looks at the interrupt flag at its next sample.
        Err(nix::Error::EINTR) => Ok(false),
        Err(err) => Err(err).context("cannot wait for curl"),
    }
}

/// Reports curl's own words if it failed.
fn finish(curl: &mut Background) -> anyhow::Result<()> {
    let status = curl.wait()?;
    if status.success() {
        return Ok(());
    }
    let mut words = String::new();
    if let Some(mut stderr) = curl.child().stderr.take() {
        let _ = stderr.read_to_string(&mut words);
    }
    let words = words.lines().next_back().unwrap_or("it gave no reason");
    bail!("the download failed ({status}): {words}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, size: u64, limit_ms: u64) -> anyhow::Result<Outcome> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let limit = Duration::from_millis(limit_ms);
        let stop = Interrupt::default();
        run(&mut command, size, limit, &stop, |_| {}, |_, _| Ok(()))
    }

    #[test]
    fn run__whole_output_is_taken() {
        let outcome = shell("head -c 300000 /dev/zero", 300_000, 10_000).expect("runs");
        assert_eq!((outcome.bytes, outcome.cut), (300_000, false));
        assert!(outcome.half_time.expect("half way") <= outcome.time);
    }

    #[test]
    fn run__cut_keeps_what_came_so_far() {
        let outcome = shell("printf 0123456789; exec sleep 60", 1_000, 300).expect("runs");
        assert_eq!((outcome.bytes, outcome.cut), (10, true));
        assert_eq!(outcome.time, Duration::from_millis(300));
        assert!(outcome.half_time.is_none());
    }

    #[test]
    fn run__failure_names_the_programs_reason() {
        let err = shell("echo no route >&2; exit 7", 10, 10_000).expect_err("fails");
        assert!(err.to_string().contains("no route"), "{err}");
    }
}
