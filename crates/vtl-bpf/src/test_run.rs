//! `BPF_PROG_TEST_RUN`: runs a program on the caller's frame, and returns the resulting frame.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Maximum length of the resulting frame, bytes.
const MAX_PACKET: usize = 4096;
/// Words of `struct __sk_buff` (linux/bpf.h) up to the last used; positions of interface and mark.
const SK_BUFF: usize = 11;
const IFINDEX: usize = 10;
const MARK: usize = 2;

/// Return values of one type of program.
#[derive(Clone, Copy, Debug)]
pub struct Verdicts {
    /// Passed to the network stack.
    pub pass: u32,
    /// Dropped or consumed.
    pub stop: u32,
    /// Sent back to the sender.
    pub answer: u32,
    /// Sent out of the interface.
    pub send: u32,
}

/// `TCX_NEXT`, `TCX_DROP` and `TCX_REDIRECT`.
pub const TC: Verdicts = Verdicts {
    pass: u32::MAX,
    stop: 2,
    answer: 7,
    send: u32::MAX,
};
/// `XDP_PASS`, `XDP_DROP`, `XDP_REDIRECT`, `XDP_TX`.
pub const XDP: Verdicts = Verdicts {
    pass: 2,
    stop: 1,
    answer: 4,
    send: 3,
};

/// Result of a run.
pub(crate) struct Ran {
    /// The program's return value.
    pub(crate) verdict: u32,
    /// Mean of the repetitions, nanoseconds.
    pub(crate) ns: u32,
}

/// Where the frame comes in.
#[derive(Clone, Copy)]
pub(crate) enum From {
    /// The loopback.
    Loopback,
    /// The loopback, with a mark, for a tcx program.
    Marked(u32),
    /// An interface of the caller's network namespace, for a tcx program.
    Tcx(u32),
    /// The same, for an XDP program.
    Xdp(u32),
}

/// Runs a program `repeat` times; `out` is the resulting frame.
pub(crate) fn run(
    program: BorrowedFd<'_>,
    frame: &[u8],
    from: From,
    repeat: u32,
    out: &mut Vec<u8>,
) -> io::Result<Ran> {
    out.resize(MAX_PACKET, 0);
    let mut skb = [0_u32; SK_BUFF];
    let mut md = libbpf_sys::xdp_md {
        data_end: frame.len() as u32,
        ..Default::default()
    };
    let (context, size) = match from {
        From::Loopback => (std::ptr::null_mut(), 0),
        From::Marked(mark) => {
            skb[MARK] = mark;
            ((&raw mut skb).cast(), size_of_val(&skb))
        }
        From::Tcx(interface) => {
            skb[IFINDEX] = interface;
            ((&raw mut skb).cast(), size_of_val(&skb))
        }
        From::Xdp(interface) => {
            md.ingress_ifindex = interface;
            ((&raw mut md).cast(), size_of_val(&md))
        }
    };
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        ctx_in: context,
        ctx_size_in: size as u32,
        repeat: repeat as i32,
        ..Default::default()
    };
    // SAFETY: the options refer to both buffers and the context with their lengths; all outlive the
    // call.
    let r = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if r != 0 {
        return Err(io::Error::from_raw_os_error(-r));
    }
    out.truncate(options.data_size_out as usize);
    Ok(Ran {
        verdict: options.retval,
        ns: options.duration,
    })
}
