//! A peer that sends anything: what it sends is spoiled on the way, with a checksum that is right, so
//! that it gets as far into the library as it can.

use std::{
    cell::Cell,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    panic,
    rc::Rc,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    net::UdpSocket,
    sync::mpsc,
    task::{LocalSet, spawn_local},
    time::timeout,
};
use vtl_core::flow::Chunk;
use vtl_proto::frame::{FlowId, Side};
use vtl_testing::PATIENCE;

use super::{
    super::{CLEAR, Expected, framed::Arrived, library::Library, sealed::Datagrams},
    Sctp,
    interop::{chunk, echo, end},
    opened, packet,
};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// How long a flow may take that perhaps nothing answers any more.
const SPOILT: Duration = Duration::from_millis(250);
const ROUNDS: u64 = 150;
const AT_ONCE: u64 = 15;

/// Types of chunks, including some that VTL does not use.
const KINDS: [u8; 15] = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 14, 130, 192, 194];

/// Numbers without end.
struct Dice(Cell<u64>);

impl Dice {
    fn throw(&self, sides: usize) -> usize {
        let mut state = self.0.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.0.set(state);
        (state >> 16) as usize % sides.max(1)
    }

    /// A packet with something wrong behind its header.
    fn spoil(&self, whole: &[u8]) -> Bytes {
        let mut packet = whole.to_vec();
        let place = |packet: &Vec<u8>| 12 + self.throw(packet.len() - 12);
        match self.throw(6) {
            0 => {
                for _ in 0..=self.throw(4) {
                    let at = place(&packet);
                    packet[at] = self.throw(256) as u8;
                }
            }
            1 => packet.truncate(place(&packet)),
            // A length, and numbers at the beginning of a chunk.
            2 => packet[14 + self.throw(2)] = self.throw(256) as u8,
            3 => {
                let at = 16 + self.throw(12);
                if let Some(byte) = packet.get_mut(at) {
                    *byte ^= 1 << self.throw(8);
                }
            }
            // Other chunks.
            4 => {
                packet[12] = KINDS[self.throw(KINDS.len())];
            }
            _ => {
                let more = self.throw(packet.len());
                packet.extend_from_within(12.max(more)..);
            }
        }
        packet::sealed(packet)
    }
}

/// Passes packets on, and spoils every `often`th; for good.
async fn between(server: SocketAddr, front: UdpSocket, dice: Dice, often: usize) {
    let mut client = None;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (len, from) = front.recv_from(&mut buffer).await.unwrap();
        let whole = &buffer[..len];
        let to = if from == server {
            client
        } else {
            client = Some(from);
            Some(server)
        };
        let Some(to) = to else { continue };
        let spoilt = len > 16 && dice.throw(often) == 0;
        let packet = match spoilt {
            true => dice.spoil(whole),
            false => Bytes::copy_from_slice(whole),
        };
        let _ = front.send_to(&packet, to).await;
    }
}

/// One association with a flow there and back; whether everything went well.
async fn meet(
    server: &Sctp,
    client: &Sctp,
    token: u64,
    to: SocketAddr,
    patience: Duration,
) -> bool {
    let rtt = Some(Duration::from_millis(1));
    server.expect(Expected {
        token,
        client: HERE,
        rtt,
        crypto: CLEAR.into(),
        accept_rate: 0,
    });
    let datagrams = Datagrams::new(&CLEAR.into(), Side::Local);
    let opening = client.begin(HERE, to, token, rtt, datagrams).unwrap();
    let exchange = async {
        let link = opened(opening.await.ok()?);
        let bytes = Bytes::from(vec![7; 200_000]);
        let sent = Chunk {
            offset: 0,
            bytes: bytes.clone(),
            urgent: false,
        };
        let flow = FlowId {
            opener: Side::Local,
            number: 1,
        };
        link.pipe.put_chunk(flow, &sent).await.ok()?;
        let mut came = 0;
        while came < bytes.len() {
            for what in link.pipe.arrivals().await? {
                if let Arrived::Frame(message) = what {
                    came += chunk(&message)?.1.bytes.len();
                }
            }
        }
        Some(came == bytes.len())
    };
    let outcome = timeout(patience, exchange).await;
    server.revoke(token);
    matches!(outcome, Ok(Some(true)))
}

#[test]
fn association__bad_packets_harm_no_other() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // Panics of tasks, which the runtime ends, are counted here.
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(info);
    }));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let (arrivals, mut arrived) = mpsc::unbounded_channel();
        let (server, port) = end(arrivals);
        let server = Rc::new(server);
        let (arrivals, _none) = mpsc::unbounded_channel();
        let client = Rc::new(end(arrivals).0);
        let at = SocketAddr::new(HERE, port);
        spawn_local(async move {
            while let Some((_, link)) = arrived.recv().await {
                spawn_local(async move { echo(&link.pipe).await });
            }
        });
        let mut well = 0;
        for round in (1..=ROUNDS).step_by(AT_ONCE as usize) {
            let mut all = Vec::new();
            for seed in round..round + AT_ONCE {
                let front = UdpSocket::bind((HERE, 0)).await.unwrap();
                let to = front.local_addr().unwrap();
                let dice = Dice(Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
                let often = [2, 5, 20, 100][dice.throw(4)];
                let proxy = spawn_local(between(at, front, dice, often));
                let (server, client) = (server.clone(), client.clone());
                let token = (0x0101_0101_0000_0000 * (seed % 200 + 1)) | seed;
                all.push(spawn_local(async move {
                    let good = meet(&server, &client, token, to, SPOILT).await;
                    proxy.abort();
                    good
                }));
            }
            for one in all {
                well += usize::from(one.await.unwrap());
            }
            // One that is not spoilt goes as ever.
            let token = 0x7001_7002_0000_0000 | round;
            assert!(meet(&server, &client, token, at, PATIENCE).await);
        }
        let panics = PANICS.load(Ordering::Relaxed);
        println!("{well} of {ROUNDS} went well; {panics} panics");
        assert!(well < ROUNDS as usize, "nothing was spoilt");
        for end in [client, server] {
            end.close();
            timeout(PATIENCE, end.wait_idle())
                .await
                .expect("all are over");
        }
    });
}
