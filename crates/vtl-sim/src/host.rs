//! One host's data plane: a safe interface to `native/native.c`.

use std::{net::IpAddr, ptr::NonNull};

use vtl_proto::{
    intf::{self, vtl_ack_hdr, vtl_graft_info, vtl_ring_ctl, vtl_sent, vtl_session, vtl_slot},
    ip,
};

use crate::ffi;

/// Buffer for any frame.
pub type FrameBuffer = [u8; ffi::VTL_NATIVE_FRAME as usize];

/// Time on a host's clock when a simulation begins, nanoseconds. Like a kernel that has run for a
/// while, so that no unset time stamp of the programs looks recent.
pub const UPTIME: u64 = 3_600_000_000_000;

/// Parameters of a new session.
#[derive(Clone, Copy, Debug)]
pub struct SessionConfig {
    /// The graft's name.
    pub graft: &'static str,
    /// The graft's parameters, by position; `None`: the default.
    pub params: [Option<u32>; intf::VTL_PARAMS as usize],
    /// Capacity of each ring, packets: a power of two.
    pub slots: u32,
    /// Maximum payload of a packet, bytes.
    pub max_payload: u16,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Number of the first transmission: 1 in vtld; other values test the wrap-around.
    pub first_xid: u32,
    /// Round trip of the handshake, microseconds; 0 if unknown.
    pub rtt_us: u32,
    /// The path's minimum round trip, as other connections know it, microseconds; 0 if unknown.
    pub known_us: u32,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            graft: "stream",
            params: Default::default(),
            slots: 1024,
            max_payload: 1440,
            ipv6: false,
            first_xid: 1,
            rtt_us: 0,
            known_us: 0,
        }
    }
}

impl SessionConfig {
    /// A session of this graft.
    pub fn of(graft: &'static str) -> Self {
        Self {
            graft,
            ..Default::default()
        }
    }

    /// Sets a parameter of the graft.
    ///
    /// # Panics
    /// If the graft has no such parameter, or the value is out of range.
    #[must_use]
    pub fn with(mut self, name: &str, value: u32) -> Self {
        let graft = graft(self.graft);
        let known = &graft.param[..graft.params as usize];
        let place = known.iter().position(|p| text(&p.name) == name);
        let place = place.unwrap_or_else(|| panic!("{} has no parameter {name}", self.graft));
        let p = &known[place];
        assert!((p.min..=p.max).contains(&value), "{name} {value}");
        self.params[place] = Some(value);
        self
    }
}

/// Descriptions of all grafts.
pub fn grafts() -> impl Iterator<Item = &'static vtl_graft_info> {
    // SAFETY: takes any index; what it returns are constants.
    (0..).map_while(|i| unsafe { ffi::vtl_native_graft(i).as_ref() })
}

/// Description of a graft.
///
/// # Panics
/// If there is no such graft.
pub fn graft(name: &str) -> &'static vtl_graft_info {
    let found = grafts().find(|g| text(&g.name) == name);
    found.unwrap_or_else(|| panic!("there is no graft {name}"))
}

/// Zero-terminated text.
pub fn text(bytes: &[core::ffi::c_char]) -> String {
    let text = bytes.iter().map(|c| *c as u8 as char);
    text.take_while(|c| *c != '\0').collect()
}

/// A host with sessions 1 to 7.
pub struct Host {
    at: NonNull<ffi::vtl_native_host>,
    slots: [u32; ffi::VTL_NATIVE_SESSIONS as usize],
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: made by vtl_native_new, and references into it cannot outlive `self`.
        unsafe { ffi::vtl_native_free(self.at.as_ptr()) };
    }
}

impl Host {
    /// A host without sessions.
    ///
    /// # Panics
    /// If memory runs out.
    pub fn new() -> Self {
        // SAFETY: takes nothing.
        let at = NonNull::new(unsafe { ffi::vtl_native_new() }).expect("memory");
        Self {
            at,
            slots: Default::default(),
        }
    }

