//! The interface of a tunnel. It goes with the process, and takes its addresses and routes along.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use ipnet::IpNet;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::Value;
use tun_rs::{DeviceBuilder, SyncDevice};

use super::join::Joiner;
use super::virtio::VIRTIO;
use crate::failure::Failure;

/// Maximum length of an interface's name: IFNAMSIZ without its 0.
const MAX_NAME: usize = 15;
/// MTU while there is no session: the minimum of IPv6 (RFC 8200, section 5).
pub(super) const MIN_MTU: u16 = 1280;
/// Bytes that are read before they are sent, if so many are there.
const ENOUGH: usize = 32 << 10;
/// Maximum length of an IP packet, bytes.
pub(super) const MAX_PACKET: usize = 65_535;

/// The interface.
pub(super) struct Device {
    tun: SyncDevice,
    name: String,
    mtu: Mutex<u16>,
    addresses: Vec<IpNet>,
    routes: Vec<IpNet>,
}

/// Parses an interface's name, as the kernel takes it.
pub(super) fn name(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_graphic() && !['/', ':', '%'].contains(&c);
    if (1..=MAX_NAME).contains(&text.len())
        && text.chars().all(is_allowed)
        && text != "."
        && text != ".."
    {
        return Ok(text.to_owned());
    }
    Err(format!(
        "an interface's name has 1 to {MAX_NAME} characters, none of them a space, /, : or %"
    ))
}

impl Device {
    /// Makes the interface, with these addresses, and routes these prefixes there.
    ///
    /// # Errors
    /// No permission, there is an interface of that name, or the packets of the tunnel itself would be routed there.
    pub(super) fn make(
        name: &str,
        addresses: &[IpNet],
        routes: &[IpNet],
        peer: IpAddr,
    ) -> anyhow::Result<Self> {
        if if_nametoindex(name).is_ok() {
            bail!("there is an interface {name} already: choose another name");
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err(explain(name, &Errno::ENOENT.into())); // which the library would make
        }
        let tun = DeviceBuilder::new()
            .name(name)
            .mtu(MIN_MTU)
            .enable(false)
            .with(|device| {
                device.offload(true);
            })
            .build_sync()
            .and_then(|tun| tun.set_nonblocking(true).map(|()| tun))
            .map_err(|error| explain(name, &error))?;
        let device = Self {
            tun,
            name: name.to_owned(),
            mtu: MIN_MTU.into(),
            addresses: addresses.to_vec(),
            routes: routes.to_vec(),
        };
        device.disable_link_local();
        ip(&["link", "set", "dev", name, "up"])?;
        device.configure("add")?;
        let text = ip(&["-json", "route", "get", &peer.to_string()])?;
        let hops: Value = serde_json::from_slice(&text).context("cannot read `ip route get`")?;
        if hops[0]["dev"] == name {
            bail!(
                "{peer}, the peer, would itself be reached through {name}: give it a route of its own first \
                 (ip route add {peer} via GATEWAY), or narrow --address and --route"
            );
        }
        Ok(device)
    }

    /// Keeps the interface from getting a link-local address when it comes up: nobody has asked for one. Without IPv6 in
    /// the kernel there would be none.
    fn disable_link_local(&self) {
        let _ = ip(&["link", "set", "dev", &self.name, "addrgenmode", "none"]);
    }

    /// Adds addresses and routes, or replaces them.
    fn configure(&self, verb: &str) -> anyhow::Result<()> {
        for address in &self.addresses {
            ip(&["address", verb, &address.to_string(), "dev", &self.name])?;
        }
        for route in &self.routes {
            let prefix = route.trunc().to_string();
            ip(&["route", verb, &prefix, "dev", &self.name])?;
        }
        Ok(())
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sets the maximum length of packets, bytes. Returns whether it was another one.
    ///
    /// # Errors
    /// The interface is gone, or was taken down.
    pub(super) fn set_mtu(&self, mtu: u16) -> anyhow::Result<bool> {
        let mut current = self.mtu.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *current;
        if before == mtu {
            return Ok(false);
        }
        self.tun.set_mtu(mtu)?;
        *current = mtu;
        if before < MIN_MTU && mtu >= MIN_MTU {
            // The kernel has taken everything of IPv6 from the interface.
            self.disable_link_local();
            self.configure("replace")?;
        }
        Ok(true)
    }

    /// Takes packets that were routed into the interface: waits for the first, and takes what else is there, up to a
    /// limit.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn read(&self, into: &mut Pieces) -> io::Result<()> {
        into.lengths.clear();
        let mut used = 0;
        while used < ENOUGH {
            match nix::unistd::read(&self.tun, &mut into.bytes[used..]) {
                Ok(length) => {
                    into.lengths.push(length);
                    used += length;
                }
                Err(Errno::EINTR) => {}
                // An error comes again with the next call.
                Err(_) if used > 0 => break,
                Err(Errno::EAGAIN) => {
                    let mut of = [PollFd::new(self.tun.as_fd(), PollFlags::POLLIN)];
                    match poll(&mut of, PollTimeout::NONE) {
                        Ok(_) | Err(Errno::EINTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Packets that the interface takes.
    pub(super) fn joiner(&self) -> Joiner {
        Joiner::new(self.tun.udp_gso())
    }

    /// Has the kernel receive packets from the interface. What it does not take is lost, as on any link.
    pub(super) fn write(&self, packets: &mut Joiner) {
        packets.take(|piece| {
            let _ = nix::unistd::write(&self.tun, piece);
        });
    }
}

fn explain(name: &str, error: &io::Error) -> anyhow::Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => {
            Failure::permission("making an interface needs root, or CAP_NET_ADMIN")
        }
        Some(Errno::ENOENT | Errno::ENODEV) => anyhow::anyhow!(
            "this kernel has no TUN: load it (modprobe tun), or build the kernel with CONFIG_TUN"
        ),
        _ => anyhow::anyhow!("cannot make the interface {name}: {error}"),
    }
}

/// Runs ip(8), and gives what it writes.
fn ip(args: &[&str]) -> anyhow::Result<Vec<u8>> {
    let output = Command::new("ip").args(args).output();
    let output = output.context("cannot run ip, of the package iproute2")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("ip {}: {}", args.join(" "), words.trim());
    }
    Ok(output.stdout)
}

/// What was read: packets, and TCP segments or UDP datagrams in one piece, each with virtio's header.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    lengths: Vec<usize>,
}

impl Pieces {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; ENOUGH + VIRTIO + MAX_PACKET],
            lengths: Vec::new(),
        }
    }

    /// The pieces that were read last.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let mut rest = &mut self.bytes[..];
        self.lengths.iter().map(move |length| {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(*length);
            rest = behind;
            piece
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name__takes_what_the_kernel_takes() {
        for good in ["vtl0", "a", "to-berlin", "fifteen-letters"] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "sixteen-letters-",
            "a b",
            "a/b",
            "tun%d",
            "a:b",
            "..",
            "ü",
        ] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
