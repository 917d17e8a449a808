//! The emulator: moves frames between the router's two devices through the model of the link.

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
/// Below this priority of the real-time class nothing runs that a packet's release depends on.
const REALTIME_PRIORITY: i32 = 10;
/// While packets flow the emulator wakes at most this often and works in batches, as a network card does.
const COALESCE: Nanos = 50_000;
/// While packets flow it looks for new ones this often, or as often as the delay demands: arrival times come
/// from the kernel, so being late here changes nothing as long as the delay has not passed.
const LOOK: Nanos = 200_000;
/// Looks without a packet after which it waits to be woken by one.
const IDLE_LOOKS: u32 = 10;
/// The longest sleep.
const DOZE: Nanos = 100_000_000;
/// A thread of the real-time class that leaves others no time is stopped by the kernel for 50 ms in every
/// second. Giving them this much of every window by itself, the emulator is never late by more.
const WINDOW: Nanos = 10_000_000;
const YIELD: Nanos = 600_000;
/// How long a device may refuse a frame before the frame is given up.
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
    /// Arrived at the far end of the link, not yet handed to the device.
    due: VecDeque<Packet>,
    last_arrival: Nanos,
    aggregates: u64,
    host_drops: u64,
    send_errors: u64,
    /// Since when the device has refused the front of `due`.
    stalled: Option<Nanos>,
}

/// The data plane.
struct Bridge {
    sockets: [PacketSocket; 2],
    /// Up, down.
    paths: [Path; 2],
    batch: ReceiveBatch,
    delay: Nanos,
}

/// What to do after a system call on a packet socket failed.
enum Failure {
    /// Nothing there, or no room: later.
    Later,
    /// The device is gone or switched off: the testbed is being removed.
    Gone,
    /// This frame cannot be handled.
    Skip,
}

fn judge(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM | libc::EINTR) => Failure::Later,
        Some(libc::ENXIO | libc::ENODEV | libc::ENETDOWN) => Failure::Gone,
        _ => Failure::Skip,
    }
}

impl Bridge {
    /// Must run in the router's namespace.
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

    /// Feeds the link with what the devices captured. Returns the number of frames, or none if the devices
    /// are gone.
    fn receive(&mut self) -> Option<usize> {
        let mut total = 0;
        for path in &mut self.paths {
            let socket = &self.sockets[path.from];
            // A bound, so that a flood in one direction does not hold up the other.
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
                    Err(e) => match judge(&e) {
                        Failure::Gone => return None,
                        Failure::Later => break,
                        Failure::Skip => path.host_drops += 1,
                    },
                }
            }
        }
        Some(total)
    }

    /// Hands over what has arrived. Returns false if the devices are gone.
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
                    Err(e) => match judge(&e) {
                        Failure::Gone => return false,
                        // The peer's ring is full, or its end of the cable is out.
                        Failure::Later if now - *path.stalled.get_or_insert(now) < STALL => break,
                        Failure::Later | Failure::Skip => {
                            path.due.pop_front();
                            path.send_errors += 1;
                        }
                    },
                }
            }
        }
        true
    }

    /// When there is something to hand over, if ever.
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

/// Moves frames until told to stop, by `stopped` or by the control socket, or until the devices are gone.
fn run(mut bridge: Bridge, mut server: control::Server, stopped: &AtomicBool) {
    let mut quiet_looks = IDLE_LOOKS;
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
        quiet_looks = if received > 0 {
            0
        } else {
            quiet_looks.saturating_add(1)
        };
        // Packets that will be held for a while need not wake anybody when they come in.
        let look = LOOK.min(bridge.delay / 2);
        let busy = quiet_looks < IDLE_LOOKS && look >= COALESCE;
        let now = now();
        let mut wake = bridge
            .next_event()
            .map_or(now + DOZE, |event| event.max(woken + COALESCE));
        if busy {
            wake = wake.min(now + look);
        }
        sleep(&bridge, &server, wake.saturating_sub(now).min(DOZE), !busy);
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

/// Sleeps for `time`, or until a request comes, or, if `frames` is set, a frame.
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

/// Real-time scheduling, so that a busy machine does not delay packets. Where that is not permitted, times
/// are as good as the scheduler makes them, and `max_late_us` tells.
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

/// An emulator on a thread of its own. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Emulator {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Emulator {
    /// Starts the emulator of a testbed whose namespaces are there. It works when this returns.
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

    /// Waits for the emulator's end.
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
