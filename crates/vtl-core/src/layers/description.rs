//! What a stack consists of: as text, `CARRIER/LAYER/LAYER?PARAMETER=VALUE`, the top layer first; in the file of stacks and
//! in SETUP.

use core::{fmt, str::FromStr};

use vtl_proto::{
    carrier::{GraftSpec, Kind},
    layers::MAX_TEXT,
};

use super::{Compression, Fec, FlowControl, Layer, Nack, Ns, Ordering, Promises};

/// Stacks that need no file: their names, and what they consist of.
pub const BUILT_IN: [(&str, &str); 1] = [("udp-plus", "udp/flow-control/ordering/nack")];

/// Maximum number of layers.
pub const MAX_LAYERS: usize = 8;

/// Carriers that can be below layers: those whose packets may get lost,
const DATAGRAMS: [&str; 2] = ["udp", "kcp"];
/// and those that move messages, of which none gets lost; a graft by its name, too.
const MESSAGES: [Kind; 4] = [Kind::Quic, Kind::Sctp, Kind::Mptcp, Kind::Graft];
/// The prefix of a graft by its name.
const GRAFT: &str = "graft:";
/// Packets that may wait for one that they have overtaken, over messages: what the largest ring of a session has.
const MESSAGES_AHEAD: u32 = 16_384;

/// A parameter: name, default, minimum and maximum.
type Param = (&'static str, u32, u32, u32);

/// Windows in packets: 100 Mbit/s at a round trip of 200 ms by default.
const WINDOW: Param = ("window", 2048, Nack::MIN_WINDOW, 8192);
/// The layers, with their parameters.
static LAYERS: [(&str, &[Param]); 6] = [
    ("flow-control", &[("window", 2048, 4, 8192)]),
    (
        "ordering",
        &[("buffer", 2048, 4, 8192), ("wait", 50, 1, 10_000)],
    ),
    ("nack", &[WINDOW]),
    ("fec", &[("block", 10, 1, 64), ("wait", 5, 1, 1000)]),
    ("compression", &[]),
    ("encryption", &[]),
];

/// A stack: the carrier, and the layers above it from the top to the bottom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    carrier: String,
    layers: Vec<GraftSpec>,
}

/// Why a stack is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The text is malformed.
    #[error("a stack is CARRIER/LAYER/LAYER?PARAMETER=VALUE, from the top to the bottom, {max} bytes at most", max = MAX_TEXT)]
    Text,
    /// Its carrier is unknown.
    #[error("layers cannot be over \"{0}\": over {all}", all = [&DATAGRAMS[..], &MESSAGES.map(Kind::name)].concat().join(", "))]
    Carrier(String),
    /// It has too many layers.
    #[error("a stack has {max} layers at most", max = MAX_LAYERS)]
    TooMany,
    /// A layer is unknown.
    #[error("there is no layer \"{0}\": there are {all}", all = names())]
    Layer(String),
    /// A layer is there twice.
    #[error("the layer {0} is there twice")]
    Twice(String),
    /// A parameter is unknown.
    #[error("the layer {0} has no parameter \"{1}\": {2}")]
    Param(String, String, String),
    /// A parameter is out of range.
    #[error("{1} {2} of the layer {0} is out of range: {3} to {4}")]
    Range(String, &'static str, u32, u32, u32),
    /// A layer does what the carrier does.
    #[error(
        "the layer {0} is for udp and kcp: {1} loses nothing, and bounds what is under way by itself"
    )]
    Needless(String, String),
    /// There is no layer.
    #[error("a stack over {0} needs a layer: without any it is the carrier {0} itself")]
    Bare(String),
    /// A layer is at the wrong place.
    #[error("{0}")]
    Order(&'static str),
    /// It does not do what TCP connections need.
    #[error(
        "it cannot carry TCP connections, it lacks {0}: over udp the layers flow-control, ordering and nack are needed, from the \
         top to the bottom"
    )]
    Lacks(&'static str),
    /// The receiver's buffer is smaller than what may come.
    #[error("ordering's buffer ({0}) must not be smaller than nack's window ({1})")]
    Buffer(u32, u32),
}

