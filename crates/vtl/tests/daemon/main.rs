//! Sockets over a daemon that the test plays, and rings in ordinary memory: what happens at moments
//! that a real daemon seldom chooses.

mod messages;
mod sealed;

use std::{
    io,
    mem::offset_of,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        memfd::{MFdFlags, memfd_create},
        resource::{UsageWho, getrusage},
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept, bind, listen, socket,
        },
        time::TimeValLike,
        uio::pwrite,
    },
};
use serde_json::{Value, json};
use vtl::{Error, Mode, Requirements, Services, Shared, Socket};
use vtl_control::{
    self as control, Done, Grant, MAX_DESCRIPTORS, Refusal, Request, receive, send, to_message,
};
use vtl_proto::{
    intf::{self, vtl_ring_ctl, vtl_slot},
    keys::Keys,
};

const SLOTS: u32 = 64;
const PAYLOAD: u16 = 100;

struct Daemon {
    socket: OwnedFd,
    path: PathBuf,
}

impl Daemon {
    fn start() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vtl-daemon-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        bind(socket.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&socket, Backlog::new(8).unwrap()).unwrap();
        Self { socket, path }
    }

    /// An application's socket, which asks for a session, and the daemon's end of it.
    fn asked(&self) -> (Socket, Client) {
        let peer = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 7);
        let mut socket = Socket::init(Mode::Initiator, peer, &self.path).unwrap();
        let asked = socket.try_negotiate(&Requirements::STREAM);
        assert!(asked.unwrap().is_none());
        // SAFETY: accept made this descriptor for us alone.
        let control = unsafe { OwnedFd::from_raw_fd(accept(self.socket.as_raw_fd()).unwrap()) };
        let client = Client(control);
        assert!(matches!(client.request(), Request::Connect { .. }));
        (socket, client)
    }

    /// The same with a session.
    fn session(&self) -> Option<(Socket, Client, Granted)> {
        self.session_with(PAYLOAD.into())
    }

    /// The same with messages of up to `max_message` bytes.
    fn session_with(&self, max_message: u32) -> Option<(Socket, Client, Granted)> {
        self.session_over(Granted::new()?, max_message)
    }

    /// The same over these rings.
    fn session_over(
        &self,
        granted: Granted,
        max_message: u32,
    ) -> Option<(Socket, Client, Granted)> {
        let (mut socket, client) = self.asked();
        client.grant_with(&granted, SLOTS, max_message);
        let opened = socket.try_negotiate(&Requirements::STREAM);
        assert!(opened.unwrap().is_some());
        Some((socket, client, granted))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

struct Client(OwnedFd);

impl Client {
    fn request(&self) -> Request {
        let message = receive(self.0.as_raw_fd()).unwrap().expect("a request").0;
        Request::parse(&message).unwrap()
    }

    fn answer(&self, answer: &Value, descriptors: &[RawFd]) {
        send(self.0.as_raw_fd(), answer, descriptors).unwrap();
    }

    fn done(&self, descriptors: &[RawFd]) {
        self.answer(&to_message(&Done {}).unwrap(), descriptors);
    }

    fn grant(&self, granted: &Granted, slots: u32) {
        self.grant_with(granted, slots, PAYLOAD.into());
    }

    fn grant_with(&self, granted: &Granted, slots: u32, max_message: u32) {
        let grant = Grant {
            sid: 0,
            key: 0,
            slots,
            max_payload: PAYLOAD,
            max_message,
            graft: "stream".to_owned(),
            gid: 1,
            services: granted.services,
            peer: Ipv4Addr::new(192, 0, 2, 1).into(),
            events: granted.events.is_some(),
            keys: granted.keys.clone(),
        };
        let Granted { tx, rx, wake, .. } = granted;
        let descriptors = [tx, rx, &granted.kick, wake].into_iter();
        let descriptors: Vec<_> = descriptors
            .chain(&granted.events)
            .map(AsRawFd::as_raw_fd)
            .collect();
        self.answer(&to_message(&grant).unwrap(), &descriptors);
    }
}

/// What the daemon and the kernel keep of a session.
struct Granted {
    tx: OwnedFd,
    rx: OwnedFd,
    kick: OwnedFd,
    wake: OwnedFd,
    events: Option<OwnedFd>,
    services: Services,
    keys: Option<Keys>,
}

impl Granted {
    /// `None` without the right to make a ring of events.
    fn new() -> Option<Self> {
        let memory = |slots: u32| {
            let fd = memfd_create(c"memory", MFdFlags::MFD_CLOEXEC).unwrap();
            let length = (i64::from(slots) + 4) * i64::from(intf::VTL_SLOT_SIZE);
            nix::unistd::ftruncate(&fd, length).unwrap();
            fd
        };
        let event = || {
            let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
            OwnedFd::from(EventFd::from_flags(flags).unwrap())
        };
        Some(Self {
            tx: memory(SLOTS),
            rx: memory(SLOTS),
            kick: event(),
            wake: event(),
            events: Some(ring_of_events()?),
            services: Services::NONE,
            keys: None,
        })
    }

    /// The kernel's: the first packet arrives.
    fn arrive(&self, data: &[u8]) {
        let slot = i64::from(intf::VTL_SLOT_SIZE);
        let at = |offset: usize| slot + i64::try_from(offset).unwrap();
        let length = u32::try_from(data.len()).unwrap().to_ne_bytes();
        pwrite(&self.rx, data, at(offset_of!(vtl_slot, data))).unwrap();
        pwrite(&self.rx, &length, at(offset_of!(vtl_slot, len))).unwrap();
        let producer = i64::try_from(offset_of!(vtl_ring_ctl, producer)).unwrap();
        pwrite(&self.rx, &1_u64.to_ne_bytes(), producer).unwrap();
    }

    fn wake(&self) {
        nix::unistd::write(&self.wake, &1_u64.to_ne_bytes()).unwrap();
    }
}

/// A BPF ring buffer, as nothing else can be mapped and watched like one.
fn ring_of_events() -> Option<OwnedFd> {
    const MAP_CREATE: libc::c_int = 0;
    const RINGBUF: u32 = 27;
    // Kind, size of keys, size of values, bytes, flags.
    let attributes: [u32; 5] = [RINGBUF, 0, 0, 4096, 0];
    let size = size_of_val(&attributes);
    // SAFETY: the attributes and their size, alive during the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, attributes.as_ptr(), size) };
    if fd < 0 {
        vtl_testing::skip("a BPF map needs root");
        return None;
    }
    // SAFETY: the kernel has just made this descriptor for us alone.
    Some(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn readable(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, 0_u8).unwrap() == 1
}

const NEVER: Option<Duration> = None;
const NOW: Option<Duration> = Some(Duration::ZERO);

fn ms(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

#[test]
fn recv_data__what_came_before_the_daemon_died_is_read() {
    let daemon = Daemon::start();
    let Some((mut socket, client, granted)) = daemon.session() else {
        return;
    };
    let reader = thread::spawn(move || {
        let mut buffer = [0; 100];
        let first = socket.recv_data(&mut buffer);
        (first, socket.recv_data(&mut buffer))
    });
    thread::sleep(Duration::from_millis(50));
    granted.arrive(b"last words");
    drop(client);
    let (first, second) = reader.join().unwrap();
    assert!(matches!(first, Ok(10)), "{first:?}");
    assert!(matches!(second, Err(Error::Broken(_))), "{second:?}");
}

#[test]
fn recv_data__without_a_ring_of_events_the_daemon_wakes() {
    let daemon = Daemon::start();
    let Some(mut granted) = Granted::new() else {
        return;
    };
    granted.events = None;
    let (mut socket, client) = daemon.asked();
    client.grant(&granted, SLOTS);
    assert!(socket.negotiate(&Requirements::STREAM).is_ok());
    assert!(matches!(socket.try_recv_data(&mut [0; 10]), Ok(None)));
    assert!(!readable(&socket));
    thread::scope(|scope| {
        let reader = scope.spawn(|| (socket.recv_data(&mut [0; 10]), socket));
        thread::sleep(Duration::from_millis(20));
        granted.arrive(b"x");
        granted.wake();
        let (got, socket) = reader.join().unwrap();
        assert!(matches!(got, Ok(1)));
        assert!(!readable(&socket));
    });
}

#[test]
fn set_timeout__as_long_as_can_be_is_for_ever() {
    let daemon = Daemon::start();
    let Some((mut socket, _client, granted)) = daemon.session() else {
        return;
    };
    socket.set_timeout(Some(Duration::MAX));
    granted.arrive(b"x");
    assert!(matches!(socket.recv_data(&mut [0; 10]), Ok(1)));
    assert!(matches!(socket.send_data(b"x"), Ok(1)));
    let shared = Shared::new(socket).unwrap();
    assert!(matches!(shared.send_data(b"x", Some(Duration::MAX)), Ok(1)));
}

#[test]
fn close__does_not_wait_for_a_daemon_that_died() {
    let daemon = Daemon::start();
    let Some((mut socket, client, _granted)) = daemon.session() else {
        return;
    };
    socket.send_data(b"never acknowledged").unwrap();
    assert!(matches!(socket.try_close(), Ok(false)));
    drop(client);
    let shared = Shared::new(socket).unwrap();
    let closed = shared.close(ms(10_000));
    assert!(matches!(closed, Err(Error::Broken(_))), "{closed:?}");
}

#[test]
fn close__takes_the_sessions_wake_ups_out_of_the_descriptor() {
    let daemon = Daemon::start();
    let Some((mut socket, client, granted)) = daemon.session() else {
        return;
    };
    granted.wake();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(client.request(), Request::Close { aborted: false });
            client.done(&[]);
        });
        assert!(matches!(socket.try_close(), Ok(true)));
    });
    assert!(!readable(&socket), "the daemon still holds the eventfd");
    assert!(
        socket
            .try_negotiate(&Requirements::STREAM)
            .unwrap()
            .is_none()
    );
    assert!(matches!(client.request(), Request::Connect { .. }));
    client.grant(&Granted::new().expect("as before"), SLOTS);
    assert!(readable(&socket));
    assert!(socket.negotiate(&Requirements::STREAM).is_ok());
}

