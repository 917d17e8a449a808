//! Applications that misuse what the daemon gave them: the memory that they share with the kernel.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use vtl_control::{Client, Destination, Grant, Listening, Request, SessionRequest};
use vtl_proto::{carrier::GRAFT_PORT, intf};
use vtl_testbed::{Host, Link};

use crate::{
    harness::{World, memory_kib, payload, until},
    users::{session, transfer},
};

const SLOT: usize = intf::VTL_SLOT_SIZE as usize;

/// A ring as an application may map it: with all rights, for as long as it likes.
struct Mapped {
    base: *mut AtomicU64,
    words: usize,
}

// SAFETY: the memory is shared by nature, and only touched atomically.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(ring: &OwnedFd, slots: usize) -> Self {
        let length = ((slots + 1) * SLOT).next_multiple_of(4096);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, never unmapped.
        let base = unsafe {
            let fd = ring.as_raw_fd();
            libc::mmap(
                std::ptr::null_mut(),
                length,
                rights,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self {
            base: base.cast(),
            words: length / 8,
        }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: as many aligned words as were mapped, for good.
        unsafe { std::slice::from_raw_parts(self.base, self.words) }
    }
}

/// One end of a session, without the library.
struct End {
    _client: Client,
    rings: [Mapped; 2],
    kick: OwnedFd,
}

impl End {
    fn new(client: Client, granted: (Grant, Vec<OwnedFd>)) -> Self {
        let (grant, descriptors) = granted;
        let slots = grant.slots as usize;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().expect("a descriptor");
        let [transmit, receive, kick] = [next(), next(), next()];
        let rings = [transmit, receive].map(|ring| Mapped::new(&ring, slots));
        Self {
            _client: client,
            rings,
            kick,
        }
    }

    /// Writes nonsense wherever it can, until told to stop.
    fn scribble(&self, stop: &AtomicBool, mut state: u64) {
        let mut random = || {
            // xorshift64, Marsaglia 2003.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        while !stop.load(Ordering::Relaxed) {
            let words = self.rings[random() as usize % 2].words();
            let value = match random() % 5 {
                0 => random(),
                1 => u64::MAX - random() % 4,
                2 => random() % 256,
                3 => 1 << (random() % 64),
                // Not far from what is there.
                _ => words[0].load(Ordering::Relaxed).wrapping_add(random() % 64),
            };
            // The control slot's producer, consumer, and flags; lengths of packets; anything.
            let at = match random() % 8 {
                0 | 1 => 0,
                2 | 3 => 8,
                4 => 16,
                5 | 6 => (1 + random() as usize % 64) * SLOT / 8,
                _ => random() as usize % words.len(),
            };
            words[at].store(value, Ordering::Relaxed);
            if random() % 64 == 0 {
                let value = (random() >> 1).to_ne_bytes();
                let _ = nix::unistd::write(&self.kick, &value);
                thread::yield_now();
            }
        }
    }
}

/// Ends the scribbling, also where an assertion fails: a scope waits for its threads.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Both ends of a session, without the library.
fn raw_session(world: &World, port: u16) -> [End; 2] {
    let [client, server] =
        [Host::Client, Host::Server].map(|h| Client::connect(&world.socket(h)).expect("answers"));
    server
        .call::<Listening>(&Request::Listen { port })
        .expect("the port is free");
    let host = world.servers()[0];
    let accepting = thread::spawn(move || {
        let answer = server.call_with_descriptors(&Request::Accept { key: None });
        End::new(server, answer.expect("a session"))
    });
    let connect = Request::Connect {
        to: Destination::Peer { host, port },
        session: SessionRequest::default(),
    };
    let answer = client.call_with_descriptors(&connect).expect("a session");
    [
        End::new(client, answer),
        accepting.join().expect("no panic"),
    ]
}

#[test]
fn scribbler__harms_only_itself() {
    let Some(mut world) = World::bare("scribble", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start_both(&["--ring-slots", "256"]);
    world.serve("f", 4 << 20);
    let ends = raw_session(&world, 60);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        for (i, end) in ends.iter().enumerate() {
            let stop = &stop;
            scope.spawn(move || end.scribble(stop, 11 + i as u64));
        }
        for server in world.servers() {
            world.download(server, "f");
        }
        transfer(session(&world, 61), &payload(2 << 20, 8));
    });
    drop(ends);
    for host in [Host::Client, Host::Server] {
        until("its session ends", || {
            let status = world.status(host);
            let sessions = status["sessions"].as_array().expect("a list");
            sessions.iter().all(|s| s["port"] == GRAFT_PORT)
        });
        let pid = world.daemon(host).pid();
        assert!(memory_kib(pid) < 200 << 10, "{} KiB", memory_kib(pid));
    }
    // Whoever comes next is not disturbed.
    for port in 62..66 {
        transfer(session(&world, port), &payload(1 << 18, port.into()));
    }
}

#[test]
fn leaver__sees_nothing_of_those_who_come_after() {
    let Some(mut world) = World::bare("leaver", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start(Host::Server, &["--ring-slots", "256"]);
    world.start(Host::Client, &["--ring-slots", "256"]);
    // Ends its session, and keeps what it had mapped.
    let rings = raw_session(&world, 70).map(|end| end.rings);
    until("the session ends", || {
        let none = |host| {
            world.status(host)["sessions"]
                .as_array()
                .is_some_and(Vec::is_empty)
        };
        none(Host::Client) && none(Host::Server)
    });
    let secret = u64::from_ne_bytes(*b"a secret");
    let wanted: Vec<u8> = b"a secret".repeat(1 << 15);
    for port in 71..75 {
        transfer(session(&world, port), &wanted);
        for ring in rings.iter().flatten() {
            let seen = ring
                .words()
                .iter()
                .any(|w| w.load(Ordering::Relaxed) == secret);
            assert!(!seen, "another application's bytes at port {port}");
        }
    }
}
