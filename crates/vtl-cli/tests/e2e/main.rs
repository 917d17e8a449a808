//! The whole system as its users meet it: the real daemon, the real command, unmodified programs,
//! in namespaces with a link between them that can be made as bad as one likes.
//!
//! What is asserted: bytes, errors and leftovers; never speed, except in `controls`, where the
//! difference between congestion controls is the matter.

mod process;
mod world;

mod accidents;
mod api;
mod bench;
mod carriers;
mod conformance;
mod controls;
mod death;
mod examples;
mod files;
mod grafts;
mod hooks;
mod hostile;
mod insider;
mod library;
mod load;
mod lossy;
mod many;
mod messages;
mod nego;
mod outage;
mod packages;
mod path;
mod peer;
mod pool;
mod programs;
mod python;
mod rules;
mod succession;
mod tunnels;
mod users;
mod ways;
mod web;