#[test]
fn negotiate__a_session_that_is_of_no_use_is_given_back() {
    let daemon = Daemon::start();
    let Some(granted) = Granted::new() else {
        return;
    };
    let (mut socket, client) = daemon.asked();
    client.grant(&granted, 7);
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = client.request();
            client.done(&[]);
            assert_eq!(request, Request::Close { aborted: true });
        });
        assert!(socket.negotiate(&Requirements::STREAM).is_err());
    });
}

/// The daemon answers a request for a session with what `answer` sends; the socket refuses that, and
/// asks for the session's end before it says so.
fn given_back(answer: impl FnOnce(&Client)) -> Error {
    let daemon = Daemon::start();
    let (mut socket, client) = daemon.asked();
    answer(&client);
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = client.request();
            client.done(&[]);
            assert_eq!(request, Request::Close { aborted: true });
        });
        socket.negotiate(&Requirements::STREAM).unwrap_err()
    })
}

#[test]
fn negotiate__a_session_whose_descriptors_do_not_fit_is_given_back() {
    let event = EventFd::new().unwrap();
    let many = [event.as_fd().as_raw_fd(); MAX_DESCRIPTORS + 5];
    let error = given_back(|client| client.done(&many));
    let io = io::Error::from(error);
    assert_eq!(io.raw_os_error(), Some(libc::EMFILE), "{io:?}");
}

