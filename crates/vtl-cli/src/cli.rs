//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::daemon::SocketArgs;
use crate::doctor::DoctorArgs;
use crate::events::EventsArgs;
use crate::exchange::{RecvArgs, SendArgs};
use crate::flow::FlowCommand;
use crate::gateway::GatewayCommand;
use crate::graft::GraftCommand;
use crate::hook::{HookCommand, RunArgs};
use crate::lab::{self, LabArgs};
use crate::path::PathCommand;
use crate::peer::PeerCommand;
use crate::rule::RuleCommand;
use crate::select::SelectCommand;
use crate::top::TopArgs;
use crate::tun::TunCommand;

const EXAMPLES: &str = "\
Examples:
  vtl doctor                          can this machine run VTL, and how fast?
  vtl hook add --port 80              carry this server's clients that speak VTL
  vtl run -- curl -O http://host/big  carry one program's TCP connections
  vtl rule add far --to 198.51.100.0/24 --carrier best   the same for all programs, lasting
  vtl send backup.tar 192.0.2.7       a file to a host where `vtl recv` waits
  vtl status                          what the daemon is carrying
  vtl path list                       delay, loss and bandwidth of the paths there
  vtl top                             both, live
  vtl events                          what happens, as it happens
  vtl demo                            TCP cubic, TCP BBR and VTL on a bad link

Exit status:
  0   success
  1   failure; one sentence on stderr says what failed and how to mend it
  2   the command line is wrong
  69  the daemon does not answer
  77  this needs root, or membership in the daemon's group
  130 interrupted
  Any other: `vtl run` and `vtl testbed exec` end as the command that they ran,
  with 127 if there is no such command, 126 if it cannot be run.";

/// Move TCP applications onto another transport protocol, at run time
///
/// VTL swaps the transport under a running machine: applications stay as they are, the kernel stays
/// as it is, and a peer without VTL gets plain TCP. The daemon, vtld, does the work; this command
/// tells it what to carry.
#[derive(Debug, Parser)]
#[command(name = "vtl", version, after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program with its TCP connections captured
    #[command(after_help = "Examples:\n  \
        vtl run -- curl -O http://host/file\n  \
        vtl run --carrier tcp:bbr -- rsync -a there here\n  \
        vtl run --carrier dccp-ccid3 --loss-tolerant -- player tcp://host:5004\n  \
        vtl run --require -- rsync -a there here\n\n\
        A peer that does not speak VTL gets plain TCP, or with --require nothing. Exits as the program does.")]
    Run(RunArgs),
    /// Choose whose TCP connections are captured
    #[command(subcommand)]
    Hook(HookCommand),
    /// Rules for all connections of this host: whose travel by what
    #[command(subcommand)]
    Rule(RuleCommand),
    /// Show connections while they run, and change what they travel by
    #[command(subcommand)]
    Flow(FlowCommand),
    /// Show the state of the paths to other hosts: delay, loss, bandwidth
    #[command(subcommand)]
    Path(PathCommand),
    /// Show paths and connections live: delay, loss, and what each travels by, how fast
    #[command(after_help = "\
On a terminal: q ends it; up, down, page up and page down show other flows, the busiest first.\n\n\
Example: vtl top --count 60 --json | jq -c '.flows[] | [.peer, .sends_by, .sends_mbit]'")]
    Top(TopArgs),
    /// Show what happens, as it happens: connections that begin, change their carrier and end, carriers, peers, rules
    #[command(after_help = "\
Examples:\n  \
        vtl events --kind flow,carrier\n  \
        vtl events --kind flow_moved --json | jq -r '[.flow, .from, .to, .why] | @tsv'\n  \
        vtl events --since 0 --no-wait           what has happened lately\n\n\
Each event has an id; --since goes on from there. Where vtld does not have all of it any more, an event \"missed\"\n\
says how many are gone. docs/management.md describes all events.")]
    Events(EventsArgs),
    /// Show and change whose keys this host knows
    #[command(subcommand)]
    Peer(PeerCommand),
    /// Show and change which protocols are in the kernel
    #[command(subcommand)]
    Graft(GraftCommand),
    /// Send a file to a host on which `vtl recv` waits
    #[command(after_help = "Example: vtl send backup.tar 192.0.2.7\n\n\
        Both ends print the file's SHA-256; the receiver keeps it only if they agree.")]
    Send(SendArgs),
    /// Wait for a file from `vtl send`
    #[command(after_help = "Example: vtl recv --output /srv/incoming")]
    Recv(RecvArgs),
    /// Carry TCP connections that this host, a router, forwards for other hosts
    #[command(subcommand)]
    Gateway(GatewayCommand),
    /// Carry all IP packets between two hosts, whatever protocol they have
    #[command(subcommand)]
    Tun(TunCommand),
    /// Say what the daemon is carrying
    Status {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    #[command(about = lab::TESTBED)]
    Testbed(LabArgs),
    #[command(about = lab::DEMO)]
    Demo(LabArgs),
    #[command(about = lab::BENCH)]
    Bench(LabArgs),
    #[command(subcommand, about = lab::SELECT)]
    Select(SelectCommand),
    /// Say which kernel features are there, which are not, and what follows
    #[command(
        after_help = "Exits with 0 if VTL can run here, 1 if it cannot, 77 if only root can tell."
    )]
    Doctor(DoctorArgs),
    /// Print a completion script for a shell
    #[command(after_help = "Example: vtl completions bash >/etc/bash_completion.d/vtl")]
    Completions(CompletionsArgs),
    /// Write the manual pages into a directory
    #[command(after_help = "Example: vtl man /usr/local/share/man/man1")]
    Man(ManArgs),
}

/// Arguments of `vtl completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell to complete for
    pub shell: clap_complete::Shell,
}

/// Arguments of `vtl man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// An existing directory
    pub dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn cli__is_consistent() {
        super::Cli::command().debug_assert();
    }
}
