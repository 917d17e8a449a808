//! The carrier's end of an association against usrsctp, over a bad link.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
    rc::Rc,
    sync::OnceLock,
};

use bytes::Bytes;
use tokio::{
    sync::mpsc,
    task::{LocalSet, spawn_local},
    time::timeout,
};
use vtl_core::flow::Chunk;
use vtl_proto::frame::{FlowId, Frame, HEADER, Side};
use vtl_testbed::{Host, Lifetime, Link, Testbed};
use vtl_testing::{PATIENCE, Turn, turn};

use super::{
    super::{
        CLEAR, Expected,
        framed::{Arrived, Pipe},
        library::{Library, Opens},
        sealed::Datagrams,
        socket,
    },
    Sctp, opened, ports,
};

const TOKEN: u64 = 0x1234_5678_9abc_def0;
/// usrsctp's.
const UDP: u16 = 9899;

struct World {
    testbed: Testbed,
    peer: PathBuf,
    dir: PathBuf,
    _turn: Turn,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn good_link() -> Link {
    Link::new(5.0, 100.0)
}

fn bad_link() -> Link {
    Link {
        loss_pct: 1.0,
        duplicate_pct: 1.0,
        reorder_pct: 2.0,
        corrupt_pct: 1.0,
        ..good_link()
    }
}

impl World {
    /// `None` where the test is skipped.
    fn new(name: &str) -> Option<Self> {
        if !vtl_testing::is_root() {
            return None;
        }
        let dir = std::env::temp_dir().join(format!("vtl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let peer = dir.join("peer");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/flows/carrier/sctp/peer.c");
        let status = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-o"])
            .arg(&peer)
            .args([source, "-lusrsctp", "-lpthread"])
            .status()
            .unwrap();
        assert!(status.success());
        let turn = turn();
        let testbed = Testbed::up(name, &bad_link(), Lifetime::Guarded).unwrap();
        Some(Self {
            testbed,
            peer,
            dir,
            _turn: turn,
        })
    }

    /// The client's address and the server's, of both families.
    fn addresses(&self) -> [(IpAddr, IpAddr); 2] {
        let [c, s] = [Host::Client, Host::Server];
        let testbed = &self.testbed;
        [
            (testbed.addr4(c).into(), testbed.addr4(s).into()),
            (testbed.addr6(c).into(), testbed.addr6(s).into()),
        ]
    }

    fn peer(&self, args: &[&dyn ToString]) -> Peer {
        let mut command = self.testbed.command(Host::Server, &self.peer).unwrap();
        command.args(args.iter().map(|arg| arg.to_string()));
        Peer(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Runs VTL's end at the client.
    fn with_end<T: Send>(&self, work: impl AsyncFnOnce() -> T + Send) -> T {
        let run = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            LocalSet::new().block_on(&runtime, async { timeout(PATIENCE, work()).await.unwrap() })
        };
        self.testbed.in_netns(Host::Client, run).unwrap()
    }
}

/// Gone with the test.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    fn ready(&mut self) {
        let mut line = String::new();
        let stdout = self.0.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }

