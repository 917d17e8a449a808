//! The heartbeat that the kernel's programs check: without it they leave connections to TCP.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use sd_notify::NotifyState;

use super::{Shared, bpf::monotonic};

/// Interval of the heartbeat; programs time out after four of them (`VTL_BEAT_NS`).
const BEAT: Duration = Duration::from_millis(250);
/// Timeout after which a thread that new connections need counts as hung. Each reports once a second, but may be
/// blocked while the verifier checks programs.
const HANGS: Duration = Duration::from_secs(10);

/// Last sign of life of a thread, nanoseconds of [`monotonic`].
pub(crate) struct Pulse(AtomicU64);

/// Begins as alive, for a thread that is about to start.
impl Default for Pulse {
    fn default() -> Self {
        let pulse = Self(AtomicU64::new(0));
        pulse.note();
        pulse
    }
}

impl Pulse {
    /// Notes a sign of life.
    pub(crate) fn note(&self) {
        let now = monotonic().as_nanos() as u64;
        self.0.store(now, Ordering::Relaxed);
    }

    pub(crate) fn is_there(&self) -> bool {
        let seen = Duration::from_nanos(self.0.load(Ordering::Relaxed));
        monotonic().saturating_sub(seen) < HANGS
    }
}

/// The heartbeat's thread; stopped on drop.
pub(super) struct Heart {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    /// Starts the thread, after the first beat.
    pub(super) fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let mut watchdog = Watchdog::start()?;
        beat(&shared);
        let thread = std::thread::Builder::new()
            .name("vtl-heart".into())
            .spawn(move || {
                let mut was_there = true;
                while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                    let is_there = shared.pulse.is_there() && shared.broker.is_there();
                    if is_there {
                        beat(&shared);
                        if let Some(watchdog) = &mut watchdog {
                            watchdog.feed();
                        }
                    } else if was_there {
                        tracing::error!("watchdog: a thread hangs: new connections are plain TCP");
                    }
                    was_there = is_there;
                }
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// The service manager's watchdog (`WatchdogSec` in systemd.service(5)), if enabled for this process: it restarts a
/// daemon whose threads hang. A thread of its own sends the messages, since a manager that does not read must not
/// block the heartbeat.
struct Watchdog {
    /// Interval of messages: half of the watchdog's timeout.
    every: Duration,
    fed: Option<Instant>,
    messages: mpsc::SyncSender<()>,
}

impl Watchdog {
    fn start() -> io::Result<Option<Self>> {
        let Some(patience) = sd_notify::watchdog_enabled() else {
            return Ok(None);
        };
        let (messages, inbox) = mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name("vtl-watchdog".into())
            .spawn(move || {
                for () in inbox {
                    if let Err(error) = sd_notify::notify(&[NotifyState::Watchdog]) {
                        tracing::warn!(%error, "watchdog: cannot notify the service manager: it may restart vtld");
                    }
                }
            })?;
        Ok(Some(Self {
            every: patience / 2,
            fed: None,
            messages,
        }))
    }

    /// Feeds the watchdog: all threads are alive.
    fn feed(&mut self) {
        if self.fed.is_none_or(|fed| fed.elapsed() >= self.every) {
            self.fed = Some(Instant::now());
            // Full: another message is queued.
            let _ = self.messages.try_send(());
        }
    }
}

fn beat(shared: &Shared) {
    let is_left = shared.is_left();
    if *is_left {
        return;
    }
    if let Err(error) = shared.maps.beat() {
        tracing::warn!(%error, "watchdog: cannot write the heartbeat: new connections are plain TCP");
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
