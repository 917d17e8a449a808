//! The emulator: forwards frames between the router's two devices, through the model of the link
//! ([`vtl_link::Direction`]).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use vtl_link::{Direction, DirectionStats, Host, Link, Nanos, Params};

use crate::control::{self, Request, Response};
use crate::error::{Error, Result};
use crate::namespace;
use crate::packet_socket::{BATCH, Packet, PacketSocket, ReceiveBatch};
use crate::state;

/// Counters of a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// From client to server.
    pub up: DirectionStats,
    /// From server to client.
    pub down: DirectionStats,
}

const SECOND: Nanos = 1_000_000_000;
/// SCHED_FIFO priority of the emulator's thread: no packet's release depends on anything that it
/// preempts.
const REALTIME_PRIORITY: i32 = 10;
/// Minimum time between two wake-ups while packets flow: interrupt coalescing, as of a network card.
const COALESCE: Nanos = 50_000;
/// Polling interval while packets flow, unless half the delay is shorter. Arrival times are the
/// kernel's, so a late poll changes nothing as long as the delay has not passed.
const POLL: Nanos = 200_000;
/// Polls without a packet after which the emulator sleeps until one arrives.
const IDLE_POLLS: u32 = 10;
/// Maximum sleep.
const MAX_SLEEP: Nanos = 100_000_000;
/// The kernel throttles real-time threads that never sleep for 50 ms in every second. So the emulator
/// sleeps at least `YIELD` of each `WINDOW`, and is never late by more than that.
const WINDOW: Nanos = 10_000_000;
const YIELD: Nanos = 600_000;
/// Time after which a frame that the device refuses is dropped.
const STALL: Nanos = 20_000_000;

/// The router's device towards the client.
pub(crate) const TO_CLIENT: &str = "to-client";
/// The router's device towards the server.
pub(crate) const TO_SERVER: &str = "to-server";

fn clock(id: ClockId) -> Nanos {
    clock_gettime(id).map_or(0, |t| t.tv_sec() as Nanos * SECOND + t.tv_nsec() as Nanos)
}

fn now() -> Nanos {
    clock(ClockId::CLOCK_MONOTONIC)
}

/// One direction: from the socket of one device to that of the other.
struct Path {
    from: usize,
    link: Direction<Packet>,
    /// Packets that have passed the link and wait for the device.
    due: VecDeque<Packet>,
    last_arrival: Nanos,
    aggregates: u64,
    host_drops: u64,
    send_errors: u64,
    /// Time since which the device has refused the front of `due`.
    stalled: Option<Nanos>,
}

/// The two directions with their sockets.
struct Bridge {
    sockets: [PacketSocket; 2],
    /// From client to server, and from server to client.
    paths: [Path; 2],
    batch: ReceiveBatch,
    /// One-way delay of the link.
    delay: Nanos,
}

/// Class of a failed system call on a packet socket.
enum Failure {
    /// Nothing to receive, or no room to send: retry later.
    Retry,
    /// The device is gone or down: the testbed is being removed.
    Gone,
    /// This frame is invalid: skip it.
    Skip,
}

fn classify(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM | libc::EINTR) => Failure::Retry,
        Some(libc::ENXIO | libc::ENODEV | libc::ENETDOWN) => Failure::Gone,
        _ => Failure::Skip,
    }
}

impl Bridge {
    /// Opens the devices in the calling thread's namespace, the router's.
    fn open(link: &Link) -> Result<Self> {
        link.check()?;
        let sockets = [
            PacketSocket::open(TO_CLIENT)?,
            PacketSocket::open(TO_SERVER)?,
        ];
        let path = |from, params| Path {
            from,
            link: Direction::new(params),
            due: VecDeque::new(),
            last_arrival: 0,
            aggregates: 0,
            host_drops: 0,
            send_errors: 0,
            stalled: None,
        };
        Ok(Bridge {
            sockets,
            paths: [path(0, Params::up(link)), path(1, Params::down(link))],
            batch: ReceiveBatch::new(),
            delay: Params::up(link).delay,
        })
    }

