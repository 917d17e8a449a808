//! Addresses that a peer tells: places to try, of which a hostile peer may name any.

use std::{collections::VecDeque, net::IpAddr};

/// Maximum number of a peer's addresses that are known at a time.
const MAX_KNOWN: usize = 16;
/// Interval at which one more is taken in place of the oldest, ns.
const RENEWAL_NS: u64 = 60_000_000_000;

/// The addresses that a peer has told in the life of an association: so many at once, and then one a minute, whatever it
/// says, so that it can have nobody else contacted faster.
#[derive(Debug, Default)]
pub struct PeerAddresses {
    known: VecDeque<IpAddr>,
    renewed_ns: u64,
}

impl PeerAddresses {
    /// Of the addresses that the peer tells now, those that may be tried: hosts' addresses, as far as the bound allows.
    pub fn admit(&mut self, now_ns: u64, told: impl IntoIterator<Item = IpAddr>) -> Vec<IpAddr> {
        let told: Vec<IpAddr> = told.into_iter().filter(|told| is_host(*told)).collect();
        for address in &told {
            if self.known.contains(address) {
                continue;
            }
            if self.known.len() >= MAX_KNOWN {
                let is_due = now_ns.saturating_sub(self.renewed_ns) >= RENEWAL_NS;
                let oldest = self.known.iter().position(|known| !told.contains(known));
                let Some(oldest) = oldest.filter(|_| is_due) else {
                    continue;
                };
                self.known.remove(oldest);
            }
            self.renewed_ns = now_ns;
            self.known.push_back(*address);
        }
        let mut admitted = Vec::new();
        for address in told {
            if self.known.contains(&address) && !admitted.contains(&address) {
                admitted.push(address);
            }
        }
        admitted
    }
}

/// Whether an address may be that of another host which a router leads to: no loopback, link-local (as clouds' metadata
/// services have), broadcast or multicast address, and none translated to IPv4 (RFC 6052, RFC 8215)
/// or that holds one (6to4, RFC 3056).
pub fn is_host(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let first = v4.octets()[0];
            let is_none = first == 0 || first >= 240;
            !(is_none || v4.is_loopback() || v4.is_link_local() || v4.is_multicast())
        }
        IpAddr::V6(v6) => {
            let is_translated = matches!(
                v6.segments(),
                [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0x64, 0xff9b, 1, ..] | [0x2002, ..]
            );
            // `::/96` and `::ffff:0:0/96` hold IPv4 addresses, the loopback and none.
            let has_v4 = v6.segments()[..5] == [0; 5];
            !(is_translated || has_v4 || v6.is_multicast() || v6.is_unicast_link_local())
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        IpAddr::V4((0xc000_0200 + n).into())
    }

    #[test]
    fn told__changes_bring_no_more_than_one_new_address_a_minute() {
        let mut told = PeerAddresses::default();
        let mut tried: Vec<IpAddr> = Vec::new();
        // Seven others each second, for ten minutes.
        for second in 0..600_u32 {
            let now = u64::from(second) * 1_000_000_000;
            let admitted = told.admit(now, (0..7).map(|n| ip(7 * second + n)));
            assert!(admitted.len() <= 7);
            tried.extend(admitted);
        }
        tried.sort_unstable();
        tried.dedup();
        assert!(
            (MAX_KNOWN..=MAX_KNOWN + 10).contains(&tried.len()),
            "{}",
            tried.len()
        );
    }

    #[test]
    fn told__known_ones_may_come_and_go() {
        let mut told = PeerAddresses::default();
        assert_eq!(told.admit(0, (0..8).map(ip)).len(), 8);
        assert_eq!(told.admit(1, (8..16).map(ip)).len(), 8);
        assert_eq!(told.admit(2, (0..8).map(ip)).len(), 8);
        assert_eq!(told.admit(3, [ip(3), ip(3), ip(20)]), [ip(3)]);
        // What is told stays known.
        let others = (0..16).map(ip).filter(|other| *other != ip(7));
        assert_eq!(told.admit(RENEWAL_NS + 3, others.chain([ip(20)])).len(), 16);
        assert!(told.admit(RENEWAL_NS + 4, [ip(7)]).is_empty());
    }

    #[test]
    fn told__hosts_only() {
        let refused = [
            "0.1.2.3",
            "127.0.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "fe80::1",
            "ff02::1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::7f00:1",
            "2002:7f00:1::1",
        ];
        let refused = refused.map(|text| text.parse().expect("an address"));
        assert!(PeerAddresses::default().admit(0, refused).is_empty());
        let taken = ["192.0.2.1", "10.0.0.1", "fd00::1", "2001:db8::1"];
        let taken = taken.map(|text| text.parse().expect("an address"));
        assert_eq!(PeerAddresses::default().admit(0, taken), taken);
    }
}
