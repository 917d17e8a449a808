//! Rules about connections that this host forwards as a gateway: decided when a SYN is held, without the kernel's table.

use std::{
    net::SocketAddr,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{About, Prefix, Profile, Rule};
use crate::hooker::carrier::CarrierPolicy;

/// The conditions of such a rule: of each kind that is named, one must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forwards {
    /// Interfaces by which the connection leaves.
    pub via: Vec<String>,
    /// The source's addresses.
    pub from: Vec<Prefix>,
    /// The source's ports.
    pub from_port: Vec<RangeInclusive<u16>>,
    /// The destination's addresses.
    pub to: Vec<Prefix>,
    /// The destination's ports.
    pub port: Vec<RangeInclusive<u16>>,
    /// The application's profiles, by the destination's port.
    pub profile: Vec<Profile>,
}

/// A connection that is forwarded.
#[derive(Clone, Copy, Debug)]
pub struct Forwarding<'a> {
    /// The interface that it leaves by.
    pub via: &'a str,
    /// Who opens it; `None`: unknown, in questions of operators.
    pub from: Option<SocketAddr>,
    /// The destination.
    pub to: SocketAddr,
}

impl Forwards {
    /// Why a connection does not match; `None` if it does.
    pub(super) fn mismatch(&self, connection: &Forwarding<'_>) -> Option<String> {
        let Forwarding { via, from, to } = connection;
        let has = |ranges: &[RangeInclusive<u16>], port: u16| {
            ranges.is_empty() || ranges.iter().any(|range| range.contains(&port))
        };
        let (ip, port) = (to.ip().to_canonical(), to.port());
        if !self.via.iter().any(|name| name == via) {
            return Some(format!("it does not leave by {}", self.via.join(" or ")));
        }
        if !has(&self.port, port) {
            return Some(format!("its port is not {port}"));
        }
        if !self.profile.is_empty() {
            match Profile::of(port) {
                Some(profile) if self.profile.contains(&profile) => {}
                Some(profile) => return Some(format!("port {port} has the profile {profile}")),
                None => return Some(format!("port {port} has no profile")),
            }
        }
        if !self.to.is_empty() && !self.to.iter().any(|prefix| prefix.contains(ip)) {
            return Some(format!("{ip} is in none of its prefixes"));
        }
        if self.from.is_empty() && self.from_port.is_empty() {
            return None;
        }
        let Some(from) = from else {
            return Some("it wants a source: --from says which".into());
        };
        let (ip, port) = (from.ip().to_canonical(), from.port());
        if !self.from.is_empty() && !self.from.iter().any(|prefix| prefix.contains(ip)) {
            return Some(format!("{ip} is in none of its sources' prefixes"));
        }
        (!has(&self.from_port, port)).then(|| format!("its source's port is not {port}"))
    }
}

/// A rule in force.
struct ForwardRule {
    name: String,
    matches: Forwards,
    policy: CarrierPolicy,
    /// Connections matched.
    matched: Arc<AtomicU64>,
}

/// The rules in force about forwarded connections.
#[derive(Default)]
pub(in crate::hooker) struct ForwardRules(Vec<ForwardRule>);

impl ForwardRules {
    /// Those of all rules; a rule that was in force before goes on counting.
    pub(in crate::hooker) fn new(rules: &[Rule], former: &Self) -> Self {
        let of = |rule: &Rule| {
            let About::Forwarded(matches, carrier) = &rule.about else {
                return None;
            };
            let named = rule.when.is_some().then(|| rule.name.as_str().into());
            let policy = CarrierPolicy {
                rule: named,
                ..CarrierPolicy::new(carrier)?
            };
            let same = (former.0.iter()).find(|it| it.name == rule.name && it.matches == *matches);
            Some(ForwardRule {
                name: rule.name.clone(),
                matches: matches.clone(),
                policy,
                matched: same.map_or_else(Arc::default, |it| Arc::clone(&it.matched)),
            })
        };
        Self(rules.iter().filter_map(of).collect())
    }

