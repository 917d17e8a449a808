//! Packets of protocol 253 that nobody asked for.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{MsgFlags, SockaddrStorage, bind, recv, sendto};
use vtl_proto::{
    field, intf,
    services::Services,
    wire::{Gids, Header, Nego, Packet, checksum},
};
use vtl_testbed::{Host, Link};

use crate::{
    harness::{World, any_payload, run, until},
    many,
};

/// The version's place in the first byte.
const VERSION: u8 = (intf::VTL_VERSION << 4) as u8;

/// A stranger on the client's host: sends what it likes, from the client's own address.
pub(crate) struct Stranger {
    fd: OwnedFd,
    /// Hears what the host's daemon keeps from raw sockets.
    ears: OwnedFd,
    to: SockaddrStorage,
    state: u64,
}

impl Stranger {
    pub(crate) fn new(world: &World, server: IpAddr) -> Self {
        Self::on(world, Host::Client, server)
    }

    pub(crate) fn on(world: &World, host: Host, server: IpAddr) -> Self {
        let family = if server.is_ipv6() {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        let open = |family, kind, protocol: i32| {
            // SAFETY: a plain system call.
            let fd = unsafe { libc::socket(family, kind, protocol) };
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            // SAFETY: a new descriptor that nobody else owns.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let both = || {
            let all = i32::from((libc::ETH_P_ALL as u16).to_be());
            [
                open(family, libc::SOCK_RAW, intf::VTL_IPPROTO as i32),
                open(libc::AF_PACKET, libc::SOCK_DGRAM, all),
            ]
        };
        let [fd, ears] = world.testbed.in_netns(host, both).expect("a namespace");
        Self {
            fd,
            ears,
            to: SocketAddr::new(server, 0).into(),
            state: 7,
        }
    }

    pub(crate) fn random(&mut self) -> u64 {
        // xorshift64, Marsaglia 2003.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    pub(crate) fn send(&self, bytes: &[u8]) {
        // A full queue is not the test's concern.
        let _ = sendto(self.fd.as_raw_fd(), bytes, &self.to, MsgFlags::empty());
    }

    pub(crate) fn send_packet(&self, packet: &Packet<'_>) {
        let mut buffer = [0; 1200];
        let length = packet.emit(&mut buffer).expect("fits");
        self.send(&buffer[..length]);
    }

    /// The packets that open and end sessions which this host has sent or received since the last call.
    pub(crate) fn overhear(&self) -> Vec<Packet<'static>> {
        let mut buffer = [0; 2048];
        let mut heard = Vec::new();
        let ears = self.ears.as_raw_fd();
        while let Ok(length) = recv(ears, &mut buffer, MsgFlags::MSG_DONTWAIT) {
            heard.extend(match Packet::parse(any_payload(&buffer[..length])) {
                Ok(Packet::Nego(nego)) => Some(Packet::Nego(nego.without_extensions())),
                Ok(Packet::NegoAck(nego)) => Some(Packet::NegoAck(nego.without_extensions())),
                Ok(Packet::NegoNack(nego)) => Some(Packet::NegoNack(nego.without_extensions())),
                Ok(Packet::Close(header)) => Some(Packet::Close(header)),
                _ => None,
            });
        }
        heard
    }

    /// Correct as far as the checksum goes.
    fn send_sealed(&self, bytes: &mut [u8]) {
        let sum = checksum(bytes);
        if let Some(field) = bytes.get_mut(field!(vtl_hdr, csum)) {
            field.copy_from_slice(&sum.to_le_bytes());
        }
        self.send(bytes);
    }