    /// Passes the frames that the devices have captured to the link. Returns their number; `None` if
    /// the devices are gone.
    fn receive(&mut self) -> Option<usize> {
        let mut total = 0;
        for path in &mut self.paths {
            let socket = &self.sockets[path.from];
            // Bounded, so that a flood in one direction does not starve the other.
            for _ in 0..8 {
                // Kernel timestamps are of the real-time clock, which others may step. It is read first, and
                // packets may be newer than both: a pause in between, as this thread is preempted, makes the link
                // longer, never shorter than it is.
                let real = clock(ClockId::CLOCK_REALTIME);
                let now = now();
                let offset = real.wrapping_sub(now);
                let plausible = now.saturating_sub(SECOND)..=now + SECOND;
                let result = socket.receive(&mut self.batch, |packet, stamp| {
                    let arrived = stamp
                        .map(|stamp| stamp.wrapping_sub(offset))
                        .filter(|arrived| plausible.contains(arrived))
                        .unwrap_or_else(self::now);
                    path.last_arrival = arrived.max(path.last_arrival);
                    path.aggregates += u64::from(packet.is_aggregate());
                    path.link.push(path.last_arrival, packet);
                });
                match result {
                    Ok(count) => {
                        total += count;
                        if count < BATCH {
                            break;
                        }
                    }
                    Err(e) => match classify(&e) {
                        Failure::Gone => return None,
                        Failure::Retry => break,
                        Failure::Skip => path.host_drops += 1,
                    },
                }
            }
        }
        Some(total)
    }

    /// Sends the packets that have passed the link. Returns false if the devices are gone.
    fn transmit(&mut self) -> bool {
        for path in &mut self.paths {
            let socket = &self.sockets[1 - path.from];
            loop {
                let now = now();
                while path.due.len() < BATCH {
                    let Some(packet) = path.link.pop(now) else {
                        break;
                    };
                    path.due.push_back(packet);
                }
                if path.due.is_empty() {
                    break;
                }
                match socket.send(path.due.iter()) {
                    Ok(sent) => {
                        drop(path.due.drain(..sent));
                        path.stalled = None;
                    }
                    Err(e) => match classify(&e) {
                        Failure::Gone => return false,
                        // The ring of the veth's peer is full, or the peer is down.
                        Failure::Retry if now - *path.stalled.get_or_insert(now) < STALL => break,
                        Failure::Retry | Failure::Skip => {
                            path.due.pop_front();
                            path.send_errors += 1;
                        }
                    },
                }
            }
        }
        true
    }

    /// Time of the next packet to send, if any; 0: one waits already.
    fn next_event(&self) -> Option<Nanos> {
        let event = |p: &Path| {
            if p.due.is_empty() {
                p.link.next_event()
            } else {
                Some(0)
            }
        };
        self.paths.iter().filter_map(event).min()
    }

    fn stats(&mut self) -> Stats {
        let [up, down] = &mut self.paths;
        let collect = |path: &mut Path| {
            path.host_drops += self.sockets[path.from].kernel_drops();
            DirectionStats {
                aggregates: path.aggregates,
                host_drops: path.host_drops,
                send_errors: path.send_errors,
                ..path.link.stats()
            }
        };
        Stats {
            up: collect(up),
            down: collect(down),
        }
    }

    fn set(&mut self, link: &Link) -> Result<()> {
        link.check()?;
        let now = now();
        self.paths[0].link.set(now, Params::up(link));
        self.paths[1].link.set(now, Params::down(link));
        self.delay = Params::up(link).delay;
        Ok(())
    }
}