    /// Waits for its end. It says on standard error what was wrong.
    fn finish(&mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

fn payload(len: usize, mut state: u64) -> Bytes {
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| byte()).collect()
}

/// An end, and its UDP port.
pub(super) fn end(arrivals: Opens) -> (Sctp, u16) {
    let socket = socket().unwrap();
    socket.set_nonblocking(true).unwrap();
    let port = socket.local_addr().unwrap().port();
    (Sctp::start(socket, arrivals).unwrap(), port)
}

/// The one chunk that a message has; `None` for any other message.
pub(super) fn chunk(message: &Bytes) -> Option<(FlowId, Chunk)> {
    let mut rest = &message[..];
    match Frame::take(&mut rest) {
        Ok(Frame::Chunk {
            flow,
            offset,
            fin: false,
            urgent,
            ..
        }) if rest.is_empty() => {
            let bytes = message.slice(HEADER..);
            let chunk = Chunk {
                offset,
                bytes,
                urgent,
            };
            Some((flow, chunk))
        }
        _ => None,
    }
}

/// Echoes messages until the association ends. Returns the number of chunks that arrived out of order within
/// their flow; `None` if a message was no chunk.
pub(super) async fn echo(pipe: &Pipe) -> Option<usize> {
    let mut ends = HashMap::new();
    let mut overtaken = 0;
    while let Some(arrived) = pipe.arrivals().await {
        for what in arrived {
            let taken = match what {
                Arrived::Stream(bytes) => pipe.put_control(bytes).await,
                Arrived::Frame(message) => {
                    let (flow, chunk) = chunk(&message)?;
                    let end = ends.entry(flow).or_default();
                    overtaken += usize::from(chunk.offset < *end);
                    *end = chunk.end().max(*end);
                    pipe.put_chunk(flow, &chunk).await
                }
            };
            if taken.is_err() {
                break;
            }
        }
    }
    Some(overtaken)
}

/// Sends control bytes and flows, all at once, and checks that they come back.
async fn there_and_back(pipe: &Rc<Pipe>) {
    const CONTROL: usize = 300_000;
    const FLOWS: [usize; 4] = [2 << 20, 1_000_001, 1, 600_000];
    // More than a message, and no multiple of one.
    const PIECE: usize = 50_000;
    let control = payload(CONTROL, 9);
    let flows = [1, 2, 3, 4].map(|number: u32| {
        let opener = Side::Local;
        let len = FLOWS[number as usize - 1];
        (FlowId { opener, number }, payload(len, number.into()))
    });
    let (to, bytes) = (Rc::clone(pipe), control.clone());
    spawn_local(async move {
        for piece in bytes.chunks(PIECE) {
            to.put_control(bytes.slice_ref(piece)).await.unwrap();
        }
    });
    for (flow, bytes) in flows.clone() {
        let to = Rc::clone(pipe);
        spawn_local(async move {
            for (offset, piece) in (0..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
                let chunk = Chunk {
                    offset,
                    bytes: bytes.slice_ref(piece),
                    urgent: false,
                };
                to.put_chunk(flow, &chunk).await.unwrap();
            }
        });
    }
    // As many bytes as went, each at its place, are each byte once.
    let mut left = CONTROL + FLOWS.iter().sum::<usize>();
    let mut said = Vec::new();
    let mut back = FLOWS.map(|len| vec![0; len]);
    while left > 0 {
        for what in pipe.arrivals().await.expect("the association lives") {
            match what {
                Arrived::Stream(bytes) => {
                    said.extend_from_slice(&bytes);
                    left -= bytes.len();
                }
                Arrived::Frame(message) => {
                    let (flow, chunk) = chunk(&message).expect("a chunk");
                    // The frames return as they went: here they are those of a flow that the peer has opened.
                    let flow = flows.iter().position(|(sent, _)| sent.at_peer() == flow);
                    let place = chunk.offset as usize..chunk.end() as usize;
                    back[flow.expect("a flow of these")][place].copy_from_slice(&chunk.bytes);
                    left -= chunk.bytes.len();
                }
            }
        }
    }
    assert!(said == control, "{} control bytes", said.len());
    for ((flow, sent), back) in flows.iter().zip(&back) {
        assert!(sent == back, "{flow:?}");
    }
}

#[test]
fn usrsctp__returns_what_it_gets() {
    let Some(world) = World::new("sctp-echo") else {
        return;
    };
    for (local, peer) in world.addresses() {
        world.testbed.set(&bad_link()).unwrap();
        let (server, _) = ports(TOKEN);
        let token = format!("{TOKEN:x}");
        let mut echo = world.peer(&[&"echo", &peer, &UDP, &server, &token]);
        echo.ready();
        world.with_end(async || {
            let (arrivals, _none) = mpsc::unbounded_channel();
            let (sctp, _) = end(arrivals);
            let to = SocketAddr::new(peer, UDP);
            let datagrams = Datagrams::new(&CLEAR.into(), Side::Local);
            let opening = sctp.begin(local, to, TOKEN, None, datagrams).unwrap();
            let link = opened(opening.await.unwrap());
            there_and_back(&link.pipe).await;
            let figures = (link.path)().unwrap();
            assert!(figures.lost > 0 && figures.rtt_ms > 0.0, "{figures:?}");
            // What ends the association goes once.
            world.testbed.set(&good_link()).unwrap();
            drop(link);
            sctp.wait_idle().await;
        });
        echo.finish();
    }
}

#[test]
fn usrsctp__opens_an_association() {
    let Some(world) = World::new("sctp-open") else {
        return;
    };
    for (local, peer) in world.addresses() {
        let (here, there) = ports(TOKEN);
        let port = OnceLock::new();
        let token = format!("{TOKEN:x}");
        std::thread::scope(|scope| {
            let ours = scope.spawn(|| {
                world.with_end(async || {
                    let (arrivals, mut arrived) = mpsc::unbounded_channel();
                    let (sctp, udp) = end(arrivals);
                    sctp.expect(Expected {
                        token: TOKEN,
                        client: peer,
                        rtt: None,
                        crypto: CLEAR.into(),
                        accept_rate: 0,
                    });
                    port.set(udp).unwrap();
                    let (token, link) = arrived.recv().await.unwrap();
                    assert_eq!(token, TOKEN);
                    echo(&link.pipe).await
                })
            });
            let udp = port.wait();
            let args: [&dyn ToString; 8] =
                [&"open", &peer, &UDP, &there, &token, &local, udp, &here];
            world.peer(&args).finish();
            let overtaken = ours.join().unwrap().expect("chunks only");
            assert!(overtaken > 0, "all chunks came in order over such a link");
        });
    }
}
