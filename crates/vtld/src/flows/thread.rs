//! The thread of flows, `vtl-flows`, and the handle that other threads use.

use std::{
    io,
    net::IpAddr,
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as blocking},
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::{LocalSet, spawn_local},
};
use vtl_control::{CarrierStatus, FlowList, FlowStatus, Learning, Lessons, SelectStatus, What};
use vtl_core::{
    profile::{Profile, Source},
    reconfigure::learn::Destination,
};
use vtl_proto::{carrier::Kind, frame::FlowName};

use super::{Desired, Flows, Handover, Limits, Names, Opened, no_such, reconfigure::RuleState};
use crate::{
    broker,
    events::emit,
    handover::{Descriptors, Outgoing},
    hooker::{self, ClientFlow, Pulse, ServerFlow},
    identity::Identity,
    panics::test_point,
};

/// Channel for the answer to a command.
type Reply<T> = blocking::SyncSender<T>;

enum Command {
    Begin,
    Opened(Opened),
    /// A flow that requires a carrier: its connect is held until one is up.
    Awaits(Box<ClientFlow>, Desired, Handle),
    Steered(ServerFlow, FlowName),
    Status(Reply<Vec<CarrierStatus>>),
    List(u64, Reply<FlowList>),
    Show(u64, Reply<Result<FlowStatus, String>>),
    Move(
        u64,
        String,
        Option<Duration>,
        Reply<Result<FlowStatus, String>>,
    ),
    Rules(Reply<Vec<RuleState>>),
    Selected(usize, Reply<SelectStatus>),
    /// The switch of the choice by the model was changed.
    Select(Reply<()>),
    Resume(Handover, Descriptors, Reply<Descriptors>),
    Leave(Lent, Reply<Handover>),
    Stop,
}

/// The outgoing handover; the caller keeps it if the thread dies.
type Lent = Arc<Mutex<Outgoing>>;

struct Thread {
    commands: mpsc::UnboundedSender<Command>,
    thread: JoinHandle<()>,
}

/// Handles of the rest of the daemon.
#[derive(Clone)]
struct Needs {
    hooker: hooker::Handle,
    broker: broker::Handle,
}

struct Shared {
    limits: Arc<Limits>,
    names: Arc<Names>,
    pulse: Arc<Pulse>,
    /// Handles for the flows; no thread is started while `None`.
    needs: Mutex<Option<Needs>>,
    thread: Mutex<Option<Thread>>,
}

