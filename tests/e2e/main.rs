//! The whole system as its users meet it: the real daemon, the real command, unmodified programs,
//! in namespaces with a link between them that can be made as bad as one likes.
//!
//! What is asserted: bytes, errors, leftovers, and what daemons count; never speed. A machine that does
//! other things makes these tests slower, and no more.
#![allow(clippy::too_many_lines, reason = "scenarios of many steps")]

mod harness;

mod accidents;
mod api;
mod attacks;
mod bench;
mod bounds;
mod carriers;
mod command;
mod conformance;
mod controls;
mod death;
mod examples;
mod files;
mod flows;
mod gateway;
mod grafts;
mod hooker;
mod hooks;
mod identity;
mod interfaces;
mod keys;
mod kinds;
mod layers;
mod library;
mod load;
mod lossy;
mod management;
mod many;
mod messages;
mod near;
mod nego;
mod netmon;
mod outage;
mod packages;
mod path;
mod pool;
mod profile;
mod programs;
mod python;
mod reconfigure;
mod registry;
mod require;
mod restart;
mod rules;
mod select;
mod stacks;
mod stateless;
mod succession;
mod systemd;
mod talk;
mod tun;
mod tunnel;
mod users;
mod versions;
mod ways;
mod web;
