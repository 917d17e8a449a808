//! The C interface of the client library: `include/vtl.h`, which also documents it. Thin: checks
//! what C can get wrong, and calls [`vtl::Shared`].

mod failure;
mod handle;
mod socket;

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use libc::{size_t, ssize_t};
use vtl::{Preference, Requirements, Services, Statistics};

use crate::{failure::Failure, handle::Table, socket::Socket};

/// The header's types.
#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod abi {
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}

use abi::{vtl_info, vtl_mode, vtl_requirements, vtl_socket, vtl_stats, vtl_switches};

static SOCKETS: Table<Socket> = Table::new();

type Outcome<T> = Result<T, Failure>;

/// Runs the body of a function of the interface; no panic gets past it.
fn guard<T: From<c_int>>(body: impl FnOnce() -> Outcome<T>) -> T {
    let caught = catch_unwind(AssertUnwindSafe(body));
    let outcome = caught.unwrap_or_else(|_| {
        Err(Failure::new(
            libc::ENOTRECOVERABLE,
            "a bug in libvtl: see standard error",
        ))
    });
    outcome.unwrap_or_else(|failure| T::from(failure::report(failure)))
}

fn socket(handle: *const vtl_socket) -> Outcome<Arc<Socket>> {
    SOCKETS
        .get(handle)
        .ok_or_else(|| Failure::new(libc::EBADF, "that is no open VTL socket"))
}

/// A handle for a new socket.
fn publish(socket: Socket, place: &mut *mut vtl_socket) -> Outcome<()> {
    *place = SOCKETS
        .insert(socket)
        .ok_or_else(|| Failure::new(libc::EMFILE, "too many VTL sockets"))?;
    Ok(())
}

/// Where a handle goes, emptied.
///
/// # Safety
/// NULL, or nobody else uses the place during `'a`, and it can be written.
unsafe fn place_of<'a>(place: *mut *mut vtl_socket) -> Outcome<&'a mut *mut vtl_socket> {
    if place.is_null() {
        return Err(Failure::invalid("there is no place for the socket: NULL"));
    }
    // SAFETY: not null; the caller's promise. C need not have put anything there before.
    unsafe {
        place.write(std::ptr::null_mut());
        Ok(&mut *place)
    }
}

/// The caller's text; `None` if it is NULL.
///
/// # Safety
/// NULL, or the text ends with a zero byte and stays as it is during `'a`.
unsafe fn text<'a>(text: *const c_char) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str();
    text.map(Some)
        .map_err(|_| Failure::invalid("an address is no text"))
}

/// The caller's bytes.
///
/// # Safety
/// `buffer` is NULL, or its `size` bytes stay as they are during `'a`.
unsafe fn bytes<'a>(buffer: *const c_void, size: size_t) -> Outcome<&'a [u8]> {
    check(buffer, size)?;
    if size == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, and not longer than memory can be; the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), size) })
}

/// The caller's room for bytes.
///
/// # Safety
/// `buffer` is NULL, or its `size` bytes can be written and are nobody else's during `'a`.
unsafe fn bytes_mut<'a>(buffer: *mut c_void, size: size_t) -> Outcome<&'a mut [u8]> {
    check(buffer, size)?;
    if size == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes`; it is only written to.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), size) })
}

fn check(buffer: *const c_void, size: size_t) -> Outcome<()> {
    if size > isize::MAX as size_t {
        return Err(Failure::invalid("a buffer of that size cannot be"));
    }
    if buffer.is_null() && size > 0 {
        return Err(Failure::invalid("the buffer is NULL"));
    }
    Ok(())
}

fn gid(agreement: &vtl::Agreement) -> c_int {
    agreement.gid.into()
}

/// `vtl_init`.
///
/// # Safety
/// The strings are NULL or end with a zero byte; `sock` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_init(
    mode: vtl_mode,
    src: *const c_char,
    dst: *const c_char,
    sock: *mut *mut vtl_socket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let (place, src, dst) = unsafe { (place_of(sock)?, text(src)?, text(dst)?) };
        publish(Socket::new(mode, src, dst)?, place)?;
        Ok(0)
    })
}

/// `vtl_negotiate`.
///
/// # Safety
/// `requirements` is NULL or has `requirements->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_negotiate(
    sock: *mut vtl_socket,
    requirements: *const vtl_requirements,
) -> c_int {
    guard(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let wanted = unsafe { read_requirements(requirements) }?;
        socket
            .shared(|s, limit| s.negotiate(&wanted, limit))
            .map(|agreement| gid(&agreement))
    })
}

