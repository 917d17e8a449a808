//! From an idle application's send to the packet at the peer's interface.

use std::io::IoSliceMut;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockProtocol, SockType, recvmsg,
    setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime};
use vtl::{Mode, Requirements, Services, Socket};
use vtl_proto::{
    intf,
    ip::{
        OFFSET_V4,
        field::{IP, V4_PROTOCOL, V4_SOURCE, V4_VERSION},
    },
};
use vtl_testbed::{Host, Lifetime, Profile, Testbed};

use super::Sheet;
use crate::daemons::{self, Daemons};
use crate::interrupt::Interrupt;
use crate::programs::Programs;

const PORT: u16 = 5_201;
/// Bytes of a message.
const MESSAGE: usize = 64;
const MESSAGES: u32 = 500;
/// How long a session rests before a message: acknowledgements are through, vtld sleeps.
const REST: Duration = Duration::from_millis(5);
/// How long a packet may take.
const PATIENCE: Duration = Duration::from_millis(500);
/// IPv4, with a header of 20 bytes.
const WITHOUT_OPTIONS: u8 = 0x45;
/// DATA of this version: the first byte of the header.
const DATA: u8 = (intf::VTL_VERSION << 4 | intf::VTL_DATA) as u8;

pub(super) fn run(
    programs: &Programs,
    name: &str,
    scratch: &Path,
    interrupt: &Interrupt,
    sheet: &mut Sheet<'_>,
) -> anyhow::Result<()> {
    let testbed = Testbed::up(name, &Profile::Wire.link(), Lifetime::Guarded)?;
    let options = daemons::Options::default();
    let daemons = Daemons::start(&testbed, programs, &options, scratch, scratch, interrupt)?;
    let tap = testbed.in_netns(Host::Server, Tap::open)??;
    let ways = [
        ("the application's own egress", true),
        ("through vtld, which sleeps", false),
    ];
    for ((way, direct), port) in ways.into_iter().zip(PORT..) {
        let at = SocketAddr::new(IpAddr::V4(testbed.addr4(Host::Server)), port);
        let mut server = Socket::init(Mode::Responder, at, daemons.socket(Host::Server))?;
        let reader = thread::spawn(move || {
            // Ends with the session.
            let _ = server.validate();
            while server.recv_in_place(64, |_| ()).is_ok_and(|n| n > 0) {}
        });
        let daemon = daemons.socket(Host::Client);
        let connect = || Socket::init(Mode::Initiator, at, daemon);
        // Only applications in vtld's own network namespace run egress themselves.
        let mut client = if direct {
            testbed.in_netns(Host::Client, connect)??
        } else {
            connect()?
        };
        client.negotiate(&Requirements {
            services: Services::RELIABLE.union(Services::ORDERED),
            ..Default::default()
        })?;
        let times = measure(&mut client, &tap, testbed.addr4(Host::Client), interrupt)?;
        for (quantile, text) in [(0.5, "p50"), (0.99, "p99")] {
            let us = times.value_at_quantile(quantile) as f64 / 1e3;
            sheet.add(way, text, us);
        }
        client.close()?;
        let _ = reader.join();
    }
    Ok(())
}

/// Nanoseconds from before the call that sends to the packet's timestamp.
fn measure(
    client: &mut Socket,
    tap: &Tap,
    from: Ipv4Addr,
    interrupt: &Interrupt,
) -> anyhow::Result<Histogram<u64>> {
    let mut times = Histogram::new(3)?;
    for _ in 0..MESSAGES {
        interrupt.check()?;
        thread::sleep(REST);
        tap.drain();
        let start = clock_gettime(ClockId::CLOCK_REALTIME)?;
        client.send_data(&[7; MESSAGE])?;
        let seen = tap.wait(from)?;
        times.record((seen - start).num_nanoseconds().max(0) as u64)?;
    }
    Ok(times)
}

/// Whether a packet, of which the IPv4 header and what follows are there, is DATA from this host.
fn is_data(packet: &[u8], from: Ipv4Addr) -> bool {
    const VTL: usize = OFFSET_V4 - IP;
    packet.len() > VTL
        && packet[V4_VERSION - IP] == WITHOUT_OPTIONS
        && packet[V4_PROTOCOL - IP] == intf::VTL_IPPROTO as u8
        && packet[V4_SOURCE.start - IP..V4_SOURCE.end - IP] == from.octets()
        && packet[VTL] == DATA
}

/// Sees what arrives at an interface, before VTL does, with the kernel's timestamps.
struct Tap(OwnedFd);

impl Tap {
    fn open() -> anyhow::Result<Self> {
        let tap = socket(
            AddressFamily::Packet,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            // Those for one protocol come behind tcx, which consumes VTL's packets.
            SockProtocol::EthAll,
        )
        .context("a packet socket")?;
        setsockopt(&tap, sockopt::ReceiveTimestampns, &true)?;
        Ok(Self(tap))
    }

    /// The next packet's IP header and what follows, and when it came.
    fn next(&self, buffer: &mut [u8]) -> nix::Result<(usize, Option<TimeSpec>)> {
        let mut control = cmsg_space!(TimeSpec);
        let mut parts = [IoSliceMut::new(buffer)];
        let message = recvmsg::<()>(
            self.0.as_raw_fd(),
            &mut parts,
            Some(&mut control),
            MsgFlags::empty(),
        )?;
        let time = message.cmsgs()?.find_map(|c| match c {
            ControlMessageOwned::ScmTimestampns(time) => Some(time),
            _ => None,
        });
        Ok((message.bytes, time))
    }

    fn drain(&self) {
        while self.next(&mut [0; 64]).is_ok() {}
    }

    /// When the next DATA packet from this host came. The kernel took the time, so how late we look
    /// does not matter.
    fn wait(&self, from: Ipv4Addr) -> anyhow::Result<TimeSpec> {
        let begun = Instant::now();
        let mut packet = [0; 64];
        while begun.elapsed() < PATIENCE {
            if let Ok((length, Some(time))) = self.next(&mut packet)
                && is_data(&packet[..length], from)
            {
                return Ok(time);
            }
            thread::sleep(Duration::from_micros(100));
        }
        bail!("a message did not leave")
    }
}
