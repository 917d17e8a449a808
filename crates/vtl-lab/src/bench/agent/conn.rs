//! What the workload needs of a connection.

use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// A connection that carries bytes both ways, in order. The futures of blocking ones never wait.
pub(super) trait Conn {
    /// Hands over all of `data`.
    async fn send(&mut self, data: &[u8]) -> io::Result<()>;

    /// Waits for bytes and hands what is there to `take`, in place where the transport can. Returns
    /// how many: 0 at the end.
    async fn receive(&mut self, take: impl FnMut(&[u8])) -> io::Result<usize>;

    /// Does nothing for a time.
    async fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Runs a future over blocking connections.
pub(super) fn run_blocking<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        // Not reached with blocking connections; harmless with others.
        std::thread::yield_now();
    }
}
