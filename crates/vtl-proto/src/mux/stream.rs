//! The state of one stream.

use core::net::SocketAddr;

use super::{MuxError, ResetCode, StreamId, lossy::Come};

/// One stream's state; offsets are bytes since the stream began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// Its identity in the session.
    pub id: StreamId,
    /// Whether this side opened it.
    pub local: bool,
    /// Where the opener wants to go.
    pub dst: SocketAddr,
    /// Who the opener's application is.
    pub src: SocketAddr,
    /// Whether OPENED was sent or has arrived.
    pub opened: bool,
    /// Bytes put into packets.
    pub sent: u64,
    /// Bytes that the peer lets us send.
    pub send_limit: u64,
    /// Bytes received.
    pub received: u64,
    /// Of those, bytes reported by [`super::Mux::consumed`].
    pub consumed: u64,
    /// Bytes that we let the peer send.
    pub recv_limit: u64,
    /// [`super::Mux::finish`] was called.
    pub finished: bool,
    /// The FIN has left.
    pub fin_sent: bool,
    /// The peer's FIN has arrived.
    pub fin_received: bool,
}

/// A stream, and which control frames it owes.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) info: StreamInfo,
    /// OPEN by the opener, OPENED by the other side: must leave before anything else but RESET.
    pub(super) hello_pending: bool,
    /// It has left.
    pub(super) hello_sent: bool,
    pub(super) credit_pending: bool,
    pub(super) fin_pending: bool,
    /// With loss: the peer is to be told how far we have sent.
    pub(super) sent_pending: bool,
    pub(super) reset_pending: Option<ResetCode>,
    /// Its place in the queue of streams that owe a frame.
    pub(super) queued: Option<u64>,
    /// With loss: what has come.
    pub(super) come: Come,
}

impl Stream {
    pub(super) fn new(info: StreamInfo) -> Self {
        Self {
            info,
            hello_pending: false,
            hello_sent: false,
            credit_pending: false,
            fin_pending: false,
            sent_pending: false,
            reset_pending: None,
            queued: None,
            come: Come::default(),
        }
    }

    /// Bytes that may be sent now.
    pub(super) fn credit(&self) -> u64 {
        if !self.hello_sent || self.info.finished || self.reset_pending.is_some() {
            return 0;
        }
        self.info.send_limit - self.info.sent
    }

    /// Takes the peer's new permission; tells whether that unblocks sending.
    pub(super) fn raise_send_limit(&mut self, limit: u64) -> Result<bool, MuxError> {
        if limit < self.info.send_limit {
            return Err(MuxError::CreditShrank(self.info.id));
        }
        let blocked = self.info.sent == self.info.send_limit;
        self.info.send_limit = limit;
        Ok(blocked && self.credit() > 0)
    }

    /// What the next OPEN, OPENED or CREDIT says, and from then on holds.
    pub(super) fn advertise(&mut self, window: u64) -> u64 {
        self.credit_pending = false;
        self.info.recv_limit = self
            .info
            .consumed
            .saturating_add(window)
            .max(self.info.recv_limit);
        self.info.recv_limit
    }

    pub(super) fn check_data(&self, offset: u64, len: u64) -> Result<(), MuxError> {
        let id = self.info.id;
        self.check_spoken()?;
        if self.info.fin_received {
            return Err(MuxError::AfterFin(id));
        }
        if offset != self.info.received {
            return Err(MuxError::Offset {
                id,
                expected: self.info.received,
                found: offset,
            });
        }
        if len > self.info.recv_limit - offset {
            return Err(MuxError::BeyondCredit(id));
        }
        Ok(())
    }

    /// The side that accepts says OPENED before anything that a stream carries.
    pub(super) fn check_spoken(&self) -> Result<(), MuxError> {
        if self.info.local && !self.info.opened {
            return Err(MuxError::NotOpened(self.info.id));
        }
        Ok(())
    }

    /// Whether a control frame may leave now. A FIN waits until the stream is accepted.
    pub(super) fn owes(&self) -> bool {
        self.reset_pending.is_some()
            || self.hello_pending
            || self.credit_pending
            || self.sent_pending
            || (self.fin_pending && self.hello_sent)
    }

    /// Both directions have ended, as far as frames go.
    pub(super) fn is_over(&self) -> bool {
        self.info.fin_sent && self.info.fin_received
    }
}
