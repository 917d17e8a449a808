//! Handover of a daemon's state to its successor, so that no hooked connection breaks at a restart: flows and
//! proxied connections with their sockets, hooks, and the mapping that shows applications their true addresses
//! meanwhile.
//!
//! One socket carries it all: the descriptors, in messages of 250, then the state, as CBOR in a memfd. Sent
//! messages are queued in the socket itself, so a successor needs its other end only. `vtld --take-over`
//! requests it from the running daemon; at a restart the service manager keeps it (systemd's descriptor store,
//! `FDSTORE` in sd_notify(3)).

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixDatagram,
    },
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::{
    cmsg_space,
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{
            AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
            recvmsg, sendmsg, setsockopt, socketpair, sockopt,
        },
    },
};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};

use crate::{
    broker, flows,
    hooker::{self, Hooker},
    option::netns_cookie,
    rules::RulesManager,
};

/// Format version; incremented for incompatible changes. New fields have defaults.
const FORMAT: u32 = 1;
/// `FDNAME` in the service manager's store.
const NAME: &str = "vtld-handover";
/// `FileDescriptorName` in dist/vtld-frames.socket.
const FRAMES: &str = "vtld-frames";
/// Descriptors in one message: the kernel takes 253 (`SCM_MAX_FD`).
const PER_MESSAGE: usize = 250;
/// Size of the socket's queue, bytes: each message takes about 1 KiB of the kernel's memory.
const QUEUE: usize = 16 << 20;
/// The only byte of a message: more follow, or it is the last one, with the state.
const MORE: u8 = b'+';
const LAST: u8 = b'.';
/// Timeout for the predecessor's next message.
const PATIENCE: Duration = Duration::from_secs(10);

/// Error of a take-over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// The predecessor died before the last message.
    #[error("the former daemon ended before it had handed everything over")]
    Incomplete,
    /// It sent nothing for 10 s.
    #[error("timeout: the former daemon stopped handing over")]
    Silence,
    /// Its format version is unknown.
    #[error(
        "the former daemon hands over in format {0}, and this one knows {FORMAT}: its connections end"
    )]
    Format(u32),
    /// Its state is malformed.
    #[error("cannot decode the former daemon's state: {0}")]
    Malformed(String),
    /// System error.
    #[error("taking over: {0}")]
    System(#[from] io::Error),
}

impl From<Errno> for HandoverError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Index of a descriptor.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Place(u32);

/// Sender of descriptors. Sends each full message at once: duplicates of all of them might exceed this process's limit
/// of open files.
#[derive(Debug)]
pub(crate) struct Outgoing {
    to: OwnedFd,
    waiting: Vec<OwnedFd>,
    count: u32,
}

impl Outgoing {
    fn new(to: OwnedFd) -> Self {
        Self {
            to,
            waiting: Vec::new(),
            count: 0,
        }
    }

    /// Queues a duplicate for sending.
    pub(crate) fn put(&mut self, descriptor: &impl AsFd) -> io::Result<Place> {
        let place = Place(self.count);
        self.waiting.push(descriptor.as_fd().try_clone_to_owned()?);
        self.count += 1;
        if self.waiting.len() == PER_MESSAGE {
            self.flush()?;
        }
        Ok(place)
    }

    fn flush(&mut self) -> io::Result<()> {
        let raw: Vec<RawFd> = self.waiting.iter().map(AsRawFd::as_raw_fd).collect();
        if !raw.is_empty() {
            message(&self.to, MORE, &raw)?;
        }
        self.waiting.clear();
        Ok(())
    }

    /// Sends the state, as the last message.
    fn finish(mut self, handover: &Handover) -> io::Result<()> {
        self.flush()?;
        let mut state = File::from(memfd_create(c"vtld-handover", MFdFlags::MFD_CLOEXEC)?);
        let mut buffered = io::BufWriter::new(&mut state);
        ciborium::into_writer(handover, &mut buffered).map_err(io::Error::other)?;
        buffered.flush()?;
        drop(buffered);
        state.seek(SeekFrom::Start(0))?;
        message(&self.to, LAST, &[state.as_raw_fd()])
    }
}

/// Descriptors received.
#[derive(Debug)]
pub(crate) struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// Takes a descriptor.
    pub(crate) fn take(&mut self, place: Place) -> io::Result<OwnedFd> {
        let found = self.0.get_mut(place.0 as usize);
        found
            .and_then(Option::take)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// The state that is handed over.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Handover {
    format: u32,
    pub(crate) hooker: hooker::Handover,
    pub(crate) flows: flows::Handover,
    /// Rules that requests have installed.
    #[serde(default)]
    rules: Vec<String>,
}

impl Handover {
    fn connections(&self) -> usize {
        self.hooker.connections() + self.flows.connections()
    }
}

