//! A loaded data plane with one open session, whose programs run by `BPF_PROG_TEST_RUN`. For tests
//! and micro-benchmarks, so failures panic; measurements of a user's graft use [`Kernel::with`] and
//! [`Kernel::try_run`].
#![allow(clippy::missing_panics_doc)]

use std::{
    io,
    num::NonZero,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    time::Instant,
};

pub use crate::test_run::{TC, Verdicts, XDP};
use crate::{
    Error, Result, objects,
    plane::{DataPlane, GraftInfo, program_of},
    pump::Turn,
    rings::{RingMaker, RingSet},
    test_run::{self, From},
};
use libbpf_rs::{Object, ObjectBuilder};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use vtl_pool::object::Description;
use vtl_proto::{
    field,
    intf::{self, vtl_ring_ctl, vtl_session, vtl_slot},
    ip,
    wire::{Ack, Data, Header, Packet},
};

/// The open session.
pub const SID: u32 = 1;
/// The peer's number for it.
pub const PEER_SID: u32 = 7;
/// Token in the peer's packets.
pub const TOKEN: u64 = 0x1122_3344_5566_7788;
/// Token in packets to the peer.
pub const PEER_TOKEN: u64 = 0x99aa_bbcc_ddee_ff00;
/// The graft of [`Kernel::new`].
pub const GID: u16 = 2;
/// Packets of its rings.
pub const SLOTS: u32 = 256;
const OURS: [u8; 4] = [10, 0, 0, 1];
const THEIRS: [u8; 4] = [10, 0, 0, 2];

/// The data plane with one graft, and the rings of a session over it.
pub struct Kernel {
    /// The data plane.
    pub plane: DataPlane,
    /// The graft.
    pub graft: GraftInfo,
    /// Initial parameters.
    params: [u32; intf::VTL_PARAMS as usize],
    /// Rings of the open session, and of [`Kernel::open_other_end`].
    rings: Vec<RingSet>,
    transmit: NonNull<vtl_slot>,
    receive: NonNull<vtl_slot>,
}

/// Result of a test run.
pub struct Ran {
    /// The program's return value.
    pub verdict: u32,
    /// The frame after the run.
    pub frame: Vec<u8>,
    /// Mean per repetition, nanoseconds.
    pub ns: u32,
}

fn map_ring(fd: BorrowedFd<'_>) -> Result<NonNull<vtl_slot>> {
    let bytes = size_of::<vtl_slot>() * (SLOTS as usize + 1);
    let length = NonZero::new(bytes.next_multiple_of(4096)).expect("not empty");
    // SAFETY: a new mapping at an address of the kernel's choice; it stays for the process's life.
    let at = unsafe {
        mmap(
            None,
            length,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_SHARED,
            fd,
            0,
        )
    };
    let failed = |errno| Error::System {
        what: "cannot map a ring".into(),
        source: io::Error::from(errno),
    };
    Ok(at.map_err(failed)?.cast())
}

impl Kernel {
    /// Loads everything, with the graft `stream`; session 1 is open, over IPv4.
    #[allow(clippy::new_without_default)] // it does far too much for a default
    pub fn new() -> Self {
        let stream = objects::graft("stream").expect("it comes with VTL");
        Self::with(stream).expect("all of VTL loads")
    }

    /// As [`Kernel::new`], with another graft and its default parameters.
    ///
    /// # Errors
    /// The kernel rejects it, or setting up fails.
    pub fn with(object: &[u8]) -> Result<Self> {
        let mut plane = DataPlane::load()?;
        let graft = plane.deploy(object)?;
        let description = Description::read(object).map_err(|e| Error::BadGraft(e.to_string()))?;
        let mut params = [0; intf::VTL_PARAMS as usize];
        for (place, parameter) in params.iter_mut().zip(&description.parameters) {
            *place = parameter.default;
        }
        let rings = RingMaker::new(&plane)?.make(&[SLOTS, SLOTS])?;
        let transmit = map_ring(rings[0].transmit())?;
        let receive = map_ring(rings[0].receive())?;
        let kernel = Self {
            plane,
            graft,
            params,
            rings,
            transmit,
            receive,
        };
        kernel.open(SID, kernel.graft.gid, intf::VTL_OPEN);
        Ok(kernel)
    }

    /// Opens the session at the other end of the first one: the frames of either are input for the
    /// other.
    pub fn open_other_end(&self) {
        self.open(PEER_SID, self.graft.gid, intf::VTL_FREE);
        let rings = self.rings.get(1).map_or(0, |rings| rings.index);
        self.change(PEER_SID, |s| {
            s.ring = rings;
            (s.token, s.peer_token, s.peer_sid) = (PEER_TOKEN, TOKEN, SID);
            s.headers = ip::template(THEIRS.into(), OURS.into());
            s.ifindex = intf::VTL_LOOPBACK_IFINDEX; // where test runs let frames come in
        });
        self.alter(|s| s.ifindex = intf::VTL_LOOPBACK_IFINDEX);
    }

