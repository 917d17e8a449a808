//! The table of sessions, shared with the kernel's programs.

use std::{
    num::NonZero,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering},
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vtl_proto::{
    intf::{self, vtl_session},
    nego::Encapsulation,
};

use crate::{Error, Result};

/// The mapped array `vtl_sessions`.
pub struct SessionTable {
    base: NonNull<vtl_session>,
    places: u32,
}

// SAFETY: the table is shared memory by nature; every access goes through atomics or through the
// exclusive phase before a session's `state` is published.
unsafe impl Send for SessionTable {}
// SAFETY: as above.
unsafe impl Sync for SessionTable {}

impl SessionTable {
    /// Maps the array `vtl_sessions` of `places` entries.
    pub(crate) fn map(fd: BorrowedFd<'_>, places: u32) -> Result<Self> {
        let length = NonZero::new(Self::length(places)).expect("not empty");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                fd,
                0,
            )
        }
        .map_err(|e| Error::System {
            what: "mapping the sessions".into(),
            source: e.into(),
        })?;
        let base = base.cast();
        Ok(Self { base, places })
    }

    /// Length of the mapping, bytes.
    fn length(places: u32) -> usize {
        (size_of::<vtl_session>() * places as usize).next_multiple_of(4096)
    }

    /// Number of entries: valid indexes are below this, and not 0.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// The entry of a session. `None` for 0 and for indexes beyond the table.
    pub fn get(&self, sid: u32) -> Option<Session<'_>> {
        if sid == 0 || sid >= self.places {
            return None;
        }
        // SAFETY: within the mapping, which lives as long as the table.
        let at = unsafe { self.base.add(sid as usize) };
        Some(Session {
            at,
            _table: std::marker::PhantomData,
        })
    }
}

impl Drop for SessionTable {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `map`, and nobody can hold a Session any more.
        let _ = unsafe { munmap(self.base.cast(), Self::length(self.places)) };
    }
}

/// Initial smoothed round-trip time and variation, microseconds: from the handshake, the only
/// sample.
pub fn supposed_rtt(rtt: std::time::Duration) -> (u32, u32) {
    let us = rtt.as_micros().clamp(1, intf::VTL_RTT_MAX_US.into()) as u32;
    (us, us / 4)
}

/// A sender's view of its path.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    /// The mean deviation of round-trip times (RFC 6298).
    pub rtt_variance: std::time::Duration,
    /// Payload bytes in all transmissions of DATA.
    pub bytes: u64,
    /// Smoothed share of packets that arrive behind later ones.
    pub reordering: f64,
    /// The application has not enough to send, or the receiver takes no more.
    pub is_limited: bool,
    /// The congestion control models the path, as it tells its mode (`enum vtl_control_mode`).
    pub models: bool,
}

/// One session's entry.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    at: NonNull<vtl_session>,
    _table: std::marker::PhantomData<&'a SessionTable>,
}

macro_rules! atomic {
    ($kind:ty, $self:ident . $($field:tt)+) => {{
        // SAFETY: the field is aligned, lives as long as the table, and is only touched atomically
        // while the session is open.
        unsafe { <$kind>::from_ptr(&raw mut (*$self.at.as_ptr()).$($field)+) }
    }};
}