/// The caller's requirements; reliability, order and congestion control if they are NULL.
///
/// # Safety
/// NULL or as large as its field `size` says.
unsafe fn read_requirements(wanted: *const vtl_requirements) -> Outcome<Requirements> {
    const SIZE: usize = size_of::<vtl_requirements>();
    if wanted.is_null() {
        return Ok(Requirements::STREAM);
    }
    // SAFETY: the field is the first one; whoever has another structure has that.
    let size = unsafe { (&raw const (*wanted).size).read() } as usize;
    if size < SIZE {
        return Err(Failure::invalid(
            "requirements->size is too small: begin with VTL_REQUIREMENTS",
        ));
    }
    if size > SIZE {
        let why = "the program was built for a newer libvtl: requirements->size is too large";
        return Err(Failure::new(libc::E2BIG, why));
    }
    // SAFETY: not null, and large enough.
    let wanted = unsafe { wanted.read() };
    let mut requirements = Requirements::default();
    for (services, level) in [
        (Services::RELIABLE, wanted.reliability),
        (Services::ORDERED, wanted.order),
        (Services::FLOW_CONTROL, wanted.flow_control),
        (Services::CONGESTION_CONTROL, wanted.congestion_control),
        (Services::MULTIPATH, wanted.multipath),
        (Services::ENCRYPTION, wanted.encryption),
        (Services::PARTIAL_ORDER, wanted.partial_order),
    ] {
        let level = match u32::try_from(level) {
            Ok(abi::VTL_NO_PREFERENCE) => Preference::None,
            Ok(abi::VTL_REQUIRE) => Preference::Require,
            Ok(abi::VTL_PREFER) => Preference::Prefer,
            Ok(abi::VTL_AVOID) => Preference::Avoid,
            Ok(abi::VTL_PROHIBIT) => Preference::Prohibit,
            _ => {
                let why = format!("{level} is no preference, for service {services}");
                return Err(Failure::invalid(why));
            }
        };
        requirements.set(services, level);
    }
    if wanted.reserved != 0 {
        return Err(Failure::invalid("requirements->reserved is not 0"));
    }
    requirements.qos = vtl::Qos {
        max_delay_ms: Some(wanted.max_delay).filter(|ms| *ms != 0),
        min_throughput_mbit: Some(wanted.min_throughput).filter(|mbit| *mbit != 0.0),
        max_loss_pct: Some(wanted.max_loss).filter(|pct| *pct != 0.0),
    };
    Ok(requirements)
}

/// `vtl_validate`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_validate(sock: *mut vtl_socket) -> c_int {
    guard(|| {
        let agreement = socket(sock)?.shared(|s, limit| s.validate(limit))?;
        Ok(gid(&agreement))
    })
}

/// `vtl_accept`.
///
/// # Safety
/// `session` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_accept(
    listener: *mut vtl_socket,
    session: *mut *mut vtl_socket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { place_of(session) }?;
        publish(socket(listener)?.accept()?, place)?;
        Ok(0)
    })
}

/// `vtl_send_data`.
///
/// # Safety
/// `buffer` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_send_data(
    sock: *mut vtl_socket,
    buffer: *const c_void,
    size: size_t,
) -> ssize_t {
    guard_size(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let data = unsafe { bytes(buffer, size) }?;
        socket.shared(|s, limit| s.send_data(data, limit))
    })
}

/// `vtl_recv_data`.
///
/// # Safety
/// `buffer` has `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_recv_data(
    sock: *mut vtl_socket,
    buffer: *mut c_void,
    size: size_t,
) -> ssize_t {
    guard_size(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let buffer = unsafe { bytes_mut(buffer, size) }?;
        socket.shared(|s, limit| s.recv_data(buffer, limit))
    })
}

/// `vtl_send_message`.
///
/// # Safety
/// `message` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_send_message(
    sock: *mut vtl_socket,
    message: *const c_void,
    size: size_t,
) -> c_int {
    // SAFETY: the caller's promise is the same.
    unsafe { vtl_send_in_lane(sock, 0, message, size) }
}

/// `vtl_send_in_lane`.
///
/// # Safety
/// `message` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_send_in_lane(
    sock: *mut vtl_socket,
    lane: u32,
    message: *const c_void,
    size: size_t,
) -> c_int {
    guard(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let message = unsafe { bytes(message, size) }?;
        socket.shared(|s, limit| s.send_in_lane(lane, message, limit))?;
        Ok(0)
    })
}

