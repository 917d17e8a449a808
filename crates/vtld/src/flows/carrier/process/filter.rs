//! vtld's end of layers over a carrier: frames go to the process of stacks, which returns packets for the carrier, and
//! packets from the carrier, which returns frames.
//!
//! Nothing here waits for both directions at once: what the process says is always read, whatever the carrier or the process
//! takes, so that two hosts that send as much as they can never wait for each other. What the process sends is bounded by
//! credit, what the carrier brings by the [`Inbox`].

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io,
};

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;
use vtl_proto::frame::Frame;

use super::{
    super::{
        super::control::emit as emit_frame,
        Carrier,
        framed::{Arrived, Out, Pipe},
        graft::whole,
        layered::Inbox,
    },
    message::Channel,
    wire::{BATCH, Figures, Tag, emit},
};

/// Bytes of packets that the process may have sent, and the carrier not taken.
pub(super) const CREDIT: usize = 128 << 10;

/// Layers that the process of stacks has made.
pub(in super::super::super) struct Filter {
    channel: Channel,
    /// Maximum length of a message at the top, bytes.
    frame: usize,
}

/// Packets on their way from the process to the carrier.
#[derive(Default)]
struct Down {
    packets: RefCell<VecDeque<Bytes>>,
    /// Bytes that the process has been sending on credit, and those of them that it has not been told to be taken.
    held: Cell<usize>,
    taken: Cell<usize>,
    /// Wakes who sends packets, and who tells the process.
    wake: Notify,
    news: Notify,
}

impl Filter {
    /// Waits for the process's answer. `mtu`: as it was told.
    pub(super) async fn new(channel: Channel, mtu: usize) -> io::Result<Self> {
        let frame = channel.opened(mtu).await?;
        Ok(Self { channel, frame })
    }

    /// Maximum size of a CHUNK for it, with its header, bytes.
    pub(in super::super) fn frame(&self) -> usize {
        self.frame
    }

    /// Moves frames and packets until the layers, the carrier or the pipe end.
    ///
    /// # Errors
    /// What has ended them; none if it was the pipe.
    pub(in super::super) async fn run(
        &self,
        pipe: &Pipe,
        inbox: &Inbox,
        lower: &dyn Carrier,
        memory: &Cell<u64>,
    ) -> io::Result<()> {
        let waiting = Cell::new(0);
        let down = Down::default();
        tokio::select! {
            ended = self.write(pipe, inbox, &waiting, &down) => ended,
            ended = self.read(pipe, &waiting, &down, memory) => ended,
            ended = send(lower, pipe, &down) => ended,
        }
    }

    /// Sends frames, and packets from the carrier, to the process.
    async fn write(
        &self,
        pipe: &Pipe,
        inbox: &Inbox,
        waiting: &Cell<usize>,
        down: &Down,
    ) -> io::Result<()> {
        while !pipe.is_over() {
            let mut messages = BytesMut::new();
            let taken = down.taken.take();
            if taken > 0 {
                emit(&mut messages, Tag::Taken, &(taken as u32).to_le_bytes());
            }
            while messages.len() < BATCH
                && let Some(out) = pipe.pop()
            {
                match out {
                    Out::Control(frames) => {
                        waiting.set(waiting.get() + frames.len());
                        let mut rest = &frames[..];
                        while !rest.is_empty() {
                            // A single control frame is shorter than any packet.
                            let len = whole(rest, self.frame).max(1);
                            emit(&mut messages, Tag::Control, &rest[..len]);
                            rest = &rest[len..];
                        }
                    }
                    Out::Chunk(frame) => {
                        waiting.set(waiting.get() + frame.len());
                        emit(&mut messages, Tag::Chunk, &frame);
                    }
                }
            }
            while messages.len() < 2 * BATCH
                && let Some(packet) = inbox.next_packet()?
            {
                emit(&mut messages, Tag::Packet, &packet);
            }
            if !messages.is_empty() {
                self.channel.write(&messages).await?;
                continue;
            }
            tokio::select! {
                () = pipe.work.notified() => {}
                () = inbox.news() => {}
                () = down.news.notified() => {}
            }
        }
        Ok(())
    }

    /// Receives frames, and packets for the carrier, from the process.
    async fn read(
        &self,
        pipe: &Pipe,
        waiting: &Cell<usize>,
        down: &Down,
        memory: &Cell<u64>,
    ) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        loop {
            while !pipe.has_room() {
                pipe.taken().await;
            }
            let (tag, body) = self.channel.next().await?;
            match tag {
                Tag::Frame => pipe.arrived(Arrived::Frame(body)),
                Tag::Packet => {
                    let held = down.held.get() + body.len();
                    if held > CREDIT || body.is_empty() {
                        return Err(invalid());
                    }
                    down.held.set(held);
                    down.packets.borrow_mut().push_back(body);
                    down.wake.notify_one();
                }
                Tag::Taken => {
                    let taken = *body.first_chunk().ok_or_else(invalid)?;
                    let taken = u32::from_le_bytes(taken) as usize;
                    waiting.set(waiting.get().checked_sub(taken).ok_or_else(invalid)?);
                    pipe.free(taken);
                }
                Tag::Figures => memory.set(Figures::read(&body).ok_or_else(invalid)?.memory),
                _ => return Err(invalid()),
            }
        }
    }
}

