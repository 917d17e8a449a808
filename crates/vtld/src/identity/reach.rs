//! Ports of this host that a peer may reach by VTL: `reach` in `peers.toml`.

use std::ops::RangeInclusive;

use toml::Value;

/// Maximum number of ranges in a list.
const MAX_RANGES: usize = 1024;

/// Ports of this host that a peer's flows may be carried to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// `None`: all ports.
    ports: Option<Vec<RangeInclusive<u16>>>,
}

impl Reach {
    /// Whether flows may be carried to a port.
    pub(crate) fn contains(&self, port: u16) -> bool {
        let ports = self.ports.as_ref();
        ports.is_none_or(|ports| ports.iter().any(|range| range.contains(&port)))
    }

    /// Whether it is limited to a list of ports.
    pub(super) fn is_limited(&self) -> bool {
        self.ports.is_some()
    }

    /// Parses one port (443), a range ("8000-8100"), or a list of such.
    ///
    /// # Errors
    /// None of these, or too many.
    pub(super) fn parse(value: &Value) -> Result<Self, String> {
        let ports = match value {
            Value::Array(all) if all.len() > MAX_RANGES => {
                return Err(format!("reach has more than {MAX_RANGES} entries"));
            }
            Value::Array(all) => all.iter().map(range).collect(),
            one => range(one).map(|range| vec![range]),
        };
        Ok(Self {
            ports: Some(ports?),
        })
    }

    /// As [`Reach::parse`], from ports and ranges as text; `None`: all ports.
    ///
    /// # Errors
    /// One is neither.
    pub(super) fn from_texts(texts: Option<&[String]>) -> Result<Self, String> {
        let parse = |texts: &[String]| {
            let texts = texts.iter().cloned().map(Value::String);
            Self::parse(&Value::Array(texts.collect()))
        };
        texts.map_or(Ok(Self::default()), parse)
    }

    /// The ports and ranges as text; `None`: all ports.
    pub(super) fn to_texts(&self) -> Option<Vec<String>> {
        let text = |range: &RangeInclusive<u16>| match range.start() == range.end() {
            true => range.start().to_string(),
            false => format!("{}-{}", range.start(), range.end()),
        };
        let ports = self.ports.as_ref()?;
        Some(ports.iter().map(text).collect())
    }
}

/// Parses a port or a range of ports.
fn range(value: &Value) -> Result<RangeInclusive<u16>, String> {
    let port = |text: &str| text.trim().parse().ok().filter(|port| *port > 0);
    let range = match value {
        Value::Integer(port) => u16::try_from(*port).ok().filter(|port| *port > 0),
        Value::String(text) => match text.split_once('-') {
            Some((from, to)) => {
                let range = port(from).zip(port(to)).filter(|(from, to)| from <= to);
                return range.map(|(from, to)| from..=to).ok_or_else(|| bad(value));
            }
            None => port(text),
        },
        _ => None,
    };
    range.map(|port| port..=port).ok_or_else(|| bad(value))
}

fn bad(value: &Value) -> String {
    format!(
        "{value} is no reach: ports are 1 to 65535, one (443), a range (\"8000-8100\") or a list"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Reach, String> {
        let table: toml::Table = format!("reach = {text}").parse().expect("TOML");
        Reach::parse(&table["reach"])
    }

    #[test]
    fn reach__ports_ranges_and_lists() {
        let all = Reach::default();
        assert!(all.contains(1) && all.contains(65_535) && !all.is_limited());
        assert_eq!(all.to_texts(), None);
        let one = parse("443").expect("a port");
        assert!(one.contains(443) && !one.contains(442) && !one.contains(444));
        let some = parse("[80, \"8000-8100\", \"22\"]").expect("ports");
        for (port, is_in) in [
            (80, true),
            (22, true),
            (8000, true),
            (8100, true),
            (7999, false),
            (8101, false),
        ] {
            assert_eq!(some.contains(port), is_in, "{port}");
        }
        let texts = some.to_texts().expect("limited");
        assert_eq!(texts, ["80", "8000-8100", "22"]);
        assert_eq!(Reach::from_texts(Some(&texts)), Ok(some));
        assert_eq!(Reach::from_texts(None), Ok(all));
        let none = parse("[]").expect("none");
        assert!(!none.contains(80) && none.is_limited());
    }

    #[test]
    fn reach__refuses_what_is_no_port() {
        for text in [
            "0",
            "65536",
            "-1",
            "\"80-\"",
            "\"90-80\"",
            "\"http\"",
            "[[80]]",
            "1.5",
            "\"0-5\"",
            "true",
            "[80, \"\"]",
        ] {
            let error = parse(text).expect_err(text);
            assert!(
                error.contains("is no reach: ports are 1 to 65535"),
                "{error}"
            );
        }
        let many = format!("[{}]", "1,".repeat(MAX_RANGES + 1));
        assert!(parse(&many).expect_err("too many").contains("more than"));
    }
}