fn names() -> String {
    LAYERS.map(|(name, _)| name).join(", ")
}

/// Layers that were made, from the top to the bottom.
pub type Built = Vec<Box<dyn Layer>>;

impl FromStr for Description {
    type Err = Unfit;

    fn from_str(text: &str) -> Result<Self, Unfit> {
        if text.len() > MAX_TEXT {
            return Err(Unfit::Text);
        }
        let mut parts = text.split('/');
        let carrier = parts.next().filter(|carrier| !carrier.is_empty());
        let layers = parts.map(|part| part.parse().map_err(|_| Unfit::Text));
        Ok(Self {
            carrier: carrier.ok_or(Unfit::Text)?.to_owned(),
            layers: layers.collect::<Result<_, _>>()?,
        })
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.carrier)?;
        self.layers
            .iter()
            .try_for_each(|layer| write!(f, "/{layer}"))
    }
}

impl Description {
    /// The carrier.
    pub fn carrier(&self) -> &str {
        &self.carrier
    }

    /// Whether it has no congestion control, and so needs an exclusive hop or a set rate.
    pub fn needs_rate(&self) -> bool {
        self.carrier == "udp"
    }

    /// Whether its packets must be sealed.
    pub fn needs_encryption(&self) -> bool {
        self.has("encryption")
    }

    /// The kind of the carrier that it is over, if that moves messages, all of them, rather than datagrams.
    pub fn over_messages(&self) -> Option<Kind> {
        match self.graft() {
            Some(_) => Some(Kind::Graft),
            None => MESSAGES
                .into_iter()
                .find(|kind| kind.name() == self.carrier),
        }
    }

    /// Whether it is over such a carrier.
    pub fn is_over_messages(&self) -> bool {
        self.over_messages().is_some()
    }

    /// The graft that it is over, if it names one.
    pub fn graft(&self) -> Option<GraftSpec> {
        self.carrier.strip_prefix(GRAFT)?.parse().ok()
    }

    fn has(&self, name: &str) -> bool {
        self.layers.iter().any(|layer| layer.name == name)
    }

