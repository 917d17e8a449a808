//! Somebody between the two hosts, who changes, repeats and forges packets.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use vtl_proto::{field, intf, ip};
use vtl_testbed::{Host, Link};

use crate::harness::{World, packet_socket, until};

const SIZE: usize = 4 << 20;
const UDP: u8 = 17;
/// A link-layer address: whoever follows it is heard no more.
const NOBODY: [u8; 6] = [2, 0, 0, 0, 0, 0x66];
/// How long the meddler holds what it says: the packet itself has arrived then.
const BEHIND: Duration = Duration::from_millis(50);
/// Not in the libc crate (`linux/if_packet.h`).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// On the router: hears what a host sends, and says to both what it likes.
struct Meddler {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<[u64; 2]>,
}

impl Meddler {
    fn begin(world: &World, hears: &'static str, other: &'static str) -> Self {
        let open = || [hears, other].map(on_interface);
        let sockets = world.testbed.in_netns(Host::Router, open);
        let [here, there] = sockets.expect("a namespace");
        let patience = nix::sys::time::TimeVal::new(0, 5_000);
        setsockopt(&here, sockopt::ReceiveTimeout, &patience).expect("set");
        let is_over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; 1 << 17];
            let mut number = 0_usize;
            let (mut said, mut followed) = (0, 0);
            let mut held = VecDeque::new();
            while !until.load(Relaxed) {
                if let Ok(length) = recv(here.as_raw_fd(), &mut buffer, MsgFlags::empty())
                    && is_vtl(&buffer[..length])
                {
                    number += 1;
                    followed += u64::from(
                        buffer[ip::field::LINK_DESTINATION] == NOBODY && !is_ack(&buffer),
                    );
                    let (mut frame, to_sender) = variation(&buffer[..length], number);
                    frame[ip::field::LINK_SOURCE].copy_from_slice(&NOBODY);
                    held.push_back((Instant::now() + BEHIND, frame, to_sender));
                }
                while let Some((_, frame, to_sender)) =
                    held.pop_front_if(|(at, ..)| *at <= Instant::now())
                {
                    let out = if to_sender { &here } else { &there };
                    if send(out.as_raw_fd(), &frame, MsgFlags::empty()).is_ok() {
                        said += 1;
                    }
                }
            }
            [said, followed]
        });
        Self { is_over, thread }
    }

    /// How many packets it has said, and how many were sent to where those came from.
    fn end(self) -> [u64; 2] {
        self.is_over.store(true, Relaxed);
        self.thread.join().expect("it ends")
    }
}

/// What others say at an interface, and not what the emulator, and this one, say there.
fn on_interface(name: &str) -> OwnedFd {
    let socket = packet_socket(name, libc::SOCK_RAW);
    let ignore = 1_i32;
    // SAFETY: an option of this length.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_IGNORE_OUTGOING,
            (&raw const ignore).cast(),
            size_of_val(&ignore) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    socket
}

/// Whether an IPv4 frame is one of VTL's: of its protocol, or of UDP.
fn is_vtl(frame: &[u8]) -> bool {
    let protocols = [intf::VTL_IPPROTO as u8, UDP];
    frame.get(ip::field::ETHERTYPE) == Some(&[8, 0])
        && frame
            .get(ip::field::V4_PROTOCOL)
            .is_some_and(|p| protocols.contains(p))
}

/// Whether a packet is an acknowledgement, if it is a session's: each copy is answered where it came from.
fn is_ack(frame: &[u8]) -> bool {
    u32::from(frame[ip::OFFSET_V4] & 15) == intf::VTL_ACK
}

