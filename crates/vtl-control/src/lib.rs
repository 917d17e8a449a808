//! The control socket of the daemon: JSON messages over a Unix `SOCK_SEQPACKET` socket. Each request
//! is one message `{"op": …}`, each answer one message `{"ok": true, …}` or
//! `{"ok": false, "error": "…"}`; either may carry file descriptors.
//!
//! - [`Request`]: all requests; each variant names the type of its answer;
//! - [`Client`]: sends requests to the daemon;
//! - [`Events`]: what happens, as the daemon tells it;
//! - [`receive`], [`Request::parse`], [`to_message`], [`Refusal`], [`send`]: the daemon's side.
//!
//! Compatible between versions: names and types of fields stay, and every new field has a default. Messages say the
//! version of the protocol ([`PROTOCOL`]), which grows when that does not hold; unknown fields are ignored, and unknown
//! requests are refused. `docs/management.md` describes all of it for other programs.
//!
//! ```no_run
//! use vtl_control::{Client, Hooks, Request, socket_path};
//!
//! let daemon = Client::connect(&socket_path(None))?;
//! let hooks: Hooks = daemon.call(&Request::HookList)?;
//! # Ok::<(), vtl_control::Error>(())
//! ```

mod answer;
mod client;
#[cfg(test)]
mod document;
mod event;
mod request;

pub use answer::{
    CarrierPath, CarrierStatus, Conditions, Deployed, Done, Explanation, FlowList, FlowStack,
    FlowStatus, Gateway, Gateways, Graft, Grafts, Grant, Hook, HookAdded, Hooked, Hooks,
    HostCertificate, Interface, Lesson, LessonOutcome, Lessons, LinkStatus, Listening, Negotiation,
    Packets, PassedRule, PathCondition, PathList, PathReport, PathStatus, Peer, Peers, Refusal,
    RefusedFile, Rule, RuleCount, Rules, SelectStatus, SelectedPath, SessionStatus, Status,
    to_message,
};
pub use client::{
    Client, DEFAULT_SOCKET, Error, MAX_DESCRIPTORS, MAX_MESSAGE, receive, send, socket_path,
};
pub use event::{
    AssociationEvent, BoundEvent, ConditionEvent, Event, Events, KINDS, PathEvent, RuleEvent, Text,
    What,
};
pub use request::{
    BadRequest, CarrierSpec, Destination, Executable, GivenUp, HookTarget, Learning,
    OpenedConnection, PROTOCOL, PeerKey, Request, SessionKey, SessionRequest,
};
