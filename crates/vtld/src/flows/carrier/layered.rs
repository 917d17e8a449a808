//! Layers over a carrier that moves messages: QUIC, SCTP, MPTCP, a session over a graft (PROTOCOL.md, section 7, "Layers over
//! other carriers").
//!
//! There is one place for all of them: the carrier below moves frames LAYERS, and no others, and what the layers make of
//! those is a carrier of its own, a [`Framed`], which the association knows. Its frames go into the layers whole, as
//! messages. The layers themselves are in the process of stacks, since they parse what a peer sends, and may be compiled
//! outside of VTL; packets pass between it and the carrier by vtld (`process/filter.rs`).

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    io,
    rc::Rc,
};

use bytes::Bytes;
use tokio::{sync::Notify, time::timeout};
use vtl_core::layers::{Description, MAX_PACKET};
use vtl_proto::{
    carrier::Kind,
    frame::{CarrierId, Frame, HEADER},
    layers::Message,
};

use super::{
    super::{control::emit, parts::first, peer::Peer},
    Carrier, Endpoint, HANDSHAKE, Local,
    framed::{self, Framed, Pipe, Reader},
    process::Filter,
};

/// Bytes of a frame LAYERS in front of a packet: its header, and the kind of the message.
const HEAD: usize = HEADER + 1;
/// Bytes of messages that may wait for the layers; the carrier below is read no further then.
const MAX_WAITING: usize = 1 << 20;
/// Memory overhead of a message that waits, bytes.
const WAITING: usize = 64;

/// The layers over a carrier.
#[derive(Clone)]
pub(in super::super) struct CarrierLayers {
    /// The endpoint of stacks, whose process has the layers; `None`: it cannot be started.
    pub(in super::super) endpoint: Option<Rc<dyn Endpoint>>,
    /// What this host, which opens the carrier, wants over it; `None`: nothing.
    pub(in super::super) to_open: Option<String>,
}

/// The peer's messages that have come by the carrier below.
#[derive(Default)]
pub(super) struct Inbox {
    messages: RefCell<VecDeque<Bytes>>,
    /// Their memory, bytes.
    held: Cell<usize>,
    /// The peer has sent what does not belong there.
    is_violated: Cell<bool>,
    /// Wakes the layers: there is one.
    news: Notify,
    /// Wakes the carrier below: there is room.
    taken: Notify,
}

impl Inbox {
    /// Takes a frame from the carrier below.
    pub(super) fn take(&self, frame: Frame<'_>) {
        match frame {
            Frame::Layers { message } => {
                self.held.set(self.held.get() + message.len() + WAITING);
                let message = Bytes::copy_from_slice(message);
                self.messages.borrow_mut().push_back(message);
            }
            // QUIC's servers answer it.
            Frame::Hello { .. } => {}
            _ => self.is_violated.set(true),
        }
        self.news.notify_one();
    }

    /// Waits until there is room for messages.
    pub(super) async fn room(&self) {
        while self.held.get() >= MAX_WAITING {
            self.taken.notified().await;
        }
    }

    /// Completes when there may be messages.
    pub(super) async fn news(&self) {
        self.news.notified().await;
    }

    fn remove(&self, place: usize) -> Option<Bytes> {
        let message = self.messages.borrow_mut().remove(place)?;
        self.held.set(self.held.get() - message.len() - WAITING);
        self.taken.notify_one();
        Some(message)
    }