/// Received state of the former daemon.
#[derive(Debug)]
pub struct Left {
    pub(crate) handover: Handover,
    pub(crate) descriptors: Descriptors,
}

impl Left {
    /// Number of connections.
    pub fn connections(&self) -> usize {
        self.handover.connections()
    }

    /// Takes the rules that requests have installed.
    pub fn take_rules(&mut self) -> Vec<String> {
        std::mem::take(&mut self.handover.rules)
    }

    /// Resumes flows, hooks and proxied connections.
    pub fn resume(self, hooker: &Hooker, broker: &broker::Handle) {
        // Flows first: new connections may belong to their associations.
        match broker.flows().resume(self.handover.flows, self.descriptors) {
            Some(mut rest) => hooker.resume(self.handover.hooker, &mut rest),
            None => hooker.begin(),
        }
    }
}

/// Creates the socket pair: the sending end, and the successor's.
///
/// # Errors
/// No descriptor is left.
pub fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    // The default size takes 200 messages.
    let _ = setsockopt(&ours, sockopt::SndBufForce, &QUEUE);
    Ok((ours, theirs))
}

/// Stops this daemon's connections and hands them over to the other end's holder. Returns the number of
/// connections.
///
/// # Errors
/// The successor has gone, or no descriptor is available. State of a thread that has died is lost.
pub fn leave(
    to: OwnedFd,
    hooker: &Hooker,
    broker: &broker::Handle,
    rules: &RulesManager,
) -> io::Result<usize> {
    let mut outgoing = Outgoing::new(to);
    let mut hooked = hooker.hand_over(&mut outgoing)?;
    let outgoing = Arc::new(Mutex::new(outgoing));
    let flows = broker.flows().hand_over(&outgoing);
    // The thread of flows has ended, and its clone with it.
    let outgoing = Arc::into_inner(outgoing).ok_or(io::ErrorKind::BrokenPipe)?;
    let outgoing = outgoing.into_inner();
    let mut outgoing = outgoing.unwrap_or_else(PoisonError::into_inner);
    hooker.hand_over_proxied(&mut outgoing, &mut hooked)?;
    let handover = Handover {
        format: FORMAT,
        hooker: hooked,
        flows,
        rules: rules.leave(),
    };
    outgoing.finish(&handover)?;
    Ok(handover.connections())
}

fn message(to: &OwnedFd, byte: u8, descriptors: &[RawFd]) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(descriptors)];
    let bytes = [IoSlice::new(std::slice::from_ref(&byte))];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(to.as_raw_fd(), &bytes, &rights, flags, None)?;
    Ok(())
}

/// Receives the state of the former daemon.
///
/// # Errors
/// [`HandoverError`].
pub fn receive(from: &OwnedFd) -> Result<Left, HandoverError> {
    let mut all = Vec::new();
    while next(from, &mut all)? == MORE {}
    let malformed = |why: &dyn ToString| HandoverError::Malformed(why.to_string());
    let state = all.pop().ok_or_else(|| malformed(&"there is no state"))?;
    let mut bytes = Vec::new();
    File::from(state).read_to_end(&mut bytes)?;
    // First, since another format may differ in everything else.
    let head: Head = ciborium::from_reader(&bytes[..]).map_err(|error| malformed(&error))?;
    if head.format != FORMAT {
        return Err(HandoverError::Format(head.format));
    }
    let handover = ciborium::from_reader(&bytes[..]).map_err(|error| malformed(&error))?;
    let descriptors = Descriptors(all.into_iter().map(Some).collect());
    Ok(Left {
        handover,
        descriptors,
    })
}

#[derive(Deserialize)]
struct Head {
    format: u32,
}

/// Receives a message.
fn next(from: &OwnedFd, descriptors: &mut Vec<OwnedFd>) -> Result<u8, HandoverError> {
    let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    let mut wanted = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
    if poll(&mut wanted, patience)? == 0 {
        return Err(HandoverError::Silence);
    }
    let mut byte = 0;
    let mut slices = [IoSliceMut::new(std::slice::from_mut(&mut byte))];
    let mut space = cmsg_space!([RawFd; PER_MESSAGE]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(from.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    for control in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(rights) = control {
            // SAFETY: the kernel has just made them for this process.
            let owned = |fd: RawFd| unsafe { OwnedFd::from_raw_fd(fd) };
            descriptors.extend(rights.into_iter().map(owned));
        }
    }
    let is_cut = received.flags.contains(MsgFlags::MSG_CTRUNC);
    if received.bytes == 0 || is_cut {
        return Err(HandoverError::Incomplete);
    }
    Ok(byte)
}

/// Whether a service manager runs, which may keep descriptors over a restart.
pub fn has_manager() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Notifies the service manager that the daemon is ready.
pub fn ready() {
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        tracing::warn!(%error, "handover: cannot notify the service manager that vtld is ready");
    }
}