/// What becomes of a packet, and whether it goes back to who has sent it.
fn variation(frame: &[u8], number: usize) -> (Vec<u8>, bool) {
    let mut frame = frame.to_vec();
    let body = ip::OFFSET_V4;
    let last = frame.len() - 1;
    match number % 6 {
        // Once more.
        0 | 1 => (frame, false),
        // Reflected.
        2 => {
            for (one, other) in [
                (ip::field::LINK_DESTINATION, ip::field::LINK_SOURCE),
                (ip::field::V4_SOURCE, ip::field::V4_DESTINATION),
            ] {
                for (i, j) in one.zip(other) {
                    frame.swap(i, j);
                }
            }
            (frame, true)
        }
        // With something changed: in the payload, in the header.
        3 => {
            frame[last] ^= 1;
            (frame, false)
        }
        4 => {
            frame[(body + number / 6 % 64).min(last)] ^= 1 << (number % 8);
            (frame, false)
        }
        // CLOSE with ABORT instead, with what proved the packet to be the sender's.
        _ => {
            frame[body] = (intf::VTL_VERSION << 4 | intf::VTL_CLOSE) as u8;
            frame[body + field!(vtl_hdr, flags).start] = intf::VTL_F_ABORT as u8;
            (frame, false)
        }
    }
}

/// Packets are said again from elsewhere, reflected, changed and made into others behind
/// themselves: that changes nothing.
fn meddled(name: &str, carrier: &str) {
    let Some(mut world) = World::new(name, &Link::new(10.0, 50.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let server = world.servers()[0];
    let run = ["--require-encryption", "--carrier", carrier];
    world.meet_by(&run);
    let ends = [Host::Client, Host::Server];
    let before = ends.map(|host| world.cost(host));
    let meddlers = [("to-client", "to-server"), ("to-server", "to-client")]
        .map(|(one, other)| Meddler::begin(&world, one, other));
    for _ in 0..2 {
        let mut download = world.start_download_run(&run, server, "f");
        let status = download.process.wait();
        assert!(status.success(), "{status}");
        download.check();
    }
    for [said, followed] in meddlers.map(Meddler::end) {
        println!("{carrier}: {said} said, {followed} followed");
        assert!(said > 100, "{said}");
        // Of a packet that a full queue has dropped, the copy is the first.
        assert!(followed <= said / 20, "{followed} of {said}");
    }
    assert!(world.carried("bytes_received") > SIZE as u64);
    for (host, before) in ends.into_iter().zip(before) {
        world.assert_cost(host, &before, 64 << 10, 5.0);
    }
}

#[test]
fn graft__meddled_with_on_the_path() {
    meddled("meddled-graft", "graft");
}

#[test]
fn quic__meddled_with_on_the_path() {
    meddled("meddled-quic", "quic");
}

/// Payloads are changed so that no checksum finds it. Whatever requires encryption arrives as it was, or ends in an
/// error; what has arrived is right.
#[test]
fn tampered__is_an_error_or_nothing() {
    let link = |tamper_pct| Link {
        tamper_pct,
        ..Link::new(10.0, 50.0)
    };
    let Some(world) = World::new("tampered", &link(0.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let server = world.servers()[0];
    for (i, carrier) in ["graft", "quic", "sctp", "kcp", "mptcp"]
        .into_iter()
        .enumerate()
    {
        let run = ["--require-encryption", "--carrier", carrier];
        let mut arrived = 0;
        for tamper in [0.02, 0.5] {
            world
                .testbed
                .set(&Link {
                    seed: 1 + i as u64,
                    ..link(tamper)
                })
                .expect("set");
            let mut download = world.start_download_run(&run, server, "f");
            if download.process.wait().success() {
                download.check();
                arrived += 1;
            } else {
                download.broke();
            }
        }
        let tampered = world.testbed.stats().expect("an emulator").down.tampered;
        println!("{carrier}: {arrived} of 2 have arrived, {tampered} packets were changed so far");
        assert!(tampered > 5 * (1 + i as u64));
        world.testbed.set(&link(0.0)).expect("set");
        until("it arrives again", || {
            let mut download = world.start_download_run(&run, server, "f");
            let arrives = download.process.wait().success();
            if arrives {
                download.check();
            }
            arrives
        });
    }
}