    /// The next packet of the layers, without the kind of its message.
    ///
    /// # Errors
    /// The peer has sent something else.
    pub(super) fn next_packet(&self) -> io::Result<Option<Bytes>> {
        let Some(message) = self.remove(0).filter(|_| !self.is_violated.get()) else {
            return match self.is_violated.get() {
                true => Err(io::ErrorKind::InvalidData.into()),
                false => Ok(None),
            };
        };
        match message.first() {
            Some(&Message::PACKET) => Ok(Some(message.slice(1..))),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Waits for a message that opens layers, and returns what `take` makes of it. Packets that have overtaken it stay.
    async fn said<T>(&self, take: impl Fn(Message<'_>) -> Option<T>) -> Result<T, String> {
        loop {
            let is_packet = |message: &Bytes| message.first() == Some(&Message::PACKET);
            let place = self.messages.borrow().iter().position(|m| !is_packet(m));
            let wrong = || Err("the peer says what does not open layers".to_owned());
            if self.is_violated.get() {
                return wrong();
            }
            if let Some(message) = place.and_then(|place| self.remove(place)) {
                return Message::parse(&message)
                    .and_then(take)
                    .map_or_else(wrong, Ok);
            }
            self.news().await;
        }
    }
}

/// Opens layers over a carrier, and serves an association by them until they or the carrier end. `receiving`: moves the frames
/// of the carrier below into `inbox`.
pub(super) async fn serve(
    lower: Rc<dyn Carrier>,
    peer: Rc<Peer>,
    id: CarrierId,
    layers: CarrierLayers,
    inbox: Rc<Inbox>,
    receiving: impl Future<Output = ()>,
) {
    let working = async {
        let is_opener = layers.to_open.is_some();
        let opened = timeout(HANDSHAKE, open(&*lower, layers, &inbox)).await;
        let filter = match opened.unwrap_or_else(|_| Err("timeout: no answer".into())) {
            Ok(filter) => filter,
            Err(why) if is_opener => {
                tracing::info!(%why, peer = %peer.key.peer, carrier = %Kind::Stack, "carrier: cannot open: plain TCP until the next attempt");
                return peer.tell_failed(Kind::Stack.name(), why);
            }
            Err(why) => {
                return tracing::debug!(%why, peer = %peer.key.peer, carrier = %Kind::Stack, "carrier: layers refused");
            }
        };
        let pipe = Pipe::new(filter.frame());
        let memory = Rc::new(Cell::new(0_u64));
        let carrier = Rc::new(Framed {
            kind: Kind::Stack,
            pipe: Rc::clone(&pipe),
            is_encrypted: lower.is_encrypted(),
            library: {
                let (lower, memory) = (Rc::clone(&lower), Rc::clone(&memory));
                let inbox = Rc::clone(&inbox);
                Box::new(move || {
                    let waiting = memory.get().saturating_add(inbox.held.get() as u64);
                    lower.memory().saturating_add(waiting)
                })
            },
            figures: {
                let lower = Rc::clone(&lower);
                Box::new(move || lower.reading())
            },
        });
        let moving = async {
            if let Err(error) = filter.run(&pipe, &inbox, &*lower, &memory).await {
                tracing::info!(%error, peer = %peer.key.peer, carrier = %Kind::Stack, "carrier: layers ended");
            }
        };
        let (of_receiver, of_peer) = (Rc::clone(&carrier), Rc::clone(&peer));
        let receiving = framed::receive(of_receiver, of_peer, id, Reader::default(), None);
        let serving = first([Box::pin(receiving) as Local<'_, ()>, Box::pin(moving)]);
        peer.run(id, carrier, serving).await;
    };
    tokio::select! {
        () = working => {}
        () = receiving => {}
    }
    lower.close();
}

/// Opens layers: this host says what they are, or takes what the peer says.
async fn open(lower: &dyn Carrier, layers: CarrierLayers, inbox: &Inbox) -> Result<Filter, String> {
    match &layers.to_open {
        Some(text) => {
            let filter = made(lower, &layers, text).await?;
            say(
                lower,
                Message::Setup {
                    token: 0,
                    rate: 0,
                    layers: text,
                },
            )
            .await?;
            let answer = inbox.said(|message| match message {
                Message::Accept => Some(Ok(())),
                Message::Refuse(why) => Some(Err(why.escape_debug().to_string())),
                _ => None,
            });
            match answer.await? {
                Ok(()) => Ok(filter),
                Err(why) => Err(format!("the peer refuses the stack: {why}")),
            }
        }
        None => {
            let said = inbox.said(|message| match message {
                Message::Setup { layers, .. } => Some(layers.to_owned()),
                _ => None,
            });
            let text = said.await?;
            match made(lower, &layers, &text).await {
                Ok(filter) => {
                    say(lower, Message::Accept).await?;
                    Ok(filter)
                }
                Err(why) => {
                    tracing::debug!(%why, "carrier: layers refused");
                    say(lower, Message::Refuse(&why)).await?;
                    // The opener closes the carrier once it has read that.
                    std::future::pending().await
                }
            }
        }
    }
}

/// Has the process of stacks make layers over a carrier.
async fn made(lower: &dyn Carrier, layers: &CarrierLayers, text: &str) -> Result<Filter, String> {
    let description: Description = text
        .parse()
        .map_err(|unfit: vtl_core::layers::Unfit| unfit.to_string())?;
    if description.over_messages() != lower.kind() {
        let below = lower.kind().map_or("", Kind::name);
        return Err(format!("{text:?} is not over {below}"));
    }
    if description.needs_encryption() && !lower.is_encrypted() {
        return Err("the layer encryption needs an encrypted carrier (--no-encryption)".into());
    }
    let mtu = lower.longest_message().saturating_sub(HEAD);
    let filter = match &layers.endpoint {
        Some(endpoint) => endpoint.filter(text.to_owned(), mtu.min(MAX_PACKET)).await,
        None => Err(io::ErrorKind::Unsupported.into()),
    };
    filter.map_err(|error| error.to_string())
}

/// Sends a message that opens layers.
async fn say(lower: &dyn Carrier, message: Message<'_>) -> Result<(), String> {
    let mut bytes = Vec::new();
    message.emit(&mut bytes);
    let frame = emit(Frame::Layers { message: &bytes });
    let said = lower.control(frame).await;
    said.map_err(|refused| refused.to_string())
}
