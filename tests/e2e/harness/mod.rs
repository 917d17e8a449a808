//! What the tests share: the programs under test, two hosts with a link between them, processes that end
//! with the test, and patience.

mod cost;
mod process;
mod programs;
mod wire;
mod world;

pub(crate) use process::*;
pub(crate) use programs::*;
pub(crate) use vtl_testing::{PATIENCE, until};
pub(crate) use wire::*;
pub(crate) use world::*;
