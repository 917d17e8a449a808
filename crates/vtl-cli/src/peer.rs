//! `vtl peer`: whose keys this host knows.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use vtl_control::{Client, Done, PeerKey, Request};
use vtl_pool::{
    Certificate,
    certificate::is_name,
    key::{PublicKey, SecretKey},
};

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Arguments of `vtl peer`.
#[derive(Debug, Subcommand)]
pub(crate) enum PeerCommand {
    /// List the peers that this host knows, and its own key
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show one of them, or what a certificate says
    Show {
        /// What it is called, or a certificate's file (*.crt)
        name: String,
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Trust a peer's key, in place of one that was learned under its name
    #[command(
        after_help = "Example: vtl peer trust gate 4f0c…9e --address 192.0.2.7 --address 2001:db8::/48 --reach 443\n\n\
        The key is what `vtl peer list` says first on that host."
    )]
    Trust(TrustArgs),
    /// Forget a peer that was learned: the next key that its addresses show counts as the first
    #[command(after_help = "Example: vtl peer forget 192.0.2.7")]
    Forget {
        /// What it is called
        name: String,
    },
    /// Make a certificate authority: NAME.key, which stays with you, and NAME.pub, which hosts trust
    Ca {
        /// What hosts call it
        name: String,
        /// Where to write both files
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
    /// Sign the certificate of a host's key with an authority's: NAME.crt
    #[command(after_help = SIGNING)]
    Sign(SignArgs),
}

const SIGNING: &str = "\
Example:
  vtl peer ca fleet                       once: fleet.key, and what hosts put into /etc/vtl/peers.toml
  vtl peer sign web1 4f0c…9e --ca fleet.key --address 192.0.2.7 --address 2001:db8::7
  scp web1.crt root@web1:/var/lib/vtl/host.crt

The key is what `vtl peer list` says first on that host. A host that others connect to needs its
addresses in the certificate; one that only connects to others needs none, and may be anywhere.
Nothing has to run here, and the authority's key should be on no host that runs VTL. The file
counts from the next control connection on.";

/// A certificate to sign.
#[derive(Debug, Args)]
pub(crate) struct SignArgs {
    /// What the host is called
    name: String,
    /// Its public key, 64 hexadecimal digits, or the file that has it (*.pub)
    key: String,
    /// The authority's secret key
    #[arg(long, value_name = "FILE")]
    ca: PathBuf,
    /// Where the host may be, an address or prefix; may be repeated
    #[arg(long = "address", value_name = "PREFIX")]
    addresses: Vec<Prefix>,
    /// For how many days it is good
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Where to write it
    #[arg(long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
}

/// Whose key is trusted.
#[derive(Debug, Args)]
pub(crate) struct TrustArgs {
    /// What this host calls it
    name: String,
    /// Its public key, 64 hexadecimal digits
    key: String,
    /// Where it may be, an address or prefix; may be repeated; anywhere unless given
    #[arg(long = "address", value_name = "PREFIX")]
    addresses: Vec<String>,
    /// A port of this host that its connections may be carried to by VTL, or a range (8000-8100); may be repeated;
    /// those of peers that are not listed unless given
    #[arg(long, value_name = "PORTS")]
    reach: Vec<String>,
}

