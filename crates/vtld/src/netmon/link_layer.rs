//! What the link layer of this host's interfaces says (VirtualStack, section III.B): by rtnetlink, ethtool and nl80211.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::socket::SockProtocol;
use tokio::task::spawn_blocking;
use vtl_bpf::{
    netdev,
    netlink::{self, attribute, attributes, value},
};
use vtl_core::netmon::{Link, Medium, signal_quality};

use crate::scope;

/// Age from which it is read anew.
const STALE: Duration = Duration::from_secs(1);
/// How long what nobody asks for is kept.
const KEPT: Duration = Duration::from_secs(60);

/// The addresses of this host and of a peer, whose route leads to an interface.
type Path = (IpAddr, IpAddr);

/// What the link layers of paths said last. Shared by threads.
#[derive(Debug, Default)]
pub(crate) struct LinkLayers {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known(HashMap<Path, Entry>);

#[derive(Debug)]
struct Entry {
    link: Link,
    /// When somebody asked for it last.
    asked: Instant,
    /// When it was read last.
    read: Option<Instant>,
    is_being_read: bool,
}

impl Known {
    /// What is known of a path, and whether it is to be read anew.
    fn ask(&mut self, path: Path, now: Instant) -> (Link, bool) {
        let age = |then: Instant| now.saturating_duration_since(then);
        self.0
            .retain(|_, entry| entry.is_being_read || age(entry.asked) < KEPT);
        let entry = self.0.entry(path).or_insert(Entry {
            link: Link::default(),
            asked: now,
            read: None,
            is_being_read: false,
        });
        entry.asked = now;
        let is_stale = entry.read.is_none_or(|read| age(read) >= STALE);
        let is_due = is_stale && !entry.is_being_read;
        entry.is_being_read |= is_due;
        (entry.link, is_due)
    }