/// The emulator's event loop. Returns on `stopped`, on [`Request::Stop`], or when the devices are gone.
fn run(mut bridge: Bridge, mut server: control::Server, stopped: &AtomicBool) {
    let mut idle_polls = IDLE_POLLS;
    let mut woken = now();
    let (mut window, mut slept) = (woken, 0);
    while !stopped.load(Ordering::Relaxed) {
        let Some(received) = bridge.receive() else {
            return;
        };
        if !bridge.transmit() {
            return;
        }
        server.serve(|request| match request {
            Request::Stop => {
                stopped.store(true, Ordering::Relaxed);
                Response::Done
            }
            Request::Stats => Response::Stats(Box::new(bridge.stats())),
            Request::Set(link) => match bridge.set(&link) {
                Ok(()) => Response::Done,
                Err(e) => Response::Refused(e.to_string()),
            },
        });
        idle_polls = if received > 0 {
            0
        } else {
            idle_polls.saturating_add(1)
        };
        // The delay leaves time to poll: packets need not wake the thread as they arrive.
        let poll = POLL.min(bridge.delay / 2);
        let busy = idle_polls < IDLE_POLLS && poll >= COALESCE;
        let now = now();
        let mut wake = bridge
            .next_event()
            .map_or(now + MAX_SLEEP, |event| event.max(woken + COALESCE));
        if busy {
            wake = wake.min(now + poll);
        }
        sleep(
            &bridge,
            &server,
            wake.saturating_sub(now).min(MAX_SLEEP),
            !busy,
        );
        woken = self::now();
        slept += woken - now;
        if woken - window > WINDOW {
            if slept < YIELD {
                std::thread::sleep(Duration::from_nanos(YIELD - slept));
                woken = self::now();
            }
            (window, slept) = (woken, 0);
        }
    }
}

/// Sleeps for `time`, or until a request arrives, or a frame if `frames` is set.
fn sleep(bridge: &Bridge, server: &control::Server, time: Nanos, frames: bool) {
    let sockets = bridge.sockets.iter().filter(|_| frames).map(AsFd::as_fd);
    let mut polled: Vec<PollFd<'_>> = server
        .descriptors()
        .chain(sockets)
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
        .collect();
    let time = TimeSpec::new((time / SECOND) as i64, (time % SECOND) as i64);
    // A signal only wakes the loop early.
    let _ = ppoll(&mut polled, Some(time), None);
}

/// Switches the thread to real-time scheduling, so that a busy machine does not delay packets. Without
/// the permission, accuracy is the scheduler's; `max_late_us` shows it.
fn raise_priority() {
    let parameters = libc::sched_param {
        sched_priority: REALTIME_PRIORITY,
    };
    // SAFETY: plain system calls on the calling thread; `parameters` outlives the call.
    unsafe {
        libc::sched_setscheduler(
            0,
            libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
            &raw const parameters,
        );
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
}

/// An emulator on a thread of its own. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct Emulator {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Emulator {
    /// Starts the emulator of a testbed whose namespaces exist. It forwards frames when this returns.
    pub(crate) fn start(name: &str, link: &Link) -> Result<Self> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (ready, opened) = mpsc::channel();
        let stop = Arc::clone(&stopped);
        let router = namespace::path_of(name, Host::Router);
        let (name, link) = (name.to_owned(), link.clone());
        let work = move || {
            let open = || -> Result<_> {
                namespace::enter(&router)?;
                Ok((
                    Bridge::open(&link)?,
                    control::Server::bind(&state::socket_path(&name))?,
                ))
            };
            match open() {
                Ok((bridge, server)) => {
                    raise_priority();
                    let _ = ready.send(Ok(()));
                    run(bridge, server, &stop);
                }
                Err(e) => drop(ready.send(Err(e))),
            }
        };
        let thread = std::thread::Builder::new()
            .name("vtl-emulator".to_owned())
            .spawn(work)
            .map_err(Error::system("start the emulator"))?;
        let emulator = Emulator {
            stopped,
            thread: Some(thread),
        };
        match opened.recv() {
            Ok(result) => result.map(|()| emulator),
            Err(e) => Err(Error::system("start the emulator")(io::Error::other(e))),
        }
    }

    /// Waits until the emulator stops.
    pub(crate) fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
