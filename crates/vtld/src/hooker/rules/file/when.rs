//! Parser of a rule's conditions on the path: `when` and `dwell`.

use std::{ops::Range, sync::Arc, time::Duration};

use toml::de::DeValue;
use vtl_core::reconfigure::{Condition, DEFAULT_DWELL, MAX_CONDITIONS, Plan, parse_time};

use super::{
    super::{About, Action, When},
    Result, Source, Value, in_order, kind,
};
use crate::hooker::Carrier;

/// Minimum of `dwell`: each switch costs some round trips.
const MIN_DWELL: Duration = Duration::from_millis(100);

/// A condition, and its carrier with its position.
type Case = (Condition, Carrier, Range<usize>);

/// What a rule says of the path, with the positions of its keys.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) conditions: Option<(Range<usize>, Vec<Case>)>,
    pub(super) dwell: Option<(Range<usize>, Duration)>,
}

impl Draft {
    /// Whether the carrier of a condition loses something.
    pub(super) fn loses(&self) -> bool {
        let cases = self.conditions.iter().flat_map(|(_, cases)| cases);
        cases
            .into_iter()
            .any(|(_, carrier, _)| matches!(carrier, Carrier::Lossy(_)))
    }
}

/// How a condition is written, for errors.
const LIKE: &str = "{ if = \"rtt >= 300ms for 200ms\", carrier = \"quic\" }";

impl Source<'_> {
    /// Reads `when`: one condition or a list.
    pub(super) fn when(&self, value: &Value<'_>) -> Result<Vec<Case>> {
        let cases = self.each(value, |value| self.case(value))?;
        match cases.len() {
            0..=MAX_CONDITIONS => Ok(cases),
            _ => {
                let text = format!("a rule has at most {MAX_CONDITIONS} conditions");
                self.wrong(value.span(), text)
            }
        }
    }

    fn case(&self, value: &Value<'_>) -> Result<Case> {
        let DeValue::Table(keys) = value.get_ref() else {
            let text = format!(
                "a condition is a table, not {}: {LIKE}",
                kind(value.get_ref())
            );
            return self.wrong(value.span(), text);
        };
        let (mut condition, mut carrier) = (None, None);
        for (key, value) in in_order(keys) {
            match key.get_ref().as_ref() {
                "if" => {
                    let parsed = self.string(value, "a condition")?.parse::<Condition>();
                    let parsed = parsed.map_err(|why| self.error(value.span(), why.to_string()));
                    condition = Some(parsed?);
                }
                "carrier" => carrier = Some((self.carrier(value)?, value.span())),
                other => {
                    let other = other.escape_debug();
                    let text = format!("a condition has no \"{other}\": it has if and carrier");
                    return self.wrong(key.span(), text);
                }
            }
        }
        let Some((condition, (carrier, at))) = condition.zip(carrier) else {
            let text = format!("a condition says if and carrier: {LIKE}");
            return self.wrong(value.span(), text);
        };
        let why = match &carrier {
            Carrier::Best
            | Carrier::Plain
            | Carrier::Graft(_)
            | Carrier::Lossy(_)
            | Carrier::Multipath(_)
            | Carrier::Stack(_)
            | Carrier::Flows(_) => {
                return Ok((condition, carrier, at));
            }
            Carrier::Control(_) => "a running connection keeps its congestion control",
            Carrier::Auto(_) => "it has conditions of its own, the model's",
            _ => "it is for ports of servers",
        };
        let text = format!(
            "{carrier} cannot take connections over: {why}; take best, tcp, graft:NAME, multipath, stack:NAME, quic, \
             sctp, kcp, mptcp or, with loss_tolerant = true, one that may lose something"
        );
        self.wrong(at, text)
    }

    /// Reads `dwell`.
    pub(super) fn dwell(&self, value: &Value<'_>) -> Result<Duration> {
        let parsed = parse_time(self.string(value, "a time")?);
        let dwell = parsed.map_err(|why| self.error(value.span(), why.to_string()))?;
        if dwell < MIN_DWELL {
            let text = "dwell is a time from 100ms to an hour: a switch costs some round trips";
            return self.wrong(value.span(), text.into());
        }
        Ok(dwell)
    }

    /// Checks that the conditions fit the rest of the rule.
    pub(super) fn conditions(
        &self,
        draft: Draft,
        about: &About,
        tolerant: bool,
    ) -> Result<Option<Arc<When>>> {
        let Some((at, cases)) = draft.conditions else {
            return match draft.dwell {
                Some((at, _)) => self.wrong(at, "dwell goes with when".into()),
                None => Ok(None),
            };
        };
        let own = match about {
            About::Opened(_, Action::Carry(own)) if own.captures() => own,
            About::Opened(_, action) => {
                let text = format!(
                    "{action} goes past vtld, which then cannot move connections: when needs a rule \
                     whose own carrier is best, services, graft:NAME, multipath, stack:NAME, quic, sctp, kcp or \
                     mptcp"
                );
                return self.wrong(at, text);
            }
            About::Forwarded(_, own) => own,
            About::Accepted(..) => {
                let text = "when is for rules about connections that this host opens or forwards: who connects \
                            chooses the carrier";
                return self.wrong(at, text.into());
            }
        };
        if matches!(own, Carrier::Auto(_)) {
            let text = "auto chooses by the path itself, so it excludes when";
            return self.wrong(at, text.into());
        }
        let lossy = cases
            .iter()
            .find(|(_, c, _)| matches!(c, Carrier::Lossy(_)));
        if let Some((_, carrier, at)) = lossy
            && !tolerant
        {
            let text = format!(
                "{carrier} does not repeat all that the network loses: mark the rule's connections loss-tolerant \
                 (loss_tolerant = true) if they can do without that, or take another carrier"
            );
            return self.wrong(at.clone(), text);
        }
        if let Some((_, carrier, at)) = lossy.filter(|_| matches!(own, Carrier::Required(..))) {
            let text = format!(
                "{carrier} excludes require_carrier and require_encryption: what may not get lost goes by TCP"
            );
            return self.wrong(at.clone(), text);
        }
        if matches!(own, Carrier::Required(..))
            && let Some((.., at)) = cases.iter().find(|(_, c, _)| *c == Carrier::Plain)
        {
            let text = "tcp excludes require_carrier and require_encryption";
            return self.wrong(at.clone(), text.into());
        }
        let (conditions, carriers) = cases.into_iter().map(|(if_, by, _)| (if_, by)).unzip();
        let dwell = draft.dwell.map_or(DEFAULT_DWELL, |(_, dwell)| dwell);
        Ok(Some(Arc::new(When {
            plan: Plan { conditions, dwell },
            carriers,
            own: own.clone(),
            tolerant,
        })))
    }
}

