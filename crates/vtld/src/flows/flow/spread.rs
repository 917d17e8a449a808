//! Sends a flow's bytes over several stacks at once: `vtl_core::stacks` says which.

use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use vtl_core::{
    flow::{Chunk, Flow, Given, Next},
    stacks::{Backlog, MAX_CHUNK, Picks, Schedule, StackState, scheduler},
};
use vtl_proto::{
    carrier::Scheduler,
    frame::{CarrierId, Side},
};

use super::{super::carrier::Carrier, CHUNK, Got, Mover, Path, Reset, socket};

/// How soon to look again for chunks that have not arrived, while there is nothing new.
const OUTSTANDING: Duration = Duration::from_millis(5);
/// How long after the last new byte they are looked at: carriers that deliver nothing have broken by then.
const WATCHED: Duration = Duration::from_secs(2);

/// The scheduler of a flow.
pub(super) struct Spreading {
    kind: Scheduler,
    scheduler: Box<dyn Schedule>,
    backlog: Backlog,
    /// When a chunk was sent last.
    sent: Instant,
}

impl Spreading {
    pub(super) fn new(kind: Scheduler) -> Self {
        Self {
            kind,
            scheduler: scheduler(kind),
            backlog: Backlog::default(),
            sent: Instant::now(),
        }
    }

    pub(super) fn is(&self, kind: Scheduler) -> bool {
        self.kind == kind
    }
}

/// Bytes of a flow that its carriers have sent and received.
#[derive(Default)]
pub(in super::super) struct Shares(RefCell<Vec<(CarrierId, [u64; 2])>>);

impl Shares {
    /// Notes bytes sent (`false`) or received (`true`) by a carrier.
    pub(in super::super) fn note(&self, carrier: CarrierId, is_received: bool, bytes: usize) {
        let mut shares = self.0.borrow_mut();
        let known = shares.iter().position(|(id, _)| *id == carrier);
        let at = known.unwrap_or_else(|| {
            shares.push((carrier, [0; 2]));
            shares.len() - 1
        });
        shares[at].1[usize::from(is_received)] += bytes as u64;
    }

    /// Bytes sent and received by a carrier.
    pub(in super::super) fn of(&self, carrier: CarrierId) -> [u64; 2] {
        let shares = self.0.borrow();
        let share = shares.iter().find(|(id, _)| *id == carrier);
        share.map_or([0; 2], |(_, bytes)| *bytes)
    }

    /// Forgets a carrier that has broken.
    pub(in super::super) fn forget(&self, carrier: CarrierId) {
        self.0.borrow_mut().retain(|(id, _)| *id != carrier);
    }
}

/// A carrier as a stack.
type Stacked = (Rc<dyn Carrier>, StackState);

