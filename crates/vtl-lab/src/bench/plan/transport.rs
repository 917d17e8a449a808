//! What carries a transfer.

use std::fmt;
use std::iter::{once, repeat};
use std::str::FromStr;

use vtl_proto::carrier::{GraftSpec, Kind, LOSSY};
use vtl_testbed::Link;

/// A transport as plans name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Transport {
    /// The kernel's TCP with this congestion control.
    Tcp(&'static str),
    /// QUIC, by quinn, with this congestion control: `cubic` or `bbr`.
    Quic(&'static str),
    /// Datagrams at the link's rate, and what arrives of them: the ceiling.
    Udp,
    /// A VTL session over this graft, read in place, encrypted or not.
    Graft(Graft),
    /// A TCP program captured by the Hooker, and what it travels by, as `vtl run --carrier` names it.
    Hook(String),
    /// The same, to a server beyond a gateway that goes on by TCP: of two links it crosses the first.
    Gateway(String),
    /// As a rule of the plan says: of an unmodified TCP program captured by the Hooker, or of an aware one that follows it.
    Rule {
        /// The rule's name.
        name: String,
        /// The application is an aware one.
        aware: bool,
    },
    /// TCP without a VTL client: the server's daemon has its port sent under this congestion control,
    /// as `vtl hook add --carrier tcp:NAME` names it.
    Served(String),
}

/// A graft, and what its parameters shall be where they do not have their defaults.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Graft {
    /// Its name.
    pub(crate) name: String,
    /// Names and values.
    pub(crate) params: Vec<(String, Setting)>,
    /// Whether payload is encrypted.
    pub(crate) sealed: bool,
}

/// What a parameter shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Setting {
    /// This.
    Number(u32),
    /// What the path deserves. Of a window as many packets as fit onto it: one bandwidth-delay product, at least the
    /// thesis's 16. Of a rate the link's.
    Path,
}

/// Parameters that may be what the path deserves.
pub(super) const WINDOW: &str = "window";
pub(super) const RATE: &str = "rate";
/// A window that is smaller than this would not be the path's, but the timers'.
const MIN_WINDOW: u64 = 16;
/// Bytes of a full packet.
const PACKET: u64 = 1_500;

impl Graft {
    /// The parameters on a link.
    pub(crate) fn params_on(&self, link: &Link) -> Vec<(String, u32)> {
        let window = link.bdp_bytes().div_ceil(PACKET).max(MIN_WINDOW);
        let path = |name: &str| match name {
            RATE => (link.rate_mbit * 1e3) as u32,
            _ => u32::try_from(window).unwrap_or(u32::MAX),
        };
        let number = |name: &str, setting: &Setting| match setting {
            Setting::Number(number) => *number,
            Setting::Path => path(name),
        };
        let params = self.params.iter();
        let param = |(name, setting): &(String, Setting)| (name.clone(), number(name, setting));
        params.map(param).collect()
    }
}

impl fmt::Display for Graft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for ((name, setting), mark) in self.params.iter().zip(once('?').chain(repeat('&'))) {
            match setting {
                Setting::Number(number) => write!(f, "{mark}{name}={number}")?,
                Setting::Path => write!(f, "{mark}{name}=path")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Graft {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, params) = text.split_once('?').unwrap_or((text, ""));
        let setting = |text: &str| match text {
            "path" => Some(Setting::Path),
            number => number.parse().ok().map(Setting::Number),
        };
        let param = |pair: &str| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), setting(value)?)).filter(|_| is_word(name))
        };
        let pairs = params.split('&').filter(|pair| !pair.is_empty());
        let params = pairs.map(param).collect::<Option<Vec<_>>>();
        match params {
            Some(params) if is_word(name) => Ok(Self {
                name: name.to_owned(),
                params,
                sealed: false,
            }),
            _ => Err(format!("\"{text}\" is no graft")),
        }
    }
}

/// The carrier that the model chooses.
const AUTO: &str = "auto";

fn is_carrier(text: &str) -> bool {
    if let Some(stack) = text.strip_prefix("stack:") {
        return stack.parse::<GraftSpec>().is_ok();
    }
    match text.strip_prefix("graft:") {
        Some(graft) => graft.parse::<Graft>().is_ok(),
        None => text == AUTO || Kind::named(text).is_some() || LOSSY.contains(&text),
    }
}

fn is_lossy(carrier: &str) -> bool {
    LOSSY.contains(&carrier)
}

fn is_word(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !text.is_empty() && text.chars().all(fits)
}

