//! The egress drivers: they make the kernel run egress of sessions and transmit the packets.

use std::{
    io,
    num::NonZero,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vtl_proto::{intf, ip};

use crate::{Error, Result, anchor::Anchor, netdev, shard::Shard};

/// Packet limit of one call, on any interface.
pub const BATCH: u32 = 256;
/// Packet limit of one call on a veth, whose peer takes each of the kernel's batches before the
/// next. On a network card it would overrun the queue.
const BATCH_VETH: u32 = 1024;
/// Frames that the kernel transmits per batch, before the receiving side of a veth, with a ring of
/// 256, takes them. Later batches of a call reuse the frames of earlier ones, at half the cost.
const FRAMES: u32 = 64;

/// One session's share of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The session.
    pub sid: u32,
    /// Frames for it, at least one. One more than its packets lets egress detect, and record in the
    /// session, that it has run dry.
    pub quota: u32,
}

/// Progress of a call: the turns below `turns` have ended, the next one has `left` frames to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Turns that have ended.
    pub turns: usize,
    /// Frames left for the turn after those.
    pub left: u32,
}

/// An entry of the map `vtl_pump` (`struct vtl_pump`), mapped: the sessions that egress serves, one
/// after the other, and how the caller hears of events.
pub struct PumpEntry {
    mapping: NonNull<libc::c_void>,
    bytes: NonZero<usize>,
    at: NonNull<intf::vtl_pump>,
}

// SAFETY: shared memory by nature, touched atomically only.
unsafe impl Send for PumpEntry {}
// SAFETY: as above.
unsafe impl Sync for PumpEntry {}

impl PumpEntry {
    /// Maps entry `index`, which must exist.
    pub(crate) fn map(fd: BorrowedFd<'_>, index: u32) -> Result<Self> {
        const PAGE: usize = 4096;
        let before = index as usize * size_of::<intf::vtl_pump>();
        let end = before + size_of::<intf::vtl_pump>();
        let bytes = NonZero::new(end.next_multiple_of(PAGE)).expect("not empty");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapping = unsafe {
            mmap(
                None,
                bytes,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                fd,
                0,
            )
        }
        .map_err(|e| Error::System {
            what: "mapping an entry of vtl_pump".into(),
            source: e.into(),
        })?;
        // SAFETY: the entry lies inside the mapping, by the choice of its length.
        let at = unsafe { mapping.byte_add(before) }.cast();
        Ok(Self { mapping, bytes, at })
    }

    fn field(&self, field: *mut u32) -> &AtomicU32 {
        // SAFETY: callers name an aligned field inside the mapping, which is touched atomically
        // only and lives as long as `self`.
        unsafe { AtomicU32::from_ptr(field) }
    }

    /// Sets the sessions whose egress runs from now on.
    ///
    /// # Panics
    /// If there are more than `VTL_TURNS`.
    pub fn set(&self, turns: &[Turn]) {
        assert!(turns.len() <= intf::VTL_TURNS as usize);
        let map = self.at.as_ptr();
        for (i, turn) in turns.iter().enumerate() {
            // SAFETY: only addresses are taken, of entry i, which exists.
            let (sid, quota) =
                unsafe { (&raw mut (*map).turns[i].sid, &raw mut (*map).turns[i].quota) };
            self.field(sid).store(turn.sid, Ordering::Relaxed);
            self.field(quota).store(turn.quota, Ordering::Relaxed);
        }
        // SAFETY: only addresses are taken.
        let (at, uses, count) = unsafe {
            (
                &raw mut (*map).at,
                &raw mut (*map).uses,
                &raw mut (*map).count,
            )
        };
        self.field(at).store(0, Ordering::Relaxed);
        self.field(uses).store(0, Ordering::Relaxed);
        self.field(count)
            .store(turns.len() as u32, Ordering::Release);
    }

