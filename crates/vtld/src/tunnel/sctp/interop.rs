//! The tunnel's end of an association against usrsctp, over a bad link.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use bytes::Bytes;
use nix::fcntl::{Flock, FlockArg};
use tokio::{task::LocalSet, time::timeout};
use vtl_testbed::{Host, Lifetime, Link, Testbed};
use vtl_testing::PATIENCE;

use super::{super::quic::Grant, Connection, Sctp, SctpReceiver, SctpSender, ports};

const TOKEN: u64 = 0x1234_5678_9abc_def0;
/// usrsctp's.
const UDP: u16 = 9899;

struct World {
    testbed: Testbed,
    peer: PathBuf,
    dir: PathBuf,
    _turn: Flock<File>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
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
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tunnel/sctp/peer.c");
        let status = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-o"])
            .arg(&peer)
            .args([source, "-lusrsctp", "-lpthread"])
            .status()
            .unwrap();
        assert!(status.success());
        let lock = File::create("/run/vtl-testbed-tests.lock").unwrap();
        let turn = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
        let link = Link {
            loss_pct: 1.0,
            duplicate_pct: 1.0,
            reorder_pct: 2.0,
            corrupt_pct: 1.0,
            ..Link::new(5.0, 100.0)
        };
        let testbed = Testbed::up(name, &link, Lifetime::Guarded).unwrap();
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
        BufReader::with_capacity(1, stdout)
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
    }

    /// What it says of its flows: their number, bytes sent and their hash, bytes received and theirs.
    fn flows(&mut self) -> Vec<Vec<String>> {
        let mut text = String::new();
        let stdout = self.0.stdout.as_mut().unwrap();
        stdout.read_to_string(&mut text).unwrap();
        assert!(self.0.wait().unwrap().success(), "{text}");
        let words = |line: &str| line.split(' ').map(str::to_owned).collect();
        text.lines().map(words).collect()
    }
}

fn fnv(bytes: &[u8]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325;
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(start, step)
}

fn payload(len: usize, mut state: u64) -> Vec<u8> {
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| byte()).collect()
}

async fn send(mut sender: SctpSender, bytes: Bytes) {
    for piece in bytes.chunks(50_000) {
        sender.write(bytes.slice_ref(piece)).await.unwrap();
    }
    sender.finish();
}

async fn everything(mut receiver: SctpReceiver) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(bytes) = receiver.read().await.unwrap() {
        all.extend(bytes);
    }
    all
}

/// One flow, there and back; how many bytes.
async fn there_and_back(connection: Connection, len: usize, seed: u64) -> usize {
    let bytes = Bytes::from(payload(len, seed));
    let (sender, receiver) = connection.open().expect("a stream");
    let ((), back) = tokio::join!(send(sender, bytes.clone()), everything(receiver));
    assert!(bytes == back, "{len}: {} bytes came back", back.len());
    back.len()
}

#[test]
fn usrsctp__returns_what_it_gets() {
    let Some(world) = World::new("sctp-echo") else {
        return;
    };
    for (local, peer) in world.addresses() {
        let (server, _) = ports(TOKEN);
        let token = format!("{TOKEN:x}");
        let mut echo = world.peer(&[&"echo", &peer, &UDP, &server, &token]);
        echo.ready();
        let sent = world.with_end(async move || {
            let (sctp, _incoming) = Sctp::new().unwrap();
            let to = SocketAddr::new(peer, UDP);
            let connecting = sctp.connect(local, to, TOKEN, None).unwrap();
            let connection = connecting.await.unwrap();
            let mut sent = 0;
            // The second round goes by the same streams.
            for round in 1..3 {
                let flows: Vec<_> = [1 << 20, 700_001, 1, 0, 300_000]
                    .into_iter()
                    .map(|len| there_and_back(connection.clone(), len, round))
                    .map(tokio::task::spawn_local)
                    .collect();
                for flow in flows {
                    sent += flow.await.unwrap();
                }
                // The peer's last message comes behind the end that the application sees.
                while connection.0.streams.flows() > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            let figures = connection.figures();
            assert!(figures.lost > 0, "{figures:?}");
            connection.close();
            connection.closed().await;
            sctp.wait_idle().await;
            sent
        });
        assert_eq!(sent, 2 * (1_048_576 + 700_001 + 1 + 300_000));
        // No more streams than flows at a time.
        let flows = echo.flows();
        assert!(flows.len() <= 5, "{flows:?}");
    }
}

#[test]
fn usrsctp__opens_flows() {
    const FLOWS: usize = 4;
    const BYTES: usize = 600_000;
    let Some(world) = World::new("sctp-open") else {
        return;
    };
    for (local, peer) in world.addresses() {
        let (here, there) = ports(TOKEN);
        let port = std::sync::OnceLock::new();
        let token = format!("{TOKEN:x}");
        std::thread::scope(|scope| {
            let end = scope.spawn(|| {
                world.with_end(async || {
                    let (sctp, mut incoming) = Sctp::new().unwrap();
                    let (client, rtt) = (peer, None);
                    sctp.grant(TOKEN, &Grant { client, rtt });
                    port.set(sctp.port).unwrap();
                    let (token, connection) = incoming.recv().await.unwrap();
                    assert_eq!(token, TOKEN);
                    let mut flows = Vec::new();
                    for _ in 0..FLOWS {
                        let (mut sender, mut receiver) = connection.accept().await.unwrap();
                        flows.push(tokio::task::spawn_local(async move {
                            let mut all = Vec::new();
                            while let Some(bytes) = receiver.read().await.unwrap() {
                                all.extend_from_slice(&bytes);
                                sender.write(bytes).await.unwrap();
                            }
                            sender.finish();
                            fnv(&all)
                        }));
                    }
                    let mut hashes = Vec::new();
                    for flow in flows {
                        hashes.push(flow.await.unwrap());
                    }
                    connection.closed().await;
                    hashes
                })
            });
            let udp = port.wait();
            let (flows, bytes) = (FLOWS, BYTES);
            let args: [&dyn ToString; 10] = [
                &"open", &peer, &UDP, &there, &token, &local, udp, &here, &flows, &bytes,
            ];
            let mut opener = world.peer(&args);
            let flows = opener.flows();
            assert_eq!(flows.len(), FLOWS, "{flows:?}");
            for flow in &flows {
                // All of it, there and back.
                assert_eq!(flow[1], BYTES.to_string(), "{flows:?}");
                assert_eq!(flow[1..3], flow[3..5], "{flows:?}");
            }
            let mut said: Vec<_> = flows.iter().map(|flow| flow[2].clone()).collect();
            let hashes = end.join().unwrap();
            let mut got: Vec<_> = hashes.iter().map(|hash| format!("{hash:016x}")).collect();
            said.sort();
            got.sort();
            assert_eq!(said, got);
        });
    }
}
