//! Log writer on a thread of its own: a pipe without a reader, or a busy disk, must not delay packets.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, SyncSender, TrySendError},
    },
    thread,
    time::Duration,
};

/// Maximum of queued lines.
const LINES: usize = 4096;
/// How long the daemon's end waits for the queue to be written.
const PATIENCE: Duration = Duration::from_secs(1);

/// Sink of log lines. Never blocks: drops lines if the queue is full.
#[derive(Clone)]
pub(crate) struct Log {
    lines: SyncSender<Vec<u8>>,
    missing: Arc<AtomicU64>,
}

/// Blocks on drop until the lines so far are written.
pub(crate) struct Written {
    log: Log,
    written: Receiver<()>,
}

/// Starts the thread, which writes to `to`.
///
/// # Errors
/// No thread can be started.
pub(crate) fn start(to: impl Write + Send + 'static) -> io::Result<(Log, Written)> {
    let (lines, inbox) = mpsc::sync_channel(LINES);
    let (tell, written) = mpsc::sync_channel(1);
    let missing = Arc::new(AtomicU64::new(0));
    let log = Log {
        lines,
        missing: Arc::clone(&missing),
    };
    thread::Builder::new()
        .name("vtl-log".into())
        .spawn(move || write(to, &inbox, &missing, &tell))?;
    let written = Written {
        log: log.clone(),
        written,
    };
    Ok((log, written))
}

fn write(
    mut to: impl Write,
    inbox: &Receiver<Vec<u8>>,
    missing: &AtomicU64,
    tell: &SyncSender<()>,
) {
    for line in inbox {
        // A failure cannot be reported anywhere.
        let _ = to.write_all(&line);
        let missing = missing.swap(0, Ordering::Relaxed);
        if missing > 0 {
            let _ = writeln!(to, "{missing} log lines dropped: their reader is too slow");
        }
        if line.is_empty() {
            let _ = to.flush();
            let _ = tell.try_send(());
        }
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if !line.is_empty()
            && let Err(TrySendError::Full(_)) = self.lines.try_send(line.to_vec())
        {
            self.missing.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        // An empty line marks the end. If the queue is full, its thread is stuck.
        if self.log.lines.try_send(Vec::new()).is_ok() {
            let _ = self.written.recv_timeout(PATIENCE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{BufRead, BufReader},
    };

    use super::*;

    #[test]
    fn start__lines_come_in_order_and_the_end_waits_for_them() {
        let path = std::env::temp_dir().join(format!("vtld-log-{}", std::process::id()));
        let (mut log, written) = start(File::create(&path).unwrap()).unwrap();
        for i in 0..1000 {
            writeln!(log, "{i}").unwrap();
        }
        drop(written);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let numbers: Vec<usize> = text.lines().map(|l| l.parse().unwrap()).collect();
        assert!(numbers.iter().copied().eq(0..1000));
    }

    #[test]
    fn start__nobody_waits_for_a_pipe_that_is_full() {
        const ALL: usize = 3 * LINES;
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let (mut log, written) = start(File::from(writer)).unwrap();
        let line = format!("{}\n", "x".repeat(99));
        for _ in 0..ALL {
            log.write_all(line.as_bytes()).unwrap();
        }
        let reader = thread::spawn(move || {
            let lines = BufReader::new(File::from(reader)).lines();
            lines.map(Result::unwrap).collect::<Vec<_>>()
        });
        drop(written);
        drop(log);
        let lines = reader.join().unwrap();
        let (told, whole): (Vec<_>, Vec<_>) =
            lines.iter().partition(|l| l.contains("log lines dropped"));
        let missing: usize = told
            .iter()
            .map(|l| l.split_once(' ').unwrap().0.parse::<usize>().unwrap())
            .sum();
        assert!(missing > 0 && whole.len() >= LINES);
        assert_eq!(missing + whole.len(), ALL);
    }
}