    /// Sets whether the caller polls the events before it sleeps, so that they need not wake it.
    /// After clearing it, the caller must poll once more.
    pub fn set_awake(&self, awake: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).awake });
        // An exchange: the caller's poll of the events must not be reordered before it.
        field.swap(awake.into(), Ordering::SeqCst);
    }

    /// Sets whether frames of [`intf::VTL_DOORBELL_ETHERTYPE`] on the loopback wake the caller; their
    /// mark is the entry's number.
    pub fn set_doorbell(&self, doorbell: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).doorbell });
        field.store(doorbell.into(), Ordering::Relaxed);
    }

    /// Sets whether the caller relays wake-ups to aware applications.
    pub fn set_relay(&self, relay: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).relay });
        field.store(relay.into(), Ordering::Relaxed);
    }

    /// Progress of egress.
    pub fn served(&self) -> Served {
        let map = self.at.as_ptr();
        // SAFETY: only the address is taken.
        let at = self.field(unsafe { &raw mut (*map).at });
        let turns = at.load(Ordering::Acquire) as usize;
        let left = turns.min(intf::VTL_TURNS as usize - 1);
        // SAFETY: as above; the entry exists.
        let left = self.field(unsafe { &raw mut (*map).turns[left].quota });
        Served {
            turns,
            left: left.load(Ordering::Relaxed),
        }
    }
}

impl Drop for PumpEntry {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `map`.
        let _ = unsafe { munmap(self.mapping, self.bytes.get()) };
    }
}

/// Egress driver requested by the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// `live` if the interface supports it, else `tc`.
    #[default]
    Auto,
    /// XDP live frames.
    Live,
    /// AF_PACKET and a tcx egress program.
    Tc,
}

/// An egress driver for one interface.
pub enum Pump {
    /// The kernel runs the graft on fresh frames and transmits them (`XDP live frames`).
    Live(Live),
    /// Frames are sent through a packet socket; tcx egress replaces their content.
    Tc(Tc),
}

/// See [`Pump::Live`].
pub struct Live {
    program: OwnedFd,
    entry: Arc<PumpEntry>,
    ifindex: u32,
    batch: u32,
    frame: Vec<u8>,
    _anchor: Arc<Anchor>,
}

/// See [`Pump::Tc`].
pub struct Tc {
    socket: OwnedFd,
    entry: Arc<PumpEntry>,
    frame: Vec<u8>,
}

impl Pump {
    /// Opens the driver for an interface; the second value is the reason for the choice.
    ///
    /// # Errors
    /// [`Error::System`] if the chosen driver does not work on this host.
    pub fn open(shard: &Shard, ifindex: u32, mtu: u32, choice: Choice) -> Result<(Self, String)> {
        let can = netdev::can_transmit_xdp(ifindex);
        let frame = frame(mtu);
        let (live, why) = match (choice, can) {
            (Choice::Live, _) => (true, "asked for"),
            (Choice::Tc, _) => (false, "asked for"),
            (Choice::Auto, Some(true)) => (true, "the interface transmits XDP frames"),
            (Choice::Auto, Some(false)) => (
                false,
                "the interface does not transmit XDP frames (a veth does when its peer has GRO \
                 on: ethtool -K PEER gro on)",
            ),
            (Choice::Auto, None) => (false, "the kernel does not say whether XDP frames work"),
        };
        let pump = if live {
            Self::Live(Live::open(shard, ifindex, frame)?)
        } else {
            Self::Tc(Tc::open(shard, ifindex, frame)?)
        };
        Ok((pump, why.to_owned()))
    }

    /// The driver's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Live(_) => "live",
            Self::Tc(_) => "tc",
        }
    }

    /// Packet limit of one call: [`BATCH`] or more.
    pub fn batch(&self) -> u32 {
        match self {
            Self::Live(live) => live.batch,
            Self::Tc(_) => BATCH,
        }
    }

    /// Runs egress of the sessions one after the other, and transmits their packets: at most
    /// [`Pump::batch`] frames. All sessions' peers must be reached through the pump's interface.
    ///
    /// # Errors
    /// The system call's error.
    ///
    /// # Panics
    /// If there are more turns than `VTL_TURNS`.
    pub fn run(&mut self, turns: &[Turn]) -> io::Result<Served> {
        let frames: u32 = turns.iter().map(|t| t.quota).sum();
        let max = self.batch();
        let entry = match self {
            Self::Live(live) => &live.entry,
            Self::Tc(tc) => &tc.entry,
        };
        let entry = Arc::clone(entry);
        entry.set(turns);
        match self {
            Self::Live(live) => live.run(frames.clamp(1, max)),
            Self::Tc(tc) => tc.run(frames.clamp(1, max)),
        }?;
        Ok(entry.served())
    }
}