impl Mover<'_> {
    /// Sends the next chunk by one of the stacks, or waits for a change. `path`: the path that the flow has without them.
    pub(super) async fn spread(
        &self,
        spreading: &mut Spreading,
        path: Path,
        next: Option<Next>,
    ) -> Result<(), Reset> {
        let mut stacks = self.peer.stacks();
        if self.state.licence.is_void_on_path() {
            // What has ended the connection, such as a firewall, ends the flow on that path.
            stacks.retain(|(_, stack)| stack.path != 0);
        }
        let has_new = match next {
            Some(Next::New { .. }) => !self.state.pending.borrow().0.is_empty(),
            Some(Next::Again(_)) => true,
            Some(Next::Fin) | None => false,
        };
        let is_readable =
            matches!(next, Some(Next::New { .. })) && socket::unread(self.ends.app.get_ref()) > 0;
        let is_idle = !has_new && !is_readable;
        self.hasten(&mut stacks, is_idle)?;
        match next {
            Some(Next::Again(chunk)) => self.place(spreading, stacks, chunk, true).await,
            Some(Next::New { offset, max }) if has_new => {
                let chunk = {
                    let (all, is_urgent) = &*self.state.pending.borrow();
                    let bytes = all.slice(..all.len().min(max as usize));
                    let urgent = *is_urgent && bytes.len() == all.len();
                    Chunk {
                        offset,
                        bytes,
                        urgent,
                    }
                };
                self.place(spreading, stacks, chunk, false).await
            }
            Some(Next::New { max, .. }) => {
                tokio::select! {
                    got = self.read_app(path, max.min(CHUNK as u64)) => match got? {
                        Got::Bytes(bytes, is_urgent) => {
                            self.state.profile.look(Side::Local, &bytes);
                            spreading.backlog.read(socket::unread(self.ends.app.get_ref()));
                            self.state.pending.replace((bytes, is_urgent));
                        }
                        Got::End => self.with(|flow| flow.send.finish())?,
                    },
                    () = self.changed.sending.notified() => {}
                    () = self.outstanding(spreading, &stacks) => {}
                }
                Ok(())
            }
            Some(Next::Fin) | None => {
                tokio::select! {
                    () = self.changed.sending.notified() => {}
                    () = self.outstanding(spreading, &stacks) => {}
                }
                Ok(())
            }
        }
    }

    /// Completes when chunks that have not arrived are to be looked at again; never where there are none.
    async fn outstanding(&self, spreading: &Spreading, stacks: &[Stacked]) {
        let states = states(stacks);
        let is_out = |flow: &mut Flow| flow.send.has_outstanding(&states);
        let is_out = spreading.sent.elapsed() < WATCHED && self.with(is_out).unwrap_or(false);
        match is_out {
            true => sleep(OUTSTANDING).await,
            false => std::future::pending().await,
        }
    }

    /// Sends chunks once more that would arrive earlier by other stacks. `is_idle`: there is nothing new to send.
    fn hasten(&self, stacks: &mut [Stacked], is_idle: bool) -> Result<(), Reset> {
        let now = self.peer.now_ns();
        loop {
            let states = states(stacks);
            let hastened = self.with(|flow| flow.send.hasten(now, &states, is_idle))?;
            let Some(hastened) = hastened else {
                return Ok(());
            };
            let chunk = hastened.chunk.clone();
            let Some(given) = self.give(&mut stacks[hastened.stack], &chunk) else {
                return Ok(());
            };
            self.with(|flow| flow.send.hastened(&hastened, given))?;
        }
    }

    /// Has the scheduler choose stacks for a chunk, or the first part of it, and sends it by these; waits if that is none.
    async fn place(
        &self,
        spreading: &mut Spreading,
        mut stacks: Vec<Stacked>,
        chunk: Chunk,
        is_again: bool,
    ) -> Result<(), Reset> {
        if !self.peer.may_place(self.id) {
            self.peer.wait_for_room(self.id);
            self.changed.sending.notified().await;
            return Ok(());
        }
        let states = states(&stacks);
        let backlog = match is_again {
            true => chunk.bytes.len() as u64,
            false => chunk.bytes.len() as u64 + spreading.backlog.expected(),
        };
        let picks = spreading.scheduler.pick(&states, backlog);
        let given = self.give_all(&mut stacks, picks, &chunk);
        let Some((len, given)) = given else {
            self.peer.wait_for_room(self.id);
            self.changed.sending.notified().await;
            return Ok(());
        };
        spreading.sent = Instant::now();
        if !is_again {
            spreading.backlog.sent(len as u64);
            drop(self.state.pending.borrow_mut().0.split_to(len));
        }
        let urgent = chunk.urgent && len == chunk.bytes.len();
        let bytes = chunk.bytes.slice(..len);
        self.with(|flow| match is_again {
            true => flow.send.sent_again_by(len, &given),
            false => flow.send.sent_new_by(bytes, urgent, &given),
        })?;
        self.changed.begun.notify_one();
        // Others are to have their turn: carriers, and other flows.
        self.peer.placed(self.id);
        tokio::task::consume_budget().await;
        Ok(())
    }

    /// Gives a chunk, or its first part, to these stacks: how long it was, and who has taken it. `None`: nobody has.
    fn give_all(
        &self,
        stacks: &mut [Stacked],
        picks: Picks,
        chunk: &Chunk,
    ) -> Option<(usize, Vec<Given>)> {
        let lens = picks.places().map(|place| stacks[place].1.chunk_len());
        let len = lens.min()?.min(MAX_CHUNK).min(chunk.bytes.len() as u64) as usize;
        let first = Chunk {
            offset: chunk.offset,
            bytes: chunk.bytes.slice(..len),
            urgent: chunk.urgent && len == chunk.bytes.len(),
        };
        let places = picks.places();
        let given: Vec<_> = places
            .filter_map(|place| self.give(&mut stacks[place], &first))
            .collect();
        (!given.is_empty()).then_some((len, given))
    }

    /// Gives a chunk to a stack; `None` if it does not take it.
    fn give(&self, (carrier, stack): &mut Stacked, chunk: &Chunk) -> Option<Given> {
        let len = chunk.bytes.len();
        if !carrier.take_now(self.id, chunk.clone()) {
            stack.has_room = false;
            return None;
        }
        let given = Given::new(self.peer.now_ns(), stack, len as u64);
        let id: CarrierId = stack.id;
        if let Some(now) = carrier.stack(id) {
            *stack = now;
        }
        self.state.licence.note_moved();
        self.state.shares.note(id, false, len);
        self.peer.count_sent(id, len);
        Some(given)
    }
}

fn states(stacks: &[Stacked]) -> Vec<StackState> {
    stacks.iter().map(|(_, stack)| *stack).collect()
}