    /// Makes a session like the first one; they share rings.
    pub fn open(&self, sid: u32, gid: u16, state: u32) {
        let mut s = vtl_session {
            sid,
            token: TOKEN,
            peer_token: PEER_TOKEN,
            peer_sid: PEER_SID,
            slots: SLOTS,
            gid,
            param: self.params,
            max_payload: 1440,
            path: 1440,
            ip_version: 4,
            headers: ip::template(OURS.into(), THEIRS.into()),
            ..Default::default()
        };
        s.tx.limit = SLOTS.into();
        s.tx.cwnd = 32;
        s.tx.reorder = intf::VTL_REORDER;
        s.tx.xid = 1;
        let entry = self.plane.sessions().get(sid).expect("a session");
        entry.initialise(s);
        entry.set_state(state);
    }

    /// Changes the session's state. No program may run meanwhile.
    pub fn alter(&self, change: impl FnOnce(&mut vtl_session)) {
        self.change(SID, change);
    }

    fn change(&self, sid: u32, change: impl FnOnce(&mut vtl_session)) {
        let entry = self.plane.sessions().get(sid).expect("a session");
        let mut state = entry.snapshot();
        change(&mut state);
        entry.set_state(intf::VTL_FREE);
        entry.initialise(state);
        entry.set_state(intf::VTL_OPEN);
    }

    /// The session's state.
    pub fn session(&self) -> vtl_session {
        self.plane
            .sessions()
            .get(SID)
            .expect("a session")
            .snapshot()
    }

    /// Points both egress drivers at a session, for one frame; returns a frame for it.
    pub fn pump(&self, sid: u32) -> Vec<u8> {
        self.plane.shards()[0]
            .pump_entry()
            .set(&[Turn { sid, quota: 1 }]);
        let mut f = vec![0; 1514];
        f[ip::field::ETHERTYPE].copy_from_slice(&(intf::VTL_PUMP_ETHERTYPE as u16).to_be_bytes());
        f
    }

    /// Writes and publishes a packet, as the application does.
    pub fn write(&self, seq: u64, payload: &[u8]) {
        let index = 1 + (seq % u64::from(SLOTS)) as usize;
        // SAFETY: the ring has SLOTS + 1 slots, and no program runs at this moment.
        unsafe {
            let slot = &mut *self.transmit.as_ptr().add(index);
            slot.len = payload.len() as u32;
            slot.data[..payload.len()].copy_from_slice(payload);
            (*self.transmit.as_ptr().cast::<vtl_ring_ctl>()).producer = seq + 1;
        }
    }

    /// Reads the receive ring: packet `seq`, and the producer position.
    pub fn read(&self, seq: u64) -> (Vec<u8>, u64) {
        let index = 1 + (seq % u64::from(SLOTS)) as usize;
        // SAFETY: as in `write`.
        unsafe {
            let slot = &*self.receive.as_ptr().add(index);
            let producer = (*self.receive.as_ptr().cast::<vtl_ring_ctl>()).producer;
            (slot.data[..slot.len as usize].to_vec(), producer)
        }
    }

    /// Runs a root program on a frame; it tail-calls the graft's.
    pub fn run(&self, program: &str, frame: &[u8], repeat: u32) -> Ran {
        self.try_run(program, frame, repeat).expect("it runs")
    }

    /// As [`Kernel::run`].
    ///
    /// # Errors
    /// The kernel does not run it.
    pub fn try_run(&self, program: &str, frame: &[u8], repeat: u32) -> Result<Ran> {
        let program_fd = self.plane.program(program);
        run(program, program_fd, frame, From::Loopback, repeat)
    }

    /// As [`Kernel::run`], for a frame that arrives on an interface of the caller's network
    /// namespace.
    pub fn run_from(&self, interface: u32, program: &str, frame: &[u8]) -> Ran {
        let from = if program.ends_with("xdp") {
            From::Xdp(interface)
        } else {
            From::Tcx(interface)
        };
        run(program, self.plane.program(program), frame, from, 1).expect("it runs")
    }

    /// Runs a program, and returns the counters that it changed.
    pub fn counted(&self, program: &str, frame: &[u8]) -> (Ran, Vec<(u32, u64)>) {
        self.counting(|| self.run(program, frame, 1))
    }

    /// Returns the counters that a run changes.
    pub fn counting(&self, run: impl FnOnce() -> Ran) -> (Ran, Vec<(u32, u64)>) {
        let before = self.plane.stats();
        let ran = run();
        let moved = self
            .plane
            .stats()
            .into_iter()
            .zip(before)
            .map(|(a, b)| a - b);
        (ran, (0..).zip(moved).filter(|(_, n)| *n != 0).collect())
    }
}

fn run(program: &str, fd: BorrowedFd<'_>, frame: &[u8], from: From, repeat: u32) -> Result<Ran> {
    let mut out = Vec::new();
    let ran = test_run::run(fd, frame, from, repeat, &mut out).map_err(|source| Error::System {
        what: format!("cannot run {program}"),
        source,
    })?;
    Ok(Ran {
        verdict: ran.verdict,
        frame: out,
        ns: ran.ns,
    })
}

