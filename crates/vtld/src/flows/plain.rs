//! Flows of grafts that go by TCP after all: over their discovery connections, where a vtld answers on them.

use std::{
    io::{self, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use tokio::{io::unix::AsyncFd, time::timeout};

use super::socket::{read_exact, watch};
use crate::{
    broker::{preamble, set_linger, tcp_rtt},
    hooker,
};

/// How long a vtld's greeting may take besides round trips: it comes at once, but may get lost.
const LATE: Duration = Duration::from_secs(1);
const ROUND_TRIPS: u32 = 4;
/// Assumed where TCP does not say.
const ROUND_TRIP: Duration = Duration::from_millis(100);

/// Carries a flow over its discovery connection; over another one if a vtld does not answer there: a network
/// that spoils the option of discovery may have led it to the application.
pub(super) async fn carry(
    hooker: hooker::Handle,
    app: TcpStream,
    dest: SocketAddr,
    peer: TcpStream,
) {
    let patience = tcp_rtt(&peer).unwrap_or(ROUND_TRIP) * ROUND_TRIPS + LATE;
    let Ok(peer) = watch(peer) else { return };
    if let Ok(Ok(())) = timeout(patience, greeted(&peer)).await {
        return hooker.carry(app, peer.into_inner(), None);
    }
    // Without a word it may end in order.
    set_linger(peer.get_ref(), false);
    match hooker.connect_plain(dest) {
        Ok(peer) => hooker.carry(app, peer, None),
        Err(error) => tracing::debug!(%error, %dest, "no second connection"),
    }
}

/// Says on a discovery connection that the application's bytes follow, once a vtld has answered there.
async fn greeted(peer: &AsyncFd<TcpStream>) -> io::Result<()> {
    if read_exact(peer).await? != preamble::GREETING {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut peer = peer.get_ref();
    // A connection that has carried next to nothing takes it at once.
    match peer.write(&preamble::Preamble::Plain.emit())? {
        preamble::LENGTH => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