impl Shared {
    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn needs(&self) -> MutexGuard<'_, Option<Needs>> {
        self.needs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of the thread of flows. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    pub(crate) fn new(limits: Limits) -> Self {
        let shared = Shared {
            limits: Arc::new(limits),
            names: Arc::default(),
            pulse: Arc::default(),
            needs: Mutex::default(),
            thread: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Enables flows, and starts the thread.
    pub(crate) fn set_hooker(&self, hooker: hooker::Handle, broker: broker::Handle) {
        *self.shared.needs() = Some(Needs { hooker, broker });
        // Peers may open sessions before their first flow.
        self.send(Command::Begin);
    }

    /// Whether the thread is responsive.
    pub(crate) fn is_there(&self) -> bool {
        self.shared.pulse.is_there()
    }

    fn send(&self, command: Command) {
        let mut thread = self.shared.thread();
        if thread.is_none() {
            let Some(needs) = self.shared.needs().clone() else {
                return;
            };
            match start(&self.shared, needs) {
                Ok(started) => *thread = Some(started),
                Err(error) => {
                    tracing::error!(%error, "flows: cannot start the thread: connections stay plain TCP");
                }
            }
        }
        // No thread: the daemon is ending.
        if let Some(running) = &*thread
            && running.commands.send(command).is_err()
        {
            // It has died: the next command starts another one.
            tracing::error!("flows: the thread has died: all flows lost");
            *thread = None;
        }
    }

    /// This host's identity.
    pub(crate) fn identity(&self) -> &Identity {
        &self.shared.limits.identity
    }

    /// Whether this host has an association with `host` that it has opened.
    pub(crate) fn knows(&self, host: IpAddr) -> bool {
        self.shared.names.knows(host)
    }

    /// Whether there is an association that `host` has opened.
    pub(crate) fn serves(&self, host: IpAddr) -> bool {
        self.shared.names.serves(host)
    }

    /// The profile that a flow of this kind is expected to have, and the carrier that it explores, if it may.
    pub(crate) fn expect(
        &self,
        source: &Source,
        may_explore: bool,
    ) -> (Option<Profile>, Option<u8>) {
        let Names {
            profiles, teacher, ..
        } = &*self.shared.names;
        let profile = profiles.expected(source);
        let destination = Destination {
            host: source.dest.ip().to_canonical(),
            profile,
        };
        let explores = may_explore && self.shared.limits.selection.learns();
        (
            profile,
            explores.then(|| teacher.explore(&destination)).flatten(),
        )
    }

    /// What flows have taught: a page from an index on.
    pub(crate) fn lessons(&self, from: usize) -> Lessons {
        let on = self.shared.limits.selection.learns();
        self.shared.names.teacher.lessons(from, on)
    }

    /// Turns learning on or off, or has what was learnt forgotten.
    ///
    /// # Errors
    /// The change does not outlive this daemon, or is not made.
    pub(crate) fn learn(&self, learning: Learning) -> Result<(), String> {
        match learning {
            Learning::On => self.shared.limits.selection.set_learns(true)?,
            Learning::Off => self.shared.limits.selection.set_learns(false)?,
            Learning::Reset => self.shared.names.teacher.reset(),
        }
        tracing::info!(?learning, "select: learning of flows was changed");
        // Flows that run follow.
        let _ = self.ask(Command::Select);
        Ok(())
    }

    /// Allocates the name of the next flow between two addresses. `required`: without fallback to TCP.
    pub(crate) fn name_flow(
        &self,
        local: IpAddr,
        peer: IpAddr,
        desired: Desired,
        required: bool,
    ) -> FlowName {
        let is_on = self.shared.limits.selection.is_on();
        self.shared
            .names
            .next(local, peer, desired, required, is_on)
    }

    /// Takes a flow opened by this host, whose TCP connection is established.
    pub(crate) fn opened(&self, flow: ClientFlow, desired: Desired) {
        match flow.name.requires_carrier() {
            true => self.send(Command::Awaits(Box::new(flow), desired, self.clone())),
            false => self.succeed(flow, desired),
        }
    }

    /// Accepts the application's connect, and starts the flow.
    fn succeed(&self, flow: ClientFlow, desired: Desired) {
        let handle = self.clone();
        let ClientFlow {
            app,
            dest,
            src,
            peer: tcp,
            name,
            forwarded,
            exe,
            ..
        } = flow;
        app.accept(move |app| match app {
            Ok(app) => handle.send(Command::Opened(Opened {
                app,
                src,
                dest,
                tcp,
                name,
                desired,
                exe,
                forwarded,
            })),
            Err(error) => tracing::debug!(%error, %dest, "flows: the application is gone"),
        });
    }

    /// Takes a steered connection; `name` is from its SYN.
    pub(crate) fn steered(&self, flow: ServerFlow, name: FlowName) {
        self.send(Command::Steered(flow, name));
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Option<T> {
        if self.shared.thread().is_none() {
            return None;
        }
        let (reply, answer) = blocking::sync_channel(1);
        self.send(command(reply));
        answer.recv().ok()
    }

    /// Status, one row for each carrier.
    pub(crate) fn status(&self) -> Vec<CarrierStatus> {
        self.ask(Command::Status).unwrap_or_default()
    }

    /// A page of flows, from id `from` on.
    pub(crate) fn list(&self, from: u64) -> FlowList {
        let none = FlowList {
            flows: Vec::new(),
            more: None,
        };
        self.ask(|reply| Command::List(from, reply)).unwrap_or(none)
    }

    /// Status of one flow.
    ///
    /// # Errors
    /// No such flow.
    pub(crate) fn show(&self, id: u64) -> Result<FlowStatus, String> {
        let answer = self.ask(|reply| Command::Show(id, reply));
        answer.unwrap_or_else(|| Err(no_such(id)))
    }

    /// Moves the sending direction of a flow to another carrier. `stay`: for how long; `None`: until that breaks.
    ///
    /// # Errors
    /// No such flow, or it may not or cannot use that carrier.
    pub(crate) fn move_flow(
        &self,
        id: u64,
        carrier: String,
        stay: Option<Duration>,
    ) -> Result<FlowStatus, String> {
        let answer = self.ask(|reply| Command::Move(id, carrier, stay, reply));
        answer.unwrap_or_else(|| Err(no_such(id)))
    }

    /// What the conditions of rules on paths say, by association.
    pub(crate) fn rule_states(&self) -> Vec<RuleState> {
        self.ask(Command::Rules).unwrap_or_default()
    }

    /// What the model has chosen, by association: a page from an index on.
    pub(crate) fn select_status(&self, from: usize) -> SelectStatus {
        let status = self.ask(|reply| Command::Selected(from, reply));
        status.unwrap_or_else(|| SelectStatus {
            on: self.shared.limits.selection.is_on(),
            paths: Vec::new(),
            more: None,
        })
    }

    /// Turns the choice by the model on or off: returns once flows that run follow.
    ///
    /// # Errors
    /// The change does not outlive this daemon, or is not made.
    pub(crate) fn select(&self, is_on: bool) -> Result<(), String> {
        let set = self.shared.limits.selection.set(is_on);
        let _ = self.ask(Command::Select);
        if set.is_ok() {
            tracing::info!(is_on, "select: the choice by the model was switched");
            emit(What::SelectionSwitched { on: is_on });
        }
        set
    }

    /// Restores the state handed over by a former daemon. Returns the other descriptors.
    pub(crate) fn resume(&self, left: Handover, descriptors: Descriptors) -> Option<Descriptors> {
        self.ask(|reply| Command::Resume(left, descriptors, reply))
    }

    /// Ends the thread, and hands its flows over to the next daemon; empty if the thread has died.
    pub(crate) fn hand_over(&self, outgoing: &Lent) -> Handover {
        let left = self.ask(|reply| Command::Leave(Arc::clone(outgoing), reply));
        self.stop();
        left.unwrap_or_default()
    }

    /// Ends all flows and the thread.
    pub(crate) fn stop(&self) {
        self.shared.needs().take();
        let thread = self.shared.thread().take();
        if let Some(Thread { commands, thread }) = thread {
            let _ = commands.send(Command::Stop);
            let _ = thread.join();
        }
    }
}

fn start(shared: &Arc<Shared>, needs: Needs) -> io::Result<Thread> {
    let (commands, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (names, pulse) = (Arc::clone(&shared.names), Arc::clone(&shared.pulse));
    let limits = Arc::clone(&shared.limits);
    let thread = std::thread::Builder::new()
        .name("vtl-flows".into())
        .spawn(move || {
            let run = async move {
                let Needs { hooker, broker } = needs;
                serve(inbox, Flows::new(hooker, broker, names, pulse, limits)).await;
            };
            LocalSet::new().block_on(&runtime, run);
        })?;
    Ok(Thread { commands, thread })
}

async fn serve(mut inbox: mpsc::UnboundedReceiver<Command>, flows: Rc<Flows>) {
    spawn_local(Rc::clone(&flows).tend());
    spawn_local(Rc::clone(&flows).measure());
    while let Some(command) = inbox.recv().await {
        test_point();
        match command {
            Command::Begin => drop(flows.endpoint(Kind::Graft)),
            Command::Opened(flow) => flows.opened(flow),
            Command::Awaits(flow, desired, handle) => {
                flows.await_carrier(*flow, desired, move |flow, desired| {
                    handle.succeed(flow, desired);
                });
            }
            Command::Steered(flow, name) => flows.steered(flow, name),
            // A reply fails if the caller has gone.
            Command::Status(reply) => drop(reply.send(flows.status())),
            Command::List(from, reply) => drop(reply.send(flows.list(from))),
            Command::Rules(reply) => drop(reply.send(flows.rule_states())),
            Command::Selected(from, reply) => drop(reply.send(flows.select_status(from))),
            Command::Select(reply) => {
                flows.follow_selection();
                let _ = reply.send(());
            }
            Command::Show(id, reply) => drop(reply.send(flows.show(id))),
            Command::Move(id, carrier, stay, reply) => {
                let flows = Rc::clone(&flows);
                spawn_local(async move {
                    let _ = reply.send(flows.move_flow(id, &carrier, stay).await);
                });
            }
            Command::Resume(left, mut descriptors, reply) => {
                flows.resume(left, &mut descriptors);
                let _ = reply.send(descriptors);
            }
            Command::Leave(outgoing, reply) => {
                let mut outgoing = outgoing.lock().unwrap_or_else(PoisonError::into_inner);
                let left = flows.hand_over(&mut outgoing);
                let _ = reply.send(left);
                break;
            }
            Command::Stop => break,
        }
    }
    flows.close().await;
}