#[test]
fn negotiate__a_session_whose_grant_is_malformed_is_given_back() {
    let error = given_back(|client| client.answer(&json!("welcome"), &[]));
    assert!(
        matches!(error, Error::Daemon(control::Error::Malformed(_))),
        "{error:?}"
    );
}

#[test]
fn negotiate__a_refusal_is_all_there_is_to_it() {
    let daemon = Daemon::start();
    let (mut socket, client) = daemon.asked();
    let refusal = Refusal {
        why: "not you".to_owned(),
        denied: true,
    };
    client.answer(&refusal.to_message(), &[]);
    let error = socket.negotiate(&Requirements::STREAM).unwrap_err();
    assert_eq!(
        io::Error::from(error).kind(),
        io::ErrorKind::PermissionDenied
    );
    assert!(!readable(&client.0), "nothing more was asked for");
}

#[test]
fn shared__a_limit_holds_while_another_thread_has_the_turn() {
    let daemon = Daemon::start();
    let Some((socket, _client, _granted)) = daemon.session() else {
        return;
    };
    let shared = Shared::new(socket).unwrap();
    thread::scope(|scope| {
        let first = scope.spawn(|| shared.recv_data(&mut [0], NEVER));
        thread::sleep(Duration::from_millis(50));
        let second = scope.spawn(|| shared.recv_data(&mut [0], ms(50)));
        let start = Instant::now();
        while !second.is_finished() && start.elapsed() < vtl_testing::PATIENCE {
            thread::sleep(Duration::from_millis(10));
        }
        let in_time = second.is_finished();
        let zero = shared.recv_data(&mut [0], NOW);
        shared.abort();
        assert!(in_time);
        let second = second.join().unwrap();
        assert!(matches!(second, Err(Error::TimedOut)), "{second:?}");
        assert!(matches!(zero, Err(Error::TimedOut)), "{zero:?}");
        assert!(matches!(first.join().unwrap(), Err(Error::Closed)));
    });
}