/// `vtl_recv_message`.
///
/// # Safety
/// `buffer` has `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_recv_message(
    sock: *mut vtl_socket,
    buffer: *mut c_void,
    size: size_t,
) -> ssize_t {
    guard_size(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let buffer = unsafe { bytes_mut(buffer, size) }?;
        socket.shared(|s, limit| s.recv_message(buffer, limit))
    })
}

/// `vtl_recv_part`.
///
/// # Safety
/// `buffer` has `size` bytes that can be written, and `more` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_recv_part(
    sock: *mut vtl_socket,
    buffer: *mut c_void,
    size: size_t,
    more: *mut c_int,
) -> ssize_t {
    guard_size(|| {
        let socket = socket(sock)?;
        // SAFETY: the caller's promise.
        let buffer = unsafe { bytes_mut(buffer, size) }?;
        if more.is_null() {
            return Err(Failure::invalid("there is no place for `more`: NULL"));
        }
        let part = socket.shared(|s, limit| s.recv_part(buffer, limit))?;
        // SAFETY: not null; that it can be written is C's promise.
        unsafe { more.write(part.more.into()) };
        Ok(part.len)
    })
}

/// As [`guard`], for functions that return a number of bytes.
fn guard_size(body: impl FnOnce() -> Outcome<usize>) -> ssize_t {
    struct Size(ssize_t);
    impl From<c_int> for Size {
        fn from(result: c_int) -> Self {
            Self(result as ssize_t)
        }
    }
    // No buffer is longer than a positive `ssize_t` can say.
    guard(|| body().map(|n| Size(n as ssize_t))).0
}

/// `vtl_close`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_close(sock: *mut vtl_socket) -> c_int {
    guard(|| {
        let closed = socket(sock)?.close();
        let open = |f: &Failure| f.code == libc::EAGAIN || f.code == libc::ETIMEDOUT;
        if !closed.as_ref().is_err_and(open) {
            SOCKETS.remove(sock);
        }
        closed.map(|()| 0)
    })
}

/// `vtl_abort`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_abort(sock: *mut vtl_socket) -> c_int {
    guard(|| {
        socket(sock)?.abort();
        SOCKETS.remove(sock);
        Ok(0)
    })
}

/// `vtl_set_stateless`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_set_stateless(sock: *mut vtl_socket, stateless: c_int) -> c_int {
    guard(|| {
        socket(sock)?.shared(|s, _| {
            s.set_stateless(stateless != 0);
            Ok(0)
        })
    })
}

/// `vtl_set_timeout`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_set_timeout(sock: *mut vtl_socket, milliseconds: c_int) -> c_int {
    guard(|| {
        socket(sock)?.set_timeout(milliseconds);
        Ok(0)
    })
}

/// `vtl_fd`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_fd(sock: *const vtl_socket) -> c_int {
    guard(|| Ok(socket(sock)?.fd()))
}

/// `vtl_get_info`.
///
/// # Safety
/// `info` has `info->size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_get_info(sock: *const vtl_socket, info: *mut vtl_info) -> c_int {
    guard(|| {
        let socket = socket(sock)?;
        let agreement = socket.agreement()?;
        let (message, packet) = socket.shared(|s, _| Ok((s.max_message(), s.max_packet())))?;
        let mut found = vtl_info {
            size: 0,
            services: agreement.services.bits().into(),
            gid: agreement.gid.into(),
            max_message: u32::try_from(message).unwrap_or(0),
            max_packet: u32::try_from(packet).unwrap_or(0),
            ..Default::default()
        };
        copy_text(&mut found.graft, &agreement.graft);
        copy_text(&mut found.peer, &agreement.peer.to_string());
        // SAFETY: the caller's promise.
        unsafe { fill(info, found, |i| &raw mut (*i).size) }
    })
}

/// Text that fits, and a zero byte.
fn copy_text(to: &mut [c_char], text: &str) {
    let max = to.len() - 1;
    for (place, byte) in to[..max].iter_mut().zip(text.bytes()) {
        *place = byte as c_char;
    }
}

