//! What each network interface can do for VTL.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

use super::bpf;

/// `NETDEV_XDP_ACT_BASIC`: the driver runs XDP programs natively.
const XDP_BASIC: u64 = 1;
/// `NETDEV_XDP_ACT_NDO_XMIT`: the driver transmits frames that XDP redirects to it.
const XDP_XMIT: u64 = 1 << 2;
/// Drivers that advertise transmission only while an XDP program is attached (or GRO is on).
const XMIT_ON_ATTACH: [&str; 2] = ["veth", "virtio_net"];

/// An interface and the egress driver that `auto` would choose for it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Nic {
    /// Interface name.
    pub(super) name: String,
    /// Kernel driver, or `virtual`.
    pub(super) driver: String,
    /// Whether XDP runs natively; absent if the kernel does not say.
    pub(super) native_xdp: Option<bool>,
    /// Whether redirected frames are transmitted, at the latest once a program is attached.
    pub(super) xdp_xmit: Option<bool>,
    /// The egress driver that follows: `live` or `tc`.
    pub(super) egress: &'static str,
}

/// All interfaces but the loopback, by name.
pub(super) fn all() -> Vec<Nic> {
    let mut nics: Vec<Nic> = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        // A file, not an interface: appears where the bonding module is loaded.
        .filter(|name| name != "lo" && name != "bonding_masters")
        .map(nic)
        .collect();
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics
}

fn nic(name: String) -> Nic {
    let driver = driver(&name);
    let features = nix::net::if_::if_nametoindex(name.as_str())
        .map_err(io::Error::from)
        .and_then(bpf::xdp_features)
        .ok();
    let native_xdp = features.map(|bits| bits & XDP_BASIC != 0);
    let xdp_xmit = features
        .map(|bits| bits & XDP_XMIT != 0 || (bits & XDP_BASIC != 0 && transmits_later(&driver)));
    let live = native_xdp == Some(true) && xdp_xmit == Some(true);
    Nic {
        name,
        driver,
        native_xdp,
        xdp_xmit,
        egress: if live { "live" } else { "tc" },
    }
}

fn transmits_later(driver: &str) -> bool {
    XMIT_ON_ATTACH.contains(&driver)
}

/// The driver bound to the interface's device; virtual interfaces name their kind in `uevent`.
fn driver(name: &str) -> String {
    let base = Path::new("/sys/class/net").join(name);
    if let Ok(target) = fs::read_link(base.join("device/driver"))
        && let Some(driver) = target.file_name()
    {
        return driver.to_string_lossy().into_owned();
    }
    let uevent = fs::read_to_string(base.join("uevent")).unwrap_or_default();
    uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVTYPE="))
        .unwrap_or("virtual")
        .to_owned()
}
