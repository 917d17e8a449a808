//! An SCTP association with a peer that is honest until the handshake is done, and then has chunks of any kind among
//! its packets, with the tag and the checksum that are right.
#![no_main]

use std::{
    net::SocketAddr,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use arbitrary::Arbitrary;
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use sctp_proto::{
    Association, AssociationHandle, ClientConfig, DatagramEvent, Endpoint, EndpointConfig, Event,
    Payload, PayloadProtocolIdentifier, ServerConfig, StreamEvent, TransportConfig,
};

#[allow(dead_code)]
#[path = "../../crates/vtld/src/flows/carrier/sctp/packet.rs"]
mod packet;

/// As the daemon has it.
const WINDOW: u32 = 1 << 20;

#[derive(Arbitrary, Debug)]
struct Chunk<'a> {
    kind: u8,
    flags: u8,
    body: &'a [u8],
}

#[derive(Arbitrary, Debug)]
enum Action<'a> {
    /// Chunks that the peer makes up.
    Chunks(Vec<Chunk<'a>>),
    /// DATA with a number near the one that is due, as most must have to mean something.
    Data {
        ahead: i8,
        stream: u8,
        sequence: u8,
        flags: u8,
        len: u16,
    },
    /// A SACK near what was sent.
    Sack {
        ahead: i8,
        gaps: [(u8, u8); 3],
        count: u8,
        window: u16,
    },
    Forward {
        ahead: i8,
        stream: u8,
        sequence: u8,
    },
    /// Both hosts go on honestly for a while.
    Exchange,
    Write {
        stream: u8,
        len: u16,
    },
    Wait(u8),
}

struct Host {
    endpoint: Endpoint,
    association: Option<(AssociationHandle, Association)>,
    there: SocketAddr,
    sent: Vec<Bytes>,
    /// The number of the last DATA, and the tag, as it sends them.
    newest: u32,
    tag: u32,
}

fn transport(here: u16, there: u16) -> Arc<TransportConfig> {
    Arc::new(
        TransportConfig::default()
            .with_max_receive_buffer_size(WINDOW)
            .with_max_send_message_size(1168)
            .with_max_num_outbound_streams(3)
            .with_max_num_inbound_streams(3)
            .with_path_model(true)
            .with_local_port(here)
            .with_remote_port(there),
    )
}

impl Host {
    fn new(is_server: bool) -> Self {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut config = EndpointConfig::new();
        config.max_payload_size(1168);
        let server = is_server.then(|| {
            let mut server = ServerConfig::new();
            server.transport = transport(2, 1);
            Arc::new(server)
        });
        let mut endpoint = Endpoint::new(Arc::new(config), server);
        let there = address(if is_server { 1 } else { 2 });
        let association = (!is_server).then(|| {
            let mut config = ClientConfig::new();
            config.transport = transport(1, 2);
            endpoint.connect(config, there).expect("an association")
        });
        Self {
            endpoint,
            association,
            there,
            sent: Vec::new(),
            newest: 0,
            tag: 0,
        }
    }

    fn take(&mut self, now: Instant, bytes: &Bytes) {
        // As the daemon does.
        if !packet::is_intact(bytes) {
            return;
        }
        let (mut is_init, mut kinds) = (false, packet::chunks(bytes));
        if let Some(first) = kinds.next() {
            is_init = matches!(first.kind, packet::INIT | packet::INIT_ACK);
        }
        let bytes = if is_init {
            packet::bare_init(bytes)
        } else {
            bytes.clone()
        };
        let happening = self.endpoint.handle(now, self.there, None, None, bytes);
        match (happening, &mut self.association) {
            (Some((handle, DatagramEvent::NewAssociation(new))), known @ None) => {
                *known = Some((handle, new));
            }
            (Some((_, DatagramEvent::AssociationEvent(event))), Some((_, association))) => {
                association.handle_event(event);
            }
            _ => {}
        }
        self.turn(now);
    }

    fn turn(&mut self, now: Instant) {
        if let Some((handle, association)) = &mut self.association {
            if association.poll_timeout().is_some_and(|at| at <= now) {
                association.handle_timeout(now);
            }
            while let Some(event) = association.poll() {
                if let Event::Stream(StreamEvent::Readable { id }) = event
                    && let Ok(mut stream) = association.stream(id)
                {
                    while let Ok(Some(chunks)) = stream.read_sctp() {
                        assert!(chunks.len() <= WINDOW as usize);
                        let mut bytes = vec![0; chunks.len()];
                        let _ = chunks.read(&mut bytes);
                    }
                }
            }
            while association.accept_stream().is_some() {}
            // The peer's messages that wait for a gap to be filled are bounded.
            assert!(association.unread() <= 2 * WINDOW);
            for _ in 0..64 {
                let Some(transmit) = association.poll_transmit(now) else {
                    break;
                };
                if let Payload::RawEncode(packets) = transmit.payload {
                    self.sent.extend(packets);
                }
            }
            while let Some(event) = association.poll_endpoint_event() {
                let handle = *handle;
                if let Some(event) = self.endpoint.handle_event(handle, event) {
                    association.handle_event(event);
                }
            }
        }
        while let Some(transmit) = self.endpoint.poll_transmit() {
            if let Payload::RawEncode(packets) = transmit.payload {
                self.sent.extend(packets);
            }
        }
        for sent in &self.sent {
            let header = packet::Header::of(sent).expect("a packet");
            if header.tag != 0 {
                self.tag = header.tag;
            }
            for chunk in packet::chunks(sent) {
                match (chunk.kind, chunk.tsn(), chunk.initial_tsn()) {
                    (packet::DATA, Some(tsn), _) => self.newest = tsn,
                    (packet::INIT | packet::INIT_ACK, _, Some(first)) => {
                        self.newest = first.wrapping_sub(1);
                    }
                    _ => {}
                }
            }
        }
    }

