//! `vtl tun up`: IP packets between two hosts, each a message of a session.

mod cut;
mod device;
mod join;
mod packet;
mod tunnel;
mod virtio;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::{Args, Subcommand};
use ipnet::IpNet;
use vtl::{Agreement, Listener, Mode, Preference, Requirements, Services, Shared, Socket};
use vtl_control::{Hooks, Request};

use crate::daemon::SocketArgs;
use crate::exchange::{explain, param, resolve};
use device::Device;
use tunnel::Tunnel;

/// VTL port of the end that listens, unless told otherwise.
const PORT: u16 = 9254;
/// Pause after the first attempt that failed; doubled after each one that follows.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Maximum of that pause.
const MAX_PAUSE: Duration = Duration::from_secs(8);

/// Commands about tunnels.
#[derive(Debug, Subcommand)]
pub(crate) enum TunCommand {
    /// Make an interface, and carry the IP packets that are routed into it to another host
    #[command(after_help = "\
Examples, one for each end:
  vtl tun up vtl0 --peer 192.0.2.7 --address 10.9.0.1/24 --address fd00:9::1/64
  vtl tun up vtl0 --peer 192.0.2.1 --address 10.9.0.2/24 --address fd00:9::2/64 --listen

Runs until it is interrupted; the interface goes with it, and its addresses and routes. A session that
breaks is opened anew. From the peer come only packets whose source is in a prefix of --address or
--route. Packets are encrypted, and each is sent once, as by UDP; --graft has another protocol.")]
    Up(UpArgs),
}

/// Arguments of `vtl tun up`.
#[derive(Clone, Debug, Args)]
pub(crate) struct UpArgs {
    /// Name of the interface that is made
    #[arg(value_name = "INTERFACE", value_parser = device::name)]
    name: String,
    /// The host at the other end: a name or an address. The port is the VTL port of the end that listens
    #[arg(long, value_name = "HOST[:PORT]")]
    peer: String,
    /// Wait for the peer to open the session: at one of the two ends
    #[arg(long)]
    listen: bool,
    /// Address of the interface, with the length of the prefix that is behind it; as often as there are addresses
    #[arg(long = "address", value_name = "ADDRESS/BITS", required = true)]
    addresses: Vec<IpNet>,
    /// Prefix behind the peer: routed into the interface; as often as there are prefixes
    #[arg(long = "route", value_name = "PREFIX")]
    routes: Vec<IpNet>,
    /// Carry packets by this graft, whatever it provides; at the end that opens the session
    #[arg(long, value_name = "NAME", conflicts_with = "listen")]
    graft: Option<String>,
    /// Give a parameter of that graft another value than its default
    #[arg(long = "param", value_name = "NAME=VALUE", requires = "graft", value_parser = param)]
    params: Vec<(String, u32)>,
    /// Carry packets in the clear, too; the end that listens must allow it as well
    #[arg(long)]
    no_encryption: bool,
}

/// Runs `vtl tun`.
pub(crate) fn run(command: &TunCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    let TunCommand::Up(args) = command;
    let peer = resolve(&args.peer, PORT)?;
    let end = End {
        args: args.clone(),
        peer,
        daemon: socket.socket.clone(),
    };
    // Errors that can be known now end the command before an interface is made, a daemon that hangs among them.
    let _: Hooks = socket.call(&Request::HookList)?;
    let source = end.source().map_err(explain)?;
    let device = Device::make(&args.name, &args.addresses, &args.routes, peer.ip())?;
    let prefixes = args.addresses.iter().chain(&args.routes);
    let tunnel = Arc::new(Tunnel::new(device, prefixes.copied().collect()));
    let inbound = Arc::clone(&tunnel);
    thread::spawn(move || {
        let _end = EndProcess;
        end.keep_open(&inbound, source);
    });
    Err(tunnel.send())
}

/// Ends the process where the thread that holds it panics: without that, nothing would be carried any more.
struct EndProcess;

impl Drop for EndProcess {
    fn drop(&mut self) {
        if thread::panicking() {
            process::exit(1);
        }
    }
}

/// This end of the tunnel.
struct End {
    args: UpArgs,
    peer: SocketAddr,
    daemon: PathBuf,
}

/// What sessions come from.
enum Source {
    Opened(Socket),
    Accepted(Listener),
}

impl End {
    fn source(&self) -> Result<Source, vtl::Error> {
        Ok(if self.args.listen {
            Source::Accepted(Listener::bind(self.peer.port(), &self.daemon)?)
        } else {
            Source::Opened(Socket::init(Mode::Initiator, self.peer, &self.daemon)?)
        })
    }

    /// Opens or accepts sessions for the tunnel, one after the other.
    fn keep_open(&self, tunnel: &Arc<Tunnel>, first: Source) {
        let mut source = Some(first);
        let mut pause = FIRST_PAUSE;
        loop {
            let opened = source.take().map_or_else(|| self.source(), Ok);
            let served = opened.and_then(|source| self.serve(tunnel, source, &mut pause));
            if let Err(error) = served {
                tunnel.say(&format!("{error}; tried again"));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Carries packets by what sessions come from there, until there is an error.
    fn serve(
        &self,
        tunnel: &Arc<Tunnel>,
        source: Source,
        pause: &mut Duration,
    ) -> Result<(), vtl::Error> {
        let mut listener = match source {
            Source::Opened(mut socket) => {
                let agreement = self.negotiate(&mut socket)?;
                let session = Arc::new(Shared::new(socket)?);
                tunnel.install(&session, &agreement);
                return tunnel.receive(&session, agreement.peer, pause);
            }
            Source::Accepted(listener) => listener,
        };
        loop {
            let socket = listener.accept()?;
            let Some(agreement) = socket.agreement().cloned() else {
                continue;
            };
            if let Some(why) = self.refusal(&agreement) {
                tunnel.say(&format!(
                    "a session with {} was refused: {why}",
                    agreement.peer
                ));
                continue;
            }
            *pause = FIRST_PAUSE;
            let session = Arc::new(Shared::new(socket)?);
            tunnel.install(&session, &agreement);
            let tunnel = Arc::clone(tunnel);
            // The next session may come while this one is not known to be broken.
            thread::spawn(move || {
                let _end = EndProcess;
                let received = tunnel.receive(&session, agreement.peer, &mut Duration::default());
                if let Err(error) = received {
                    tunnel.say(&format!("{error}; waiting for another session"));
                }
            });
        }
    }

    /// Why this end does not take a session.
    fn refusal(&self, agreement: &Agreement) -> Option<&'static str> {
        if agreement.peer != self.peer.ip() {
            return Some("it is not the --peer");
        }
        let is_encrypted = agreement.services.contains(Services::ENCRYPTION);
        (!is_encrypted && !self.args.no_encryption)
            .then_some("it is not encrypted (--no-encryption allows that)")
    }

    fn negotiate(&self, socket: &mut Socket) -> Result<Agreement, vtl::Error> {
        let mut requirements = Requirements::default();
        if !self.args.no_encryption {
            requirements.set(Services::ENCRYPTION, Preference::Require);
        }
        let Some(graft) = &self.args.graft else {
            // IP promises nothing, and what it carries has its own control of everything.
            requirements.set(Services::TCP, Preference::Avoid);
            return socket.negotiate(&requirements);
        };
        let params = self.args.params.iter();
        let params: Vec<_> = params
            .map(|(name, value)| (name.as_str(), *value))
            .collect();
        socket.negotiate_exactly(&requirements, graft, &params)
    }
}