/// `vtl_get_stats`.
///
/// # Safety
/// `stats` has `stats->size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_get_stats(sock: *const vtl_socket, stats: *mut vtl_stats) -> c_int {
    guard(|| {
        let socket = socket(sock)?;
        socket.agreement()?;
        let s: Statistics = socket.shared(|s, _| s.statistics())?;
        let found = vtl_stats {
            size: 0,
            reserved: 0,
            rtt: s.rtt_ms,
            min_rtt: s.min_rtt_ms,
            rate: s.rate_mbit,
            loss: s.loss_pct,
            window: s.cwnd,
            sent: s.sent,
            retransmitted: s.retransmitted,
            lost: s.lost,
            delivered: s.delivered,
            unacknowledged: s.unacknowledged,
            received: s.received,
            duplicates: s.duplicates,
            timeouts: s.timeouts,
        };
        // SAFETY: the caller's promise.
        unsafe { fill(stats, found, |i| &raw mut (*i).size) }
    })
}

/// `vtl_get_switches`.
///
/// # Safety
/// `switches` has `switches->size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vtl_get_switches(
    sock: *const vtl_socket,
    switches: *mut vtl_switches,
) -> c_int {
    guard(|| {
        let s = socket(sock)?.shared(|s, _| Ok(s.switches()))?;
        let found = vtl_switches {
            size: 0,
            reserved: 0,
            count: s.count,
            packets: s.given_up.packets,
            messages: s.given_up.messages,
            bytes: s.given_up.bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { fill(switches, found, |i| &raw mut (*i).size) }
    })
}

/// Writes `found` to the caller's structure, which may belong to an older or newer header: what it
/// lacks is left out, what it has more is left alone.
///
/// # Safety
/// `place` is NULL or has as many bytes as its field `size` says.
unsafe fn fill<T>(
    place: *mut T,
    mut found: T,
    size: unsafe fn(*mut T) -> *mut u32,
) -> Outcome<c_int> {
    if place.is_null() {
        return Err(Failure::invalid("there is no place for the answer: NULL"));
    }
    // SAFETY: both are structures that begin with their size.
    unsafe {
        let given = size(place).read();
        if (given as usize) < size_of::<u32>() {
            return Err(Failure::invalid("set the structure's size first"));
        }
        size(&raw mut found).write(given);
        let max = size_of::<T>().min(given as usize);
        std::ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), place.cast(), max);
    }
    Ok(0)
}

/// `vtl_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_last_error() -> *const c_char {
    failure::last()
}

/// `vtl_strerror`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_strerror(result: c_int) -> *const c_char {
    failure::meaning(result).as_ptr()
}

/// `vtl_version`.
#[unsafe(no_mangle)]
pub extern "C" fn vtl_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Does not compile if a function is not what the header declares.
const _: () = {
    macro_rules! same {
        ($($name:ident($($arg:ty),*) -> $result:ty;)*) => {
            $(let _: [unsafe extern "C" fn($($arg),*) -> $result; 2] = [$name, abi::$name];)*
        };
    }
    type Sock = *mut vtl_socket;
    same! {
        vtl_init(vtl_mode, *const c_char, *const c_char, *mut Sock) -> c_int;
        vtl_negotiate(Sock, *const vtl_requirements) -> c_int;
        vtl_validate(Sock) -> c_int;
        vtl_accept(Sock, *mut Sock) -> c_int;
        vtl_send_data(Sock, *const c_void, size_t) -> ssize_t;
        vtl_recv_data(Sock, *mut c_void, size_t) -> ssize_t;
        vtl_send_message(Sock, *const c_void, size_t) -> c_int;
        vtl_send_in_lane(Sock, u32, *const c_void, size_t) -> c_int;
        vtl_recv_message(Sock, *mut c_void, size_t) -> ssize_t;
        vtl_recv_part(Sock, *mut c_void, size_t, *mut c_int) -> ssize_t;
        vtl_close(Sock) -> c_int;
        vtl_abort(Sock) -> c_int;
        vtl_set_timeout(Sock, c_int) -> c_int;
        vtl_set_stateless(Sock, c_int) -> c_int;
        vtl_fd(*const vtl_socket) -> c_int;
        vtl_get_info(*const vtl_socket, *mut vtl_info) -> c_int;
        vtl_get_stats(*const vtl_socket, *mut vtl_stats) -> c_int;
        vtl_get_switches(*const vtl_socket, *mut vtl_switches) -> c_int;
        vtl_last_error() -> *const c_char;
        vtl_strerror(c_int) -> *const c_char;
        vtl_version() -> *const c_char;
    }
};
