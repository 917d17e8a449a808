//! Succession of a socket's session by another one, with other requirements (`PROTOCOL.md`, section
//! 4, "Succession"): new data goes over the new session, and data of the old one is read first.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::Epoll;
use vtl_control::{Client, Destination, Done, GivenUp, Grant, Request, SessionRequest};

use crate::{
    error::Error,
    session::{Halt, Session},
    socket::{Agreement, Mode, Socket},
    waiting::{Source, epoll, watch},
};

/// How long late packets of an unreliable session are awaited after its succession.
const LATE: Duration = Duration::from_secs(1);
/// Maximum number of previous sessions that are not finished.
const MAX_OLD: usize = 8;

/// State of a socket besides its present session.
#[derive(Default)]
pub(crate) struct Succession {
    /// Pending request for a session to succeed the present one.
    asked: Option<Asked>,
    /// Its result, until a caller takes it.
    outcome: Option<Result<Agreement, Error>>,
    /// `outcome` is new: the other direction's waiter was not told.
    pub(crate) news: bool,
    /// Error in following the peer's succession of the present session.
    trouble: Option<Error>,
    /// For a responder, the connection that holds its port.
    port: Option<Arc<Client>>,
    /// Previous sessions, in order, until they are read to their ends.
    pub(crate) old: VecDeque<Old>,
    /// Wake-ups of the present session; `None`: the socket's own descriptor.
    own: Option<Arc<Epoll>>,
    /// Packets given up in all finished sessions.
    pub(crate) given_up: u64,
    /// Ask for stateless switches from now on.
    pub(crate) stateless: bool,
    /// What these have cost so far.
    pub(crate) switches: Switches,
}

/// Stateless switches of a socket so far, whichever side has asked for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// How many.
    pub count: u64,
    /// What this side had sent and has given up in them, at most: of what is under way at that moment, the peer may get
    /// some.
    pub given_up: GivenUp,
}

impl Switches {
    fn add(&mut self, cut: GivenUp) {
        self.count += 1;
        self.given_up.packets += cut.packets;
        self.given_up.messages += cut.messages;
        self.given_up.bytes += cut.bytes;
    }
}

enum Asked {
    /// No answer yet on this connection to the daemon.
    Waiting(Arc<Client>),
    /// Granted on this connection, but a message is sent in part.
    Granted(Arc<Client>, Grant, Vec<OwnedFd>),
}

pub(crate) struct Old {
    pub(crate) session: Session,
    client: Arc<Client>,
    own: Option<Arc<Epoll>>,
    since: Instant,
    /// The last packet is published, or is of no use.
    ended: bool,
    /// A stateless switch has ended it, and the daemon has forgotten it.
    cut: bool,
}

impl Old {
    /// Advances the end of the session as far as possible without blocking. True when it is over.
    fn tend(&mut self) -> bool {
        // The session's wake-ups are handled here, and must not keep the descriptor readable.
        let _ = self.session.clear_wakeups();
        if self.cut {
            return self.session.is_cut_read();
        }
        self.ended = self.ended || self.session.try_end_sending();
        let read = if self.session.reliable {
            self.session.is_read()
        } else {
            self.since.elapsed() > LATE && !self.session.is_unread()
        };
        read && self.ended && self.session.is_sent()
    }
}

/// How long an operation on a session may block.
#[derive(Clone, Copy)]
pub(crate) enum Patience {
    None,
    Until(Option<Instant>),
}

/// A non-blocking operation on one session.
type Attempt<'a, T> = &'a mut dyn FnMut(&mut Session) -> Result<Option<T>, Halt>;

impl Socket {
    /// Requests a session to succeed the present one, and returns the result.
    pub(crate) fn try_succeed(
        &mut self,
        wanted: &SessionRequest,
    ) -> Result<Option<Agreement>, Error> {
        self.tend();
        if let Some(outcome) = self.succession.outcome.take() {
            return outcome.map(Some);
        }
        if self.succession.asked.is_none() {
            if self.succession.old.len() >= MAX_OLD {
                return Err(Error::Misuse(
                    "read what came before the last changes first",
                ));
            }
            let session = self.open_session()?;
            session.between_messages()?;
            let succeeds = session.key;
            let client = Client::connect(&self.daemon)?;
            client.ask(&Request::Connect {
                to: Destination::Successor { succeeds },
                session: SessionRequest {
                    stateless: self.succession.stateless,
                    ..wanted.clone()
                },
            })?;
            watch(&self.any, &client, Source::Other)?;
            self.succession.asked = Some(Asked::Waiting(Arc::new(client)));
        }
        // No other operation consumes these wake-ups while this one waits.
        self.open_session()?.clear_wakeups()?;
        Ok(None)
    }

