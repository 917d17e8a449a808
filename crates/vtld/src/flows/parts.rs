//! Concurrent parts of one task. Polls only the parts that were woken, unlike `select!` and `join!`, which poll all of
//! them each time.

use futures_util::{StreamExt, stream::FuturesUnordered};

use super::carrier::Local;

/// A set of concurrent futures.
pub(super) type Parts<'a, T> = FuturesUnordered<Local<'a, T>>;

/// Runs the futures until the first one completes.
pub(super) async fn first<const N: usize>(parts: [Local<'_, ()>; N]) {
    let mut parts: Parts<'_, ()> = parts.into_iter().collect();
    parts.next().await;
}
