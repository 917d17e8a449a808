//! Per-thread state for egress: several shards send in parallel, each for its own sessions.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use libbpf_rs::MapHandle;

use crate::{
    Error, Result,
    anchor::{Anchor, FrameNamespace},
    pump::PumpEntry,
};

/// A shard's part of the data plane. Usable from any thread.
pub struct Shard {
    number: u32,
    entry: Arc<PumpEntry>,
    events: MapHandle,
    /// `vtl_root_out_xdp`, loaded with the shard's number.
    program: OwnedFd,
    anchor: OnceLock<Arc<Anchor>>,
}

impl Shard {
    pub(crate) fn new(number: u32, entry: PumpEntry, events: MapHandle, program: OwnedFd) -> Self {
        Self {
            number,
            entry: Arc::new(entry),
            events,
            program,
            anchor: OnceLock::new(),
        }
    }

    /// The shard's number, as in `vtl_session.shard`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The shard's entry of `vtl_pump`: the sessions that egress serves.
    pub fn pump_entry(&self) -> &Arc<PumpEntry> {
        &self.entry
    }

    /// The ring buffer of `vtl_event`s from the kernel's programs.
    pub fn events(&self) -> &MapHandle {
        &self.events
    }

    /// A descriptor of the shard's live-frame program.
    pub(crate) fn program(&self) -> Result<OwnedFd> {
        self.program.try_clone().map_err(|source| Error::System {
            what: "the egress program".into(),
            source,
        })
    }

    /// The attachment that all its live-frame pumps share.
    pub(crate) fn anchor(&self) -> Result<Arc<Anchor>> {
        if let Some(anchor) = self.anchor.get() {
            return Ok(Arc::clone(anchor));
        }
        let made = Anchor::of_own(self.program.as_fd())?;
        Ok(Arc::clone(self.anchor.get_or_init(|| Arc::new(made))))
    }

    /// Attaches the live-frame program in an existing namespace, instead of one of its own.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses.
    pub fn anchor_in(&self, namespace: &Arc<FrameNamespace>) -> Result<()> {
        let made = Anchor::in_namespace(namespace, self.program.as_fd(), self.number)?;
        let _ = self.anchor.set(Arc::new(made));
        Ok(())
    }

    /// Attaches the live-frame program ahead of time: about 12 ms that the first pump would wait
    /// for.
    ///
    /// # Errors
    /// See [`crate::link::attach`].
    pub fn prepare_live(&self) -> Result<()> {
        self.anchor().map(drop)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;
    use crate::{
        plane::DataPlane,
        pump::Turn,
        test_run::{self, From},
    };

    #[test]
    fn live_program__serves_its_own_shard() {
        if !nix::unistd::geteuid().is_root() {
            vtl_testing::skip("loading eBPF programs takes root");
            return;
        }
        const SHARDS: usize = 3;
        let plane = DataPlane::load_for(0, SHARDS as u32, true, true).unwrap();
        let frame = crate::pump::frame(1500);
        for running in 0..SHARDS {
            // Nobody has that session, so its turn ends at once.
            for shard in plane.shards() {
                shard.pump_entry().set(&[Turn { sid: 1, quota: 1 }]);
            }
            let program = plane.shards()[running].program().unwrap();
            let from = From::Loopback;
            test_run::run(program.as_fd(), &frame, from, 1, &mut Vec::new()).unwrap();
            for (number, shard) in plane.shards().iter().enumerate() {
                let served = shard.pump_entry().served().turns;
                assert_eq!(
                    served,
                    usize::from(number == running),
                    "{number} of {running}"
                );
            }
        }
    }
}