    fn write(&mut self, stream: u16, len: usize) {
        if let Some((_, association)) = &mut self.association {
            let kind = PayloadProtocolIdentifier::Binary;
            let _ = association.open_stream(stream, kind);
            if let Ok(mut stream) = association.stream(stream) {
                let _ = stream.write_with_ppi(&vec![7; len], kind);
            }
        }
    }
}

fn exchange(hosts: &mut [Host; 2], now: Instant) {
    for _ in 0..8 {
        for from in 0..2 {
            hosts[from].turn(now);
            for packet in std::mem::take(&mut hosts[from].sent) {
                hosts[1 - from].take(now, &packet);
            }
        }
    }
}

/// A packet of the client's.
fn forged(tag: u32, chunks: &[(u8, u8, Vec<u8>)]) -> Bytes {
    let mut packet = vec![0, 1, 0, 2];
    packet.extend(tag.to_be_bytes());
    packet.extend([0; 4]);
    for (kind, flags, body) in chunks {
        packet.extend([*kind, *flags]);
        packet.extend((4 + body.len() as u16).to_be_bytes());
        packet.extend(body);
        packet.resize(packet.len().next_multiple_of(4), 0);
    }
    packet::sealed(packet)
}

/// The clock stands still but for what the input says.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

fuzz_target!(|actions: Vec<Action<'_>>| {
    let mut now = *BEGAN;
    let mut hosts = [Host::new(false), Host::new(true)];
    exchange(&mut hosts, now);
    hosts[0].write(1, 100);
    exchange(&mut hosts, now);
    assert!(hosts[1].association.is_some(), "no handshake");
    for action in actions.iter().take(100) {
        let (tag, newest, theirs) = (hosts[0].tag, hosts[0].newest, hosts[1].newest);
        let near = |from: u32, ahead: i8| from.wrapping_add_signed(ahead.into());
        let chunks = match action {
            Action::Chunks(chunks) => chunks
                .iter()
                .take(8)
                .map(|c| (c.kind, c.flags, c.body[..c.body.len().min(1200)].to_vec()))
                .collect(),
            Action::Data {
                ahead,
                stream,
                sequence,
                flags,
                len,
            } => {
                let mut body = near(newest, *ahead).to_be_bytes().to_vec();
                body.extend(u16::from(stream % 4).to_be_bytes());
                body.extend(u16::from(*sequence).to_be_bytes());
                body.extend([0, 0, 0, 53]);
                body.resize(body.len() + usize::from(len % 1200), 7);
                vec![(packet::DATA, *flags, body)]
            }
            Action::Sack {
                ahead,
                gaps,
                count,
                window,
            } => {
                let mut body = near(theirs, *ahead).to_be_bytes().to_vec();
                body.extend((u32::from(*window) << 8).to_be_bytes());
                let count = usize::from(count % 4);
                body.extend((count as u16).to_be_bytes());
                body.extend([0, 0]);
                for (from, to) in &gaps[..count] {
                    body.extend(u16::from(*from).to_be_bytes());
                    body.extend(u16::from(*to).to_be_bytes());
                }
                vec![(packet::SACK, 0, body)]
            }
            Action::Forward {
                ahead,
                stream,
                sequence,
            } => {
                let mut body = near(newest, *ahead).to_be_bytes().to_vec();
                body.extend(u16::from(stream % 4).to_be_bytes());
                body.extend(u16::from(*sequence).to_be_bytes());
                vec![(192, 0, body)]
            }
            Action::Exchange => {
                exchange(&mut hosts, now);
                continue;
            }
            Action::Write { stream, len } => {
                let len = usize::from(len % 1168) + 1;
                hosts[1].write(u16::from(stream % 3), len);
                hosts[1].turn(now);
                continue;
            }
            Action::Wait(tenths) => {
                now += Duration::from_millis(u64::from(*tenths) * 50);
                hosts[1].turn(now);
                continue;
            }
        };
        hosts[1].take(now, &forged(tag, &chunks));
    }
});
