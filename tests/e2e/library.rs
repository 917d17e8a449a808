//! The library in Rust: listeners, sockets for several threads, time limits, and how waiting ends.

use std::{
    net::SocketAddr,
    os::fd::AsFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, poll};
use vtl::{Error, Listener, Mode, Requirements, Shared, Socket};
use vtl_control::{Client, Grant, Request};
use vtl_testbed::{Host, Link};

use crate::harness::{PATIENCE, World, until};

const PORT: u16 = 4000;

fn pair(name: &str, rate_mbit: f64) -> Option<World> {
    let world = World::with_daemons(name, &Link::new(5.0, rate_mbit))?;
    Some(world)
}

fn initiator(world: &World, port: u16) -> Socket {
    let to = SocketAddr::new(world.servers()[0], port);
    Socket::init(Mode::Initiator, to, &world.socket(Host::Client)).expect("a socket")
}

/// A session that the peer has noticed.
fn connect(world: &World) -> Socket {
    let mut socket = initiator(world, PORT);
    socket.negotiate(&Requirements::STREAM).expect("a session");
    assert_eq!(socket.send_data(b"hello").expect("sent"), 5);
    socket
}

#[track_caller]
fn expect(socket: &mut Socket, wanted: &[u8]) {
    let mut buffer = [0; 100];
    socket.set_timeout(Some(PATIENCE));
    let n = socket.recv_data(&mut buffer).expect("received");
    assert_eq!(&buffer[..n], wanted);
}

fn readable(fd: &impl AsFd, ms: u16) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, ms).expect("polled") == 1
}

#[test]
fn listener__gives_each_session_and_they_outlive_it() {
    let Some(world) = pair("lib-listener", 100.0) else {
        return;
    };
    let daemon = world.socket(Host::Server);
    let mut listener = Listener::bind(PORT, &daemon).expect("a port");
    assert!(listener.try_accept().expect("a listener").is_none());
    assert!(!readable(&listener, 0));
    let mut clients: Vec<Socket> = (0..3).map(|_| connect(&world)).collect();
    assert!(readable(&listener, 60_000));
    let mut servers: Vec<Socket> = (0..2)
        .map(|_| listener.accept().expect("a session"))
        .collect();
    // Who waits and goes takes nothing along.
    let request = Request::Accept { key: Some(1) };
    let stranger = Client::connect(&daemon).expect("answers");
    assert!(
        stranger.call::<Grant>(&request).is_err(),
        "that is not the key"
    );
    assert!(readable(&listener, 60_000));
    // The third one was not accepted.
    drop(listener);
    for server in &mut servers {
        expect(server, b"hello");
        server.send_data(b"there").expect("sent");
    }
    let ends = clients.iter_mut().map(|client| {
        client.set_timeout(Some(PATIENCE));
        let mut buffer = [0; 100];
        client.recv_data(&mut buffer)
    });
    let ends: Vec<_> = ends.collect();
    assert_eq!(ends.iter().filter(|e| matches!(e, Ok(5))).count(), 2);
    assert_eq!(
        ends.iter()
            .filter(|e| matches!(e, Err(Error::Broken(_))))
            .count(),
        1
    );
    // The port is free again.
    until("the port is free", || Listener::bind(PORT, &daemon).is_ok());
}

#[test]
fn time_limits__leave_everything_as_it_was() {
    // What a full ring holds takes seconds.
    let Some(world) = pair("lib-limits", 5.0) else {
        return;
    };
    let at = SocketAddr::new(world.servers()[0], PORT);
    let mut server = Socket::init(Mode::Responder, at, &world.socket(Host::Server)).expect("one");
    server.set_timeout(Some(Duration::from_millis(20)));
    let start = Instant::now();
    assert!(matches!(server.validate(), Err(Error::TimedOut)));
    assert!(start.elapsed() >= Duration::from_millis(20));
    let mut client = connect(&world);
    server.set_timeout(Some(PATIENCE));
    assert_eq!(server.validate().expect("the same attempt").services, {
        client.agreement().expect("a session").services
    });
    expect(&mut server, b"hello");
    client.set_timeout(Some(Duration::from_millis(20)));
    assert!(matches!(client.recv_data(&mut [0]), Err(Error::TimedOut)));
    assert!(client.statistics().expect("counted").sent > 0);
    // A full ring, and nobody reads.
    let data = vec![7; 1 << 20];
    let error = loop {
        if let Err(error) = client.send_data(&data) {
            break error;
        }
    };
    assert!(matches!(error, Error::TimedOut), "{error}");
    assert!(matches!(client.try_close(), Ok(false)));
    assert!(client.unacknowledged() > 0);
    assert!(matches!(client.close(), Err(Error::TimedOut)));
    // That was the end of it.
    let mut buffer = vec![0; 1 << 20];
    while server.recv_data(&mut buffer).is_ok_and(|n| n > 0) {}
}

#[test]
fn shared__ends_for_everybody_with_the_daemon_or_by_close() {
    let Some(mut world) = pair("lib-shared", 100.0) else {
        return;
    };
    let mut listener = Listener::bind(PORT, &world.socket(Host::Server)).expect("a port");
    let shared = |socket| Arc::new(Shared::new(socket).expect("descriptors"));
    let mut servers = Vec::new();
    let mut session = || {
        let client = connect(&world);
        servers.push(listener.accept().expect("a session"));
        shared(client)
    };
    let (closed, orphan, polled) = (session(), session(), session());
    let reader = |socket: &Arc<Shared>| {
        let socket = Arc::clone(socket);
        thread::spawn(move || socket.recv_data(&mut [0], None))
    };
    let waiting = reader(&closed);
    let orphaned = reader(&orphan);
    thread::sleep(Duration::from_millis(50));
    closed.close(Some(PATIENCE)).expect("closed");
    assert!(matches!(
        waiting.join().expect("no panic"),
        Err(Error::Closed)
    ));
    assert!(matches!(closed.send_data(b"x", None), Err(Error::Closed)));
    // Somebody who polls, as the header says: refused, then told.
    let refused = polled.recv_data(&mut [0], Some(Duration::ZERO));
    assert!(matches!(refused, Err(Error::TimedOut)));
    assert!(!readable(&*polled, 50));
    world.take_daemon(Host::Client).kill();
    assert!(matches!(
        orphaned.join().expect("no panic"),
        Err(Error::Broken(_))
    ));
    assert!(readable(&*polled, 60_000));
    let broken = polled.recv_data(&mut [0], Some(Duration::ZERO));
    assert!(matches!(broken, Err(Error::Broken(_))), "{broken:?}");
}
