//! How fast bytes go through sessions: `goodput recv [SESSIONS]` at one host, `goodput send ADDRESS
//! SECONDS [SESSIONS]` at the other; session i at port 9254 + i. The daemon's socket is
//! `$VTL_SOCKET`. The receiver reads in place, checks each packet's first four bytes against a
//! counter, and prints one JSON line: goodput of all sessions, and the least and the most that one
//! got.

use std::{
    env,
    error::Error,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use vtl::{Mode, Requirements, Services, Socket, control::socket_path};

const PORT: u16 = 9254;
/// The data are counters below this prime, four bytes each: 128 KiB that stay in the cache, as with
/// iperf3, and do not repeat in step with packets or rings.
const PERIOD: u64 = 32_749;
/// What one session may write before the next one's turn.
const BLOCK: usize = 64 << 10;
/// Packets that one session may have before the next one's turn.
const SHARE: u64 = 64;
/// Pause of a reader that has read all there was.
const NAP: Duration = Duration::from_micros(100);
/// The longest wait; sessions that broke are noticed then.
const PATIENCE_MS: u16 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let sessions = |i: usize| arg(i).map_or(Ok(1), str::parse);
    match arg(0) {
        Some("recv") => receive(sessions(1)?),
        Some("send") => {
            let to: IpAddr = arg(1).ok_or("send to whom?")?.parse()?;
            let seconds = arg(2).unwrap_or("5").parse()?;
            send(to, Duration::from_secs_f64(seconds), sessions(3)?)
        }
        _ => Err("usage: goodput recv [SESSIONS] | goodput send ADDRESS SECONDS [SESSIONS]".into()),
    }
}

/// Waits until one of many sockets has something to do.
struct Waiter {
    epoll: Epoll,
    found: Vec<EpollEvent>,
}

impl Waiter {
    fn new<'a>(sockets: impl Iterator<Item = &'a Socket>) -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mut count = 0;
        for socket in sockets {
            epoll.add(socket.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, count))?;
            count += 1;
        }
        let found = vec![EpollEvent::empty(); 256.min(count as usize)];
        Ok(Self { epoll, found })
    }

    fn wait(&mut self) -> nix::Result<impl Iterator<Item = usize>> {
        let timeout = EpollTimeout::from(PATIENCE_MS);
        let count = self.epoll.wait(&mut self.found, timeout)?;
        Ok(self.found[..count].iter().map(|e| e.data() as usize))
    }
}

struct Sender<'a> {
    socket: Socket,
    data: &'a [u8],
    at: usize,
}

impl Sender<'_> {
    /// Writes a block, or as much of one as there is room for. True if there may be more.
    fn write(&mut self) -> Result<bool, vtl::Error> {
        let mut left = BLOCK;
        while left > 0 {
            let end = self.data.len().min(self.at + left);
            match self.socket.try_send_data(&self.data[self.at..end])? {
                Some(n) => {
                    self.at = (self.at + n) % self.data.len();
                    left -= n;
                }
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

fn send(to: IpAddr, time: Duration, sessions: u16) -> Result<(), Box<dyn Error>> {
    let data: Vec<u8> = (0..PERIOD).flat_map(|n| (n as u32).to_ne_bytes()).collect();
    let mut senders = Vec::new();
    for i in 0..sessions {
        let to = SocketAddr::new(to, PORT + i);
        let mut socket = Socket::init(Mode::Initiator, to, &socket_path(None))?;
        socket.negotiate(&Requirements {
            services: Services::RELIABLE.union(Services::ORDERED),
            ..Default::default()
        })?;
        senders.push(Sender {
            socket,
            data: &data,
            at: 0,
        });
    }
    let mut waiter = Waiter::new(senders.iter().map(|s| &s.socket))?;
    let mut ready: Vec<usize> = (0..senders.len()).collect();
    let start = Instant::now();
    while start.elapsed() < time {
        // One block each in turn, as long as they have room.
        let mut again = Vec::new();
        for i in ready {
            if senders[i].write()? {
                again.push(i);
            }
        }
        ready = again;
        if ready.is_empty() {
            ready.extend(waiter.wait()?);
        }
    }
    for sender in senders {
        sender.socket.close()?;
    }
    Ok(())
}

#[derive(Default)]
struct Receiver {
    bytes: u64,
    wrong: u64,
    ended: bool,
}

impl Receiver {
    /// Reads at most `SHARE` packets. Returns how many; `None` when there is nothing more.
    fn read(&mut self, socket: &mut Socket) -> Result<Option<u64>, vtl::Error> {
        let count = socket.try_recv_in_place(SHARE, |packet| {
            let first = packet
                .first_chunk()
                .map(|b| u64::from(u32::from_ne_bytes(*b)));
            self.wrong += u64::from(first != Some(self.bytes / 4 % PERIOD));
            self.bytes += packet.len() as u64;
        })?;
        self.ended = count == Some(0);
        Ok(count.filter(|n| *n > 0))
    }
}

fn receive(sessions: u16) -> Result<(), Box<dyn Error>> {
    let mut sockets = Vec::new();
    for i in 0..sessions {
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), PORT + i);
        sockets.push(Socket::init(Mode::Responder, any, &socket_path(None))?);
    }
    for socket in &mut sockets {
        socket.validate()?;
    }
    let mut receivers: Vec<Receiver> = sockets.iter().map(|_| Receiver::default()).collect();
    let mut waiter = Waiter::new(sockets.iter())?;
    let mut ready: Vec<usize> = (0..sockets.len()).collect();
    let mut left = sockets.len();
    let mut start = None;
    let mut busy = None;
    while left > 0 {
        let mut again = Vec::new();
        let (mut read, mut more) = (false, false);
        for i in ready {
            let receiver = &mut receivers[i];
            if receiver.ended {
                continue;
            }
            if let Some(count) = receiver.read(&mut sockets[i])? {
                again.push(i);
                read = true;
                more |= count == SHARE;
            }
            left -= usize::from(receiver.ended);
        }
        if read {
            let now = Instant::now();
            start.get_or_insert(now);
            // While the first close is awaited all are still sending.
            if left == sockets.len() {
                let bytes = receivers.iter().map(|r| r.bytes).sum::<u64>();
                busy = Some((now, bytes));
            }
        }
        ready = again;
        if ready.is_empty() && left > 0 {
            ready.extend(waiter.wait()?);
        } else if !more {
            // As the blocking calls do: to ask for a wake-up is dear, and more is on its way.
            std::thread::sleep(NAP);
        }
    }
    let (seconds, measured) = match (start, busy) {
        (Some(start), Some((end, bytes))) => ((end - start).as_secs_f64(), bytes),
        _ => (0.0, 0),
    };
    let gbit = measured as f64 * 8.0 / 1e9 / seconds;
    let bytes: u64 = receivers.iter().map(|r| r.bytes).sum();
    let wrong: u64 = receivers.iter().map(|r| r.wrong).sum();
    let min = receivers.iter().map(|r| r.bytes).min().unwrap_or(0);
    let max = receivers.iter().map(|r| r.bytes).max().unwrap_or(0);
    println!(
        "{{\"sessions\":{sessions},\"bytes\":{bytes},\"seconds\":{seconds:.3},\"gbit\":{gbit:.3},\
         \"least\":{min},\"most\":{max},\"wrong\":{wrong}}}"
    );
    Ok(())
}
