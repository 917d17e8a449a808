//! Failures as C knows them: a negative errno code, and a sentence for each thread.

use std::{
    cell::RefCell,
    ffi::{CStr, CString},
};

use libc::c_int;
use vtl::{Error, control};

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// An errno code, more than 0.
    pub(crate) code: c_int,
    /// One sentence.
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { code, why }
    }

    /// An argument that cannot be.
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, why)
    }

    /// For a call with a time limit of `timeout` ms.
    pub(crate) fn of(error: &Error, timeout: c_int) -> Self {
        let code = match error {
            Error::Daemon(error) => match error {
                control::Error::Unreachable { .. } | control::Error::Refused(_) => {
                    libc::ECONNREFUSED
                }
                control::Error::Denied(_) | control::Error::Forbidden(_) => libc::EACCES,
                control::Error::Closed => libc::ECONNABORTED,
                control::Error::Silent(_) => libc::ETIMEDOUT,
                control::Error::System(errno) => *errno as c_int,
                control::Error::Malformed(_)
                | control::Error::Protocol(_)
                | control::Error::TooOld => libc::EPROTO,
            },
            Error::Contradiction(_) | Error::Misuse(_) => libc::EINVAL,
            Error::Broken(_) | Error::Cut(_) => libc::ECONNABORTED,
            // As sockets with the kernel's TLS say it.
            Error::Forged(_) => libc::EBADMSG,
            Error::ClosedByPeer(_) => libc::EPIPE,
            Error::TimedOut if timeout == 0 => libc::EAGAIN,
            Error::TimedOut => libc::ETIMEDOUT,
            Error::Closed => libc::EBADF,
            Error::MessageSize { .. } => libc::EMSGSIZE,
            Error::BufferTooSmall(_) => libc::ENOBUFS,
            Error::System(error) => error.raw_os_error().unwrap_or(libc::EIO),
        };
        Self::new(code, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the sentence for [`last`] and returns the result for C.
pub(crate) fn report(failure: Failure) -> c_int {
    let mut why = failure.why.into_bytes();
    why.retain(|byte| *byte != 0);
    let why = CString::new(why).unwrap_or_default();
    // While a thread ends there may be no place for it any more.
    let _ = LAST.try_with(|last| last.replace(why));
    -failure.code
}

/// The sentence of this thread's last failure. Valid until its next one.
pub(crate) fn last() -> *const libc::c_char {
    LAST.try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// What a result means in general.
pub(crate) fn meaning(result: c_int) -> &'static CStr {
    if result >= 0 {
        return c"success";
    }
    match result.saturating_neg() {
        libc::EAGAIN => c"it would have to wait",
        libc::ETIMEDOUT => c"the time limit has passed",
        libc::EBADF => c"not an open VTL socket",
        libc::EINVAL => c"an argument or an operation that does not fit the socket",
        libc::EACCES => c"this user may not use the VTL daemon",
        libc::EADDRINUSE => c"the VTL port is taken",
        libc::ECONNREFUSED => c"the daemon cannot be reached, or there is no such session",
        libc::ECONNABORTED => c"the session broke: what was sent last may not have arrived",
        libc::EBADMSG => c"somebody on the path has changed a packet",
        libc::EPIPE => c"the peer has closed the session",
        libc::ENOTCONN => c"there is no session yet",
        libc::EMSGSIZE => c"the message is empty or too long for the session",
        libc::ENOBUFS => c"the message does not fit into the buffer",
        libc::E2BIG => c"the structure is larger than this library knows",
        libc::EPROTO => c"the daemon and the library do not understand each other",
        libc::EMFILE | libc::ENFILE => c"too many open files",
        libc::ENOMEM => c"out of memory",
        libc::ENOTRECOVERABLE => c"a bug in libvtl",
        _ => c"a system error",
    }
}
