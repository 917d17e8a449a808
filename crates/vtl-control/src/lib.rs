//! The control socket of the daemon: JSON messages over a Unix `SOCK_SEQPACKET` socket. Each request
//! is one message `{"op": …}`, each answer one message `{"ok": true, …}` or
//! `{"ok": false, "error": "…"}`; either may carry file descriptors.

mod client;
mod request;

pub use client::{
    Client, DEFAULT_SOCKET, Error, MAX_DESCRIPTORS, MAX_MESSAGE, receive, send, socket_path,
};
pub use request::{
    BadRequest, CarrierSpec, Destination, Executable, HookTarget, OpenedConnection, Request,
    SessionKey, SessionRequest,
};
