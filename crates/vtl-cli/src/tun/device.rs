//! The interface of a tunnel. It goes with the process, and takes its addresses and routes along.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use ipnet::IpNet;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use serde_json::Value;
use tun_rs::{DeviceBuilder, GROTable, IDEAL_BATCH_SIZE, SyncDevice, VIRTIO_NET_HDR_LEN};

use crate::failure::Failure;

/// Maximum length of an interface's name: IFNAMSIZ without its 0.
const MAX_NAME: usize = 15;
/// MTU while there is no session: the minimum of IPv6 (RFC 8200, section 5).
pub(super) const MIN_MTU: u16 = 1280;
/// Bytes before packets, for the device's header.
const HEADROOM: usize = VIRTIO_NET_HDR_LEN;
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

    /// Takes packets that were routed into the interface; waits for the first.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn read(&self, into: &mut ReadBuffers) -> io::Result<()> {
        let ReadBuffers {
            raw,
            packets,
            sizes,
            used,
        } = into;
        *used = 0;
        match self.tun.recv_multiple(raw, packets, sizes, 0) {
            Ok(count) => {
                *used = count;
                Ok(())
            }
            // A packet that cannot be taken apart.
            Err(error) if error.raw_os_error().is_none() => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Has the kernel receive packets from the interface. What it does not take is lost, as on any link.
    pub(super) fn write(&self, batch: &mut Batch) {
        let Batch { packets, used, gro } = batch;
        let _ = self.tun.send_multiple(gro, &mut packets[..*used], HEADROOM);
        *used = 0;
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

/// Room for packets that are read.
pub(super) struct ReadBuffers {
    raw: Vec<u8>,
    packets: Vec<Vec<u8>>,
    sizes: Vec<usize>,
    used: usize,
}

impl ReadBuffers {
    pub(super) fn new() -> Self {
        Self {
            raw: vec![0; HEADROOM + MAX_PACKET],
            // What the kernel hands over in one piece is taken apart into packets of at most the MTU.
            packets: vec![vec![0; MAX_PACKET]; IDEAL_BATCH_SIZE],
            sizes: vec![0; IDEAL_BATCH_SIZE],
            used: 0,
        }
    }

    /// The packets that were read last.
    pub(super) fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let packets = self.packets.iter().zip(&self.sizes);
        packets
            .take(self.used)
            .map(|(packet, size)| &packet[..*size])
    }
}

/// Packets that are to be written together: segments of one TCP connection go to the kernel as one.
pub(super) struct Batch {
    packets: Vec<Vec<u8>>,
    used: usize,
    gro: GROTable,
}

impl Batch {
    /// Maximum number of packets.
    const MAX_PACKETS: usize = 64;

    pub(super) fn new() -> Self {
        // Segments are put together in the first one's buffer.
        let packet = || Vec::with_capacity(2 * HEADROOM + MAX_PACKET);
        Self {
            packets: (0..Self::MAX_PACKETS).map(|_| packet()).collect(),
            used: 0,
            gro: GROTable::default(),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.packets.len()
    }

    /// Adds a packet of at most 64 KiB; there must be room.
    pub(super) fn push(&mut self, packet: &[u8]) {
        let room = &mut self.packets[self.used];
        room.clear();
        room.resize(HEADROOM, 0);
        room.extend_from_slice(packet);
        self.used += 1;
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