#[cfg(test)]
#[allow(clippy::too_many_lines, reason = "tables of cases")]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{Rule, Wrong, parse},
        *,
    };

    fn rule(rest: &str) -> std::result::Result<Vec<Rule>, Wrong> {
        parse(&format!("[[rule]]\nname = \"a\"\n{rest}\n"), |_| None)
    }

    const TWO: &str = "carrier = \"graft:cubic\"\nwhen = [\n  \
        { if = \"rtt >= 300ms for 200ms\", carrier = \"quic\" },\n  \
        { if = \"loss > 2% and rate < 1Mbit\", carrier = \"tcp\" },\n]\ndwell = \"3s\"";

    #[test]
    fn when__is_read_with_the_rest() {
        let rules = rule(TWO).expect("right");
        let when = rules[0].when.as_ref().expect("conditions");
        let words: Vec<_> = when
            .plan
            .conditions
            .iter()
            .map(ToString::to_string)
            .collect();
        let wanted = ["rtt >= 300ms for 200ms", "loss > 2% and rate < 1Mbit/s"];
        assert_eq!(words, wanted);
        let carriers: Vec<_> = when.carriers.iter().map(ToString::to_string).collect();
        assert_eq!(carriers, ["quic", "tcp"]);
        assert_eq!(when.own.to_string(), "graft:cubic");
        assert_eq!(when.plan.dwell, Duration::from_secs(3));
        let one = rule("carrier = \"best\"\nwhen = { carrier = \"kcp\", if = \"jitter > 9ms\" }");
        let when = one.expect("right")[0].when.clone().expect("one");
        assert_eq!(when.plan.dwell, DEFAULT_DWELL);
        let plans = super::super::super::plans(&rules);
        assert!(plans.contains_key("a") && plans.len() == 1);
        assert!(rule("carrier = \"best\"").expect("right")[0].when.is_none());
    }

    #[test]
    fn when__refuses_with_place_and_reason() {
        let of = |carrier: &str, case: &str| format!("{carrier}\nwhen = [{case}]");
        let best = "carrier = \"best\"";
        let good = "{ if = \"rtt > 9ms\", carrier = \"quic\" }";
        let many = [good; MAX_CONDITIONS + 1].join(", ");
        for (text, line, column, about) in [
            (of(best, "7"), 4, 9, "a condition is a table, not a number"),
            (of(best, "{ }"), 4, 9, "says if and carrier"),
            (
                of(best, "{ if = \"rtt > 9ms\" }"),
                4,
                9,
                "says if and carrier",
            ),
            (of(best, "{ if = 7 }"), 4, 16, "a condition is text"),
            (of(best, "{ when = 7 }"), 4, 11, "it has if and carrier"),
            (
                of(best, "{ if = \"rt > 9ms\", carrier = \"quic\" }"),
                4,
                16,
                "no figure \"rt\"",
            ),
            (
                of(best, "{ if = \"rtt > 9\", carrier = \"quic\" }"),
                4,
                16,
                "no unit of rtt",
            ),
            (
                of(best, "{ if = \"loss > 0%\", carrier = \"quic\" }"),
                4,
                16,
                "no number above 0",
            ),
            (
                of(best, "{ if = \"rtt > 9ms\", carrier = \"x\" }"),
                4,
                39,
                "no carrier \"x\"",
            ),
            (
                of(best, "{ if = \"rtt > 9ms\", carrier = \"tcp:bbr\" }"),
                4,
                39,
                "cannot take",
            ),
            (
                of(best, "{ if = \"rtt > 9ms\", carrier = \"udp\" }"),
                4,
                39,
                "(loss_tolerant = true)",
            ),
            (
                of(
                    best,
                    "{ if = \"rtt > 9ms\", carrier = \"graft:partial-reliability?max-loss=1\" }",
                ),
                4,
                39,
                "(loss_tolerant = true)",
            ),
            // The mark without anything that loses.
            (
                of("loss_tolerant = true\ncarrier = \"best\"", good),
                3,
                1,
                "best has no use for the mark",
            ),
            (
                of(
                    "loss_tolerant = true\nrequire_carrier = true\ncarrier = \"best\"",
                    "{ if = \"rtt > 9ms\", carrier = \"udp\" }",
                ),
                6,
                39,
                "excludes require_carrier",
            ),
            (of(best, ""), 4, 8, "an empty list"),
            (of(best, &many), 4, 8, "at most 8 conditions"),
            (of("carrier = \"tcp:bbr\"", good), 4, 1, "goes past vtld"),
            (of("bypass = true", good), 4, 1, "goes past vtld"),
            (of("listen = 80", good), 4, 1, "who connects chooses"),
            (
                of(
                    "require_carrier = true\ncarrier = \"best\"",
                    "{ if = \"rtt > 9ms\", carrier = \"tcp\" }",
                ),
                5,
                39,
                "tcp excludes require_carrier",
            ),
            (
                format!("{best}\ndwell = \"3s\""),
                4,
                1,
                "dwell goes with when",
            ),
            (
                of("carrier = \"best\"\ndwell = \"1ms\"", good),
                4,
                9,
                "from 100ms to an hour",
            ),
            (
                of("carrier = \"best\"\ndwell = \"2h\"", good),
                4,
                9,
                "no unit of a time",
            ),
            (
                of("carrier = \"best\"\ndwell = 3", good),
                4,
                9,
                "a time is text",
            ),
        ] {
            let wrong = rule(&text).expect_err(&text);
            assert_eq!(
                (wrong.place.line, wrong.place.column),
                (line, column),
                "{wrong}: {text}"
            );
            assert!(wrong.text.contains(about), "{wrong}: {text}");
        }
    }

    #[test]
    fn when__may_lose_what_the_rule_marks() {
        let lossy =
            "{ if = \"rtt >= 300ms\", carrier = \"graft:partial-reliability?max-loss=100\" }";
        for own in ["best", "graft:go-back-n?window=16", "udp"] {
            let text = format!("carrier = \"{own}\"\nloss_tolerant = true\nwhen = {lossy}");
            let when = rule(&text).expect(&text)[0].when.clone().expect("one");
            assert!(when.tolerant);
            let wanted = "graft:partial-reliability?max-loss=100";
            assert_eq!(when.carriers[0].to_string(), wanted);
            assert_eq!(when.own.to_string(), own);
        }
        // And back to what loses nothing.
        let text = "carrier = \"udp\"\nloss_tolerant = true\nwhen = { if = \"loss > 5%\", carrier = \"best\" }";
        assert!(
            rule(text).expect("right")[0]
                .when
                .as_ref()
                .expect("one")
                .tolerant
        );
        let one = rule(TWO).expect("right")[0].when.clone().expect("two");
        assert!(!one.tolerant);
    }

    #[test]
    fn when__excludes_auto() {
        let of = |own: &str, case: &str| {
            let case = format!("{{ if = \"rtt > 9ms\", carrier = \"{case}\" }}");
            rule(&format!("carrier = \"{own}\"\nwhen = {case}"))
        };
        let wrong = of("auto", "quic").expect_err("refused");
        assert!(wrong.text.contains("excludes when"), "{wrong}");
        let wrong = of("best", "auto").expect_err("refused");
        let about = "auto cannot take connections over";
        assert!(wrong.text.contains(about), "{wrong}");
    }

    proptest! {
        #[test]
        fn when__survives_broken_files(
            at in 0..TWO.len(), len in 0_usize..20, new in "[-\\[\\]{}\"'=,.<>%0-9a-z ]{0,6}"
        ) {
            let mut bytes = TWO.as_bytes().to_vec();
            let end = (at + len).min(bytes.len());
            bytes.splice(at..end, new.bytes());
            if let Err(wrong) = rule(&String::from_utf8_lossy(&bytes)) {
                prop_assert!(!wrong.text.is_empty() && wrong.place.line <= 10);
            }
        }
    }
}
