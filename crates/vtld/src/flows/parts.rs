//! Parts of one task. Unlike `select!` and `join!`, which poll all of them each time, only those are polled that were
//! woken.

use futures_util::{StreamExt, stream::FuturesUnordered};

use super::carrier::Local;

/// Some that run side by side.
pub(super) type Parts<'a, T> = FuturesUnordered<Local<'a, T>>;

/// Completes with the first of them.
pub(super) async fn first<const N: usize>(parts: [Local<'_, ()>; N]) {
    let mut parts: Parts<'_, ()> = parts.into_iter().collect();
    parts.next().await;
}
