use std::{
    net::TcpListener,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};

use super::*;

const SLOTS: u32 = 16;
const PAYLOAD: u16 = 600;

/// Nothing lies behind a gap.
fn in_order(_: u64) -> Option<u64> {
    None
}

/// A transmit ring at one end is the receive ring at the other: a perfect path.
fn path() -> OwnedFd {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let fd = memfd_create(c"path", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, 64 << 10).unwrap();
    fd
}

fn pair() -> (Streams<()>, Streams<()>) {
    let (there, back) = (path(), path());
    let end = |initiator, out: &OwnedFd, back: &OwnedFd| {
        let tx = TxRing::map(out.as_fd(), SLOTS, PAYLOAD).unwrap();
        Streams::new(
            initiator,
            false,
            tx,
            RxRing::map(back.as_fd(), SLOTS).unwrap(),
        )
    };
    (end(true, &there, &back), end(false, &back, &there))
}

/// The two ends of a TCP connection: the application's, and vtld's.
fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let app = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    // As the Hooker hands sockets over.
    set_linger(&ours, true);
    (app, ours)
}

fn address() -> SocketAddr {
    "192.0.2.1:80".parse().unwrap()
}

/// Tells what epoll knows of a flow's socket.
fn look(end: &mut Streams<()>, id: StreamId) {
    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};
    let Some(socket) = end.socket(id) else { return };
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    epoll.add(socket, EpollEvent::new(INTEREST, 0)).unwrap();
    let mut events = [EpollEvent::empty()];
    if epoll.wait(&mut events, EpollTimeout::ZERO).unwrap() == 1 {
        end.ready(id, events[0].events());
    }
}

/// Lets both ends work until neither has anything to do, and returns what they ask for.
fn settle(a: &mut Streams<()>, b: &mut Streams<()>) -> Vec<Effect<()>> {
    let mut effects = Vec::new();
    for _ in 0..50 {
        for end in [&mut *a, &mut *b] {
            for id in end.flows.keys().copied().collect::<Vec<_>>() {
                look(end, id);
            }
            end.transmit();
            end.receive(in_order, &mut effects).unwrap();
        }
    }
    effects
}

/// An open flow: client application, server application, and the two ends between them.
fn flow() -> (TcpStream, TcpStream, Streams<()>, Streams<()>, StreamId) {
    let (mut a, mut b) = pair();
    let (client, ours) = tcp();
    let Ok(id) = a.open(App::Socket(ours), address(), address()) else {
        panic!("a new session has room");
    };
    a.transmit();
    let mut effects = Vec::new();
    b.receive(in_order, &mut effects).unwrap();
    assert!(matches!(effects[..], [Effect::Open { .. }]));
    let (server, ours) = tcp();
    b.serve(id, ours, None);
    settle(&mut a, &mut b);
    (client, server, a, b, id)
}

#[test]
fn streams__data_in_the_packet_of_open_is_kept() {
    let (mut a, mut b) = pair();
    let (mut client, ours) = tcp();
    client.write_all(b"hello").unwrap();
    let id = a
        .open(App::Socket(ours), address(), address())
        .ok()
        .unwrap();
    for _ in 0..100 {
        look(&mut a, id);
        a.transmit();
    }
    let mut effects = Vec::new();
    b.receive(in_order, &mut effects).unwrap();
    let (mut server, ours) = tcp();
    b.serve(id, ours, None);
    settle(&mut a, &mut b);
    let mut got = [0; 5];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}

#[test]
fn streams__half_close_both_ways_keeps_every_byte() {
    let (mut client, mut server, mut a, mut b, _) = flow();
    let question: Vec<u8> = (0..20_000_u32).map(|n| n as u8).collect();
    client.write_all(&question).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    settle(&mut a, &mut b);
    let mut got = Vec::new();
    server.read_to_end(&mut got).unwrap();
    assert_eq!(got, question);
    server.write_all(b"answer").unwrap();
    drop(server);
    settle(&mut a, &mut b);
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"answer");
    assert_eq!((a.flows(), b.flows()), (0, 0));
    assert!(a.idle() && b.idle());
}

#[test]
fn streams__an_urgent_byte_stays_one() {
    let (client, mut server, mut a, mut b, id) = flow();
    let App::Socket(ours) = &a.flows[&id].app else {
        panic!("it is open");
    };
    // As the Hooker hands sockets over.
    setsockopt(ours, sockopt::OobInline, &true).unwrap();
    (&client).write_all(b"one").unwrap();
    urgent::send(&client, b'!').unwrap();
    (&client).write_all(b"two").unwrap();
    settle(&mut a, &mut b);
    let mut got = [0; 8];
    assert_eq!(server.read(&mut got).unwrap(), 3);
    assert!(urgent::is_next(&server));
    let n = recv(server.as_raw_fd(), &mut got[3..4], MsgFlags::MSG_OOB).unwrap();
    assert_eq!(n, 1);
    assert_eq!(server.read(&mut got[4..]).unwrap(), 3);
    assert_eq!(&got[..7], b"one!two");
}

#[test]
fn streams__a_reset_reaches_the_other_application() {
    let (client, mut server, mut a, mut b, _) = flow();
    set_linger(&client, true);
    drop(client);
    settle(&mut a, &mut b);
    assert_eq!(b.flows(), 0);
    let error = server.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn streams__a_reset_behind_an_end_reaches_the_other_application() {
    let (client, mut server, mut a, mut b, id) = flow();
    client.shutdown(Shutdown::Write).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
    set_linger(&client, true);
    drop(client);
    look(&mut a, id);
    settle(&mut a, &mut b);
    assert_eq!((a.flows(), b.flows()), (0, 0));
    let error = server.write(&[0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn streams__a_server_that_cannot_be_reached_refuses_the_connect() {
    let (mut a, mut b) = pair();
    let id = a.open(App::Held(()), address(), address()).ok().unwrap();
    a.transmit();
    b.receive(in_order, &mut Vec::new()).unwrap();
    b.refuse(id, ResetCode::Refused);
    let effects = settle(&mut a, &mut b);
    assert!(matches!(
        effects[..],
        [Effect::Refuse {
            code: ResetCode::Refused,
            ..
        }]
    ));
    assert_eq!(a.flows(), 0);
}

#[test]
fn streams__a_connect_is_accepted_once_the_server_is() {
    let (mut a, mut b) = pair();
    let id = a.open(App::Held(()), address(), address()).ok().unwrap();
    a.transmit();
    b.receive(in_order, &mut Vec::new()).unwrap();
    let (_server, ours) = tcp();
    b.serve(id, ours, None);
    let effects = settle(&mut a, &mut b);
    assert!(matches!(effects[..], [Effect::Accept { .. }]));
}

#[test]
fn streams__a_slow_reader_stops_the_writer() {
    let (mut client, server, mut a, mut b, id) = flow();
    client.set_nonblocking(true).unwrap();
    let block = vec![1; 64 << 10];
    let mut written = 0_u64;
    for _ in 0..2_000 {
        match client.write(&block) {
            Ok(n) => written += n as u64,
            Err(_) => {
                let before = a.bytes_sent;
                settle(&mut a, &mut b);
                if a.bytes_sent == before {
                    break;
                }
            }
        }
    }
    // Credit, socket buffers and rings: far less than was offered.
    assert!(written < 40 << 20, "{written} bytes were taken");
    assert!(b.flows[&id].inbox.len() as u64 <= vtl_proto::mux::DEFAULT_WINDOW);
    drop(server);
}