impl Session<'_> {
    /// `VTL_FREE`, `VTL_OPENING` or `VTL_OPEN`.
    pub fn state(&self) -> u32 {
        atomic!(AtomicU32, self.state).load(Ordering::Acquire)
    }

    /// Publishes the state, with release ordering: the programs see all earlier stores first.
    pub fn set_state(&self, state: u32) {
        atomic!(AtomicU32, self.state).store(state, Ordering::Release);
    }

    /// Overwrites a free entry, except its state.
    ///
    /// # Panics
    /// If the entry is in use.
    pub fn initialise(&self, mut value: vtl_session) {
        assert_eq!(
            self.state(),
            intf::VTL_FREE,
            "only a free session may be overwritten"
        );
        value.state = intf::VTL_FREE;
        // SAFETY: no program touches a free entry, and of vtld's threads only the one that makes
        // sessions does: the others check the state first.
        unsafe { self.at.as_ptr().write_volatile(value) };
    }

    /// Changes an entry in state `VTL_OPENING`: no program processes data for it yet; the root
    /// programs write only the return path (`ifindex`, `port`, the Ethernet header) and the numbers of
    /// the replay check.
    ///
    /// # Panics
    /// If the session is open.
    pub fn complete(&self, change: impl FnOnce(&mut vtl_session)) {
        assert_eq!(
            self.state(),
            intf::VTL_OPENING,
            "an open session belongs to the programs"
        );
        // SAFETY: in this state the programs write only fields that `change` has no reason to
        // touch, and of vtld's threads only the one that makes sessions refers to it, except to the
        // lock of egress.
        change(unsafe { &mut *self.at.as_ptr() });
    }

    /// A copy of the whole entry; not atomic as a whole: each field is from some moment during the
    /// call.
    pub fn snapshot(&self) -> vtl_session {
        // SAFETY: within the mapping; any bit pattern is valid.
        unsafe { self.at.as_ptr().read_volatile() }
    }

    /// Enlarges the used part of the rings. Only before any packet beyond the present part was
    /// accepted or written: up to there, both sizes map packets to the same slots.
    pub fn widen(&self, slots: u32) {
        atomic!(AtomicU32, self.slots).store(slots, Ordering::Release);
    }

    /// Takes the egress lock, which direct egress holds for less than a microsecond. False if it
    /// stays taken.
    pub fn lock_egress(&self) -> bool {
        const TRIES: u32 = 10_000;
        let lock = atomic!(AtomicU32, self.tx.egress_lock);
        let locked = (0..TRIES).any(|_| {
            std::hint::spin_loop();
            lock.swap(1, Ordering::SeqCst) == 0
        });
        // This run serves all requests so far; later ones find the lock taken.
        if locked {
            self.take_event();
        }
        locked
    }

    /// Takes the application's event, before what it announces is served: the next one tells of itself.
    pub fn take_event(&self) {
        atomic!(AtomicU32, self.tx.event_pending).swap(0, Ordering::SeqCst);
    }

    /// Whether the application has to be woken; clears the flag.
    pub fn take_wakeups(&self) -> bool {
        let pending = atomic!(AtomicU32, self.pending_wakeups);
        pending.load(Ordering::Relaxed) != 0 && pending.swap(0, Ordering::SeqCst) != 0
    }

    /// Releases the egress lock. `has_timer`: the caller will run egress before or at the next probe
    /// timeout. True if egress must run once more.
    pub fn unlock_egress(&self, has_timer: bool) -> bool {
        atomic!(AtomicU32, self.tx.has_timer).store(has_timer.into(), Ordering::Relaxed);
        atomic!(AtomicU32, self.tx.egress_lock).swap(0, Ordering::SeqCst);
        atomic!(AtomicU32, self.tx.rerun).swap(0, Ordering::SeqCst) != 0
    }

    /// Time of the pump's next egress call: 0 at once, `u64::MAX` only on an event, else
    /// CLOCK_MONOTONIC in ns.
    pub fn wake_ns(&self) -> u64 {
        atomic!(AtomicU64, self.tx.wake_ns).load(Ordering::Acquire)
    }

    /// Packets that pacing allows at time `now`; `u64::MAX` without pacing.
    pub fn paced(&self, now: u64) -> u64 {
        let gap = atomic!(AtomicU64, self.tx.pacing_gap_ns).load(Ordering::Relaxed);
        let from = atomic!(AtomicU64, self.tx.pace_ns).load(Ordering::Relaxed);
        now.saturating_sub(from)
            .checked_div(gap)
            .map_or(u64::MAX, |n| n + 1)
    }

    /// Estimates the packets that egress would send now without pacing, by window and data.
    /// `producer`: packets written to the transmit ring since the session began.
    pub fn sendable(&self, producer: u64) -> u64 {
        let load = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let next = load(atomic!(AtomicU64, self.tx.next));
        let lost = atomic!(AtomicU32, self.tx.lost_pending).load(Ordering::Relaxed);
        let fresh = producer
            .min(load(atomic!(AtomicU64, self.tx.limit)))
            .saturating_sub(next);
        let room = load(atomic!(AtomicU64, self.tx.cwnd)).saturating_sub(self.in_flight());
        room.min(fresh + u64::from(lost))
    }

    /// Packets in flight: sent, and neither delivered nor given up.
    pub fn in_flight(&self) -> u64 {
        let load = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let out = load(atomic!(AtomicU64, self.tx.delivered))
            + load(atomic!(AtomicU64, self.tx.lost_total))
            + load(atomic!(AtomicU64, self.tx.abandoned));
        load(atomic!(AtomicU64, self.tx.sent)).saturating_sub(out)
    }

    /// Transmissions of DATA so far.
    pub fn sent(&self) -> u64 {
        atomic!(AtomicU64, self.tx.sent).load(Ordering::Relaxed)
    }

    /// Number of the first packet that was not sent yet.
    pub fn next(&self) -> u64 {
        atomic!(AtomicU64, self.tx.next).load(Ordering::Acquire)
    }

    /// The congestion window, packets.
    pub fn cwnd(&self) -> u64 {
        atomic!(AtomicU64, self.tx.cwnd).load(Ordering::Relaxed)
    }

    /// Sets the handshake's round-trip time as initial estimate, unless there is a sample already.
    pub fn suppose_rtt(&self, rtt: std::time::Duration) {
        let (us, variation_us) = supposed_rtt(rtt);
        let srtt = atomic!(AtomicU32, self.tx.srtt_us);
        if srtt
            .compare_exchange(0, us, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            atomic!(AtomicU32, self.tx.rttvar_us).store(variation_us, Ordering::Relaxed);
        }
    }

    /// Sets the path's minimum round-trip time, as other connections know it, unless there is a sample already.
    pub fn suppose_min_rtt(&self, rtt: std::time::Duration) {
        let min = atomic!(AtomicU32, self.tx.meter.min_rtt_us);
        // Fails where there is one.
        let _ = min.compare_exchange(0, supposed_rtt(rtt).0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The smoothed round-trip time; 0 before the first sample.
    pub fn srtt(&self) -> std::time::Duration {
        let us = atomic!(AtomicU32, self.tx.srtt_us).load(Ordering::Relaxed);
        std::time::Duration::from_micros(us.into())
    }

    /// The minimum round-trip time of late, from acknowledgements. `None` before the first.
    pub fn measured_rtt(&self) -> Option<std::time::Duration> {
        let us = atomic!(AtomicU32, self.tx.meter.min_rtt_us).load(Ordering::Relaxed);
        // What was supposed has no time.
        let at = atomic!(AtomicU64, self.tx.meter.min_rtt_ns).load(Ordering::Relaxed);
        (us != 0 && at != 0).then(|| std::time::Duration::from_micros(us.into()))
    }

    /// Path measurements from acknowledgements.
    pub fn meter(&self) -> intf::vtl_meter {
        // SAFETY: within the mapping; any bit pattern is valid.
        let read = || unsafe { (&raw const (*self.at.as_ptr()).tx.meter).read_volatile() };
        let mut meter = read();
        // The listener may be writing: retry until two reads agree.
        for _ in 0..8 {
            let again = read();
            let same = (again.xid, again.arrived) == (meter.xid, meter.arrived);
            meter = again;
            if same {
                break;
            }
        }
        meter
    }

    /// What the sender has of the path besides [`Session::meter`].
    pub fn sender(&self) -> Sender {
        let long = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let short = |at: &AtomicU32| at.load(Ordering::Relaxed);
        let variance_us = short(atomic!(AtomicU32, self.tx.rttvar_us));
        Sender {
            rtt_variance: std::time::Duration::from_micros(variance_us.into()),
            bytes: long(atomic!(AtomicU64, self.tx.bytes)),
            reordering: f64::from(short(atomic!(AtomicU32, self.tx.reordered_q16))) / 65_536.0,
            is_limited: long(atomic!(AtomicU64, self.tx.app_limited)) != 0
                || long(atomic!(AtomicU64, self.tx.next))
                    >= long(atomic!(AtomicU64, self.tx.limit)),
            models: short(atomic!(AtomicU32, self.tx.mode)) != intf::VTL_MODE_NONE,
        }
    }

    /// Pacing gap between two packets, ns; 0 without pacing.
    pub fn pacing_gap_ns(&self) -> u64 {
        atomic!(AtomicU64, self.tx.pacing_gap_ns).load(Ordering::Relaxed)
    }

    /// Interface towards the peer; 0 until a packet came from it; `VTL_TUNNEL`: packets go over
    /// TCP.
    pub fn ifindex(&self) -> u32 {
        atomic!(AtomicU32, self.ifindex).load(Ordering::Acquire)
    }

    /// Switches to packets over TCP; or back, to the interface that the peer's next packet shows.
    pub fn set_tunnel(&self, tunnel: bool) {
        let ifindex = if tunnel { intf::VTL_TUNNEL } else { 0 };
        atomic!(AtomicU32, self.ifindex).store(ifindex, Ordering::Release);
    }

    /// The peer's UDP port; 0: native packets, without UDP, in both directions.
    pub fn port(&self) -> u16 {
        u16::from_be(atomic!(AtomicU16, self.port).load(Ordering::Relaxed))
    }

    /// Switches to packets to the peer's UDP port or, 0, without UDP.
    pub fn set_port(&self, port: u16) {
        atomic!(AtomicU16, self.port).store(port.to_be(), Ordering::Relaxed);
    }

    /// Encapsulation of packets to the peer.
    pub fn encapsulation(&self) -> Encapsulation {
        match self.ifindex() {
            intf::VTL_TUNNEL => Encapsulation::Tcp,
            _ => Encapsulation::by(self.port()),
        }
    }

    /// Consecutive probe timeouts without any acknowledgement.
    pub fn timeouts(&self) -> u32 {
        atomic!(AtomicU32, self.tx.timeouts).load(Ordering::Relaxed)
    }

    /// Number of the first unacknowledged packet.
    pub fn acknowledged(&self) -> u64 {
        atomic!(AtomicU64, self.tx.una).load(Ordering::Relaxed)
    }

    /// Sets the path's maximum payload, bytes: larger packets are fragmented into halves.
    pub fn set_path(&self, max: u16) {
        atomic!(AtomicU16, self.path).store(max, Ordering::Relaxed);
    }

    /// Packets in flight or lost: not acknowledged by the peer.
    pub fn unacknowledged(&self) -> u64 {
        let next = atomic!(AtomicU64, self.tx.next).load(Ordering::Relaxed);
        next.saturating_sub(atomic!(AtomicU64, self.tx.una).load(Ordering::Relaxed))
    }

    /// Sets the destination of the user's wake-ups: one of `vtl_aware`.
    pub fn set_aware(&self, aware: u32) {
        atomic!(AtomicU32, self.aware).store(aware, Ordering::Relaxed);
    }

    /// Requests PROBEs until the peer acknowledges one.
    pub fn probe(&self) {
        atomic!(AtomicU32, self.tx.probe).store(1, Ordering::Release);
    }

    /// Requests an acknowledgement from egress: a window update for the peer.
    pub fn request_ack(&self) {
        atomic!(AtomicU32, self.rx.ack_now).store(1, Ordering::Release);
    }

    /// The session's graft; valid once it is open.
    pub fn gid(&self) -> u16 {
        atomic!(AtomicU16, self.gid).load(Ordering::Relaxed)
    }

    /// Maximum payload that both hosts accept, bytes.
    pub fn max_payload(&self) -> u16 {
        atomic!(AtomicU16, self.max_payload).load(Ordering::Relaxed)
    }

    /// The peer's index of the session, and its token for it.
    pub fn peer(&self) -> (u32, u64) {
        (
            atomic!(AtomicU32, self.peer_sid).load(Ordering::Relaxed),
            atomic!(AtomicU64, self.peer_token).load(Ordering::Relaxed),
        )
    }

    /// Bitmap of the packets arrived, of the 64 from number `word` * 64 on, in order or not; `None`
    /// beyond the highest. Once its bit is seen, an out-of-order packet is whole in its slot until
    /// the reader frees it. Bits of packets in order may be cleared.
    pub fn arrived(&self, word: u64) -> Option<u64> {
        let end = atomic!(AtomicU64, self.rx.max).load(Ordering::Relaxed);
        // SAFETY: within the mapping, aligned, and only touched atomically here.
        let map = unsafe { &raw mut (*self.at.as_ptr()).rx.map };
        let at = (word % u64::from(intf::VTL_WINDOW_WORDS)) as usize;
        // SAFETY: as above; the index is below the array's length.
        let bits = unsafe { AtomicU64::from_ptr(map.cast::<u64>().add(at)) };
        (word * 64 < end).then(|| bits.load(Ordering::Acquire))
    }

    /// Count of valid acknowledgements received.
    pub fn acks(&self) -> u64 {
        atomic!(AtomicU64, self.tx.acks).load(Ordering::Relaxed)
    }

    /// Changes with every valid packet of the peer: detects liveness.
    pub fn heard(&self) -> u64 {
        let acks = self.acks();
        let data = atomic!(AtomicU64, self.rx.received).load(Ordering::Relaxed);
        let again = atomic!(AtomicU32, self.rx.dups).load(Ordering::Relaxed);
        acks.wrapping_add(data).wrapping_add(again.into())
    }
}
