//! Stacks of layers by name: built-in ones, and those of `stacks.toml`, beside the file of rules (docs/stacks.md). It is read
//! at start and whenever the rules are, and rejected as a whole on any error.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use serde::Deserialize;
use toml::Spanned;
use vtl_core::layers::{BUILT_IN, Description};
use vtl_proto::carrier::GraftSpec;

use crate::rules::is_regular;

/// Name of the file, in the directory of the rules.
pub(crate) const FILE: &str = "stacks.toml";

/// Maximum size of the file, bytes, and number of its stacks.
const LONGEST: u64 = 64 << 10;
const MAX_STACKS: usize = 64;
/// Maximum length of a name, characters.
const LONGEST_NAME: usize = 64;
/// Maximum rate, Mbit/s.
const MAX_RATE: u32 = 100_000;

/// The stacks in force.
static STACKS: Mutex<Option<Arc<NamedStacks>>> = Mutex::new(None);

fn stacks() -> MutexGuard<'static, Option<Arc<NamedStacks>>> {
    // Poisoning is harmless: no critical section leaves a partial update.
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stacks that this host knows by name.
#[derive(Debug)]
pub(crate) struct NamedStacks {
    /// The file, for errors.
    file: PathBuf,
    by_name: BTreeMap<String, NamedStack>,
    /// kbit/s.
    accept_rate: u32,
}

/// A stack by name.
#[derive(Clone, Debug)]
struct NamedStack {
    layers: Description,
    /// What this host, and the peer, send at most, Mbit/s.
    rate: Option<u32>,
    peer_rate: Option<u32>,
    /// Its hops carry nothing else.
    exclusive: bool,
}

/// A stack that is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToOpen {
    pub(crate) layers: Description,
    /// What this host, and the peer, send at most, kbit/s; 0: without bound.
    pub(crate) rate: u32,
    pub(crate) peer_rate: u32,
}

/// The file as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    accept_rate: Option<Spanned<u32>>,
    #[serde(default)]
    stack: Vec<Spanned<Row>>,
}

/// A stack as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: Spanned<String>,
    #[serde(default)]
    carrier: Option<Spanned<String>>,
    layers: Option<Spanned<Vec<String>>>,
    rate: Option<Spanned<u32>>,
    peer_rate: Option<Spanned<u32>>,
    #[serde(default)]
    exclusive: bool,
}

impl NamedStacks {
    /// Those that need no file.
    fn built_in(file: &Path) -> Self {
        let each = BUILT_IN.map(|(name, text)| {
            let stack = NamedStack {
                layers: text.parse().expect("a test parses it"),
                rate: None,
                peer_rate: None,
                exclusive: false,
            };
            (name.to_owned(), stack)
        });
        Self {
            file: file.to_owned(),
            by_name: each.into_iter().collect(),
            accept_rate: 0,
        }
    }