    /// Opens session `sid` with the peer's session of the same number, as vtld does (`entry` and
    /// `fill` in `broker/session.rs`). `side`: 0 at one host, 1 at the other.
    ///
    /// # Panics
    /// If the session exists, or the parameters are invalid.
    pub fn open(&mut self, sid: u32, side: u8, config: &SessionConfig) {
        assert!(config.slots.is_power_of_two() && config.slots <= intf::VTL_MAX_WINDOW);
        // SAFETY: the host is alive; the call checks `sid`.
        let r = unsafe { ffi::vtl_native_add(self.at.as_ptr(), sid, config.slots) };
        assert_eq!(r, 0, "session {sid}");
        self.slots[sid as usize] = config.slots;
        let s = self.session_mut(sid);
        s.token = token(sid, side);
        s.peer_token = token(sid, 1 - side);
        s.peer_sid = sid;
        let graft = graft(config.graft);
        s.gid = graft.gid as u16;
        for (place, param) in graft.param.iter().enumerate() {
            s.param[place] = config.params[place].unwrap_or(param.initial);
        }
        s.max_payload = config.max_payload;
        s.path = config.max_payload;
        let address = |host: u8| match config.ipv6 {
            true => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host.into()]),
            false => IpAddr::from([10, 0, 0, host]),
        };
        s.ip_version = if config.ipv6 { 6 } else { 4 };
        s.headers = ip::template(address(1 + side), address(2 - side));
        s.headers[..12].copy_from_slice(&[2, 0, 0, 0, 0, 2 - side, 2, 0, 0, 0, 0, 1 + side]);
        s.ifindex = ffi::VTL_NATIVE_IFINDEX;
        s.tx.limit = config.slots.into();
        s.tx.cwnd = 32;
        s.tx.reorder = intf::VTL_REORDER;
        s.tx.xid = config.first_xid;
        s.tx.acked_xid = config.first_xid.wrapping_sub(1);
        s.tx.meter.xid = s.tx.acked_xid;
        s.tx.meter.min_rtt_us = config.known_us;
        if config.rtt_us != 0 {
            s.tx.srtt_us = config.rtt_us;
            s.tx.rttvar_us = config.rtt_us / 2;
            s.tx.pacing_gap_ns = u64::from(config.rtt_us) * 1000 / 64;
        }
        s.state = intf::VTL_OPEN;
    }

    fn slots(&self, sid: u32) -> u64 {
        let slots = self.slots[sid as usize];
        assert_ne!(slots, 0, "there is no session {sid}");
        slots.into()
    }

    /// A session's state.
    pub fn session(&self, sid: u32) -> &vtl_session {
        self.slots(sid);
        // SAFETY: the session exists and lives as long as the host, which is borrowed; C code runs
        // only in methods that borrow it exclusively.
        unsafe { &*ffi::vtl_native_session(self.at.as_ptr(), sid) }
    }

    /// A session's state, mutable.
    pub fn session_mut(&mut self, sid: u32) -> &mut vtl_session {
        self.slots(sid);
        // SAFETY: as in `session`, and the borrow is exclusive.
        unsafe { &mut *ffi::vtl_native_session(self.at.as_ptr(), sid) }
    }

    /// The graft's own state (`vtl_tx.own`), of which a transport function's is at the start: `vtl_bbr`,
    /// `vtl_cc`, `vtl_tfrc` or `vtl_reverse`.
    pub fn state<T: OwnState>(&self, sid: u32) -> &T {
        let own = &self.session(sid).tx.own;
        assert!(size_of::<T>() <= size_of_val(own));
        // SAFETY: it fits, words are aligned enough for it, and any bits are one of its values.
        unsafe { &*own.as_ptr().cast() }
    }

    /// The graft's own state, mutable.
    pub fn state_mut<T: OwnState>(&mut self, sid: u32) -> &mut T {
        let own = &mut self.session_mut(sid).tx.own;
        assert!(size_of::<T>() <= size_of_val(own));
        // SAFETY: as in `state`, and the borrow is exclusive.
        unsafe { &mut *own.as_mut_ptr().cast() }
    }

    /// Control block of the transmit ring.
    pub fn tx_ctl(&mut self, sid: u32) -> &mut vtl_ring_ctl {
        self.slots(sid);
        // SAFETY: slot 0 of the ring, which is larger and aligned to 8 bytes; exclusive borrow.
        unsafe { &mut *ffi::vtl_native_tx_ring(self.at.as_ptr(), sid).cast() }
    }

    /// Control block of the receive ring.
    pub fn rx_ctl(&mut self, sid: u32) -> &mut vtl_ring_ctl {
        self.slots(sid);
        // SAFETY: as in `tx_ctl`.
        unsafe { &mut *ffi::vtl_native_rx_ring(self.at.as_ptr(), sid).cast() }
    }

    /// The slot of packet `seq` in the transmit ring.
    pub fn tx_slot(&mut self, sid: u32, seq: u64) -> &mut vtl_slot {
        let index = 1 + (seq % self.slots(sid)) as usize;
        // SAFETY: the ring has `slots` + 1 entries; exclusive borrow.
        unsafe { &mut *ffi::vtl_native_tx_ring(self.at.as_ptr(), sid).add(index) }
    }

    /// Time of the session's next egress call, on the simulation's clock; see [`UPTIME`].
    pub fn wake(&self, sid: u32) -> u64 {
        self.session(sid).tx.wake_ns.saturating_sub(UPTIME)
    }

    /// The slot of packet `seq` in the receive ring.
    pub fn rx_slot(&mut self, sid: u32, seq: u64) -> &mut vtl_slot {
        let index = 1 + (seq % self.slots(sid)) as usize;
        // SAFETY: as in `tx_slot`.
        unsafe { &mut *ffi::vtl_native_rx_ring(self.at.as_ptr(), sid).add(index) }
    }

    /// The scoreboard entry of packet `seq`.
    pub fn sent(&mut self, sid: u32, seq: u64) -> &mut vtl_sent {
        let index = (seq % self.slots(sid)) as usize;
        // SAFETY: the scoreboard has `slots` entries; exclusive borrow.
        unsafe { &mut *ffi::vtl_native_scoreboard(self.at.as_ptr(), sid).add(index) }
    }

    /// One of the counters `VTL_ST_*`.
    pub fn stat(&self, stat: u32) -> u64 {
        assert!(stat < intf::VTL_STATS);
        // SAFETY: VTL_STATS counters, alive as long as the host.
        unsafe { *ffi::vtl_native_stats(self.at.as_ptr()).add(stat as usize) }
    }

    /// Events of a session for vtld since the last call: bits of `VTL_EV_*`.
    pub fn events(&mut self, sid: u32) -> u32 {
        self.slots(sid);
        // SAFETY: the session exists.
        unsafe { ffi::vtl_native_events(self.at.as_ptr(), sid) }
    }

    /// Runs egress for one packet. Returns the frame's length; `None`: the time of the next call is
    /// in the session's `wake_ns`.
    pub fn egress(&mut self, sid: u32, now: u64, frame: &mut FrameBuffer) -> Option<usize> {
        self.slots(sid);
        // SAFETY: the buffer is as long as the header says that any frame needs.
        let n = unsafe { ffi::vtl_native_egress(self.at.as_ptr(), sid, now, frame.as_mut_ptr()) };
        (n != 0).then_some(n as usize)
    }

    /// Passes a frame to ingress. Returns the length of the answer, if there is one.
    pub fn ingress(&mut self, now: u64, frame: &[u8], answer: &mut FrameBuffer) -> Option<usize> {
        // SAFETY: the lengths are those of the slices.
        let n = unsafe {
            ffi::vtl_native_ingress(
                self.at.as_ptr(),
                now,
                frame.as_ptr(),
                frame.len() as u32,
                answer.as_mut_ptr(),
                ffi::VTL_NATIVE_ANSWER,
            )
        };
        (n != 0).then_some(n as usize)
    }

    /// Calls a transport function of egress. `fill` completes the context, in which session and
    /// time are set; returns the verdict and the resulting context.
    pub fn out(
        &mut self,
        function: OutFunction,
        sid: u32,
        now: u64,
        fill: impl FnOnce(&mut ffi::vtl_out),
    ) -> (u32, ffi::vtl_out) {
        // SAFETY: plain data, for which zeros are valid.
        let mut o: ffi::vtl_out = unsafe { std::mem::zeroed() };
        (o.s, o.now) = (self.session_mut(sid), now);
        fill(&mut o);
        // SAFETY: the session belongs to this host, and `fill` had only pointers into it to give.
        let verdict = unsafe { function(self.at.as_ptr(), &raw mut o) };
        (verdict, o)
    }

    /// Calls a transport function of ingress for the packet with this header; see [`Host::out`].
    pub fn input(
        &mut self,
        function: InFunction,
        sid: u32,
        hdr: &mut intf::vtl_data_hdr,
        fill: impl FnOnce(&mut ffi::vtl_in),
    ) -> (u32, ffi::vtl_in) {
        // SAFETY: plain data, for which zeros are valid.
        let mut i: ffi::vtl_in = unsafe { std::mem::zeroed() };
        (i.s, i.hdr) = (self.session_mut(sid), hdr);
        fill(&mut i);
        // SAFETY: as in `out`.
        let verdict = unsafe { function(self.at.as_ptr(), &raw mut i) };
        (verdict, i)
    }

    /// Calls a transport function of the listener for an acknowledgement; see [`Host::out`].
    ///
    /// # Panics
    /// If the bitmap is too long.
    pub fn ackd(
        &mut self,
        function: AckFunction,
        sid: u32,
        now: u64,
        hdr: &mut vtl_ack_hdr,
        map: &[u64],
        fill: impl FnOnce(&mut ffi::vtl_ackd),
    ) -> (u32, ffi::vtl_ackd) {
        let mut words = [0; intf::VTL_ACK_WORDS as usize + 1];
        words[..map.len()].copy_from_slice(map);
        // SAFETY: plain data, for which zeros are valid.
        let mut a: ffi::vtl_ackd = unsafe { std::mem::zeroed() };
        (a.s, a.now, a.hdr) = (self.session_mut(sid), now, hdr);
        (a.map, a.words) = (words.as_ptr(), map.len() as u32);
        fill(&mut a);
        // SAFETY: as in `out`; the bitmap has the length that the contract asks for.
        let verdict = unsafe { function(self.at.as_ptr(), &raw mut a) };
        a.map = std::ptr::null();
        (verdict, a)
    }

    /// Builds an acknowledgement with up to `words` words of bitmap. Returns the length of the
    /// complete bitmap, words.
    pub fn build_ack(
        &mut self,
        sid: u32,
        hdr: &mut vtl_ack_hdr,
        map: &mut [u64; intf::VTL_ACK_WORDS as usize + 1],
        words: u32,
        update: bool,
    ) -> u32 {
        let s: *mut vtl_session = self.session_mut(sid);
        // SAFETY: the session belongs to this host, and the bitmap is as long as any.
        unsafe {
            ffi::vtl_native_ack_build(
                self.at.as_ptr(),
                s,
                hdr,
                map.as_mut_ptr(),
                words.min(intf::VTL_ACK_WORDS),
                update.into(),
            )
        }
    }

    /// `vtl_rx_limit`.
    pub fn rx_limit(&mut self, sid: u32) -> u64 {
        let s: *mut vtl_session = self.session_mut(sid);
        // SAFETY: the session belongs to this host.
        unsafe { ffi::vtl_native_rx_limit(self.at.as_ptr(), s) }
    }

    /// `vtl_can_send`.
    pub fn can_send(&mut self, sid: u32) -> bool {
        let s: *mut vtl_session = self.session_mut(sid);
        // SAFETY: the session belongs to this host.
        unsafe { ffi::vtl_native_can_send(self.at.as_ptr(), s) != 0 }
    }
}