/// A frame for egress to fill, of the size of the largest packet.
pub(crate) fn frame(mtu: u32) -> Vec<u8> {
    let headers =
        intf::VTL_HEADROOM + intf::VTL_UDP_HEADER + size_of::<intf::vtl_data_hdr>() as u32;
    let max = headers + intf::VTL_MAX_PAYLOAD;
    let mut frame = vec![0; (mtu + ip::field::IP as u32).min(max) as usize];
    frame[ip::field::ETHERTYPE].copy_from_slice(&(intf::VTL_PUMP_ETHERTYPE as u16).to_be_bytes());
    frame
}

impl Live {
    fn open(shard: &Shard, ifindex: u32, mut frame: Vec<u8>) -> Result<Self> {
        // Larger than any packet, so that egress always shortens it: if a program leaves the length
        // unchanged, the kernel takes that of the frame's previous use, which the receiving side of
        // a veth may have turned into a short acknowledgement.
        frame.extend([0; 2]);
        Ok(Self {
            program: shard.program()?,
            entry: Arc::clone(shard.pump_entry()),
            ifindex,
            batch: if netdev::is_veth(ifindex) {
                BATCH_VETH
            } else {
                BATCH
            },
            frame,
            _anchor: shard.anchor()?,
        })
    }

    fn run(&mut self, count: u32) -> io::Result<()> {
        let mut context = libbpf_sys::xdp_md {
            data_end: self.frame.len() as u32,
            ingress_ifindex: self.ifindex,
            ..Default::default()
        };
        let mut options = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
            data_in: self.frame.as_ptr().cast(),
            data_size_in: self.frame.len() as u32,
            ctx_in: (&raw mut context).cast(),
            ctx_size_in: size_of::<libbpf_sys::xdp_md>() as u32,
            repeat: count as i32,
            flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
            batch_size: count.min(FRAMES),
            ..Default::default()
        };
        // SAFETY: the options refer to the frame and the context, which outlive the call.
        let r = unsafe {
            libbpf_sys::bpf_prog_test_run_opts(self.program.as_raw_fd(), &raw mut options)
        };
        if r < 0 {
            Err(io::Error::from_raw_os_error(-r))
        } else {
            Ok(())
        }
    }
}

impl Tc {
    fn open(shard: &Shard, ifindex: u32, frame: Vec<u8>) -> Result<Self> {
        // SAFETY: a plain system call; protocol 0 receives nothing.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(Error::last("a packet socket"));
        }
        // SAFETY: a new descriptor that nobody else owns.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let to = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: 0,
            sll_ifindex: ifindex as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: the address is initialised and its true size is given.
        let r = unsafe {
            libc::bind(
                fd,
                (&raw const to).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        if r < 0 {
            return Err(Error::last("binding a packet socket"));
        }
        let option = |name, value: libc::c_int| {
            // SAFETY: an int option with its size.
            unsafe {
                libc::setsockopt(
                    fd,
                    libc::SOL_SOCKET,
                    name,
                    (&raw const value).cast(),
                    size_of::<libc::c_int>() as u32,
                )
            }
        };
        // Room for whole batches below the socket: an overflow would block the pump.
        option(libc::SO_SNDBUFFORCE, 4 << 20);
        // Egress finds its entry of `vtl_pump` by the mark.
        if option(libc::SO_MARK, shard.number() as libc::c_int) < 0 {
            return Err(Error::last("marking a packet socket"));
        }
        Ok(Self {
            socket,
            entry: Arc::clone(shard.pump_entry()),
            frame,
        })
    }

    fn run(&mut self, count: u32) -> io::Result<()> {
        let mut part = libc::iovec {
            iov_base: self.frame.as_mut_ptr().cast(),
            iov_len: self.frame.len(),
        };
        // SAFETY: mmsghdr is plain data for which zeros are valid.
        let mut messages: [libc::mmsghdr; BATCH as usize] = unsafe { std::mem::zeroed() };
        for message in &mut messages[..count as usize] {
            message.msg_hdr.msg_iov = &raw mut part;
            message.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: `count` messages, each with one part, all alive during the call.
        let r = unsafe {
            libc::sendmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT,
            )
        };
        let error = io::Error::last_os_error();
        // A full queue is normal backpressure.
        if r < 0 && !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS)) {
            return Err(error);
        }
        Ok(())
    }
}