/// Every valid name; NAME stands for a graft.
fn names() -> String {
    let carriers = Kind::NAMED.map(Kind::name).into_iter().chain(LOSSY);
    let hooks = carriers.map(|carrier| format!(", hook:{carrier}"));
    "tcp-cubic, tcp-bbr, tcp-reno, quic, quic-bbr, udp, graft:NAME, graft:NAME?PARAMETER=VALUE, \
     sealed:NAME, hook:auto, hook:graft:NAME, hook:stack:NAME, hook:tcp:CONTROL, hook:rule:NAME, graft:rule:NAME, \
     gateway:CARRIER"
        .to_owned()
        + &hooks.collect::<String>()
}

impl Transport {
    /// Payload of a full packet over its size on the link with its IP header, at 1,500 bytes over
    /// IPv4: the share of the rate that goodput can reach.
    ///
    /// TCP: headers of 20 and 20 bytes, timestamps 12; MPTCP 20 more. QUIC: 20, 8, and 40 of its own
    /// (short header 1 + 8 + 3, STREAM frame 12, tag 16). SCTP: 72 in packets of 1,224 bytes. KCP: 52 in
    /// packets of 1,260. `stack:udp-plus`: 71 in the same. UDP: 20 and 8. VTL: 20 and 40; encrypted, 16 more.
    pub(crate) fn efficiency(&self) -> f64 {
        let payload = match self {
            Self::Tcp(_) | Self::Served(_) => 1448.0,
            Self::Quic(_) => 1432.0,
            Self::Udp => 1472.0,
            Self::Graft(graft) if graft.sealed => 1424.0,
            Self::Graft(_) | Self::Rule { .. } => 1440.0,
            Self::Hook(carrier) | Self::Gateway(carrier) => match carrier.as_str() {
                "quic" => 1432.0,
                "sctp" => 1500.0 * 1152.0 / 1224.0,
                "kcp" => 1500.0 * 1208.0 / 1260.0,
                stack if stack.starts_with("stack:") => 1500.0 * 1189.0 / 1260.0,
                "mptcp" => 1428.0,
                AUTO => 1448.0,
                _ => 1440.0,
            },
        };
        payload / 1500.0
    }

    /// Whether it takes daemons.
    pub(crate) fn needs_daemons(&self) -> bool {
        matches!(
            self,
            Self::Graft(_) | Self::Hook(_) | Self::Gateway(_) | Self::Served(_) | Self::Rule { .. }
        )
    }

    /// The graft that it goes over, if it names one.
    pub(crate) fn graft(&self) -> Option<Graft> {
        match self {
            Self::Graft(graft) => Some(graft.clone()),
            Self::Hook(carrier) | Self::Gateway(carrier) => {
                carrier.strip_prefix("graft:")?.parse().ok()
            }
            _ => None,
        }
    }

    /// What a captured program asks for on a link, as `vtl run --carrier` names it.
    pub(crate) fn carrier_on(&self, link: &Link) -> Option<String> {
        let (Self::Hook(carrier) | Self::Gateway(carrier)) = self else {
            return None;
        };
        Some(self.graft().map_or_else(
            || carrier.clone(),
            |graft| {
                let params = graft.params_on(link).into_iter();
                let params = params.map(|(name, value)| (name, Setting::Number(value)));
                let params = params.collect();
                format!("graft:{}", Graft { params, ..graft })
            },
        ))
    }

    /// Whether it is a captured program's.
    pub(crate) fn is_hook(&self) -> bool {
        matches!(
            self,
            Self::Hook(_) | Self::Gateway(_) | Self::Rule { aware: false, .. }
        )
    }

    /// The carrier that the server's port is hooked with, if it is: `Some(None)`, whichever clients
    /// ask for.
    pub(crate) fn hooked(&self) -> Option<Option<String>> {
        match self {
            Self::Hook(_) | Self::Rule { aware: false, .. } => Some(None),
            Self::Served(control) => Some(Some(format!("tcp:{control}"))),
            _ => None,
        }
    }

    /// Whether the model chooses what it travels by, which may be plain TCP.
    pub(crate) fn is_auto(&self) -> bool {
        matches!(self, Self::Hook(carrier) if carrier == AUTO)
    }

