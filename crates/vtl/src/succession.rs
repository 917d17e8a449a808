//! A socket whose session is succeeded by another one, with other requirements (`PROTOCOL.md`,
//! section 4, "Succession"): data go by the new session from then on, and those of the old one are
//! read first.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::Epoll;
use vtl_control::{Client, Destination, Done, Grant, Request, SessionRequest};

use crate::{
    error::Error,
    session::{Halt, Session},
    socket::{Agreement, Mode, Socket},
    waiting::{Source, epoll, watch},
};

/// Packets of a session that may lose some are waited for so long after it was succeeded.
const LATE: Duration = Duration::from_secs(1);
/// So many sessions may wait for being read.
const MOST: usize = 8;

/// What a socket has besides its session.
#[derive(Default)]
pub(crate) struct Succession {
    /// A session was asked for that succeeds the present one.
    asked: Option<Asked>,
    /// What came of that, until somebody asks.
    outcome: Option<Result<Agreement, Error>>,
    /// There is an outcome that nobody was told of.
    pub(crate) news: bool,
    /// Why the session by which the peer has succeeded the present one could not be had.
    trouble: Option<Error>,
    /// Of a responder, the connection that holds its port.
    port: Option<Arc<Client>>,
    /// The sessions before, in the order in which they are read, until they were read to their ends.
    pub(crate) old: VecDeque<Old>,
    /// What wakes the user of the present session; without, the socket's own descriptor does.
    own: Option<Arc<Epoll>>,
    /// Packets that were given up in all sessions before.
    pub(crate) given_up: u64,
}

enum Asked {
    /// On this connection to the daemon.
    Waiting(Arc<Client>),
    /// It was granted on this one, in the middle of a message.
    Granted(Arc<Client>, Grant, Vec<OwnedFd>),
}

pub(crate) struct Old {
    pub(crate) session: Session,
    client: Arc<Client>,
    own: Option<Arc<Epoll>>,
    since: Instant,
    /// The peer is told that nothing follows, or would not hear it.
    ended: bool,
}

impl Old {
    /// Does what is left to do, as far as that does not take waiting. True when nothing is.
    fn tend(&mut self) -> bool {
        // What wakes its user is looked at here, and must not keep the descriptor readable.
        let _ = self.session.clear_wakeups();
        self.ended = self.ended || self.session.try_end_sending();
        let read = if self.session.reliable {
            self.session.is_read()
        } else {
            self.since.elapsed() > LATE && !self.session.is_unread()
        };
        read && self.ended && self.session.is_sent()
    }
}

/// How long an operation on a session may wait.
#[derive(Clone, Copy)]
pub(crate) enum Patience {
    None,
    Until(Option<Instant>),
}

/// An operation on one session that does not wait.
type Attempt<'a, T> = &'a mut dyn FnMut(&mut Session) -> Result<Option<T>, Halt>;

impl Socket {
    /// Asks for a session in place of the present one, and says what came of it.
    pub(crate) fn try_succeed(
        &mut self,
        wanted: &SessionRequest,
    ) -> Result<Option<Agreement>, Error> {
        self.tend();
        if let Some(outcome) = self.succession.outcome.take() {
            return outcome.map(Some);
        }
        if self.succession.asked.is_none() {
            if self.succession.old.len() >= MOST {
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
                session: wanted.clone(),
            })?;
            watch(&self.any, &client, Source::Other)?;
            self.succession.asked = Some(Asked::Waiting(Arc::new(client)));
        }
        // Nobody but this operation looks at what wakes it.
        self.open_session()?.clear_wakeups()?;
        Ok(None)
    }

    /// Takes the answer to what was asked, and heeds it unless a message was begun meanwhile.
    fn take_answer(&mut self) {
        if let Some(Asked::Waiting(client)) = &self.succession.asked {
            let client = Arc::clone(client);
            let answer = match client.answer() {
                Ok(None) => return,
                answer => answer,
            };
            // Fails only if it never came in.
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
        let between = |s: &Session| s.between_messages().is_ok();
        if self.session.as_ref().is_some_and(between)
            && let Some(Asked::Granted(client, grant, descriptors)) = self
                .succession
                .asked
                .take_if(|a| matches!(a, Asked::Granted(..)))
        {
            let outcome = self.go_over(client, grant, descriptors);
            if outcome.is_err() {
                // The peer has gone over, or will.
                let _ = self.client.call::<Done>(&Request::Close { aborted: true });
            }
            self.tell(outcome);
        }
    }

    fn tell(&mut self, outcome: Result<Agreement, Error>) {
        self.succession.outcome = Some(outcome);
        self.succession.news = true;
    }

    /// Goes over to the session by which the peer has succeeded the present one.
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
            self.succession.old.push_back(Old {
                // Nobody waits for the last packet where it may get lost.
                ended: !before.reliable,
                session: before,
                client,
                own,
                since: Instant::now(),
            });
        }
        self.agreement = Some(agreement.clone());
        Ok(agreement)
    }

    /// Whether other sessions than the present one have to be looked after.
    fn is_changing(&self) -> bool {
        let Succession {
            old,
            asked,
            trouble,
            ..
        } = &self.succession;
        !old.is_empty() || asked.is_some() || trouble.is_some()
    }

    /// Goes on with a succession, as far as that does not take waiting.
    pub(crate) fn tend(&mut self) {
        self.take_answer();
        let full = self.succession.old.len() >= MOST;
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
        }
        let mut done = self.succession.old.iter_mut().map(Old::tend);
        // All of them are looked after, and they go in their order.
        let first = done.next() == Some(true);
        done.for_each(drop);
        if first {
            self.retire();
        }
    }

    /// Whether the peer has everything that was sent in the sessions before.
    pub(crate) fn are_old_delivered(&self) -> Result<bool, Error> {
        let mut all = true;
        for old in &self.succession.old {
            all &= old.ended
                && match old.session.delivered() {
                    // An orderly end: it read all that was sent before.
                    Err(Error::ClosedByPeer(_)) => true,
                    delivered => delivered?,
                };
        }
        Ok(all)
    }

    /// Ends the first of the sessions before.
    pub(crate) fn retire(&mut self) {
        let Some(mut old) = self.succession.old.pop_front() else {
            return;
        };
        // The peer takes an orderly end for a sign that all was read.
        let aborted = old.session.reliable && !old.session.is_read();
        // Without a daemon it has ended.
        let _ = old.client.call::<Done>(&Request::Close { aborted });
        // They fail only if it never came in.
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

    /// Receives from the sessions before, then from the present one; waits for something.
    pub(crate) fn recv_with<T>(
        &mut self,
        recv: impl FnMut(&mut Session, Patience) -> Result<Option<T>, Halt>,
    ) -> Result<T, Error> {
        self.operate(recv, |socket, attempt| socket.try_recv_with(attempt))
    }

    /// While the present session is the only one, waits in it; else has `among_all` find one where
    /// there is something to do, and waits for what wakes the socket.
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
                    // When receiving, there was something, but not enough.
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

    /// Receives from the sessions before, then from the present one, if there is something.
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
                        // The time of the others has not come; they are looked at when it has.
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
                    // What the peer sends now cannot be had.
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