    /// Checks that it makes sense. `knows`: whether there is another layer with this name and these parameters, made outside
    /// VTL, which passes on what it gets, in order.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, knows: impl Fn(&GraftSpec) -> bool) -> Result<(), Unfit> {
        let is_over_messages = self.is_over_messages();
        if !DATAGRAMS.contains(&&*self.carrier) && !is_over_messages {
            return Err(Unfit::Carrier(self.carrier.clone()));
        }
        if is_over_messages && self.layers.is_empty() {
            return Err(Unfit::Bare(self.carrier.clone()));
        }
        if self.layers.len() > MAX_LAYERS {
            return Err(Unfit::TooMany);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let name = &layer.name;
            if self.layers[..i].iter().any(|other| other.name == *name) {
                return Err(Unfit::Twice(name.clone()));
            }
            match params(name) {
                Some(params) => check_params(layer, params)?,
                None if knows(layer) => {}
                None => return Err(Unfit::Layer(name.clone())),
            }
            if is_over_messages && matches!(&**name, "flow-control" | "nack" | "fec") {
                return Err(Unfit::Needless(name.clone(), self.carrier.clone()));
            }
        }
        let promises = self.promises()?;
        if self.carrier == "udp" {
            for (is_kept, what) in [
                (promises.reliable, "reliability"),
                (promises.ordered, "order"),
                (promises.controlled, "flow control"),
            ] {
                if !is_kept {
                    return Err(Unfit::Lacks(what));
                }
            }
        }
        Ok(())
    }

    /// What the layers together promise over packets of UDP.
    fn promises(&self) -> Result<Promises, Unfit> {
        let mut all = Promises::default();
        let mut window = None;
        for (i, layer) in self.layers.iter().enumerate().rev() {
            let is_lowest = i + 1 == self.layers.len();
            match &*layer.name {
                "nack" => {
                    (all.reliable, all.ordered) = (true, false);
                    window = Some(value(layer, "window"));
                }
                "ordering" => {
                    let buffer = value(layer, "buffer");
                    if let Some(window) = window.filter(|window| buffer < *window) {
                        return Err(Unfit::Buffer(buffer, window));
                    }
                    all.ordered = true;
                }
                "flow-control" => {
                    if !(all.reliable && all.ordered) {
                        return Err(Unfit::Order(
                            "flow-control counts packets: it belongs above ordering, and that above nack",
                        ));
                    }
                    all.controlled = true;
                }
                "fec" if all.reliable => {
                    return Err(Unfit::Order(
                        "fec makes lost packets, of which there are none above nack: it belongs below",
                    ));
                }
                "encryption" if !is_lowest => {
                    return Err(Unfit::Order(
                        "encryption is the lowest layer: the others then parse nothing that was not authenticated",
                    ));
                }
                _ => {}
            }
        }
        Ok(all)
    }

    /// Makes the layers, but for encryption, which is the packets' own. `rtt`: the path's round-trip time, if it is known;
    /// `make`: makes a layer that is none of VTL's.
    ///
    /// # Errors
    /// What is wrong.
    pub fn build(
        &self,
        rtt: Option<Ns>,
        knows: impl Fn(&GraftSpec) -> bool,
        make: impl Fn(&GraftSpec) -> Option<Box<dyn Layer>>,
    ) -> Result<Built, Unfit> {
        self.check(knows)?;
        let over_messages = self.is_over_messages();
        let reliable = self.has("nack") || over_messages;
        let layers = self.layers.iter().filter(|l| l.name != "encryption");
        let layers = layers.map(|layer| -> Result<Box<dyn Layer>, Unfit> {
            let value = |name| value(layer, name);
            Ok(match &*layer.name {
                "flow-control" => Box::new(FlowControl::new(value("window"))),
                "ordering" if over_messages => Box::new(Ordering::new(MESSAGES_AHEAD, 0, true)),
                "ordering" => Box::new(Ordering::new(value("buffer"), value("wait"), reliable)),
                "nack" => Box::new(Nack::new(value("window"), rtt)),
                "fec" => Box::new(Fec::new(value("block"), value("wait"))),
                "compression" => Box::new(Compression::default()),
                name => make(layer).ok_or_else(|| Unfit::Layer(name.to_owned()))?,
            })
        });
        layers.collect()
    }

    /// Packets that a peer can have this host keep, at most; over messages, [`Pipeline::held`](super::Pipeline::held) says what it
    /// keeps.
    pub fn memory(&self) -> u64 {
        let of = |layer: &GraftSpec| match &*layer.name {
            "flow-control" => value(layer, "window"),
            "ordering" => value(layer, "buffer"),
            // What waits at the top.
            _ => 0,
        };
        self.layers.iter().map(|layer| u64::from(of(layer))).sum()
    }
}

/// The parameters of a layer of VTL's.
fn params(name: &str) -> Option<&'static [Param]> {
    let found = LAYERS.iter().find(|(known, _)| *known == name);
    found.map(|(_, params)| *params)
}

fn check_params(layer: &GraftSpec, params: &[Param]) -> Result<(), Unfit> {
    for (name, value) in &layer.params {
        let Some((known, _, min, max)) = params.iter().find(|(known, ..)| known == name) else {
            let all = params.iter().map(|(name, ..)| *name);
            let all = match params.is_empty() {
                true => "it has none".to_owned(),
                false => format!("it has {}", all.collect::<Vec<_>>().join(", ")),
            };
            return Err(Unfit::Param(layer.name.clone(), name.clone(), all));
        };
        if !(min..=max).contains(&value) {
            return Err(Unfit::Range(layer.name.clone(), known, *value, *min, *max));
        }
    }
    Ok(())
}