    /// Takes the answer to the request, and acts on it unless a message is sent in part.
    fn take_answer(&mut self) {
        if let Some(Asked::Waiting(client)) = &self.succession.asked {
            let client = Arc::clone(client);
            let answer = match client.answer() {
                Ok(None) => return,
                answer => answer,
            };
            // Fails only if it was never added.
            let _ = self.any.delete(&*client);
            self.succession.asked = None;
            match answer {
                Ok(Some((grant, descriptors))) => {
                    let granted = Asked::Granted(client, grant, descriptors);
                    self.succession.asked = Some(granted);
                }
                Ok(None) => {}
                Err(error) => self.tell(Err(error.into())),
            }
        }
        let between = |s: &Session| s.is_cut() || s.between_messages().is_ok();
        if self.session.as_ref().is_some_and(between)
            && let Some(Asked::Granted(client, grant, descriptors)) = self
                .succession
                .asked
                .take_if(|a| matches!(a, Asked::Granted(..)))
        {
            let outcome = self.go_over(client, grant, descriptors);
            if outcome.is_err() {
                // The peer has moved on to the new session, or will.
                let _ = self.client.call::<Done>(&Request::Close { aborted: true });
                self.lose_cut();
            }
            self.tell(outcome);
        }
    }

    fn tell(&mut self, outcome: Result<Agreement, Error>) {
        self.succession.outcome = Some(outcome);
        self.succession.news = true;
    }

    /// Moves on to the session by which the peer has succeeded the present one.
    fn follow(&mut self) -> Result<(), Error> {
        let succeeds = self.open_session()?.key;
        let client = Arc::new(Client::connect(&self.daemon)?);
        let (grant, descriptors) = client.call_with_descriptors(&Request::Follow { succeeds })?;
        self.go_over(client, grant, descriptors).map(drop)
    }

