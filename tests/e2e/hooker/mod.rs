//! The Hooker alone, without sessions: what it captures goes on over plain TCP, and must not notice.

mod capture;
mod discovery;
mod hooks;
mod net;
mod tcp;
