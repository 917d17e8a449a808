//! The egress drivers: how the kernel is asked to run a session's egress graft and to transmit
//! what it makes.

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
use vtl_proto::intf;

use crate::{Error, Result, anchor::Anchor, netdev, shard::Shard};

/// Packets that one call may ask for on any interface.
pub const BATCH: u32 = 256;
/// The same on a veth, whose other side takes each of the kernel's batches before the next one. More
/// would overrun the queue of a network card.
const BATCH_VETH: u32 = 1024;
/// Frames that the kernel transmits at a time, before it lets the receiving side of a veth, whose
/// ring holds 256, take them. Later batches of a call use the frames of earlier ones again, which
/// costs half as much as new ones.
const FRAMES: u32 = 64;

/// One session's part of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The session.
    pub sid: u32,
    /// Frames for it, at least one. One more than it has packets lets egress find out, and note
    /// in the session, that it has run dry.
    pub quota: u32,
}

/// How far a call came: the turns below `turns` have ended, the next one has `left` frames to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Turns that have ended.
    pub turns: usize,
    /// Frames that the turn behind those may still have.
    pub left: u32,
}

/// An entry of the map `vtl_pump`: whom egress serves.
pub struct Order {
    mapping: NonNull<libc::c_void>,
    bytes: NonZero<usize>,
    at: NonNull<intf::vtl_pump>,
}

// SAFETY: shared memory by nature, touched atomically only.
unsafe impl Send for Order {}
// SAFETY: as above.
unsafe impl Sync for Order {}

impl Order {
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
            what: "mapping the pump's order".into(),
            source: e.into(),
        })?;
        // SAFETY: the entry lies inside the mapping, whose length was made so.
        let at = unsafe { mapping.byte_add(before) }.cast();
        Ok(Self { mapping, bytes, at })
    }

    fn field(&self, field: *mut u32) -> &AtomicU32 {
        // SAFETY: callers name an aligned field inside the mapping, which is touched atomically
        // only and lives as long as `self`.
        unsafe { AtomicU32::from_ptr(field) }
    }

    /// Names the sessions whose egress runs from now on.
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

    /// Says whether the caller will look at the events before it sleeps, so that they need not wake
    /// it. Look once more after saying that you will not.
    pub fn set_awake(&self, awake: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).awake });
        // An exchange: the look at the events must not come before it.
        field.swap(awake.into(), Ordering::SeqCst);
    }

    /// Says whether frames of [`intf::VTL_BELL_ETHERTYPE`] on the loopback wake the caller, which have
    /// the entry's number as their mark.
    pub fn set_bell(&self, bell: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).bell });
        field.store(bell.into(), Ordering::Relaxed);
    }

    /// Says whether the caller hands wake-ups on to aware applications.
    pub fn set_relay(&self, relay: bool) {
        // SAFETY: only the address is taken.
        let field = self.field(unsafe { &raw mut (*self.at.as_ptr()).relay });
        field.store(relay.into(), Ordering::Relaxed);
    }

    /// How far egress has come.
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

impl Drop for Order {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `map`.
        let _ = unsafe { munmap(self.mapping, self.bytes.get()) };
    }
}

/// Which driver a user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// `live` where the interface can, else `tc`.
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
    order: Arc<Order>,
    ifindex: u32,
    batch: u32,
    frame: Vec<u8>,
    _anchor: Arc<Anchor>,
}

/// See [`Pump::Tc`].
pub struct Tc {
    socket: OwnedFd,
    order: Arc<Order>,
    frame: Vec<u8>,
}

impl Pump {
    /// Opens the driver for an interface; the second value says in words why this one.
    ///
    /// # Errors
    /// [`Error::System`] if the chosen driver does not work here.
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

    /// Packets that one call may ask for: [`BATCH`] or more.
    pub fn batch(&self) -> u32 {
        match self {
            Self::Live(live) => live.batch,
            Self::Tc(_) => BATCH,
        }
    }

    /// Has the kernel make and transmit packets of one session after the other, with at most
    /// [`Pump::batch`] frames. All sessions must be reached through the pump's interface.
    ///
    /// # Errors
    /// The system call's error.
    ///
    /// # Panics
    /// If there are more turns than `VTL_TURNS`.
    pub fn run(&mut self, turns: &[Turn]) -> io::Result<Served> {
        let frames: u32 = turns.iter().map(|t| t.quota).sum();
        let most = self.batch();
        let order = match self {
            Self::Live(live) => &live.order,
            Self::Tc(tc) => &tc.order,
        };
        let order = Arc::clone(order);
        order.set(turns);
        match self {
            Self::Live(live) => live.run(frames.clamp(1, most)),
            Self::Tc(tc) => tc.run(frames.clamp(1, most)),
        }?;
        Ok(order.served())
    }
}

/// A frame for egress to fill, as large as the largest packet.
pub(crate) fn frame(mtu: u32) -> Vec<u8> {
    let headers =
        intf::VTL_HEADROOM + intf::VTL_UDP_HEADER + size_of::<intf::vtl_data_hdr>() as u32;
    let most = headers + intf::VTL_MAX_PAYLOAD;
    let mut frame = vec![0; (mtu + 14).min(most) as usize];
    frame[12..14].copy_from_slice(&(intf::VTL_PUMP_ETHERTYPE as u16).to_be_bytes());
    frame
}

impl Live {
    fn open(shard: &Shard, ifindex: u32, mut frame: Vec<u8>) -> Result<Self> {
        // Larger than any packet, so that egress always cuts it: of a frame that a program leaves
        // as it was, the kernel takes the length from the frame's last use, which may have become a
        // short acknowledgement on the receiving side of a veth.
        frame.extend([0; 2]);
        Ok(Self {
            program: shard.program()?,
            order: Arc::clone(shard.order()),
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
        // Room for whole batches below the socket: what does not fit would block the pump.
        option(libc::SO_SNDBUFFORCE, 4 << 20);
        // By the mark egress finds whom it serves.
        if option(libc::SO_MARK, shard.number() as libc::c_int) < 0 {
            return Err(Error::last("marking a packet socket"));
        }
        Ok(Self {
            socket,
            order: Arc::clone(shard.order()),
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
        // A full queue is the path's normal way to say "later".
        if r < 0 && !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS)) {
            return Err(error);
        }
        Ok(())
    }
}
