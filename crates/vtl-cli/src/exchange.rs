//! The commands `vtl send` and `vtl recv`: sockets for [`crate::transfer`].

use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use vtl::{Mode, Preference, Requirements, Services, Socket};
use vtl_control::{Hooks, Request};

use crate::daemon::{self, SocketArgs};
use crate::transfer::{self, Destination};

/// VTL port of `vtl recv`, unless told otherwise.
const PORT: u16 = 9253;

/// Arguments of `vtl send`.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// The file
    file: PathBuf,
    /// The host on which `vtl recv` runs: a name or an address, with :PORT behind it if not the default one
    /// (an IPv6 address then goes into brackets)
    #[arg(value_name = "HOST[:PORT]")]
    to: String,
    /// Send over this graft, whatever it provides, instead of the highest-ranked one
    #[arg(long, value_name = "NAME")]
    graft: Option<String>,
    /// Give a parameter of that graft another value than its default
    #[arg(long = "param", value_name = "NAME=VALUE", requires = "graft", value_parser = param)]
    params: Vec<(String, u32)>,
    /// Send in the clear
    #[arg(long)]
    no_encryption: bool,
}

/// Parses a graft's parameter.
pub(crate) fn param(text: &str) -> Result<(String, u32), String> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    let value = value
        .parse()
        .map_err(|_| format!("{value} is not a number"))?;
    Ok((name.to_owned(), value))
}

/// Arguments of `vtl recv`.
#[derive(Debug, Args)]
pub(crate) struct RecvArgs {
    /// VTL port to wait at
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Where the file goes: a directory, or the file itself
    #[arg(long, short, default_value = ".", value_name = "PATH")]
    output: PathBuf,
    /// Replace an existing file
    #[arg(long, short)]
    force: bool,
}

/// Runs `vtl send`.
pub(crate) fn send(args: &SendArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    // Checked before the daemon and the peer are asked.
    let file = &args.file;
    let metadata = file
        .metadata()
        .with_context(|| format!("cannot open {}", file.display()))?;
    if !metadata.is_file() {
        bail!(
            "{} is not a regular file: pack a directory with tar first",
            file.display()
        );
    }
    let to = resolve(&args.to, PORT)?;
    let mut connection = open(Mode::Initiator, to, socket)?;
    let mut requirements = Requirements::default();
    if !args.no_encryption {
        requirements.set(Services::ENCRYPTION, Preference::Require);
    }
    let agreement = match &args.graft {
        Some(graft) => {
            let params: Vec<_> = args.params.iter().map(|(n, v)| (n.as_str(), *v)).collect();
            connection.negotiate_exactly(&requirements, graft, &params)
        }
        None => {
            let services = Services::RELIABLE.union(Services::ORDERED);
            let services = services.union(Services::CONGESTION_CONTROL);
            requirements.set(services, Preference::Require);
            connection.negotiate(&requirements)
        }
    };
    let agreement = agreement.map_err(explain)?;
    eprintln!(
        "session with {} over graft {}",
        agreement.peer, agreement.graft
    );
    transfer::send(file, &mut connection)?;
    // The receiver has confirmed the file, and may close before it acknowledges the last packet.
    let _ = connection.close();
    Ok(())
}

/// Runs `vtl recv`.
pub(crate) fn recv(args: &RecvArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), args.port);
    let mut connection = open(Mode::Responder, any, socket)?;
    eprintln!("waiting at VTL port {}", args.port);
    let agreement = connection.validate().map_err(explain)?;
    eprintln!(
        "session with {} over graft {}",
        agreement.peer, agreement.graft
    );
    let destination = Destination {
        path: args.output.clone(),
        force: args.force,
    };
    let received = transfer::receive(&destination, &mut connection);
    // Waits until the verdict has arrived, also a refusal: without it the sender takes nothing for received.
    let _ = connection.close();
    received.map(drop)
}

fn open(mode: Mode, address: SocketAddr, socket: &SocketArgs) -> anyhow::Result<Socket> {
    // The library waits for a daemon that hangs, as its sessions may outlive that; a command ends.
    let _: Hooks = socket.call(&Request::HookList)?;
    Socket::init(mode, address, &socket.socket).map_err(explain)
}

/// Gives the daemon's absence, and its refusal to talk to this user, their exit statuses.
pub(crate) fn explain(error: vtl::Error) -> anyhow::Error {
    match error {
        vtl::Error::Daemon(error) => daemon::explain(error),
        other => other.into(),
    }
}

/// A name or an address, either with a port behind it or without: then the default one.
pub(crate) fn resolve(text: &str, default: u16) -> anyhow::Result<SocketAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, default));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => {
            let port = port.parse().ok().filter(|p| *p > 0);
            (
                host,
                port.with_context(|| format!("{text}: the port must be 1 to 65535"))?,
            )
        }
        None => (text, default),
    };
    (host, port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve {host}"))?
        .next()
        .with_context(|| format!("{host} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolve__takes_all_forms() {
        let text = |t: &str| resolve(t, PORT).unwrap().to_string();
        assert_eq!(text("10.0.0.2"), "10.0.0.2:9253");
        assert_eq!(text("10.0.0.2:7"), "10.0.0.2:7");
        assert_eq!(text("fd00::2"), "[fd00::2]:9253");
        assert_eq!(text("[fd00::2]:7"), "[fd00::2]:7");
        assert!(resolve("host:0", PORT).is_err());
        assert!(resolve("host:notaport", PORT).is_err());
    }
}