/// A parameter's value, or its default.
fn value(layer: &GraftSpec, name: &str) -> u32 {
    let default = params(&layer.name).and_then(|all| all.iter().find(|(known, ..)| *known == name));
    let given = layer.params.get(name).copied();
    given
        .or(default.map(|(_, default, ..)| *default))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<(), Unfit> {
        text.parse::<Description>()?
            .check(|layer| layer.name == "own")
    }

    #[test]
    fn check__by_what_the_layers_promise_together() {
        for fit in [
            BUILT_IN[0].1,
            "udp/compression/flow-control?window=64/ordering/nack?window=64/fec?block=4/encryption",
            "udp/flow-control/ordering/own?x=1/nack/fec",
            "kcp",
            "kcp/fec",
            "kcp/compression/fec/encryption",
            "quic/own?x=1",
            "sctp/compression/ordering/encryption",
            "mptcp/compression",
            "graft/ordering/own",
            "graft:cubic/compression",
            "graft:go-back-n?window=64/compression",
        ] {
            assert_eq!(checked(fit), Ok(()), "{fit}");
            let parsed: Description = fit.parse().unwrap();
            assert_eq!(parsed.to_string(), fit);
        }
        for (unfit, about) in [
            ("", "a stack is CARRIER"),
            ("udp/", "a stack is CARRIER"),
            ("udp/nack?window", "a stack is CARRIER"),
            (
                "tcp/nack",
                "cannot be over \"tcp\": over udp, kcp, quic, sctp, mptcp, graft",
            ),
            ("graft:/compression", "cannot be over \"graft:\""),
            ("quic", "a stack over quic needs a layer"),
            ("quic/nack", "the layer nack is for udp and kcp: quic loses"),
            ("graft/fec", "the layer fec is for udp and kcp"),
            ("sctp/flow-control", "the layer flow-control is for"),
            ("mptcp/encryption/compression", "lowest layer"),
            ("udp", "it lacks reliability"),
            ("udp/ordering/fec", "it lacks reliability"),
            ("udp/nack", "it lacks order"),
            ("udp/ordering/nack", "it lacks flow control"),
            ("udp/ordering/flow-control/nack", "flow-control counts"),
            ("udp/flow-control/nack/ordering", "flow-control counts"),
            ("udp/flow-control/ordering/fec/nack", "belongs below"),
            ("udp/encryption/flow-control/ordering/nack", "lowest layer"),
            ("udp/x/nack", "no layer \"x\": there are flow-control"),
            ("udp/nack/nack", "there twice"),
            (
                "udp/nack?windows=9",
                "no parameter \"windows\": it has window",
            ),
            ("kcp/compression?x=9", "no parameter \"x\": it has none"),
            (
                "udp/nack?window=9000",
                "window 9000 of the layer nack is out of range: 32 to 8192",
            ),
            (
                "udp/ordering?buffer=40/nack?window=41",
                "(40) must not be smaller than nack's window (41)",
            ),
            ("kcp/a/b/c/d/e/f/g/h/i", "8 layers at most"),
        ] {
            let error = checked(unfit).expect_err(unfit).to_string();
            assert!(error.contains(about), "{unfit}: {error}");
        }
        assert!(checked(&"udp".repeat(MAX_TEXT)).is_err());
    }

    #[test]
    fn build__makes_the_layers_from_the_top() {
        let built = |text: &str| {
            let parsed: Description = text.parse().unwrap();
            parsed
                .build(None, |_| true, |_| None)
                .map(|built| built.len())
        };
        assert_eq!(built(BUILT_IN[0].1), Ok(3));
        assert_eq!(built("kcp/compression/encryption"), Ok(1));
        assert_eq!(built("quic/ordering/compression/encryption"), Ok(2));
        assert_eq!(built("kcp/own"), Err(Unfit::Layer("own".into())));
    }
}