#[test]
fn shared__who_waits_sleeps_though_somebody_else_was_told() {
    let daemon = Daemon::start();
    let Some((socket, _client, granted)) = daemon.session() else {
        return;
    };
    let shared = Shared::new(socket).unwrap();
    let full = loop {
        if let Err(error) = shared.send_data(&[7; 1000], NOW) {
            break error;
        }
    };
    assert!(matches!(full, Error::TimedOut), "{full:?}");
    assert!(!readable(&shared));
    granted.wake();
    let used = || {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
        usage.user_time() + usage.system_time()
    };
    let before = used();
    let nothing = shared.recv_data(&mut [0], ms(500));
    assert!(matches!(nothing, Err(Error::TimedOut)), "{nothing:?}");
    let spent = (used() - before).num_milliseconds();
    assert!(spent < 50, "{spent} ms of CPU time while it waited");
    assert!(readable(&shared), "the sender, of the wake-up");
}

/// Whichever thread takes the daemon's answer, nobody asks for another session.
#[test]
fn shared__a_reader_may_take_what_was_negotiated() {
    let daemon = Daemon::start();
    for _ in 0..20 {
        let Some(granted) = Granted::new() else {
            return;
        };
        let (socket, client) = daemon.asked();
        let shared = Shared::new(socket).unwrap();
        thread::scope(|scope| {
            let asks = scope.spawn(|| shared.negotiate(&Requirements::STREAM, ms(5000)));
            thread::sleep(Duration::from_millis(20));
            client.grant(&granted, SLOTS);
            let nothing = shared.recv_data(&mut [0], NOW);
            assert!(matches!(nothing, Err(Error::TimedOut)), "{nothing:?}");
            let agreed = asks.join().unwrap();
            assert!(agreed.is_ok(), "{agreed:?}");
        });
    }
}

#[test]
fn shared__a_failure_is_told_in_both_directions() {
    let daemon = Daemon::start();
    let (socket, client) = daemon.asked();
    let shared = Shared::new(socket).unwrap();
    let waits = shared.recv_data(&mut [0], NOW);
    assert!(matches!(waits, Err(Error::TimedOut)), "{waits:?}");
    client.answer(&Refusal::from("no").to_message(), &[]);
    let refused = shared.send_data(b"x", NOW);
    assert!(matches!(refused, Err(Error::Daemon(_))), "{refused:?}");
    assert!(readable(&shared));
}
