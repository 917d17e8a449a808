//! What a carrier does for the flows of an association.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use vtl_control::TunnelPath;
use vtl_core::flow::Chunk;
use vtl_proto::frame::FlowId;

/// Why a carrier does not take something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// It has broken.
    #[error("the carrier has broken")]
    Broken,
    /// It has no room for another flow.
    #[error("the carrier is full")]
    Full,
}

/// Waits until a carrier has taken something. What was under way when it is dropped may have been taken.
pub(super) type Taking<'a> = Pin<Box<dyn Future<Output = Result<(), Refused>> + 'a>>;

/// Moves frames to another host. What arrives goes to [`super::peer::Peer`].
pub(super) trait Carrier {
    /// As commands and `vtl status` call it; `None` for the control connection, which has no flows.
    fn name(&self) -> Option<&'static str>;

    /// Sends control frames.
    fn control(&self, frames: Bytes) -> Taking<'_>;

    /// Sends bytes of a flow.
    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_>;

    /// A flow has ended: nothing more comes of it.
    fn forget(&self, flow: FlowId);

    /// Ends it.
    fn close(&self);

    /// Figures of its path.
    fn path(&self) -> Option<TunnelPath>;
}