    /// Parses a file.
    ///
    /// # Errors
    /// Where it is wrong, as one sentence.
    fn parse(file: &Path, text: &str) -> Result<Self, String> {
        let wrong = |at: usize, why: &str| {
            let before = text.get(..at).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            format!("{}:{line}:{column}: {why}", file.display())
        };
        let parsed: Text = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            wrong(at, &error.message().trim().replace('\n', ", "))
        })?;
        let mut all = Self::built_in(file);
        if let Some(rate) = parsed.accept_rate {
            let at = rate.span().start;
            let rate = rate.into_inner();
            if rate > MAX_RATE {
                let why =
                    format!("accept_rate is in Mbit/s: 0, which refuses stacks, to {MAX_RATE}");
                return Err(wrong(at, &why));
            }
            all.accept_rate = rate * 1000;
        }
        for row in parsed.stack {
            let at = row.span().start;
            if all.by_name.len() == MAX_STACKS {
                return Err(wrong(at, &format!("more than {MAX_STACKS} stacks")));
            }
            let (name, stack) = stack(row.into_inner()).map_err(|(at, why)| wrong(at, &why))?;
            if all.by_name.insert(name.clone(), stack).is_some() {
                let why = format!("there is a stack \"{name}\" already: take another name");
                return Err(wrong(at, &why));
            }
        }
        Ok(all)
    }

    /// The stack that a carrier `stack:NAME?PARAMETER=VALUE` names.
    fn resolve(&self, spec: &GraftSpec) -> Result<ToOpen, String> {
        let Some(stack) = self.by_name.get(&spec.name) else {
            let all: Vec<_> = self.by_name.keys().map(|n| format!("stack:{n}")).collect();
            return Err(format!(
                "there is no carrier stack:{}: there are {}, and those that {} declares",
                spec.name,
                all.join(", "),
                self.file.display()
            ));
        };
        let (mut rate, mut peer_rate) = (stack.rate, stack.peer_rate);
        if stack.layers.is_over_messages() && !spec.params.is_empty() {
            return Err(format!("stack:{spec}: {}", no_rate(&stack.layers)));
        }
        for (name, value) in &spec.params {
            match &**name {
                "rate" => rate = Some(*value),
                "peer-rate" => peer_rate = Some(*value),
                other => {
                    return Err(format!(
                        "stack:{spec}: a stack has no parameter \"{other}\": it has rate and peer-rate, in Mbit/s"
                    ));
                }
            }
            if !(1..=MAX_RATE).contains(value) {
                return Err(format!(
                    "stack:{spec}: {name} is in Mbit/s, from 1 to {MAX_RATE}"
                ));
            }
        }
        let peer_rate = peer_rate.or(rate);
        if stack.layers.needs_rate() && !stack.exclusive && rate.is_none() {
            return Err(format!(
                "stack:{spec} has no congestion control: say the rate of the hop in Mbit/s (stack:{}?rate=20), or declare a \
                 stack with rate or exclusive = true in {}",
                spec.name,
                self.file.display()
            ));
        }
        Ok(ToOpen {
            layers: stack.layers.clone(),
            rate: rate.unwrap_or(0) * 1000,
            peer_rate: peer_rate.unwrap_or(0) * 1000,
        })
    }
}

/// Why a stack has no rate.
fn no_rate(layers: &Description) -> String {
    format!(
        "a rate is for stacks over udp: {} controls congestion itself",
        layers.carrier()
    )
}

/// Makes a stack of what is written; else where it is wrong, and why.
fn stack(row: Row) -> Result<(String, NamedStack), (usize, String)> {
    let at = row.name.span().start;
    let name = row.name.into_inner();
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(fits) {
        let why = format!(
            "a stack's name has 1 to {LONGEST_NAME} letters, digits, dots, hyphens and underscores"
        );
        return Err((at, why));
    }
    let carrier = row.carrier.map_or("udp".to_owned(), Spanned::into_inner);
    let (at, text) = match row.layers {
        Some(layers) => {
            let at = layers.span().start;
            let mut parts = vec![carrier];
            parts.extend(layers.into_inner());
            (at, parts.join("/"))
        }
        None if carrier == "udp" => (at, BUILT_IN[0].1.to_owned()),
        None => (at, carrier),
    };
    let wrong = |why: vtl_core::layers::Unfit| (at, format!("stack \"{name}\": {why}"));
    let layers: Description = text.parse().map_err(wrong)?;
    layers.check(is_there).map_err(wrong)?;
    let rate = row.rate.as_ref().or(row.peer_rate.as_ref());
    if let Some(rate) = rate.filter(|_| layers.is_over_messages()) {
        let why = format!("stack \"{name}\": {}", no_rate(&layers));
        return Err((rate.span().start, why));
    }
    let rate = |rate: Option<Spanned<u32>>| match rate {
        Some(rate) if !(1..=MAX_RATE).contains(rate.get_ref()) => {
            let why = format!("a rate is in Mbit/s, from 1 to {MAX_RATE}");
            Err((rate.span().start, why))
        }
        rate => Ok(rate.map(Spanned::into_inner)),
    };
    let stack = NamedStack {
        layers,
        rate: rate(row.rate)?,
        peer_rate: rate(row.peer_rate)?,
        exclusive: row.exclusive,
    };
    Ok((name, stack))
}

