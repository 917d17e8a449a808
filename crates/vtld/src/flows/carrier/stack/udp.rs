//! The task of a stack over UDP alone: its layers make a stream of frames from packets.

use std::rc::Rc;

use bytes::BytesMut;
use tokio::time::{Instant, sleep_until};
use vtl_proto::carrier::Kind;

use super::{
    super::{
        SILENCE, TICK,
        conversations::Talk,
        framed::{Arrived, Out},
    },
    SharedTaskState, UdpLayers,
};

/// Why a stack has ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("closed here")]
    Here,
    #[error("timeout: nothing received from the peer")]
    Silence,
}

/// The task of a stack.
pub(super) struct Driver {
    talk: Talk,
    layers: UdpLayers,
    task_state: SharedTaskState,
    /// Bytes of frames that are in no packet yet.
    unsent: BytesMut,
}

impl Driver {
    pub(super) fn new(talk: Talk, layers: UdpLayers, task_state: SharedTaskState) -> Self {
        Self {
            talk,
            layers,
            task_state,
            unsent: BytesMut::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let pipe = Rc::clone(self.talk.pipe());
        let ended = loop {
            if let Err(ended) = self.step().await {
                break ended;
            }
            let next = Instant::now() + TICK;
            let next = self.layers.next_timeout().map_or(next, |due| due.min(next));
            tokio::select! {
                () = pipe.work.notified() => {}
                () = pipe.taken(), if self.layers.pipeline.has_incoming() => {}
                () = sleep_until(next) => {}
            }
        };
        tracing::debug!(%ended, peer = %self.talk.peer(), carrier = %Kind::Stack, "carrier: stack ended");
    }

    async fn step(&mut self) -> Result<(), Ended> {
        if self.talk.pipe().is_over() {
            return Err(Ended::Here);
        }
        for packet in self.talk.packets() {
            self.layers.receive(&self.talk, &packet).await;
        }
        while self.talk.pipe().has_room()
            && let Some(packet) = self.layers.deliver()
        {
            let arrived = Arrived::Stream(packet.into_bytes());
            self.talk.pipe().arrived(arrived);
        }
        loop {
            self.fill();
            if !self.layers.transmit(&self.talk).await {
                break;
            }
        }
        let is_idle = self.unsent.is_empty();
        self.task_state.borrow_mut().path = self.layers.path(is_idle);
        match self.layers.is_dead(SILENCE) {
            true => Err(Ended::Silence),
            false => Ok(()),
        }
    }

    /// Gives frames to the layers, as many as they take.
    fn fill(&mut self) {
        let max = self.layers.capacity();
        while self.layers.pipeline.is_ready() {
            while self.unsent.len() < max
                && let Some(Out::Control(bytes) | Out::Chunk(bytes)) = self.talk.pipe().next()
            {
                self.unsent.extend_from_slice(&bytes);
            }
            if self.unsent.is_empty() {
                return;
            }
            let len = self.unsent.len().min(max);
            let packet = self.unsent.split_to(len);
            self.layers.send(&packet);
        }
    }
}
