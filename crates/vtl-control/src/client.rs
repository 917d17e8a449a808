//! A connection to the daemon, and its messages.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use nix::{
    cmsg_space,
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect,
            recvmsg, sendmsg, setsockopt, socket, sockopt,
        },
        time::TimeVal,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    FlowList, Hooks, Lessons, PathList, Peers, Request, Rules, SelectStatus, Status,
    answer::from_message,
    request::{PROMPT, PROTOCOL},
};

/// Default path of the daemon's socket.
pub const DEFAULT_SOCKET: &str = "/run/vtl/vtld.sock";
/// Maximum length of a message, bytes.
pub const MAX_MESSAGE: usize = 128 << 10;
/// Maximum number of descriptors in one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Errors of requests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No daemon listens at the socket.
    #[error("no VTL daemon answers at {path}: {cause} (start one with: vtld --socket {path})")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        cause: Errno,
    },
    /// This user may not connect to the socket.
    #[error("{0} may only be used by root and by members of its group: ask to join it")]
    Denied(PathBuf),
    /// The daemon closed the connection.
    #[error("the VTL daemon closed the connection")]
    Closed,
    /// The daemon did not answer in this time.
    #[error(
        "the VTL daemon did not answer within {} s: it hangs, or is stopped; it may still do what was asked",
        .0.as_secs()
    )]
    Silent(Duration),
    /// A message could not be sent or received.
    #[error("talking to the VTL daemon: {0}")]
    System(#[from] Errno),
    /// The daemon speaks this version of the control protocol, which this client does not.
    #[error(
        "the VTL daemon speaks version {0} of the control protocol, and this command version {PROTOCOL}: use the command \
         that came with it, or restart vtld after an upgrade"
    )]
    Protocol(u64),
    /// The daemon does not know the request: it is of an older version.
    #[error(
        "the running VTL daemon is older than this command, and does not know this request: restart it (systemctl \
         restart vtld)"
    )]
    TooOld,
    /// The answer is not JSON of the expected form.
    #[error("the VTL daemon answered something else than expected: {0}")]
    Malformed(String),
    /// The daemon refused the request, with its reason.
    #[error("{0}")]
    Refused(String),
    /// The daemon denied the request to this user, with its reason; others may make it.
    #[error("{0}")]
    Forbidden(String),
}

/// The socket to use: an explicit one, else `$VTL_SOCKET`, else [`DEFAULT_SOCKET`].
pub fn socket_path(explicit: Option<&Path>) -> PathBuf {
    explicit.map_or_else(
        || std::env::var_os("VTL_SOCKET").map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from),
        Path::to_path_buf,
    )
}

/// A connection to the daemon. Objects made on a connection (a session, a listener) end with it.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    /// Answers that nobody waits for any more, and that are still to come.
    late: AtomicU32,
}

