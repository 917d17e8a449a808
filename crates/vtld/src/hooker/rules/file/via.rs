//! Rules about connections that this host forwards as a gateway.

use std::ops::Range;

use super::{About, Action, Draft, Key, Result, Source, Value};
use crate::hooker::{carrier::CarrierPolicy, rules::Forwards};

/// Longest name of an interface, bytes (`IFNAMSIZ`, with the end).
const LONGEST: usize = 15;

/// The conditions that other rules do not have; `via` has to be there.
#[derive(Default)]
pub(super) struct Via<'a> {
    pub(super) matches: Forwards,
    /// The first key of these.
    pub(super) key: Option<&'a Key<'a>>,
}

impl Source<'_> {
    pub(super) fn interface(&self, value: &Value<'_>) -> Result<String> {
        let name = self.string(value, "an interface")?;
        if name.is_empty() || name.len() > LONGEST || name.contains(['/', ' ']) {
            let text = "via is the name of an interface, like wan0, or a list of them";
            return self.wrong(value.span(), text.into());
        }
        Ok(name.to_owned())
    }

    /// Builds a rule about forwarded connections. Also returns the position of the action.
    pub(super) fn forwarded(
        &self,
        mut draft: Draft<'_>,
        key: &Key<'_>,
        name: &str,
    ) -> Result<(About, Range<usize>)> {
        let mut matches = std::mem::take(&mut draft.via.matches);
        if matches.via.is_empty() {
            let text = format!(
                "\"{}\" goes with \"via\", the interface of a gateway: on a host of its own, programs, users and \
                 destinations say which connections are meant",
                key.get_ref()
            );
            return self.wrong(key.span(), text);
        }
        let process = &draft.matches;
        if process.local
            || !(process.cgroup.is_empty() && process.user.is_empty() && process.exe.is_empty())
        {
            let text = "\"via\" is about connections of other hosts, so it excludes cgroup, user, exe and local";
            return self.wrong(key.span(), text.into());
        }
        matches.to = std::mem::take(&mut draft.matches.to);
        matches.port = std::mem::take(&mut draft.matches.port);
        matches.profile = std::mem::take(&mut draft.matches.profile);
        let marks = [
            draft.tolerant.map(|at| ("loss_tolerant", at)),
            draft
                .required
                .map(|(must, at)| (super::required_by(must), at)),
            draft.others.map(|(_, at)| ("others", at)),
        ];
        if let Some((mark, at)) = marks.into_iter().flatten().next() {
            return self.wrong(at, format!("a rule with \"via\" has no {mark}"));
        }
        let bounded = std::mem::take(&mut draft.bounded);
        match draft.actions.pop() {
            Some((_, value, Action::Carry(carrier))) => {
                let carrier = self.bounded(Some(carrier), bounded)?.unwrap_or_default();
                if CarrierPolicy::new(&carrier).is_none_or(|policy| policy.required) {
                    let text = format!(
                        "a gateway does not carry by {carrier}: take best, auto, graft:NAME, multipath, stack:NAME, quic, sctp, \
                         kcp or mptcp"
                    );
                    return self.wrong(value.span(), text);
                }
                let carrier = self.marked(carrier, &None, &value.span(), false)?;
                Ok((About::Forwarded(matches, carrier), value.span()))
            }
            Some((key, _, Action::Bypass)) => {
                let text = "a rule with \"via\" names a carrier: what a gateway does not carry, `vtl gateway add \
                            --to` and `--port` leave out";
                self.wrong(key.span(), text.into())
            }
            None => {
                let text = format!(
                    "rule \"{name}\" says what it matches, not what is to happen: add carrier = \"best\", \
                     \"graft:NAME\" or another"
                );
                self.wrong(key.span(), text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{parse, parse_beside};
    use super::*;

    fn rule(rest: &str) -> String {
        format!("[[rule]]\nname = \"a\"\n{rest}\n")
    }

    #[test]
    fn parse__what_a_gateway_forwards() {
        let text = rule(
            "via = [\"wan0\", \"wan1\"]\nfrom = [\"10.1.0.0/16\", \"2001:db8::7\"]\nfrom_port = \"4000-4100\"\n\
             to = \"10.2.0.0/16\"\nport = [80, 443]\nprofile = \"loss-sensitive\"\ncarrier = \"graft:cubic\"\n\
             when = { if = \"loss > 5%\", carrier = \"quic\" }",
        );
        let rules = parse(&text, |_| None).expect("right");
        let About::Forwarded(matches, _) = &rules[0].about else {
            panic!("{rules:?}");
        };
        assert_eq!(matches.via, ["wan0", "wan1"]);
        assert_eq!((matches.from.len(), matches.to.len()), (2, 1));
        assert_eq!(
            (&matches.from_port[..], matches.port.len()),
            (&[4000..=4100][..], 2)
        );
        assert_eq!(
            (matches.profile.len(), rules[0].action()),
            (1, "graft:cubic".into())
        );
        assert!(rules[0].when.is_some());
    }

    #[test]
    fn parse__what_does_not_go_with_via() {
        let via = "via = \"wan0\"\n";
        for (rest, line, about) in [
            (format!("{via}bypass = true"), 4, "gateway add"),
            (via.to_owned(), 3, "not what is to happen"),
            (
                format!("{via}carrier = \"tcp:bbr\""),
                4,
                "does not carry by tcp:bbr",
            ),
            (
                format!("{via}carrier = \"tcp\""),
                4,
                "does not carry by tcp",
            ),
            (
                format!("{via}user = 0\ncarrier = \"best\""),
                3,
                "excludes cgroup, user",
            ),
            (
                format!("{via}local = true\ncarrier = \"best\""),
                3,
                "excludes cgroup, user",
            ),
            (
                format!("{via}carrier = \"best\"\nrequire_carrier = true"),
                5,
                "require_carrier",
            ),
            (
                format!("{via}carrier = \"udp\"\nloss_tolerant = true"),
                5,
                "loss_tolerant",
            ),
            (format!("{via}carrier = \"udp\""), 4, "loss"),
            (
                format!("{via}services = {{ require = \"encryption\" }}"),
                4,
                "does not carry",
            ),
            (format!("{via}listen = 80"), 3, "exclude each other"),
            (
                "from = \"10.0.0.1\"\ncarrier = \"best\"".into(),
                3,
                "goes with \"via\"",
            ),
            (
                "from_port = 80\ncarrier = \"best\"".into(),
                3,
                "goes with \"via\"",
            ),
            (
                "via = \"a/b\"\ncarrier = \"best\"".into(),
                3,
                "name of an interface",
            ),
            ("via = []\ncarrier = \"best\"".into(), 3, "empty list"),
        ] {
            let wrong = parse(&rule(&rest), |_| None).expect_err(&rest);
            assert!(wrong.text.contains(about), "{rest}: {wrong}");
            assert_eq!(wrong.place.line, line, "{rest}: {wrong}");
        }
    }

    #[test]
    fn parse_beside__agrees_with_others() {
        let others = parse(&rule("listen = 80"), |_| None).expect("right");
        let beside = |text: &str| parse_beside(text, &others, |_| None);
        let wrong = beside(&rule("bypass = true")).expect_err("a name");
        assert!(wrong.text.contains("two rules"), "{wrong}");
        let b = |rest: &str| rule(rest).replace("\"a\"", "\"b\"");
        let wrong = beside(&b("listen = 80")).expect_err("a port");
        assert!(wrong.text.contains("has port 80 already"), "{wrong}");
        let right = beside(&b("listen = 81")).expect("another port");
        assert_eq!(right.len(), 1, "only its own");
    }
}
