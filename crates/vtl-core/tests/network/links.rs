//! Carriers, and what they take and bring.

use super::*;

impl Simulation {
    pub(super) fn new_carrier(&mut self, kind: Kind, opener: usize) {
        let number = self.carriers.len() as u32;
        self.carriers.push(Carrier {
            kind,
            opener,
            number,
            dead: false,
            used: [true; 2],
            pipes: Default::default(),
        });
        let index = self.carriers.len() - 1;
        for host in 0..2 {
            let id = self.carriers[index].id(host);
            self.hosts[host].add_carrier(id, kind == Kind::Lossy);
        }
        // Some live to the end, unless one is needed then.
        let life = match self.random.below(4) {
            0 => 3000 * S,
            _ => self.random.below(6 * S),
        };
        self.at(self.now + life, Happening::Die(index));
    }

    /// A host stops using a carrier, after it has taken what has arrived by it.
    pub(super) fn give_up(&mut self, index: usize, host: usize) {
        if !self.carriers[index].used[host] {
            return;
        }
        self.receive(index, host, usize::MAX);
        let carrier = &mut self.carriers[index];
        carrier.used[host] = false;
        let id = carrier.id(host);
        self.hosts[host].carrier_broken(id);
        if self.carriers[index].used == [false; 2] {
            let (kind, opener) = (self.carriers[index].kind, self.random.below(2) as usize);
            let at = self.now + self.random.below(2 * S);
            self.at(at, Happening::NewCarrier(kind, opener));
        }
    }

    /// Takes packets that have arrived by a carrier.
    pub(super) fn receive(&mut self, index: usize, host: usize, max: usize) {
        for _ in 0..max {
            let carrier = &mut self.carriers[index];
            let in_order = !matches!(carrier.kind, Kind::Graft | Kind::Lossy);
            let pipe = &mut carrier.pipes[1 - host];
            let Some((&number, _)) = pipe.arrived.first_key_value() else {
                return;
            };
            if in_order && number != pipe.next {
                return;
            }
            pipe.next = number + 1;
            let packet = pipe.arrived.remove(&number).expect("just seen");
            let id = carrier.id(host);
            if self.random.below(2) == 0 {
                self.hosts[host]
                    .handle(self.now, id, &packet)
                    .expect("well-formed");
                continue;
            }
            let mut rest = &packet[..];
            while !rest.is_empty() {
                let frame = Frame::take(&mut rest).expect("well-formed");
                self.receive_frame(host, id, frame);
            }
        }
    }

    /// Takes a frame; the application gets some of the bytes at once where it can.
    pub(super) fn receive_frame(&mut self, host: usize, carrier: CarrierId, frame: Frame<'_>) {
        let now = self.now;
        let Frame::Chunk {
            flow: id,
            offset,
            bytes,
            fin: false,
            urgent: false,
        } = frame
        else {
            return self.hosts[host].handle_frame(now, carrier, frame);
        };
        let mut given = 0;
        if self.hosts[host].is_next(id, offset, bytes.len() as u64) {
            given = self.random.below(bytes.len() as u64 + 1) as usize;
            let flow = self.flows.iter_mut().find(|flow| flow.id(host) == id);
            let flow = flow.expect("one of ours");
            let direction = &mut flow.directions[1 - host];
            assert_eq!(direction.read, offset);
            for (at, byte) in (offset..).zip(&bytes[..given]) {
                assert_eq!(*byte, pattern(flow.number, 1 - host, at), "offset {at}");
            }
            direction.read += given as u64;
            self.given += given as u64;
            self.hosts[host].note_given(now, carrier, id, given);
        }
        if given < bytes.len() {
            let (offset, rest) = (offset + given as u64, BytesMut::from(&bytes[given..]));
            self.hosts[host].handle_bytes(now, carrier, id, offset, rest);
        }
    }

    /// Sends packets by a carrier, as long as there is something to send and room.
    pub(super) fn fill(&mut self, index: usize, host: usize) {
        let id = self.carriers[index].id(host);
        while self.carriers[index].pipes[host].unsettled.len() < WINDOW_PACKETS {
            let mut packet = vec![0; PACKET];
            let mut used = self.hosts[host].poll_control(id, &mut packet);
            let turn = self.random.below(self.flows.len() as u64) as usize;
            for flow in (turn..self.flows.len()).chain(0..turn) {
                while packet.len() - used > frame::HEADER {
                    let max = packet.len() - used - frame::HEADER;
                    match self.chunk(flow, host, id, max) {
                        Some(bytes) => {
                            packet[used..used + bytes.len()].copy_from_slice(&bytes);
                            used += bytes.len();
                        }
                        None => break,
                    }
                }
            }
            if used == 0 {
                return;
            }
            packet.truncate(used);
            let at = self.arrival();
            let kind = self.carriers[index].kind;
            let in_order = match kind {
                Kind::Graft => false,
                Kind::Lossy => self.loss == 0,
                Kind::Control | Kind::Quic => true,
            };
            let pipe = &mut self.carriers[index].pipes[host];
            let number = pipe.sent;
            pipe.sent += 1;
            let at = if in_order {
                at.max(pipe.busy_until)
            } else {
                at
            };
            pipe.busy_until = at;
            if kind == Kind::Graft {
                pipe.unsettled.insert(number);
            }
            if kind == Kind::Lossy {
                let is_lost = self.random.percent(self.loss) || at > self.now + S;
                self.has_lost |= is_lost || self.loss > 0;
                self.pass(host, &packet, at);
                if is_lost {
                    continue;
                }
            }
            self.at(at, Happening::Packet(index, host, number, packet));
        }
    }

    /// Notes when the chunks of a packet are no longer on their way.
    pub(super) fn pass(&mut self, host: usize, mut packet: &[u8], arrival: u64) {
        while let Ok(Frame::Chunk {
            flow,
            offset,
            bytes,
            ..
        }) = Frame::take(&mut packet)
        {
            let is_it = |other: &Flow| other.id(host) == flow.at_peer();
            let index = self.flows.iter().position(is_it).expect("ours");
            let end = offset + bytes.len() as u64;
            let at = arrival + 10 * MS + self.random.below(300 * MS);
            self.at(at, Happening::Passed(index, host, end));
        }
    }

    /// The next chunk of a flow for a carrier, as a frame.
    pub(super) fn chunk(
        &mut self,
        index: usize,
        host: usize,
        carrier: CarrierId,
        max: usize,
    ) -> Option<Vec<u8>> {
        let id = self.flows[index].id(host);
        let readable = self.readable(index, host);
        let flow = self.hosts[host].flow_mut(id)?;
        let chunk = match flow.send.next(Path::Carrier(carrier), max)? {
            Next::Again(chunk) => {
                flow.send.sent_again(chunk.bytes.len());
                chunk
            }
            Next::New { offset, max } => {
                let len = max.min(readable);
                if len == 0 {
                    return None;
                }
                let bytes = self.new_bytes(index, host, offset, len);
                let flow = self.hosts[host].flow_mut(id)?;
                flow.send.sent_new(bytes.clone(), false);
                Chunk {
                    offset,
                    bytes,
                    urgent: false,
                }
            }
            Next::Fin => unreachable!("by TCP only"),
        };
        let mut buffer = vec![0; frame::HEADER + chunk.bytes.len()];
        let frame = Frame::Chunk {
            flow: id,
            offset: chunk.offset,
            bytes: &chunk.bytes,
            fin: false,
            urgent: chunk.urgent,
        };
        frame.emit(&mut buffer)?;
        Some(buffer)
    }
}
