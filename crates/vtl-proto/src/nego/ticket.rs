//! Tickets: stateless address validation by the responder.
//!
//! A ticket contains its time and a session index, authenticated by a keyed hash (MAC) over both and the
//! address that it was sent to; its bearer receives packets at that address. A ticket also permits early data,
//! for one session: used tickets are registered for as long as they are valid (RFC 8446, section 8.2), in a
//! bounded register, against replay.

use core::{hash::Hasher, net::IpAddr, time::Duration};
use std::collections::BTreeSet;

use siphasher::sip::SipHasher24;

use super::{PATIENCE, nanos};
use crate::wire::Ticket;

/// Lifetime of a ticket.
pub const LIFE: Duration = Duration::from_secs(3600);
/// Lifetime of a key. Longer than used tickets are registered, so that one former key is sufficient.
const ROTATION: Duration = Duration::from_secs(3660);
/// Maximum number of registered tickets; 32 bytes or so each.
const STRIKES: usize = 16_384;

/// Validity of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Invalid: none, forged, from another address, expired, or from before a restart.
    Stranger,
    /// Validates the address.
    Proven,
    /// Validates the address, and was not used.
    Fresh,
    /// Has opened a session.
    Used,
}

struct Key {
    secret: [u8; 16],
    /// Time of its first tickets, ms.
    since: u64,
}

/// Issues tickets, and tells what a ticket that comes back is worth.
pub(super) struct Mint {
    started_ns: u64,
    current: Key,
    previous: Option<Key>,
    /// Used tickets, by age.
    strikes: BTreeSet<(u64, u64)>,
    /// Tickets up to this one have been evicted from the register, and permit no early data.
    floor: Option<(u64, u64)>,
    max: usize,
}

impl Mint {
    pub(super) fn new(now_ns: u64, secret: [u8; 16]) -> Self {
        Self {
            started_ns: now_ns,
            current: Key { secret, since: 0 },
            previous: None,
            strikes: BTreeSet::new(),
            floor: None,
            max: STRIKES,
        }
    }

    /// ms since the start.
    fn ms(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.started_ns) / 1_000_000
    }

    /// Rotates the key if it has expired, and drops expired tickets.
    pub(super) fn maintain(&mut self, now_ns: u64, secret: impl FnOnce() -> [u8; 16]) {
        let now = self.ms(now_ns);
        if now >= self.current.since + nanos(ROTATION) / 1_000_000 {
            let key = Key {
                secret: secret(),
                since: now,
            };
            self.previous = Some(core::mem::replace(&mut self.current, key));
        }
        // Longer than valid: the NEGO may be retransmitted.
        let keep = nanos(LIFE + PATIENCE) / 1_000_000;
        while let Some(oldest) = self.strikes.first().filter(|(time, _)| time + keep < now) {
            let oldest = *oldest;
            self.strikes.remove(&oldest);
        }
    }

    /// Issues a ticket for an address; `sid`: the index of its session.
    pub(super) fn issue(&self, now_ns: u64, addr: IpAddr, sid: u32) -> Ticket {
        let time = self.ms(now_ns);
        let mac = mac(&self.current, addr, time, sid);
        Ticket { time, mac, sid }
    }

    /// What a ticket from this address permits. Does not consume it.
    pub(super) fn judge(&self, now_ns: u64, addr: IpAddr, ticket: &Ticket) -> Standing {
        let now = self.ms(now_ns);
        if ticket.sid == 0 || ticket.time > now {
            return Standing::Stranger;
        }
        let keys = [Some(&self.current), self.previous.as_ref()];
        let key = keys.into_iter().flatten().find(|k| k.since <= ticket.time);
        // Constant time: a comparison of two 64-bit numbers is one instruction.
        let forged = |key| mac(key, addr, ticket.time, ticket.sid) != ticket.mac;
        if key.is_none_or(forged) {
            return Standing::Stranger;
        }
        let id = (ticket.time, ticket.mac);
        if self.strikes.contains(&id) {
            Standing::Used
        } else if now - ticket.time > nanos(LIFE) / 1_000_000 {
            Standing::Stranger
        } else if self.floor.is_some_and(|floor| id <= floor) {
            Standing::Proven
        } else {
            Standing::Fresh
        }
    }

    /// Registers a ticket as used.
    pub(super) fn strike(&mut self, ticket: &Ticket) {
        self.strikes.insert((ticket.time, ticket.mac));
        if self.strikes.len() > self.max {
            self.floor = self.strikes.pop_first().max(self.floor);
        }
    }

    #[cfg(test)]
    pub(super) fn with_strikes(mut self, max: usize) -> Self {
        self.max = max;
        self
    }
}

