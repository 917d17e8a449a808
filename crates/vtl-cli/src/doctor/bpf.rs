//! Safe wrappers for the handful of `bpf(2)` commands that the probes need.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_sys as sys;

/// One eBPF instruction.
pub(super) use sys::bpf_insn as Insn;

/// `dst = imm`, on 64 bits.
pub(super) fn mov_imm(dst: u8, imm: i32) -> Insn {
    insn(0xb7, dst, 0, imm)
}

/// `call helper`.
pub(super) fn call(helper: u32) -> Insn {
    insn(0x85, 0, 0, i32::try_from(helper).unwrap_or(i32::MAX))
}

/// `exit`.
pub(super) fn exit() -> Insn {
    insn(0x95, 0, 0, 0)
}

fn insn(code: u8, dst: u8, src: u8, imm: i32) -> Insn {
    let mut insn = Insn {
        code,
        imm,
        ..Insn::default()
    };
    insn.set_dst_reg(dst);
    insn.set_src_reg(src);
    insn
}

/// Verifies and loads a program.
pub(super) fn load(
    prog_type: sys::bpf_prog_type,
    attach_type: sys::bpf_attach_type,
    insns: &[Insn],
) -> io::Result<OwnedFd> {
    const NAME: &CStr = c"vtl_doctor";
    const LICENSE: &CStr = c"GPL";
    let mut opts = sys::bpf_prog_load_opts {
        sz: size_of::<sys::bpf_prog_load_opts>() as sys::size_t,
        expected_attach_type: attach_type,
        ..Default::default()
    };
    // SAFETY: the strings are NUL-terminated, `insns` and `opts` live through the call, and the
    // count is that of `insns`.
    let fd = unsafe {
        sys::bpf_prog_load(
            prog_type,
            NAME.as_ptr(),
            LICENSE.as_ptr(),
            insns.as_ptr(),
            insns.len() as sys::size_t,
            &raw mut opts,
        )
    };
    own(fd)
}

/// Creates a map; `inner` is the template of a map of maps.
pub(super) fn create_map(
    map_type: sys::bpf_map_type,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    let opts = sys::bpf_map_create_opts {
        sz: size_of::<sys::bpf_map_create_opts>() as sys::size_t,
        map_flags: flags,
        inner_map_fd: inner.map_or(0, |fd| fd.as_raw_fd().cast_unsigned()),
        ..Default::default()
    };
    // SAFETY: the name is NUL-terminated and `opts` lives through the call.
    let fd = unsafe {
        sys::bpf_map_create(
            map_type,
            c"vtl_doctor".as_ptr(),
            key_size,
            value_size,
            max_entries,
            &raw const opts,
        )
    };
    own(fd)
}

/// Attaches a program to `target` (an interface index or a cgroup's descriptor) for as long as the
/// returned link is open.
pub(super) fn link(
    prog: BorrowedFd<'_>,
    target: i32,
    attach_type: sys::bpf_attach_type,
    flags: u32,
) -> io::Result<OwnedFd> {
    let opts = sys::bpf_link_create_opts {
        sz: size_of::<sys::bpf_link_create_opts>() as sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: `prog` is open and `opts` lives through the call.
    let fd =
        unsafe { sys::bpf_link_create(prog.as_raw_fd(), target, attach_type, &raw const opts) };
    own(fd)
}

/// Runs an XDP program once on a live frame that the kernel makes for it.
pub(super) fn run_live_frame(prog: BorrowedFd<'_>) -> io::Result<()> {
    let frame = [0u8; 64];
    let mut opts = sys::bpf_test_run_opts {
        sz: size_of::<sys::bpf_test_run_opts>() as sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        repeat: 1,
        flags: sys::BPF_F_TEST_XDP_LIVE_FRAMES,
        ..Default::default()
    };
    // SAFETY: `prog` is open; `frame` and `opts` live through the call.
    match unsafe { sys::bpf_prog_test_run_opts(prog.as_raw_fd(), &raw mut opts) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The `NETDEV_XDP_ACT_*` bits that a network device's driver advertises.
pub(super) fn xdp_features(ifindex: u32) -> io::Result<u64> {
    let mut opts = sys::bpf_xdp_query_opts {
        sz: size_of::<sys::bpf_xdp_query_opts>() as sys::size_t,
        ..Default::default()
    };
    let index = i32::try_from(ifindex).map_err(io::Error::other)?;
    // SAFETY: `opts` lives through the call.
    match unsafe { sys::bpf_xdp_query(index, 0, &raw mut opts) } {
        0 => Ok(opts.feature_flags),
        err => Err(io::Error::from_raw_os_error(-err)),
    }
}

/// Maps the first page of a `BPF_F_MMAPABLE` array and unmaps it again.
pub(super) fn map_and_unmap(map: BorrowedFd<'_>) -> io::Result<()> {
    const PAGE: usize = 4096;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            map.as_raw_fd(),
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `page` is the mapping made above, and nothing else refers to it.
    unsafe { libc::munmap(page, PAGE) };
    Ok(())
}

fn own(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: libbpf returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