impl Client {
    /// Connects. Who asks ends even if the daemon hangs: a request that is not answered within
    /// [`Request::patience`] fails with [`Error::Silent`].
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Denied`], [`Error::Silent`].
    pub fn connect(path: &Path) -> Result<Self, Error> {
        Self::open(path, PROMPT)
    }

    /// `limit`: time until the daemon must have room for the connection, and later for each request; not zero.
    fn open(path: &Path, limit: Duration) -> Result<Self, Error> {
        let socket = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        let send_timeout = TimeVal::new(limit.as_secs() as i64, limit.subsec_micros().into());
        setsockopt(&socket, sockopt::SendTimeout, &send_timeout)?;
        let to = UnixAddr::new(path)?;
        match retry(|| connect(socket.as_raw_fd(), &to)) {
            Ok(()) => Ok(Self {
                socket,
                late: AtomicU32::new(0),
            }),
            Err(Errno::EAGAIN) => Err(Error::Silent(limit)),
            Err(Errno::EACCES | Errno::EPERM) => Err(Error::Denied(path.to_path_buf())),
            Err(cause) => Err(Error::Unreachable {
                path: path.to_path_buf(),
                cause,
            }),
        }
    }

    /// Sends a request, and waits for the answer; [`Request`] names its type.
    ///
    /// # Errors
    /// [`Error::Refused`] or [`Error::Forbidden`] with the daemon's reason, or an error of the
    /// connection.
    pub fn call<T: DeserializeOwned>(&self, request: &Request) -> Result<T, Error> {
        Ok(self.call_with_descriptors(request)?.0)
    }

    /// As [`Client::call`]; also returns the descriptors that came with the answer.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_with_descriptors<T: DeserializeOwned>(
        &self,
        request: &Request,
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        self.probe(request)?;
        self.ask(request)?;
        self.await_answer(request.patience())
    }

    /// As [`Client::call`], and passes descriptors to the daemon.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_handing<T: DeserializeOwned>(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<T, Error> {
        self.probe(request)?;
        self.request(request, descriptors)?;
        Ok(self.await_answer(request.patience())?.0)
    }

    /// Tells early whether the daemon answers at all, before a request that it may take long for.
    fn probe(&self, request: &Request) -> Result<(), Error> {
        if request.patience() > Some(PROMPT) {
            self.call::<Hooks>(&Request::HookList)?;
        }
        Ok(())
    }

    /// The daemon's status, with all sessions: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn status(&self) -> Result<Status, Error> {
        self.pages(
            |from| Request::Status {
                from: from.unwrap_or_default(),
            },
            |status: &mut Status| &mut status.more,
            |status, page| status.sessions.extend(page.sessions),
        )
    }

    /// All flows: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn flows(&self) -> Result<FlowList, Error> {
        self.pages(
            |from| Request::FlowList {
                from: from.unwrap_or_default(),
            },
            |list: &mut FlowList| &mut list.more,
            |list, page| list.flows.extend(page.flows),
        )
    }

    /// The paths to other hosts: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn paths(&self) -> Result<PathList, Error> {
        self.pages(
            |from| Request::PathList { from },
            |list: &mut PathList| &mut list.more,
            |list, page| list.paths.extend(page.paths),
        )
    }

    /// The choice by the model: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn selected(&self) -> Result<SelectStatus, Error> {
        self.pages(
            |from| Request::SelectStatus {
                from: from.unwrap_or_default(),
            },
            |list: &mut SelectStatus| &mut list.more,
            |list, page| list.paths.extend(page.paths),
        )
    }

    /// What flows have taught: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn lessons(&self) -> Result<Lessons, Error> {
        self.pages(
            |from| Request::SelectLessons {
                from: from.unwrap_or_default(),
            },
            |list: &mut Lessons| &mut list.more,
            |list, page| list.lessons.extend(page.lessons),
        )
    }

    /// All known peers: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn peers(&self) -> Result<Peers, Error> {
        self.pages(
            |from| Request::PeerList {
                from: from.unwrap_or_default(),
            },
            |list: &mut Peers| &mut list.more,
            |list, page| list.peers.extend(page.peers),
        )
    }

    /// All rules in force: requests all pages.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn rules(&self) -> Result<Rules, Error> {
        self.pages(
            |from| Request::RuleList {
                from: from.unwrap_or_default(),
            },
            |list: &mut Rules| &mut list.more,
            |list, page| list.rules.extend(page.rules),
        )
    }

    /// Requests a list page by page. `request`: the page that starts there, `None` for the first. `more`: the field
    /// that says where the next one starts. `append` adds a page's items to the list.
    fn pages<T: DeserializeOwned, K: Copy + PartialOrd>(
        &self,
        request: impl Fn(Option<K>) -> Request,
        more: impl Fn(&mut T) -> &mut Option<K>,
        append: impl Fn(&mut T, T),
    ) -> Result<T, Error> {
        let mut list: T = self.call(&request(None))?;
        while let Some(from) = more(&mut list).take() {
            let mut page: T = self.call(&request(Some(from)))?;
            // A page that does not lead on would be requested for ever.
            *more(&mut list) = more(&mut page).filter(|next| *next > from);
            append(&mut list, page);
        }
        Ok(list)
    }

    /// Sends a request without waiting; [`Client::answer`] takes the answer.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::System`].
    pub fn ask(&self, request: &Request) -> Result<(), Error> {
        self.request(request, &[])
    }

    fn request(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let descriptors: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        // A path that is not UTF-8.
        let mut message = serde_json::to_value(request).map_err(|_| Errno::EILSEQ)?;
        message["protocol"] = PROTOCOL.into();
        match send(self.socket.as_raw_fd(), &message, &descriptors) {
            Err(Error::System(Errno::EPIPE | Errno::ECONNRESET)) => Err(Error::Closed),
            Err(Error::System(Errno::EAGAIN)) => Err(Error::Silent(PROMPT)),
            sent => sent,
        }
    }

    /// Waits for the pending answer: for as long as it takes, or at most `patience`.
    fn await_answer<T: DeserializeOwned>(
        &self,
        patience: Option<Duration>,
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        let until = patience.map(|patience| Instant::now() + patience);
        loop {
            if let Some(answer) = self.answer()? {
                return Ok(answer);
            }
            let mut readable = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let limit = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            });
            match poll(&mut readable, limit) {
                Ok(0) => {
                    self.late.fetch_add(1, Ordering::Relaxed);
                    return Err(Error::Silent(patience.unwrap_or_default()));
                }
                // A signal: what is left of the time is less now.
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the daemon has gone, of a connection that is readable and has no pending request. Takes late answers.
    pub fn has_gone(&self) -> bool {
        !matches!(self.answer::<Value>(), Ok(None))
    }

    /// Takes the pending answer; `None` if it has not arrived. The descriptor becomes readable when
    /// it does.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn answer<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, Error> {
        loop {
            let (message, descriptors) =
                match receive_with(self.socket.as_raw_fd(), MsgFlags::MSG_DONTWAIT) {
                    Ok(Some(received)) => received,
                    Ok(None) => return Err(Error::Closed),
                    Err(Error::System(Errno::EAGAIN)) => return Ok(None),
                    Err(error) => return Err(error),
                };
            let less_one = |late: u32| late.checked_sub(1);
            let late = self
                .late
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less_one);
            if late.is_err() {
                return Ok(Some((from_message(message)?, descriptors)));
            }
        }
    }
}