/// Directory of layers that are compiled outside of VTL.
static LAYERS: OnceLock<PathBuf> = OnceLock::new();

/// Has layers be looked for in this directory. Call it once, before anything else of this crate.
pub fn use_layers(directory: PathBuf) {
    // The first one stays.
    let _ = LAYERS.set(directory);
}

/// Directory of layers that are compiled outside of VTL.
pub(crate) fn layer_directory() -> Option<&'static Path> {
    LAYERS.get().map(PathBuf::as_path)
}

/// The file of a layer that is compiled outside of VTL.
///
/// # Errors
/// There is none, or somebody else than root may write it or its directory.
pub(crate) fn layer_file(name: &str) -> io::Result<PathBuf> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let directory = layer_directory().filter(|_| name.chars().all(fits));
    let directory = directory.ok_or(io::ErrorKind::NotFound)?;
    let file = directory.join(format!("{name}.so"));
    for path in [directory, &file] {
        let about = fs::metadata(path)?;
        if about.uid() != 0 || about.mode() & 0o022 != 0 {
            let path = path.display();
            return Err(io::Error::other(format!(
                "{path} is not root's alone (chown root, chmod go-w)"
            )));
        }
    }
    Ok(file)
}

/// Whether there is a file for a layer.
fn is_there(layer: &GraftSpec) -> bool {
    match layer_file(&layer.name) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => {
            tracing::warn!(%error, layer = %layer.name, "stacks: layer refused");
            false
        }
    }
}