    pub(in crate::hooker) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a connection is to travel by, as the first rule that matches says; counts it.
    pub(in crate::hooker) fn decide(&self, connection: &Forwarding<'_>) -> Option<CarrierPolicy> {
        let mut all = self.0.iter();
        let rule = all.find(|rule| rule.matches.mismatch(connection).is_none())?;
        rule.matched.fetch_add(1, Ordering::Relaxed);
        Some(rule.policy.clone())
    }

    /// Connections that a rule has matched; `None`: it is not about forwarded ones.
    pub(in crate::hooker) fn matched(&self, rule: &str) -> Option<u64> {
        let found = self.0.iter().find(|it| it.name == rule)?;
        Some(found.matched.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn rules(text: &str) -> Vec<Rule> {
        parse(text, |_| None).expect("right")
    }

    fn connection<'a>(via: &'a str, from: &str, to: &str) -> Forwarding<'a> {
        Forwarding {
            via,
            from: Some(from.parse().expect("an address")),
            to: to.parse().expect("an address"),
        }
    }

    const FLOW: &str = "[[rule]]\nname = \"flow\"\nvia = \"wan0\"\nfrom = \"10.1.0.2\"\nfrom_port = 4000\n\
                        to = \"10.2.0.2\"\nport = 80\ncarrier = \"quic\"\n";
    const HOP: &str = "[[rule]]\nname = \"hop\"\nvia = [\"wan0\", \"wan1\"]\nto = \"10.2.0.0/16\"\n\
                       carrier = \"graft:cubic\"\n";

    #[test]
    fn decide__the_first_rule_that_matches_a_flow_or_a_hop() {
        let all = ForwardRules::new(&rules(&format!("{FLOW}{HOP}")), &ForwardRules::default());
        let policy = |via: &str, from: &str, to: &str| all.decide(&connection(via, from, to));
        let quic = policy("wan0", "10.1.0.2:4000", "10.2.0.2:80").expect("the flow");
        assert!(quic.kind.is_some());
        for (via, from, to) in [
            ("wan0", "10.1.0.2:4001", "10.2.0.2:80"),
            ("wan0", "10.1.0.3:4000", "10.2.0.2:80"),
            ("wan0", "10.1.0.2:4000", "10.2.0.2:81"),
            ("wan0", "10.1.0.2:4000", "10.2.0.3:80"),
            ("wan1", "10.1.0.2:4000", "10.2.0.2:80"),
        ] {
            let hop = policy(via, from, to).expect("the hop");
            assert!(
                hop.options.is_some() && hop.kind.is_none(),
                "{via} {from} {to}"
            );
        }
        assert!(policy("lan0", "10.1.0.2:4000", "10.2.0.2:80").is_none());
        assert!(policy("wan0", "10.1.0.2:4000", "10.3.0.2:80").is_none());
        assert_eq!(
            [all.matched("flow"), all.matched("hop")],
            [Some(1), Some(5)]
        );
        // Of one that stays, and of one that does not.
        let text = format!("{FLOW}{}", HOP.replace("/16", "/24"));
        let next = ForwardRules::new(&rules(&text), &all);
        assert_eq!(
            [next.matched("flow"), next.matched("hop")],
            [Some(1), Some(0)]
        );
        assert_eq!(next.matched("other"), None);
    }

    #[test]
    fn mismatch__says_why() {
        let all = rules(FLOW);
        let About::Forwarded(matches, _) = &all[0].about else {
            panic!("{all:?}");
        };
        let unknown = Forwarding {
            from: None,
            ..connection("wan0", "10.1.0.2:4000", "10.2.0.2:80")
        };
        let why = matches.mismatch(&unknown).expect("no source");
        assert!(why.contains("--from"), "{why}");
        let why = matches.mismatch(&connection("lan0", "10.1.0.2:4000", "10.2.0.2:80"));
        assert_eq!(why.as_deref(), Some("it does not leave by wan0"));
    }
}