/// State of a transport function in `vtl_tx.own`: plain integers.
pub trait OwnState {}
impl OwnState for ffi::vtl_bbr {}
impl OwnState for ffi::vtl_cc {}
impl OwnState for ffi::vtl_tfrc {}
impl OwnState for ffi::vtl_reverse {}

/// A transport function of egress.
pub type OutFunction =
    unsafe extern "C" fn(*mut ffi::vtl_native_host, *mut ffi::vtl_out) -> ffi::vtl_verdict;
/// A transport function of ingress.
pub type InFunction =
    unsafe extern "C" fn(*mut ffi::vtl_native_host, *mut ffi::vtl_in) -> ffi::vtl_verdict;
/// A transport function of the listener.
pub type AckFunction =
    unsafe extern "C" fn(*mut ffi::vtl_native_host, *mut ffi::vtl_ackd) -> ffi::vtl_verdict;

/// The token of session `sid` at one of the two hosts.
pub fn token(sid: u32, side: u8) -> u64 {
    0x0123_4567_89ab_cdef ^ u64::from(sid) << 32 ^ u64::from(side)
}

/// Packets in flight by the sender's count (`vtl_in_flight`), without the lower bound of 0.
pub fn in_flight(s: &vtl_session) -> i64 {
    s.tx.sent as i64 - (s.tx.delivered + s.tx.lost_total + s.tx.abandoned) as i64
}