fn mac(key: &Key, addr: IpAddr, time: u64, sid: u32) -> u64 {
    let octets = match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    };
    let mut hasher = SipHasher24::new_with_key(&key.secret);
    hasher.write(&octets);
    hasher.write(&time.to_be_bytes());
    hasher.write(&sid.to_be_bytes());
    hasher.finish()
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const HERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 1));
    const THERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 2));

    #[test]
    fn judge__every_field_counts() {
        let mint = Mint::new(7 * S, [1; 16]);
        let now = 20 * S;
        let good = mint.issue(now, HERE, 5);
        assert_eq!(good.time, 13_000);
        assert_eq!(mint.judge(now, HERE, &good), Standing::Fresh);
        assert_eq!(mint.judge(now, THERE, &good), Standing::Stranger);
        for bad in [
            Ticket { sid: 6, ..good },
            Ticket { sid: 0, ..good },
            Ticket {
                time: good.time - 1,
                ..good
            },
            Ticket {
                mac: good.mac ^ 1,
                ..good
            },
            Ticket::default(),
        ] {
            assert_eq!(mint.judge(now, HERE, &bad), Standing::Stranger, "{bad:?}");
        }
        let restarted = Mint::new(7 * S, [2; 16]);
        assert_eq!(restarted.judge(now, HERE, &good), Standing::Stranger);
        assert_eq!(
            mint.judge(now - S, HERE, &good),
            Standing::Stranger,
            "from the future"
        );
    }

    #[test]
    fn judge__age_and_keys() {
        let mut mint = Mint::new(0, [1; 16]);
        let first = mint.issue(0, HERE, 5);
        let at = |s: u64| s * S;
        assert_eq!(mint.judge(at(3600), HERE, &first), Standing::Fresh);
        assert_eq!(mint.judge(at(3601), HERE, &first), Standing::Stranger);
        let late = mint.issue(at(3600), HERE, 5);
        mint.maintain(at(3659), || panic!("too early"));
        mint.maintain(at(3660), || [2; 16]);
        let new = mint.issue(at(3660), HERE, 5);
        assert_eq!(mint.judge(at(3661), HERE, &late), Standing::Fresh);
        assert_eq!(mint.judge(at(3661), HERE, &new), Standing::Fresh);
        mint.maintain(at(7320), || [3; 16]);
        assert_eq!(mint.judge(at(7320), HERE, &late), Standing::Stranger);
        assert_eq!(mint.judge(at(7260), HERE, &new), Standing::Fresh);
    }

    #[test]
    fn strike__outlives_the_ticket() {
        let mut mint = Mint::new(0, [1; 16]);
        let ticket = mint.issue(0, HERE, 5);
        mint.strike(&ticket);
        for s in [0, 1800, 3600, 3608] {
            mint.maintain(s * S, || panic!("too early"));
            assert_eq!(mint.judge(s * S, HERE, &ticket), Standing::Used);
        }
        mint.maintain(3610 * S, || panic!("too early"));
        assert!(mint.strikes.is_empty());
        assert_eq!(mint.judge(3610 * S, HERE, &ticket), Standing::Stranger);
    }

    #[test]
    fn strike__a_full_register_makes_older_tickets_worth_less() {
        let mut mint = Mint::new(0, [1; 16]).with_strikes(2);
        let tickets: Vec<_> = (0..4).map(|s| mint.issue(s * S, HERE, 5)).collect();
        for ticket in &tickets[1..] {
            mint.strike(ticket);
        }
        let standing: Vec<_> = tickets.iter().map(|t| mint.judge(9 * S, HERE, t)).collect();
        use Standing::{Proven, Used};
        assert_eq!(standing, [Proven, Proven, Used, Used]);
        assert_eq!(mint.strikes.len(), 2);
    }
}