    /// A packet of each type with random fields, whole, cut, grown, or with a lie about its length.
    fn send_mutations(&mut self, count: usize) {
        const HEADER: usize = size_of::<intf::vtl_hdr>();
        const DATA: usize = size_of::<intf::vtl_data_hdr>();
        const ACK: usize = size_of::<intf::vtl_ack_hdr>();
        const NEGO: usize = size_of::<intf::vtl_nego>();
        for i in 0..count {
            let mut bytes = vec![0; [HEADER, DATA, ACK, NEGO, 512, 1400][i % 6]];
            for chunk in bytes.chunks_mut(8) {
                let word = self.random().to_ne_bytes();
                chunk.copy_from_slice(&word[..chunk.len()]);
            }
            let kind = (self.random() % 16) as u8;
            // Mostly the right version, mostly sessions that exist.
            bytes[0] = if i % 8 == 0 { kind << 4 } else { VERSION } | kind;
            bytes[field!(vtl_hdr, gid)]
                .copy_from_slice(&((self.random() % 4) as u16).to_be_bytes());
            bytes[field!(vtl_hdr, sid)]
                .copy_from_slice(&((self.random() % 5) as u32).to_be_bytes());
            let own = match kind {
                0 | 2 => DATA,
                1 => ACK,
                3..=5 => NEGO,
                _ => HEADER,
            };
            let length = match i % 3 {
                0 => bytes.len().saturating_sub(own) as u16,
                1 => 0xffff,
                _ => self.random() as u16,
            };
            bytes[field!(vtl_hdr, len)].copy_from_slice(&length.to_be_bytes());
            bytes[field!(vtl_hdr, aux)].fill(0);
            match i % 4 {
                0 => self.send(&bytes),
                1 => {
                    let cut = self.random() as usize % bytes.len();
                    self.send(&bytes[..cut]);
                }
                _ => self.send_sealed(&mut bytes),
            }
        }
    }

    /// Opens a session at a port, and returns the answer.
    pub(crate) fn negotiate(&mut self, port: u16) -> Nego<'static> {
        let mut answer = None;
        let token = self.random();
        until("a session", || {
            // Under the same guard it is the same request.
            self.send_nego(port, token);
            std::thread::sleep(Duration::from_millis(30));
            for packet in self.overhear() {
                match packet {
                    Packet::NegoAck(nego) if nego.header.token == token => answer = Some(nego),
                    _ => {}
                }
            }
            answer.is_some()
        });
        answer.expect("until")
    }

    /// Whether there is any answer to requests for a session.
    pub(crate) fn is_answered(&mut self, port: u16) -> bool {
        let token = self.random();
        (0..10).any(|_| {
            self.send_nego(port, token);
            std::thread::sleep(Duration::from_millis(30));
            self.overhear().iter().any(|packet| match packet {
                Packet::NegoAck(nego) => nego.header.token == token,
                Packet::NegoNack(nack) => nack.peer_token == token,
                _ => false,
            })
        })
    }

    /// Asks for a session, and is refused for this reason.
    #[track_caller]
    pub(crate) fn is_refused(&mut self, port: u16, reason: u32) {
        let token = self.random();
        until("a refusal", || {
            self.send_nego(port, token);
            std::thread::sleep(Duration::from_millis(30));
            self.overhear().iter().any(|packet| {
                matches!(packet, Packet::NegoNack(nack)
                    if nack.peer_token == token && u32::from(nack.reason) == reason)
            })
        });
    }

    /// Asks for a session; the answer must have this guard.
    fn send_nego(&self, port: u16, token: u64) {
        let nego = Nego {
            header: Header {
                flags: 0,
                gid: 0,
                sid: 0,
                token: 0,
            },
            token,
            peer_token: 0,
            sid: 900 + (token % 100) as u32,
            ring_slots: 64,
            max_payload: 1400,
            port,
            services: Services::RELIABLE.bits(),
            reason: 0,
            gids: Gids::new(&[1, 2, 3]).expect("few"),
            ..Nego::default()
        };
        self.send_packet(&Packet::Nego(nego));
    }
}

/// A counter of the server's packets.
fn count(world: &World, name: &str) -> u64 {
    world.status(Host::Server)["packets"][name]
        .as_u64()
        .expect("a number")
}