    fn note(&mut self, path: Path, link: Option<Link>, now: Instant) {
        if let Some(entry) = self.0.get_mut(&path) {
            entry.link = link.unwrap_or_default();
            entry.read = Some(now);
            entry.is_being_read = false;
        }
    }
}

impl LinkLayers {
    fn known(&self) -> MutexGuard<'_, Known> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of the interface by which packets of a path leave. It is read anew in another thread, as the kernel
    /// may keep who asks waiting while interfaces change. Needs a runtime.
    pub(crate) fn latest(self: &Arc<Self>, path: Path) -> Link {
        let (link, is_due) = self.known().ask(path, Instant::now());
        if is_due {
            let layers = Arc::clone(self);
            spawn_blocking(move || {
                let (local, peer) = path;
                let link = scope::exit(peer, local, 0).ok().map(read);
                layers.known().note(path, link, Instant::now());
            });
        }
        link
    }
}

/// Reads what the link layer of an interface says. It may take as long as somebody else changes interfaces.
pub(crate) fn read(index: u32) -> Link {
    if let Ok((rate, signal)) = wireless(index) {
        return Link {
            medium: Some(Medium::WiFi),
            rate,
            signal,
        };
    }
    let medium = medium(index).ok().flatten();
    // What others, such as a TUN interface, call their rate means nothing.
    let has_rate = matches!(medium, Some(Medium::Ethernet | Medium::Cellular));
    let rate = if has_rate {
        netdev::link_rate(index).ok().flatten()
    } else {
        None
    };
    let signal = None;
    Link {
        medium,
        rate,
        signal,
    }
}

/// Drivers of modems in cellular networks.
const MODEMS: [&str; 9] = [
    "qmi_wwan",
    "cdc_mbim",
    "huawei_cdc_ncm",
    "sierra_net",
    "hso",
    "mhi_net",
    "mhi_wwan_mbim",
    "iosm",
    "mtk_t7xx",
];

/// The medium of an interface that is not Wi-Fi.
fn medium(index: u32) -> io::Result<Option<Medium>> {
    /// RTEXT_FILTER_SKIP_STATS: the answer is short without.
    const NO_STATISTICS: u32 = 1 << 3;
    // struct ifinfomsg: the device's type, and its index.
    let mut body = vec![0; 16];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body.extend(attribute(libc::IFLA_EXT_MASK, &NO_STATISTICS.to_ne_bytes()));
    let socket = netlink::open(SockProtocol::NetlinkRoute)?;
    let link = netlink::get(&socket, libc::RTM_GETLINK, &body)?;
    let device = link.get(2..4).and_then(value).map_or(0, u16::from_ne_bytes);
    let info = attributes(link.get(16..).unwrap_or_default())
        .find(|(kind, _)| *kind == libc::IFLA_LINKINFO);
    let name = info.and_then(|(_, info)| {
        let name = attributes(info).find(|(kind, _)| *kind == libc::IFLA_INFO_KIND)?;
        name.1.split(|byte| *byte == 0).next()
    });
    let is_modem = || netdev::driver(index).is_ok_and(|driver| MODEMS.contains(&&*driver));
    Ok(match (name.unwrap_or_default(), device) {
        (b"wwan" | b"rmnet", _) => Some(Medium::Cellular),
        (
            b"tun" | b"wireguard" | b"ipip" | b"sit" | b"ip6tnl" | b"gre" | b"gretap" | b"ip6gre"
            | b"ip6gretap" | b"vti" | b"vti6" | b"xfrm" | b"vxlan" | b"geneve" | b"ppp" | b"fou",
            _,
        ) => Some(Medium::Tunnel),
        (_, libc::ARPHRD_LOOPBACK) => None,
        _ if is_modem() => Some(Medium::Cellular),
        (_, libc::ARPHRD_ETHER) => Some(Medium::Ethernet),
        (_, libc::ARPHRD_PPP | libc::ARPHRD_NONE) => Some(Medium::Tunnel),
        _ => None,
    })
}

// linux/genetlink.h and linux/nl80211.h, which libc lacks.
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const NL80211_CMD_GET_INTERFACE: u8 = 5;
const NL80211_CMD_GET_STATION: u8 = 17;
const NL80211_ATTR_IFINDEX: u16 = 3;
const NL80211_ATTR_STA_INFO: u16 = 21;
const NL80211_STA_INFO_SIGNAL: u16 = 7;
const NL80211_STA_INFO_TX_BITRATE: u16 = 8;
const NL80211_STA_INFO_SIGNAL_AVG: u16 = 13;
const NL80211_RATE_INFO_BITRATE: u16 = 1;
const NL80211_RATE_INFO_BITRATE32: u16 = 5;
/// Length of generic netlink's header: the command, the version.
const GENERIC: usize = 4;

/// The rate, bit/s, and the quality of the signal of a Wi-Fi interface, if it is connected to one other station.
///
/// # Errors
/// It is no Wi-Fi interface, or there is no Wi-Fi here.
fn wireless(index: u32) -> io::Result<(Option<u64>, Option<f64>)> {
    let socket = netlink::open(SockProtocol::NetlinkGeneric)?;
    let family = family(&socket, b"nl80211\0")?.ok_or(io::ErrorKind::Unsupported)?;
    let about = |command: u8| {
        let mut body = vec![command, 0, 0, 0];
        body.extend(attribute(NL80211_ATTR_IFINDEX, &index.to_ne_bytes()));
        body
    };
    netlink::get(&socket, family, &about(NL80211_CMD_GET_INTERFACE))?;
    let mut stations = Vec::new();
    netlink::dump(&socket, family, &about(NL80211_CMD_GET_STATION), |body| {
        stations.push(station(body.get(GENERIC..).unwrap_or_default()));
    })?;
    match stations[..] {
        [station] => Ok(station),
        _ => Ok((None, None)),
    }
}

/// The number of a family of generic netlink, if the kernel has it. Asked for by its name, the kernel would load a module.
fn family(socket: &OwnedFd, name: &[u8]) -> io::Result<Option<u16>> {
    let mut found = None;
    let body = [CTRL_CMD_GETFAMILY, 1, 0, 0];
    netlink::dump(socket, libc::GENL_ID_CTRL as u16, &body, |message| {
        let of = |wanted| {
            let all = attributes(message.get(GENERIC..).unwrap_or_default());
            all.into_iter().find(|(kind, _)| *kind == wanted)
        };
        if of(CTRL_ATTR_FAMILY_NAME).is_some_and(|(_, known)| known == name) {
            found = of(CTRL_ATTR_FAMILY_ID)
                .and_then(|(_, id)| value(id))
                .map(u16::from_ne_bytes);
        }
    })?;
    Ok(found)
}

/// The rate and the quality of the signal in a message about a station.
fn station(message: &[u8]) -> (Option<u64>, Option<f64>) {
    let (mut rate, mut signal, mut average) = (None, None, None);
    let info = attributes(message).filter(|(kind, _)| *kind == NL80211_ATTR_STA_INFO);
    for (kind, bytes) in info.flat_map(|(_, info)| attributes(info)) {
        match kind {
            NL80211_STA_INFO_SIGNAL => signal = bytes.first().copied(),
            NL80211_STA_INFO_SIGNAL_AVG => average = bytes.first().copied(),
            NL80211_STA_INFO_TX_BITRATE => rate = bit_rate(bytes),
            _ => {}
        }
    }
    let signal = average.or(signal);
    (rate, signal.map(|dbm| signal_quality(dbm as i8)))
}

/// The rate in a description of one, bit/s.
fn bit_rate(description: &[u8]) -> Option<u64> {
    const UNIT: u64 = 100_000;
    let (mut short, mut long) = (None, None);
    for (kind, bytes) in attributes(description) {
        match kind {
            NL80211_RATE_INFO_BITRATE => short = value(bytes).map(u16::from_ne_bytes),
            NL80211_RATE_INFO_BITRATE32 => long = value(bytes).map(u32::from_ne_bytes),
            _ => {}
        }
    }
    let units = long.or(short.map(u32::from)).filter(|units| *units > 0)?;
    Some(u64::from(units) * UNIT)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn ask__each_path_is_read_once_in_a_second_as_long_as_somebody_asks() {
        let path = |last| (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, last]));
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let fast = Link {
            rate: Some(1_000_000_000),
            ..Link::default()
        };
        let mut known = Known::default();
        assert_eq!(known.ask(path(2), at(0)), (Link::default(), true));
        assert_eq!(known.ask(path(3), at(0)), (Link::default(), true));
        assert!(!known.ask(path(2), at(5000)).1, "it is being read");
        known.note(path(2), Some(fast), at(5000));
        known.note(path(3), None, at(5000));
        assert_eq!(known.ask(path(2), at(5999)), (fast, false));
        assert_eq!(known.ask(path(2), at(6000)), (fast, true));
        // Another one that is due is not forgotten.
        assert_eq!(known.ask(path(3), at(6000)), (Link::default(), true));
        known.note(path(2), Some(fast), at(6000));
        known.note(path(3), Some(fast), at(6000));
        assert_eq!(known.ask(path(2), at(65_999)), (fast, true));
        assert_eq!(known.ask(path(3), at(66_001)), (Link::default(), true));
        assert_eq!(known.0.len(), 2);
    }

    #[test]
    fn read__the_loopback_has_no_medium() {
        assert_eq!(read(scope::LOOPBACK), Link::default());
        assert_eq!(read(u32::MAX), Link::default());
        let socket = netlink::open(SockProtocol::NetlinkGeneric).expect("a socket");
        let id = family(&socket, b"nlctrl\0").expect("a list");
        assert_eq!(id, Some(libc::GENL_ID_CTRL as u16));
        assert_eq!(family(&socket, b"no such\0").expect("a list"), None);
    }

    #[test]
    fn station__of_a_rate_and_a_signal() {
        let rate = [
            attribute(NL80211_RATE_INFO_BITRATE, &650_u16.to_ne_bytes()),
            attribute(NL80211_RATE_INFO_BITRATE32, &8667_u32.to_ne_bytes()),
        ]
        .concat();
        let info = [
            attribute(NL80211_STA_INFO_SIGNAL, &[-40_i8 as u8]),
            attribute(NL80211_STA_INFO_TX_BITRATE, &rate),
            attribute(NL80211_STA_INFO_SIGNAL_AVG, &[-70_i8 as u8]),
        ]
        .concat();
        let message = [
            attribute(NL80211_ATTR_IFINDEX, &3_u32.to_ne_bytes()),
            attribute(NL80211_ATTR_STA_INFO, &info),
        ]
        .concat();
        let (rate, signal) = station(&message);
        assert_eq!(rate, Some(866_700_000));
        assert!((signal.expect("known") - 0.6).abs() < 1e-9);
        assert_eq!(station(&message[..message.len() / 2]).0, None);
        for length in 0..message.len() {
            station(&message[..length]);
        }
        let slow = attribute(NL80211_RATE_INFO_BITRATE, &10_u16.to_ne_bytes());
        assert_eq!(bit_rate(&slow), Some(1_000_000));
        assert_eq!(bit_rate(&[]), None);
    }
}
