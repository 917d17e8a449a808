//! Parser of what a rule bounds: `max_delay` and `min_throughput`.

use std::ops::Range;

use vtl_core::reconfigure::{Bounds, parse_rate, parse_time};

use super::{Key, Result, Source, Value};
use crate::hooker::Carrier;

/// The bounds of a rule as read, with the position of the first key.
#[derive(Default)]
pub(super) struct Bounded {
    bounds: Bounds,
    at: Option<Range<usize>>,
}

impl Source<'_> {
    /// Reads one of them, `key`.
    pub(super) fn bound(
        &self,
        key: &Key<'_>,
        value: &Value<'_>,
        bounded: &mut Bounded,
    ) -> Result<()> {
        let wrong = |why: &dyn std::fmt::Display| self.error(value.span(), why.to_string());
        if key.get_ref() == "max_delay" {
            let parsed = parse_time(self.string(value, "a time")?);
            bounded.bounds.max_delay = Some(parsed.map_err(|why| wrong(&why))?);
        } else {
            let parsed = parse_rate(self.string(value, "a rate")?);
            bounded.bounds.min_throughput = Some(parsed.map_err(|why| wrong(&why))?);
        }
        bounded.at.get_or_insert(key.span());
        Ok(())
    }

    /// Adds the bounds, if there are any, to the carrier that is to keep them; `None`: to none.
    pub(super) fn bounded(
        &self,
        carrier: Option<Carrier>,
        bounded: Bounded,
    ) -> Result<Option<Carrier>> {
        let Some(at) = bounded.at else {
            return Ok(carrier);
        };
        match carrier {
            Some(Carrier::Auto(_)) => Ok(Some(Carrier::Auto(bounded.bounds))),
            _ => {
                let text = "max_delay and min_throughput go with carrier = \"auto\", about connections that this host \
                            opens or forwards: where the carrier is named there is nothing to choose";
                self.wrong(at, text.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Wrong, parse};
    use super::*;
    use crate::hooker::rules::{About, Action, Rule};

    fn rule(rest: &str) -> std::result::Result<Vec<Rule>, Wrong> {
        parse(&format!("[[rule]]\nname = \"a\"\n{rest}\n"), |_| None)
    }

    #[test]
    fn bounds__go_with_auto() {
        let both = "carrier = \"auto\"\nmax_delay = \"200ms\"\nmin_throughput = \"5M\"";
        let rules = rule(both).expect("right");
        let About::Opened(_, action) = &rules[0].about else {
            panic!("opened");
        };
        let wanted = "auto, max_delay 200ms, min_throughput 5Mbit/s";
        assert_eq!(action.to_string(), wanted);
        let rules = rule("min_throughput = \"800kbit/s\"\nport = 5060\ncarrier = \"auto\"");
        let rules = rules.expect("in any order");
        let Some(Action::Carry(Carrier::Auto(bounds))) =
            rules.first().and_then(|rule| match &rule.about {
                About::Opened(_, action) => Some(action),
                _ => None,
            })
        else {
            panic!("auto");
        };
        assert_eq!(
            (bounds.max_delay, bounds.min_throughput),
            (None, Some(800_000))
        );
        // What a gateway forwards.
        let rules = rule("via = \"wan0\"\ncarrier = \"auto\"\nmax_delay = \"1s\"").expect("right");
        let About::Forwarded(_, carrier) = &rules[0].about else {
            panic!("forwarded");
        };
        assert_eq!(carrier.to_string(), "auto, max_delay 1s");
        let rules = rule("carrier = \"auto\"").expect("right");
        let About::Opened(_, action) = &rules[0].about else {
            panic!("opened");
        };
        assert_eq!(action.to_string(), "auto");
    }

    #[test]
    fn bounds__are_refused_with_place_and_reason() {
        for (text, line, column, about) in [
            (
                "max_delay = \"1s\"\ncarrier = \"best\"",
                3,
                1,
                "go with carrier = \"auto\"",
            ),
            (
                "carrier = \"best\"\nmin_throughput = \"1M\"",
                4,
                1,
                "nothing to choose",
            ),
            ("bypass = true\nmax_delay = \"1s\"", 4, 1, "go with carrier"),
            (
                "listen = 80\nmax_delay = \"1s\"",
                4,
                1,
                "that this host opens",
            ),
            (
                "via = \"w\"\ncarrier = \"quic\"\nmax_delay = \"1s\"",
                5,
                1,
                "go with carrier",
            ),
            (
                "carrier = \"auto\"\nmax_delay = 200",
                4,
                13,
                "a time is text",
            ),
            (
                "carrier = \"auto\"\nmax_delay = \"200\"",
                4,
                13,
                "no unit of a time",
            ),
            (
                "carrier = \"auto\"\nmin_throughput = \"5\"",
                4,
                18,
                "no unit of a rate",
            ),
            (
                "carrier = \"auto\"\nmin_throughput = \"0M\"",
                4,
                18,
                "no number above 0",
            ),
        ] {
            let wrong = rule(text).expect_err(text);
            let place = (wrong.place.line, wrong.place.column);
            assert_eq!(place, (line, column), "{wrong}: {text}");
            assert!(wrong.text.contains(about), "{wrong}: {text}");
        }
    }
}