impl AsFd for Client {
    /// Without a pending request, hung up means that the daemon has gone; readable, that it may have: [`Client::has_gone`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends one message.
///
/// # Errors
/// [`Error::System`], with `EILSEQ` if a path in the message is not UTF-8.
pub fn send(socket: RawFd, message: &impl Serialize, descriptors: &[RawFd]) -> Result<(), Error> {
    let text = serde_json::to_vec(message).map_err(|_| Errno::EILSEQ)?;
    let rights = [ControlMessage::ScmRights(descriptors)];
    let control = if descriptors.is_empty() {
        &rights[..0]
    } else {
        &rights[..]
    };
    retry(|| {
        sendmsg::<()>(
            socket,
            &[IoSlice::new(&text)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
    })?;
    Ok(())
}

/// Repeats a call interrupted by a signal.
fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            done => return done,
        }
    }
}

/// Receives one message; `None` at the end of the connection.
///
/// # Errors
/// [`Error::System`], with `EMFILE` if not all descriptors could be received; or
/// [`Error::Malformed`] if the message is longer than [`MAX_MESSAGE`] or no JSON.
pub fn receive(socket: RawFd) -> Result<Option<(Value, Vec<OwnedFd>)>, Error> {
    receive_with(socket, MsgFlags::empty())
}