    fn go_over(
        &mut self,
        client: Arc<Client>,
        grant: Grant,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Agreement, Error> {
        let own = Arc::new(epoll()?);
        watch(&own, &*client, Source::Any)?;
        let (session, agreement) = Session::granted(grant, descriptors, &own, &client)?;
        watch(&self.any, &own.0, Source::Other)?;
        let client = std::mem::replace(&mut self.client, client);
        if self.mode() == Mode::Responder {
            self.succession.port.get_or_insert(Arc::clone(&client));
        }
        let own = self.succession.own.replace(own);
        if let Some(mut before) = self.session.replace(session) {
            before.old = true;
            let cut = before.is_cut();
            if cut {
                let given_up = before.cut_off();
                self.succession.switches.add(given_up);
                // Without the daemon the session has ended anyway.
                let _ = client.call::<Done>(&Request::GiveUp(given_up));
            }
            self.succession.old.push_back(Old {
                // Over an unreliable graft the last packet may get lost: it is not sent.
                ended: cut || !before.reliable,
                cut,
                session: before,
                client,
                own,
                since: Instant::now(),
            });
        }
        self.agreement = Some(agreement.clone());
        Ok(agreement)
    }

    /// Notes that the present session, if it was cut, has no successor that can be used.
    fn lose_cut(&mut self) {
        if let Some(session) = &mut self.session {
            session.lost = session.is_cut();
        }
    }

    /// Whether there is more to handle than the present session.
    fn is_changing(&self) -> bool {
        let Succession {
            old,
            asked,
            trouble,
            ..
        } = &self.succession;
        !old.is_empty() || asked.is_some() || trouble.is_some()
    }

    /// Advances a succession as far as possible without blocking.
    pub(crate) fn tend(&mut self) {
        self.take_answer();
        let full = self.succession.old.len() >= MAX_OLD;
        if let Some(session) = &mut self.session {
            session.stays = full;
            if session.is_left() {
                self.succession.trouble = self.follow().err();
            }
        }
        if self.succession.trouble.is_some()
            && let Some(session) = &mut self.session
        {
            session.stays = true;
            session.lost = session.is_cut();
        }
        let mut done = self.succession.old.iter_mut().map(Old::tend);
        // Handle all of them; they retire in order.
        let first = done.next() == Some(true);
        done.for_each(drop);
        if first {
            self.retire();
        }
    }

    /// Whether the peer has acknowledged everything sent in previous sessions.
    pub(crate) fn are_old_delivered(&self) -> Result<bool, Error> {
        let mut all = true;
        for old in &self.succession.old {
            all &= old.cut
                || old.ended
                    && match old.session.delivered() {
                        // An orderly end: the peer read everything before.
                        Err(Error::ClosedByPeer(_)) => true,
                        delivered => delivered?,
                    };
        }
        Ok(all)
    }

    /// Ends the oldest of the previous sessions.
    pub(crate) fn retire(&mut self) {
        let Some(mut old) = self.succession.old.pop_front() else {
            return;
        };
        // Its wake-ups went with it: a reader that waited behind it has to look at the next one.
        self.succession.news = true;
        if !old.cut {
            // To the peer, an orderly end means that everything was read.
            let aborted = old.session.reliable && !old.session.is_read();
            // Without the daemon the session has ended anyway.
            let _ = old.client.call::<Done>(&Request::Close { aborted });
        }
        // Fails only if it was never added.
        let _ = match &old.own {
            Some(own) => self.any.delete(&own.0),
            None => self.any.delete(&*old.client),
        };
        self.succession.given_up += old.session.given_up();
    }

    /// Sends in the present session; waits for room.
    pub(crate) fn send_with<T>(
        &mut self,
        send: impl FnMut(&mut Session, Patience) -> Result<Option<T>, Halt>,
    ) -> Result<T, Error> {
        self.operate(send, |socket, attempt| socket.try_send_with(attempt))
    }

    /// Receives from the previous sessions, then from the present one; waits for data.
    pub(crate) fn recv_with<T>(
        &mut self,
        recv: impl FnMut(&mut Session, Patience) -> Result<Option<T>, Halt>,
    ) -> Result<T, Error> {
        self.operate(recv, |socket, attempt| socket.try_recv_with(attempt))
    }

    /// Blocks in the present session while it is the only one; else tries all sessions through
    /// `among_all`, and waits for the socket's descriptor.
    fn operate<T>(
        &mut self,
        mut operation: impl FnMut(&mut Session, Patience) -> Result<Option<T>, Halt>,
        among_all: impl Fn(&mut Self, Attempt<'_, T>) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let limit = self.deadline();
        self.ready(limit)?;
        loop {
            self.tend();
            if self.is_changing() {
                match among_all(self, &mut |session| operation(session, Patience::None))? {
                    Some(done) => return Ok(done),
                    None => self.rest(limit)?,
                }
            } else {
                match operation(self.open_session()?, Patience::Until(limit)) {
                    // When receiving: the packets were not enough.
                    Err(Halt::Succeeded) | Ok(None) => {}
                    Err(Halt::Error(error)) => return Err(error),
                    Ok(Some(done)) => return Ok(done),
                }
            }
        }
    }

    /// Sends in the present session, if there is room.
    pub(crate) fn try_send_with<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Session) -> Result<Option<T>, Halt>,
    ) -> Result<Option<T>, Error> {
        loop {
            self.open_session()?;
            self.tend();
            match attempt(self.open_session()?) {
                Err(Halt::Succeeded) => {}
                Err(Halt::Error(error)) => return Err(error),
                Ok(sent) => return Ok(sent),
            }
        }
    }

    /// Receives from the previous sessions, then from the present one, if there is data.
    pub(crate) fn try_recv_with<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Session) -> Result<Option<T>, Halt>,
    ) -> Result<Option<T>, Error> {
        loop {
            self.open_session()?;
            self.tend();
            for Old { session, .. } in &mut self.succession.old {
                let reliable = session.reliable;
                match attempt(session) {
                    Ok(Some(received)) => return Ok(Some(received)),
                    Err(Halt::Error(error)) if reliable => return Err(error),
                    Ok(None) if reliable => {
                        // Later sessions have to wait: they are checked when this one is finished.
                        self.open_session()?.clear_wakeups()?;
                        return Ok(None);
                    }
                    _ => {}
                }
            }
            match attempt(self.open_session()?) {
                Err(Halt::Succeeded) => {}
                Err(Halt::Error(error)) => return Err(error),
                Ok(received) => {
                    // The peer's new data is out of reach.
                    let trouble = self.succession.trouble.take();
                    return match trouble.filter(|_| received.is_none()) {
                        Some(trouble) => Err(trouble),
                        None => Ok(received),
                    };
                }
            }
        }
    }
}