    /// The default congestion control of hosts for it.
    pub(crate) fn host_control(&self) -> &'static str {
        match self {
            Self::Tcp(control) => control,
            // As most systems have it.
            auto if auto.is_auto() => "cubic",
            // What VTL gives way to, and what its own connections use.
            _ => "bbr",
        }
    }

    /// Whether it is a captured program's that gets what arrives, and not what is lost.
    pub(crate) fn is_lossy_hook(&self) -> bool {
        match self {
            Self::Hook(carrier) => is_lossy(carrier),
            Self::Rule { aware, .. } => !aware,
            _ => false,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(control) => write!(f, "tcp-{control}"),
            Self::Quic("cubic") => f.write_str("quic"),
            Self::Quic(control) => write!(f, "quic-{control}"),
            Self::Udp => f.write_str("udp"),
            Self::Graft(graft) if graft.sealed => write!(f, "sealed:{graft}"),
            Self::Graft(graft) => write!(f, "graft:{graft}"),
            Self::Hook(name) => write!(f, "hook:{name}"),
            Self::Gateway(name) => write!(f, "gateway:{name}"),
            Self::Rule { name, aware: false } => write!(f, "hook:rule:{name}"),
            Self::Rule { name, aware: true } => write!(f, "graft:rule:{name}"),
            Self::Served(control) => write!(f, "hook:tcp:{control}"),
        }
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = match name {
            "tcp-cubic" => Some(Self::Tcp("cubic")),
            "tcp-bbr" => Some(Self::Tcp("bbr")),
            "tcp-reno" => Some(Self::Tcp("reno")),
            "quic" => Some(Self::Quic("cubic")),
            "quic-bbr" => Some(Self::Quic("bbr")),
            "udp" => Some(Self::Udp),
            _ => match name.split_once(':') {
                Some((kind @ ("graft" | "hook"), rule))
                    if let Some(rule) = rule.strip_prefix("rule:") =>
                {
                    is_word(rule).then(|| Self::Rule {
                        name: rule.to_owned(),
                        aware: kind == "graft",
                    })
                }
                Some(("graft", graft)) => graft.parse().ok().map(Self::Graft),
                Some(("sealed", graft)) => graft.parse().ok().map(|graft: Graft| {
                    let sealed = true;
                    Self::Graft(Graft { sealed, ..graft })
                }),
                Some(("hook", carrier)) if is_carrier(carrier) => {
                    Some(Self::Hook(carrier.to_owned()))
                }
                Some(("gateway", carrier)) if is_carrier(carrier) && !is_lossy(carrier) => {
                    Some(Self::Gateway(carrier.to_owned()))
                }
                Some(("hook", carrier)) => carrier
                    .strip_prefix("tcp:")
                    .filter(|control| is_word(control))
                    .map(|control| Self::Served(control.to_owned())),
                _ => None,
            },
        };
        known.ok_or_else(|| format!("there is no transport \"{name}\": valid are {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__round_trip() {
        for name in [
            "tcp-cubic",
            "tcp-bbr",
            "tcp-reno",
            "quic",
            "quic-bbr",
            "udp",
            "graft:stream",
            "graft:go-back-n?window=64",
            "graft:partial-reliability?window=path&max-loss=50",
            "sealed:stream",
            "sealed:go-back-n?window=64",
            "hook:graft:stream",
            "hook:graft:udp-plus?rate=path",
            "gateway:graft:stream",
            "gateway:quic",
            "hook:auto",
            "hook:quic",
            "hook:sctp",
            "hook:udp-lite",
            "hook:tcp:stream",
            "hook:stack:udp-plus?rate=20",
            "hook:rule:far",
            "graft:rule:far",
        ] {
            let transport: Transport = name.parse().expect("valid");
            assert_eq!(transport.to_string(), name);
        }
        for wrong in [
            "tcp",
            "graft:",
            "hook:tcp",
            "hook:tcp:",
            "hook:quic-bbr",
            "hook:rule:",
            "graft:rule:a b",
            "hook:graft:",
            "hook:stack:",
            "graft:a b",
            "graft:?window=1",
            "graft:a?window",
            "graft:a?window=-1",
            "hook:graft:stream?window",
            "gateway:udp",
            "gateway:tcp",
            "",
        ] {
            let error = wrong.parse::<Transport>().expect_err("refused");
            assert!(error.contains("valid are tcp-cubic"), "{error}");
        }
    }

    #[test]
    fn params_on__the_window_of_the_path() {
        let graft: Graft = "go-back-n?window=path".parse().expect("valid");
        let window = |rtt, rate| graft.params_on(&Link::new(rtt, rate))[0].1;
        // 1.25 MB under way, in packets of 1,500 bytes; and no less than the thesis's window.
        assert_eq!(window(100.0, 100.0), 834);
        assert_eq!(window(10.0, 16.0), 16);
        let hook: Transport = "hook:graft:udp-plus?rate=path".parse().expect("valid");
        let carrier = hook.carrier_on(&Link::new(40.0, 20.0));
        assert_eq!(carrier.as_deref(), Some("graft:udp-plus?rate=20000"));
    }
}