fn receive_with(socket: RawFd, flags: MsgFlags) -> Result<Option<(Value, Vec<OwnedFd>)>, Error> {
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut space = cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let message = retry(|| {
        recvmsg::<()>(
            socket,
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC | flags,
        )
        .map(|message| (message.bytes, message.flags))
    });
    let (bytes, flags) = match message {
        Err(Errno::ECONNRESET) => return Ok(None),
        other => other?,
    };
    let descriptors = descriptors(&space);
    if bytes == 0 {
        return Ok(None);
    }
    if flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(Errno::EMFILE.into());
    }
    if flags.contains(MsgFlags::MSG_TRUNC) {
        return Err(Error::Malformed(format!(
            "a message of more than {MAX_MESSAGE} bytes"
        )));
    }
    let value =
        serde_json::from_slice(&buffer[..bytes]).map_err(|e| Error::Malformed(e.to_string()))?;
    Ok(Some((value, descriptors)))
}

/// The descriptors in a control buffer that was zeroed before: those of the first message, the only
/// one enabled. nix returns none if some were truncated, so that they would leak.
fn descriptors(space: &[u8]) -> Vec<OwnedFd> {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let Some((header, data)) = space.split_at_checked(HEADER) else {
        return Vec::new();
    };
    // SAFETY: plain integers, in a slice of the structure's size.
    let header: libc::cmsghdr = unsafe { header.as_ptr().cast::<libc::cmsghdr>().read_unaligned() };
    if (header.cmsg_level, header.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
        return Vec::new();
    }
    let length = header.cmsg_len.saturating_sub(HEADER).min(data.len());
    data[..length]
        .as_chunks()
        .0
        .iter()
        .map(|fd| {
            // SAFETY: the kernel has just made this descriptor for us alone.
            unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(*fd)) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, thread};

    use nix::sys::socket::{Backlog, accept, bind, listen, socketpair};
    use serde_json::json;

    use super::*;
    use crate::{Done, Rule, RuleCount, to_message};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap()
    }

    /// A client at one end of a pair.
    fn client(socket: OwnedFd) -> Client {
        Client {
            socket,
            late: AtomicU32::new(0),
        }
    }

    #[test]
    fn await_answer__gives_up_on_a_silent_daemon_only() {
        let (here, there) = pair();
        let client = client(here);
        let answer = || client.await_answer::<Done>(Some(Duration::ZERO));
        client.ask(&Request::RuleReload).unwrap();
        assert!(matches!(answer(), Err(Error::Silent(Duration::ZERO))));
        client.ask(&Request::RuleReload).unwrap();
        let tell = |message: Value| send(there.as_raw_fd(), &message, &[]).unwrap();
        tell(json!({ "error": "too late" }));
        assert!(
            matches!(answer(), Err(Error::Silent(_))),
            "nobody waits for that one"
        );
        tell(json!({ "error": "too late again" }));
        client.ask(&Request::RuleReload).unwrap();
        tell(to_message(&Done {}).unwrap());
        assert!(answer().is_ok());
        drop(there);
        assert!(matches!(answer(), Err(Error::Closed)));
    }

    #[test]
    fn call__asks_for_the_hooks_first_where_an_answer_may_take_long() {
        let (here, there) = pair();
        let daemon = thread::spawn(move || {
            let mut asked = Vec::new();
            while let Ok(Some((request, _))) = receive(there.as_raw_fd()) {
                asked.push(Request::parse(&request).unwrap());
                // Of the form of both answers.
                let answer = json!({ "ok": true, "hooks": [], "count": 3 });
                send(there.as_raw_fd(), &answer, &[]).unwrap();
            }
            asked
        });
        let client = client(here);
        let reload = || Request::RuleReload;
        assert_eq!(client.call::<RuleCount>(&reload()).unwrap().count, 3);
        drop(client);
        assert_eq!(daemon.join().unwrap(), [Request::HookList, reload()]);
    }

    #[test]
    fn open__gives_up_where_the_daemon_accepts_nobody() {
        let path = std::env::temp_dir().join(format!("vtl-full-{}", std::process::id()));
        let listener = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let _first = Client::connect(&path).unwrap();
        let second = Client::open(&path, Duration::from_millis(1));
        assert!(matches!(second, Err(Error::Silent(_))), "{second:?}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn receive__descriptors_come_along() {
        let (here, there) = pair();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let request = json!({ "x": 1 });
        send(here.as_raw_fd(), &request, &[writer.as_raw_fd()]).unwrap();
        drop(writer);
        let (value, descriptors) = receive(there.as_raw_fd()).unwrap().unwrap();
        assert_eq!((value, descriptors.len()), (request, 1));
        nix::unistd::write(&descriptors[0], b"x").unwrap();
        drop(descriptors);
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn receive__more_descriptors_than_there_is_place_for_are_refused_and_closed() {
        let (here, there) = pair();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let many = [writer.as_raw_fd(); MAX_DESCRIPTORS + 5];
        send(here.as_raw_fd(), &json!({}), &many).unwrap();
        drop(writer);
        let refused = receive(there.as_raw_fd());
        assert!(
            matches!(refused, Err(Error::System(Errno::EMFILE))),
            "{refused:?}"
        );
        // A leaked descriptor would keep the pipe open.
        let mut fds = [nix::poll::PollFd::new(
            reader.as_fd(),
            nix::poll::PollFlags::POLLIN,
        )];
        assert_eq!(nix::poll::poll(&mut fds, 0_u8), Ok(1));
    }

    #[test]
    fn rules__are_asked_for_until_there_are_no_more() {
        let (here, there) = pair();
        let rule = |name: u32| Rule {
            name: name.to_string(),
            conditions: None,
            listen: None,
            action: "best".to_owned(),
            when: Vec::new(),
            expires: None,
            connections: None,
            missing: Vec::new(),
            installed: false,
        };
        // The last page points to itself: there are no more.
        let pages = [(0, Some(2)), (2, Some(3)), (3, Some(3))];
        let daemon = thread::spawn(move || {
            for (first, more) in pages {
                let (request, _) = receive(there.as_raw_fd()).unwrap().unwrap();
                assert_eq!(
                    Request::parse(&request),
                    Ok(Request::RuleList { from: first })
                );
                let page = Rules {
                    file: "/rules".into(),
                    rules: vec![rule(first)],
                    more,
                };
                let message = to_message(&page).unwrap();
                send(there.as_raw_fd(), &message, &[]).unwrap();
            }
        });
        let rules = client(here).rules().unwrap();
        let all = vec![rule(0), rule(2), rule(3)];
        assert_eq!((rules.rules, rules.more), (all, None));
        daemon.join().unwrap();
    }

    #[test]
    fn connect__a_signal_does_not_end_it() {
        extern "C" fn nothing(_: libc::c_int) {}
        let path = std::env::temp_dir().join(format!("vtl-connect-{}", std::process::id()));
        let listener = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        // Without SA_RESTART, as Python has it.
        // SAFETY: the action is valid, and the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
        }
        let _first = Client::connect(&path).unwrap();
        thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let path = &path;
            let second = scope.spawn(move || {
                // SAFETY: no arguments, no failure.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                Client::connect(path)
            });
            let thread = told.recv().unwrap();
            for _ in 0..5 {
                thread::sleep(Duration::from_millis(10));
                // SAFETY: the thread waits for us to accept, or has not been joined at least.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
            }
            // Room for the second one.
            // SAFETY: accept made this descriptor for us alone.
            let _accepted = unsafe { OwnedFd::from_raw_fd(accept(listener.as_raw_fd()).unwrap()) };
            assert!(second.join().unwrap().is_ok());
        });
        std::fs::remove_file(path).unwrap();
    }
}