/// Size of a program's machine code, bytes.
fn machine_code(fd: BorrowedFd<'_>) -> u32 {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut length = size_of_val(&info) as u32;
    // SAFETY: the structure and its length, alive during the call; it asks for no arrays.
    let r = unsafe {
        libbpf_sys::bpf_prog_get_info_by_fd(fd.as_raw_fd(), &raw mut info, &raw mut length)
    };
    assert_eq!(r, 0, "a program of ours can be looked at");
    info.jited_prog_len
}

/// Programs that run single transport functions on the session: `bpf/micro.bpf.c`.
pub struct Micro(Object);

impl Micro {
    /// Loads them.
    pub fn load(kernel: &Kernel) -> Self {
        let open = ObjectBuilder::default().open_memory(objects::MICRO);
        let mut open = open.expect("the object can be read");
        kernel
            .plane
            .loader()
            .share_maps(&mut open)
            .expect("the same maps");
        Self(open.load().expect("the programs load"))
    }

    /// The program that calls a function, or (`base`) everything but the call: name, descriptor,
    /// and number of calls per run.
    fn program(&self, prefix: &str, function: &str) -> (String, BorrowedFd<'_>, u32) {
        // As in bpf/micro.bpf.c.
        const TURNS: u32 = 64;
        [("", TURNS), ("1", 1)]
            .into_iter()
            .find_map(|(suffix, turns)| {
                let name = format!("{prefix}{suffix}_{function}");
                program_of(&self.0, &name).map(|fd| (name, fd, turns))
            })
            .expect("programs of this name")
    }

    /// Calls a transport function, 64 times if it is called in a loop.
    pub fn call(&self, function: &str, frame: &[u8]) {
        let (name, fd, _) = self.program("cost", function);
        let ran = run(&name, fd, frame, From::Loopback, 1).expect("it runs");
        assert_eq!(ran.verdict, 0, "{name} finds its session");
    }

    /// Machine code of a transport function, bytes.
    pub fn code(&self, function: &str) -> u32 {
        let bytes = |prefix: &str| machine_code(self.program(prefix, function).1);
        bytes("cost").saturating_sub(bytes("base"))
    }

    /// Cost of a transport function, nanoseconds: the mean over many calls, minimum of several
    /// runs.
    pub fn ns(&self, function: &str, frame: &[u8]) -> f64 {
        const CALLS: u32 = 128_000;
        const TRIES: usize = 5;
        let turns = self.program("cost", function).2;
        let time = |prefix: &str| {
            let (name, fd, _) = self.program(prefix, function);
            // The kernel reports whole nanoseconds only.
            let once = || {
                let begun = Instant::now();
                let ran = run(&name, fd, frame, From::Loopback, CALLS / turns).expect("it runs");
                let took = begun.elapsed();
                assert_eq!(ran.verdict, 0, "{name} finds its session");
                took.as_nanos() as f64 / f64::from(CALLS / turns)
            };
            // Disturbances only add: take the minimum.
            (0..TRIES).map(|_| once()).fold(f64::INFINITY, f64::min)
        };
        (time("cost") - time("base")).max(0.0) / f64::from(turns)
    }
}

/// The header of packets that the peer sends.
pub fn header() -> Header {
    Header {
        flags: 0,
        gid: GID,
        sid: SID,
        token: TOKEN,
    }
}

/// A DATA packet from the peer.
pub fn data(seq: u64, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        flags: flags as u8,
        ..header()
    };
    frame(&Packet::Data(Data {
        header,
        seq,
        xid: (seq as u32).wrapping_add(1),
        ts: 77,
        payload,
    }))
}

/// An acknowledgement from the peer.
pub fn ack(cum: u64, received: u64, echo_xid: u32, bitmap: &[u8]) -> Vec<u8> {
    frame(&Packet::Ack(Ack {
        header: header(),
        cum,
        limit: cum + u64::from(SLOTS),
        received,
        echo_seq: cum.saturating_sub(1),
        echo_xid,
        echo_ts: 0,
        dups: 0,
        skip: 0,
        bitmap,
    }))
}

/// A packet in Ethernet and IPv4, from the peer.
pub fn frame(packet: &Packet<'_>) -> Vec<u8> {
    let mut body = vec![0; packet.wire_len()];
    packet.emit(&mut body).expect("a packet that parses");
    around(&body)
}

/// Encloses any body in Ethernet and IPv4.
pub fn around(body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    ip::enclose(body, THEIRS.into(), OURS.into(), &mut frame);
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame
}

/// Offset of the VTL header.
pub const VTL: usize = ip::OFFSET_V4;

/// Recomputes the checksum after a change of a frame of [`around`].
pub fn seal(frame: &mut [u8]) {
    let sum = vtl_proto::wire::checksum(&frame[VTL..]);
    frame[VTL..][field!(vtl_hdr, csum)].copy_from_slice(&sum.to_le_bytes());
}