/// Stores the successor's end in the service manager, and waits until it has it.
///
/// # Errors
/// The manager does not answer.
pub fn store(theirs: &OwnedFd) -> io::Result<()> {
    let state = [
        NotifyState::FdStore,
        NotifyState::FdName(NAME),
        // Not a connection whose end should remove it.
        NotifyState::Custom("FDPOLL=0"),
    ];
    sd_notify::notify_with_fds(&state, &[theirs.as_fd()])?;
    // Barrier: the manager closes it once the former message is processed. If this process ended before, the
    // message could not be attributed to it.
    let (ours, barrier) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[barrier.as_fd()])?;
    drop(barrier);
    let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    match poll(
        &mut [PollFd::new(ours.as_fd(), PollFlags::empty())],
        patience,
    )? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// Descriptors passed by the service manager.
#[derive(Debug, Default)]
pub struct Given {
    /// State of a former daemon.
    pub left: Option<OwnedFd>,
    /// A netlink socket of a namespace for live frames (`vtl_bpf::anchor::FrameNamespace`).
    pub frames: Option<OwnedFd>,
}

/// Takes the passed descriptors, and removes stored ones from the manager.
pub fn given() -> Given {
    let mut given = Given::default();
    for (fd, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
        // SAFETY: the manager has passed it to this process, which has not used it yet.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        match name.as_str() {
            // The latest one counts.
            NAME => given.left = Some(fd),
            FRAMES if is_elsewhere(&fd) => given.frames = Some(fd),
            FRAMES => tracing::warn!(
                "egress: the socket of vtld-frames.socket is of this network namespace and is not used: its PrivateNetwork= had no effect"
            ),
            _ => {}
        }
    }
    if given.left.is_some() {
        let forget = [NotifyState::FdStoreRemove, NotifyState::FdName(NAME)];
        if let Err(error) = sd_notify::notify(&forget) {
            tracing::warn!(%error, "handover: cannot remove the state from the service manager's descriptor store");
        }
    }
    given
}

/// Whether a socket belongs to another network namespace.
fn is_elsewhere(socket: &OwnedFd) -> bool {
    let here = UnixDatagram::unbound().and_then(|ours| netns_cookie(&ours));
    matches!((here, netns_cookie(socket)), (Ok(here), Ok(there)) if here != there)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn empty(format: u32) -> Handover {
        Handover {
            rules: Vec::new(),
            format,
            hooker: hooker::Handover::default(),
            flows: flows::Handover::default(),
        }
    }

    /// A file that nobody else has, and its number.
    fn file() -> (OwnedFd, u64) {
        let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        let number = file.metadata().unwrap().ino();
        (file.into(), number)
    }

    #[test]
    fn receive__every_descriptor_in_its_place() {
        let (ours, theirs) = channel().unwrap();
        let mut outgoing = Outgoing::new(ours);
        // More than a message, and not a multiple.
        let mut places = Vec::new();
        for _ in 0..2 * PER_MESSAGE + 7 {
            let (file, number) = file();
            places.push((outgoing.put(&file).unwrap(), number));
        }
        outgoing.finish(&empty(FORMAT)).unwrap();
        // The sender has gone.
        let mut left = receive(&theirs).unwrap();
        assert_eq!(left.connections(), 0);
        for (place, number) in &places {
            let found = File::from(left.descriptors.take(*place).unwrap());
            assert_eq!(found.metadata().unwrap().ino(), *number);
        }
        assert!(left.descriptors.take(places[0].0).is_err(), "there is one");
        assert!(left.descriptors.take(Place(u32::MAX)).is_err());
    }

    #[test]
    fn receive__a_predecessor_that_dies_or_is_another() {
        let (ours, theirs) = channel().unwrap();
        let mut outgoing = Outgoing::new(ours);
        outgoing.put(&file().0).unwrap();
        outgoing.flush().unwrap();
        drop(outgoing);
        assert!(matches!(receive(&theirs), Err(HandoverError::Incomplete)));

        let (ours, theirs) = channel().unwrap();
        Outgoing::new(ours).finish(&empty(FORMAT + 1)).unwrap();
        let refused = receive(&theirs).unwrap_err();
        assert!(matches!(refused, HandoverError::Format(_)), "{refused}");

        let (ours, theirs) = channel().unwrap();
        let (garbage, _) = file();
        message(&ours, LAST, &[garbage.as_raw_fd()]).unwrap();
        let refused = receive(&theirs).unwrap_err();
        assert!(matches!(refused, HandoverError::Malformed(_)), "{refused}");
    }
}