/// Sends packets by the carrier.
async fn send(lower: &dyn Carrier, pipe: &Pipe, down: &Down) -> io::Result<()> {
    while !pipe.is_over() {
        let Some(packet) = down.packets.borrow_mut().pop_front() else {
            down.wake.notified().await;
            continue;
        };
        let frame = emit_frame(Frame::Layers { message: &packet });
        if lower.message(frame).await.is_err() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        down.held.set(down.held.get() - packet.len());
        down.taken.set(down.taken.get() + packet.len());
        down.news.notify_one();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tokio::task::{LocalSet, spawn_local};
    use vtl_control::CarrierPath;
    use vtl_core::{
        flow::Chunk,
        layers::{Description, Pipeline},
    };
    use vtl_proto::{
        carrier::Kind,
        frame::{FlowId, Side},
        layers::Message,
    };

    use super::{
        super::super::{Refused, Taking},
        super::pipeline,
        *,
    };

    const MTU: usize = 1200;
    const FLOW: FlowId = FlowId {
        opener: Side::Local,
        number: 7,
    };

    /// A carrier below, which ends in the other host's inbox.
    struct Wire(Rc<Inbox>);

    impl Carrier for Wire {
        fn kind(&self) -> Option<Kind> {
            Some(Kind::Quic)
        }

        fn control(&self, frames: Bytes) -> Taking<'_> {
            Box::pin(async move {
                self.0.room().await;
                self.0
                    .take(Frame::take(&mut &frames[..]).expect("one frame"));
                Ok(())
            })
        }

        fn chunk(&self, _flow: FlowId, _chunk: Chunk) -> Taking<'_> {
            Box::pin(async { Err(Refused::Full) })
        }

        fn forget(&self, _flow: FlowId) {}

        fn close(&self) {}

        fn path(&self) -> Option<CarrierPath> {
            None
        }

        fn is_encrypted(&self) -> bool {
            false
        }
    }

    /// One host's layers. Returns the pipe above them, which ends with them.
    async fn host(stack: &str, to: &Rc<Inbox>, from: &Rc<Inbox>) -> Rc<Pipe> {
        let stack: Description = stack.parse().expect("a stack");
        let layers = stack.build(None, |_| false, |_| None).expect("it fits");
        let (ours, theirs) = Channel::pair().expect("sockets");
        let theirs = Channel::new(theirs).expect("a socket");
        spawn_local(pipeline::run(theirs, Pipeline::new(layers, MTU, 0, None)));
        let filter = Filter::new(ours, MTU).await.expect("it is made");
        let pipe = Pipe::new(filter.frame());
        let (driven, from, wire) = (Rc::clone(&pipe), Rc::clone(from), Wire(Rc::clone(to)));
        spawn_local(async move {
            let _ = filter.run(&driven, &from, &wire, &Cell::new(0)).await;
            driven.end();
        });
        pipe
    }

    /// Sends bytes by one pipe, in chunks behind one another.
    async fn send(pipe: &Pipe, bytes: &Bytes) {
        for (number, part) in bytes.chunks(10_000).enumerate() {
            let chunk = Chunk {
                offset: number as u64 * 10_000,
                bytes: Bytes::copy_from_slice(part),
                urgent: false,
            };
            pipe.put_chunk(FLOW, &chunk).await.expect("it serves");
        }
    }

    /// Takes as many bytes from a pipe.
    async fn received(pipe: &Pipe, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut left = len;
        while left > 0 {
            for what in pipe.arrivals().await.expect("it serves") {
                let Arrived::Frame(frames) = what else {
                    panic!("layers pass on whole frames");
                };
                let Ok(Frame::Chunk {
                    offset, bytes: of, ..
                }) = Frame::take(&mut &frames[..])
                else {
                    panic!("another frame");
                };
                let offset = offset as usize;
                bytes[offset..offset + of.len()].copy_from_slice(of);
                left -= of.len();
            }
        }
        bytes
    }

    #[tokio::test]
    async fn filter__moves_all_bytes_while_both_sides_send_and_ends_at_what_layers_refuse() {
        const LEN: usize = 6 << 20;
        let test = async {
            let (here, there) = (Rc::<Inbox>::default(), Rc::<Inbox>::default());
            let stack = "quic/ordering/compression";
            let ours = host(stack, &there, &here).await;
            let theirs = host(stack, &here, &there).await;
            let bytes = |seed: usize| -> Bytes {
                let bytes = (0..LEN).map(|i| (i / 100 * seed) as u8);
                bytes.collect::<Vec<u8>>().into()
            };
            let (up, down) = (bytes(7), bytes(11));
            let ((), (), came_up, came_down) = tokio::join!(
                send(&ours, &up),
                send(&theirs, &down),
                received(&theirs, LEN),
                received(&ours, LEN)
            );
            assert!(came_up == up && came_down == down);
            // Control frames are cut between frames, whatever the batch.
            let frame = emit_frame(Frame::Reject { flow: FLOW });
            let batch: Bytes = frame.repeat(200).into();
            ours.put_control(batch).await.expect("it serves");
            let mut frames = 0;
            while frames < 200 {
                for what in theirs.arrivals().await.expect("it serves") {
                    let Arrived::Frame(bytes) = what else {
                        panic!("layers pass on whole frames");
                    };
                    let mut rest = &bytes[..];
                    while !rest.is_empty() {
                        Frame::take(&mut rest).expect("whole");
                        frames += 1;
                    }
                }
            }
            // The peer sends what no layer of its own would.
            let message = &[Message::PACKET, 9, 9, 9];
            here.take(Frame::Layers { message });
            assert!(ours.arrivals().await.is_none(), "it has ended");
            // Or what belongs to no layers.
            there.take(Frame::Reject { flow: FLOW });
            assert!(theirs.arrivals().await.is_none(), "it has ended");
        };
        LocalSet::new().run_until(test).await;
    }
}