/// Runs a subcommand of `vtl peer`.
pub(crate) fn run(command: &PeerCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        PeerCommand::List { json } => {
            output::show(&daemon::ask(&socket.socket, Client::peers)?, *json)?;
        }
        PeerCommand::Show { name, json } if name.ends_with(".crt") => {
            let (_, certificate) = Certificate::read(Path::new(name))?;
            output::show(&described(&certificate), *json)?;
        }
        PeerCommand::Show { name, json } => {
            let all = daemon::ask(&socket.socket, Client::peers)?;
            let found = all.peers.iter().find(|peer| peer.known.name == *name);
            let Some(found) = found else {
                bail!("there is no peer {name}: vtl peer list");
            };
            output::show(found, *json)?;
        }
        PeerCommand::Trust(TrustArgs {
            name,
            key,
            addresses,
            reach,
        }) => {
            let Done {} = socket.call(&Request::PeerTrust(PeerKey {
                name: name.clone(),
                key: key.clone(),
                addresses: addresses.clone(),
                reach: Some(reach.clone()).filter(|reach| !reach.is_empty()),
            }))?;
            if reach.is_empty() {
                return Ok(());
            }
            // A daemon of a version before takes the request, and leaves that out.
            let all = daemon::ask(&socket.socket, Client::peers)?;
            let has_reach =
                |peer: &vtl_control::Peer| peer.known.name == *name && peer.known.reach.is_some();
            ensure!(
                all.peers.iter().any(has_reach),
                "{name} is trusted, without --reach: vtld is of a version that does not know that; restart it and say this again"
            );
        }
        PeerCommand::Forget { name } => {
            let Done {} = socket.call(&Request::PeerForget { name: name.clone() })?;
        }
        PeerCommand::Ca { name, dir } => authority(name, dir)?,
        PeerCommand::Sign(args) => sign(args)?,
    }
    Ok(())
}

/// `vtl peer ca`
fn authority(name: &str, dir: &Path) -> anyhow::Result<()> {
    ensure!(
        is_name(name) && !name.starts_with('.'),
        "{name:?} is no name: letters, digits, dots, colons, hyphens and underscores"
    );
    let key = SecretKey::generate()?;
    let (secret, _) = key.write(dir, name)?;
    eprintln!(
        "{}: keep it to yourself, on no host that runs VTL",
        secret.display()
    );
    eprintln!("for /etc/vtl/peers.toml of all hosts:");
    output::print(&format!(
        "policy = \"ca\"\n[[ca]]\nname = \"{name}\"\nkey = \"{}\"\n",
        key.public()
    ))?;
    Ok(())
}

/// `vtl peer sign`
fn sign(args: &SignArgs) -> anyhow::Result<()> {
    let ca = SecretKey::read(&args.ca)?;
    let key = match PublicKey::parse(&args.key) {
        Some(key) => key,
        None => PublicKey::read(Path::new(&args.key)).with_context(|| {
            format!(
                "{:?} is no key: 64 hexadecimal digits, or a file that has them",
                args.key
            )
        })?,
    };
    let addresses: Vec<_> = args
        .addresses
        .iter()
        .map(|at| (at.address, at.bits))
        .collect();
    let good = Duration::from_secs(u64::from(args.days) * 86_400);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let bytes = Certificate::sign(&args.name, key, &addresses, (now + good).as_secs(), &ca)?;
    let path = args.output.join(format!("{}.crt", args.name));
    // Names may have dots, and never a slash.
    fs::write(&path, Certificate::to_text(&bytes))
        .with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!(
        "{}: for /var/lib/vtl/host.crt on {}, good until {}",
        path.display(),
        args.name,
        Certificate::parse(&bytes)?.expiry()
    );
    Ok(())
}

fn described(certificate: &Certificate) -> Value {
    let prefix = |(address, bits): &(IpAddr, u8)| format!("{address}/{bits}");
    let addresses: Vec<_> = certificate.addresses.iter().map(prefix).collect();
    json!({
        "name": certificate.name,
        "key": certificate.key.to_string(),
        "signer": certificate.signer.to_string(),
        "addresses": addresses,
        "expires": certificate.expiry().to_string(),
    })
}

/// An address, or a prefix of addresses.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl FromStr for Prefix {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "no address or prefix: write 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32";
        let (address, bits) = text
            .split_once('/')
            .map_or((text, None), |(a, b)| (a, Some(b)));
        let address: IpAddr = address.parse().map_err(|_| WRONG)?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(max), str::parse).map_err(|_| WRONG)?;
        Ok(Self { address, bits })
    }
}