/// Puts the stacks of a file in force; only the built-in ones if it does not exist. Returns those before.
///
/// # Errors
/// It cannot be read, or where it is wrong, as one sentence. Those in force stay.
pub(crate) fn load(file: &Path) -> Result<Option<Arc<NamedStacks>>, String> {
    let read = || -> io::Result<String> {
        let file = File::open(file)?;
        is_regular(&file)?;
        let mut text = String::new();
        file.take(LONGEST + 1).read_to_string(&mut text)?;
        match text.len() as u64 > LONGEST {
            true => Err(io::Error::other(format!(
                "longer than {} KiB",
                LONGEST >> 10
            ))),
            false => Ok(text),
        }
    };
    let loaded = match read() {
        Ok(text) => NamedStacks::parse(file, &text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => NamedStacks::built_in(file),
        Err(error) => return Err(format!("cannot read {}: {error}", file.display())),
    };
    Ok(stacks().replace(Arc::new(loaded)))
}

/// Puts those in force that were before.
pub(crate) fn restore(former: Option<Arc<NamedStacks>>) {
    *stacks() = former;
}

fn current() -> Arc<NamedStacks> {
    let known = stacks().clone();
    known.unwrap_or_else(|| Arc::new(NamedStacks::built_in(Path::new(FILE))))
}

/// The stack that a carrier names.
///
/// # Errors
/// There is none, a parameter is wrong, or it has no congestion control and no rate: one sentence.
pub(crate) fn resolve(spec: &GraftSpec) -> Result<ToOpen, String> {
    current().resolve(spec)
}

/// Rate at which peers may have this host send by their stacks, kbit/s; 0: they may have no stack, as what has no congestion
/// control is not for others to start here.
pub(crate) fn accept_rate() -> u32 {
    current().accept_rate
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NamedStacks, String> {
        NamedStacks::parse(Path::new("stacks.toml"), text)
    }

    fn resolve(stacks: &NamedStacks, spec: &str) -> Result<ToOpen, String> {
        stacks.resolve(&spec.parse().expect("a name with parameters"))
    }

    #[test]
    fn resolve__a_stack_without_congestion_control_needs_a_rate_or_an_exclusive_hop() {
        let stacks = parse(
            "accept_rate = 50\n\
             [[stack]]\nname = \"lte\"\nrate = 5\npeer_rate = 20\n\
             layers = [\"flow-control\", \"ordering\", \"nack?window=512\", \"fec?block=20\"]\n\
             [[stack]]\nname = \"backhaul\"\nexclusive = true\n\
             [[stack]]\nname = \"kcp-fec\"\ncarrier = \"kcp\"\nlayers = [\"fec\"]\n\
             [[stack]]\nname = \"bare\"\n\
             [[stack]]\nname = \"packed\"\ncarrier = \"quic\"\nlayers = [\"compression\"]\n",
        )
        .expect("right");
        assert_eq!(stacks.accept_rate, 50_000);
        for (spec, layers, rate, peer_rate) in [
            ("udp-plus?rate=20", BUILT_IN[0].1, 20, 20),
            ("udp-plus?rate=20&peer-rate=1", BUILT_IN[0].1, 20, 1),
            (
                "lte",
                "udp/flow-control/ordering/nack?window=512/fec?block=20",
                5,
                20,
            ),
            (
                "lte?rate=7",
                "udp/flow-control/ordering/nack?window=512/fec?block=20",
                7,
                20,
            ),
            ("backhaul", BUILT_IN[0].1, 0, 0),
            ("kcp-fec", "kcp/fec", 0, 0),
            ("packed", "quic/compression", 0, 0),
        ] {
            let found = resolve(&stacks, spec).expect(spec);
            assert_eq!(found.layers.to_string(), layers, "{spec}");
            let rates = (found.rate, found.peer_rate);
            assert_eq!(rates, (rate * 1000, peer_rate * 1000), "{spec}");
        }
        for (spec, about) in [
            (
                "udp-plus",
                "has no congestion control: say the rate of the hop in Mbit/s (stack:udp-plus?rate=20)",
            ),
            ("bare", "exclusive = true in stacks.toml"),
            ("udp-plus?peer-rate=1", "no congestion control"),
            (
                "x",
                "no carrier stack:x: there are stack:backhaul, stack:bare, ",
            ),
            (
                "lte?window=1",
                "no parameter \"window\": it has rate and peer-rate",
            ),
            ("lte?rate=0", "rate is in Mbit/s, from 1 to 100000"),
            ("packed?rate=5", "quic controls congestion itself"),
        ] {
            let error = resolve(&stacks, spec).expect_err(spec);
            assert!(error.contains(about), "{spec}: {error}");
        }
    }

    #[test]
    fn parse__says_where_a_file_is_wrong() {
        let row = |rest: &str| format!("[[stack]]\nname = \"a\"\n{rest}\n");
        for (text, about) in [
            ("x = 1", "stacks.toml:1:1: unknown field"),
            ("[[stack]]\n", "missing field `name`"),
            ("accept_rate = 100001", "1:15: accept_rate is in Mbit/s"),
            ("[[stack]]\nname = \"a b\"", "2:8: a stack's name has"),
            (&row("rate = 0"), "3:8: a rate is in Mbit/s"),
            (&row("rate = \"20\""), "3:8: invalid type"),
            (
                &row("layers = [\"nack\"]"),
                "3:10: stack \"a\": it cannot carry TCP connections, it lacks order",
            ),
            (&row("layers = [\"x\"]"), "there is no layer \"x\""),
            (&row("carrier = \"tcp\""), "layers cannot be over \"tcp\""),
            (
                &row("carrier = \"quic\""),
                "a stack over quic needs a layer",
            ),
            (
                &row("rate = 9\ncarrier = \"graft\"\nlayers = [\"compression\"]"),
                "3:8: stack \"a\": a rate is for stacks over udp: graft controls",
            ),
            (&row(&row("")), "there is a stack \"a\" already"),
            (
                &row("[[stack]]\nname = \"udp-plus\"\n"),
                "\"udp-plus\" already",
            ),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(about), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert_eq!(parse("").expect("right").by_name.len(), 1);
    }
}