#[test]
fn garbage__is_counted_and_disturbs_nothing() {
    let Some(mut world) = World::new("garbage", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", 4 << 20);
    world.serve("small", 1 << 18);
    world.meet();
    let cost = world.cost(Host::Server);
    for server in world.servers() {
        let counters = ["malformed", "no_session", "control"];
        let before = counters.map(|name| count(&world, name));
        let mut download = world.start_download(server, "f");
        download.reaches(100_000);
        let mut stranger = Stranger::new(&world, server);
        while download.process.ended().is_none() {
            stranger.send_mutations(200);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(download.process.wait().success());
        download.check();
        for (name, before) in counters.iter().zip(before) {
            assert!(count(&world, name) > before, "{name}");
        }
        // Sessions that strangers' packets broke would be opened anew.
        world.download(server, "small");
    }
    world.assert_cost(Host::Server, &cost, 32 << 10, 5.0);
    let sessions = world.status(Host::Server)["sessions"].clone();
    assert!(
        sessions.as_array().is_some_and(|s| s.len() <= 2),
        "{sessions}"
    );
    assert!(
        world.sum(Host::Client, "bytes_received") >= 2 * ((4 << 20) + (1 << 18)),
        "one session a family"
    );
}

#[test]
fn flood__of_requests_is_survived() {
    let Some(mut world) = World::bare("flood", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start_both(&["--ring-slots", "64"]);
    world.serve("f", 4 << 20);
    let server = world.servers()[0];
    let cost = world.cost(Host::Server);
    let mut download = world.start_download(server, "f");
    download.reaches(100_000);
    let mut stranger = Stranger::new(&world, server);
    let started = Instant::now();
    for i in 0..3000 {
        let token = stranger.random();
        stranger.send_nego([0, 9][i % 2], token);
        if i % 50 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert!(download.process.wait().success());
    download.check();
    let sessions = |world: &World| {
        let status = world.status(Host::Server);
        status["sessions"].as_array().map_or(0, Vec::len)
    };
    let max = sessions(&world);
    println!("flood: {max} sessions, {:?}", started.elapsed());
    world.assert_cost(Host::Server, &cost, 32 << 10, 5.0);
    // Nobody uses them: they go.
    until("strangers' sessions end", || sessions(&world) <= 1);
    println!("flood: over after {:?}", started.elapsed());
    assert!(world.daemon(Host::Server).ended().is_none());
    world.download(server, "f");
}

/// Somebody asks for sessions as fast as possible; somebody else opens some as if nothing were.
#[test]
fn flood__by_one_address_costs_the_others_nothing() {
    let Some(mut world) = World::alone("flood-one", &Link::new(200.0, 20.0)) else {
        return;
    };
    world.start_both(&["--ring-slots", "64"]);
    let mut ip = world.testbed.command(Host::Client, "ip").expect("there");
    run(ip.args("addr add 10.73.0.77/24 dev eth0".split(' ')));
    // How long each takes, sorted.
    let open = |world: &World| {
        let mut times: Vec<_> = (7400..7410)
            .map(|port| {
                let began = Instant::now();
                let (client, _server) = many::open(world, port);
                let took = began.elapsed();
                client.close().expect("closed");
                took
            })
            .collect();
        times.sort();
        times
    };
    let calm = open(&world)[9];
    let mut stranger = Stranger::new(&world, world.servers()[0]);
    let other = SocketAddr::new([10, 73, 0, 77].into(), 0);
    bind(stranger.fd.as_raw_fd(), &SockaddrStorage::from(other)).expect("an address");
    let cost = world.cost(Host::Server);
    let began = Instant::now();
    let flooding = AtomicBool::new(true);
    let (flooded, sent) = thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut sent = 0_u64;
            while flooding.load(Ordering::Relaxed) {
                for _ in 0..30 {
                    let token = stranger.random();
                    stranger.send_nego(9, token);
                }
                sent += 30;
                thread::sleep(Duration::from_millis(2));
            }
            sent
        });
        let mut times = Vec::new();
        while began.elapsed() < Duration::from_secs(4) {
            times.extend(open(&world));
        }
        flooding.store(false, Ordering::Relaxed);
        times.sort();
        (times[times.len() / 2], flood.join().expect("no panic"))
    });
    let elapsed = began.elapsed();
    let [control, limited] = ["control", "limited"].map(|name| count(&world, name));
    println!(
        "flood: {sent} requests in {elapsed:?}, {limited} of {control} dropped; \
         sessions opened within {calm:?} before, half of them within {flooded:?} meanwhile"
    );
    let may = u64::from(intf::VTL_NEGO_LIMIT_BURST) + elapsed.as_secs() * 1000;
    let passed = control - limited;
    assert!(sent > 3 * may, "no flood");
    assert!(
        (may / 2..2 * may).contains(&passed),
        "{passed} came through"
    );
    // Most did not have to ask twice. One may: the machine drops packets of a flood before they are counted.
    assert!(flooded < calm + Duration::from_millis(200));
    world.assert_cost(Host::Server, &cost, 32 << 10, elapsed.as_secs_f64() / 2.0);
}
