//! A peer that opens a session by the rules, and then breaks them.

use std::{thread, time::Duration};

use vtl_proto::{
    carrier::GRAFT_PORT,
    intf,
    wire::{Ack, Data, Header, Packet},
};
use vtl_testbed::{Host, Link};

use crate::{
    attacks::stranger::Stranger,
    harness::{World, until},
};

/// A session for flows, without a daemon at this end.
struct Peer {
    stranger: Stranger,
    header: Header,
    seq: u64,
    xid: u32,
}

impl Peer {
    fn open(world: &World) -> Self {
        let mut stranger = Stranger::new(world, world.servers()[0]);
        let answer = stranger.negotiate(GRAFT_PORT);
        let header = Header {
            flags: 0,
            gid: answer.gids[0],
            sid: answer.sid,
            token: answer.token,
        };
        Self {
            stranger,
            header,
            seq: 0,
            xid: 1,
        }
    }

    fn random(&mut self) -> u64 {
        self.stranger.random()
    }

    fn emit(&self, packet: &Packet<'_>) {
        let mut buffer = [0; 2048];
        if let Ok(length) = packet.emit(&mut buffer) {
            self.stranger.send(&buffer[..length]);
        }
    }

    fn data(&mut self, seq: u64, payload: &[u8]) {
        let data = Data {
            header: self.header,
            seq,
            xid: self.xid,
            ts: 1,
            payload,
        };
        self.xid = self.xid.wrapping_add(1);
        self.emit(&if payload.is_empty() {
            Packet::Probe(data)
        } else {
            Packet::Data(data)
        });
    }

    /// The next packet in order.
    fn frames(&mut self, payload: &[u8]) {
        self.data(self.seq, payload);
        self.seq += 1;
    }

    /// Some number that protocols fear.
    fn awkward(&mut self) -> u64 {
        let near = self.random() % 70;
        match self.random() % 6 {
            0 => near,
            1 => u64::MAX - near,
            2 => (1 << 32) - 35 + near,
            3 => (1 << 63) - 35 + near,
            4 => self.seq.wrapping_sub(35).wrapping_add(near),
            _ => self.random(),
        }
    }

    /// An acknowledgement of anything.
    fn ack(&mut self) {
        let mut bitmap = vec![0; [0, 8, 64, 1024][self.random() as usize % 4]];
        for byte in &mut bitmap {
            *byte = self.random() as u8;
        }
        let ack = Ack {
            header: Header {
                flags: self.random() as u8,
                ..self.header
            },
            cum: self.awkward(),
            limit: self.awkward(),
            received: self.awkward(),
            echo_seq: self.awkward(),
            echo_xid: self.awkward() as u32,
            echo_ts: self.random() as u32,
            dups: self.random() as u32,
            skip: self.random() as u32 % 384,
            bitmap: &bitmap,
        };
        self.emit(&Packet::Ack(ack));
    }

    /// One frame, mostly of a flow that may exist.
    fn frame(&mut self) -> Vec<u8> {
        let kind = self.random() as u8 % 22;
        let number = match self.random() % 4 {
            0 => self.random() as u32,
            n => n as u32,
        };
        let body = [0, 0, 4, 8, 12, self.random() as usize % 100][self.random() as usize % 6];
        let flags = self.random() as u8;
        let mut bytes = frame(number, kind, flags, self.awkward(), &vec![7; body]);
        if self.random().is_multiple_of(4) {
            bytes[4..6].copy_from_slice(&(self.stranger.random() as u16).to_be_bytes());
        }
        bytes
    }
}

fn frame(number: u32, kind: u8, flags: u8, offset: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.extend((body.len() as u16).to_be_bytes());
    bytes.extend([kind, flags]);
    bytes.extend(offset.to_be_bytes());
    bytes.extend(body);
    bytes
}

/// HELLO of an association that there is not.
fn hello() -> Vec<u8> {
    frame(1, 17, 1, 0x1234_5678, b"VTL2")
}

#[test]
fn peer__that_breaks_the_rules_harms_only_itself() {
    let Some(mut world) = World::bare("peer", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start_both(&["--ring-slots", "512"]);
    world.serve("f", 4 << 20);
    let server = world.servers()[1];
    world.download(server, "f");
    let cost = world.cost(Host::Server);
    let mut download = world.start_download_by(server, "f", &["--limit-rate", "2M"]);
    for round in 0..16 {
        let mut peer = Peer::open(&world);
        let request = hello();
        peer.frames(&request);
        for i in 0..400 {
            match round % 4 {
                // Frames of nonsense, in order.
                0 => {
                    let frames: Vec<u8> = (0..3).flat_map(|_| peer.frame()).collect();
                    peer.frames(&frames);
                }
                // Acknowledgements of what was and was not sent.
                1 => peer.ack(),
                // Data and probes out of every window.
                2 => {
                    let seq = peer.awkward();
                    let length = peer.random() as usize % 1400;
                    peer.data(seq, &vec![1; length]);
                }
                _ => {
                    peer.ack();
                    let seq = peer.awkward();
                    peer.data(seq, &request);
                }
            }
            if i % 100 == 99 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        peer.emit(&Packet::Close(peer.header));
    }
    assert!(download.process.wait().success());
    download.check();
    world.download(server, "f");
    world.assert_cost(Host::Server, &cost, 64 << 10, 5.0);
    until("its sessions end", || {
        let status = world.status(Host::Server);
        status["sessions"].as_array().is_some_and(|s| s.len() <= 1)
    });
    world.download(server, "f");
}

#[test]
fn peer__that_opens_and_is_not_there_is_nobodys_way() {
    const SIZE: u64 = 1 << 20;
    let Some(world) = World::new("absent", &Link::new(2.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE as usize);
    // In the client's name, though its daemon knows nothing of it.
    let stranger = &mut Stranger::new(&world, world.servers()[0]);
    for _ in 0..4 {
        stranger.negotiate(GRAFT_PORT);
    }
    // From the server's host to the client, where nothing waits for flows.
    let back = &mut Stranger::on(
        &world,
        Host::Server,
        world.testbed.addr4(Host::Client).into(),
    );
    back.is_refused(GRAFT_PORT, intf::VTL_NACK_NO_LISTENER);
    world.download(world.servers()[0], "f");
    // None of them was taken for the way to the server.
    let status = world.status(Host::Client);
    let sessions = status["sessions"].as_array().expect("a list");
    assert_eq!(sessions.len(), 1, "{status}");
}
