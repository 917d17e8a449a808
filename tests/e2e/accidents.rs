//! Daemons that are killed and paths that break at random moments under flows in both directions: what
//! arrives is the beginning of what was sent, and nobody sees an end that was none.

use std::{
    fs::{self, File},
    net::IpAddr,
    ops::Range,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, python3, source, until};

/// The server's port.
const PORT: u16 = 7400;
/// Bytes in each direction of a flow: together a second or two of the link.
const SIZE: usize = 1_500_000;
/// What the flows of a round travel by, each over both families.
const CARRIERS: [&str; 4] = ["graft:stream", "quic", "sctp", "kcp"];
/// IP protocols.
const UDP: u8 = 17;
const VTL: u8 = 253;

/// What happens in mid-flow.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Accident {
    /// A daemon is killed.
    Kill(Host),
    /// The server's daemon is told to end.
    Terminate,
    /// Another daemon takes over from one.
    TakeOver(Host),
    /// The path drops the packets of an IP protocol from now on.
    Drop(u8),
    /// The path drops everything for a while.
    Outage,
}

impl Accident {
    const ALL: [Self; 8] = [
        Self::Kill(Host::Server),
        Self::Drop(VTL),
        Self::TakeOver(Host::Server),
        Self::Kill(Host::Client),
        Self::TakeOver(Host::Client),
        Self::Drop(UDP),
        Self::Outage,
        Self::Terminate,
    ];

    /// Whether flows over a carrier must come through.
    fn is_survived(self) -> bool {
        match self {
            Self::Kill(_) | Self::Terminate => false,
            Self::TakeOver(_) | Self::Drop(_) | Self::Outage => true,
        }
    }
}

/// The files and the program, in the world's directory.
struct Programs {
    down: PathBuf,
    up: PathBuf,
    served: PathBuf,
}

impl Programs {
    fn new(world: &World) -> Self {
        let write = |name: &str, bytes: &[u8]| {
            let path = world.path(name);
            fs::write(&path, bytes).expect("written");
            path
        };
        Self {
            down: write("down", &payload(SIZE, 11)),
            up: write("up", &payload(SIZE, 12)),
            served: world.path("served"),
        }
    }

    /// The server's program; what it says goes into `served`.
    fn serve(&self, world: &World) -> Process {
        let said = File::create(&self.served).expect("a file");
        let mut command = world.testbed.command(Host::Server, python3()).unwrap();
        command
            .arg(source("programs/duplex.py"))
            .args(["serve", "::"]);
        command.arg(PORT.to_string()).args([&self.down, &self.up]);
        let process = Process::start(command.stdout(said));
        until("the server's program is ready", || self.lines() == 1);
        process
    }

    fn lines(&self) -> usize {
        let said = fs::read_to_string(&self.served).unwrap_or_default();
        said.lines().count()
    }

    /// A flow, captured, that begins when there is the file `go`; what it says goes into a file.
    fn call(
        &self,
        world: &World,
        carrier: &str,
        server: IpAddr,
        go: &Path,
        said: &Path,
    ) -> Process {
        let run = ["run", "--carrier", carrier, "--", python3()];
        let mut command = world.vtl(Host::Client, &run);
        command
            .arg(source("programs/duplex.py"))
            .args(["call", &server.to_string()]);
        command
            .arg(PORT.to_string())
            .args([&self.up, &self.down])
            .arg(go);
        Process::start(
            command
                .stdout(File::create(said).expect("a file"))
                .stderr(Stdio::null()),
        )
    }
}

/// Whether what a program says of a flow is the truth: everything came, or it was told of an error.
#[track_caller]
fn judge(said: &Value, context: &str) -> bool {
    if said["connect"].is_string() {
        return false;
    }
    assert_eq!(said["right"], true, "{context}: {said}: not what was sent");
    let whole = said["received"] == SIZE;
    // An error is told once, to whichever call comes first: behind it there is nothing to read.
    if said["end"] == "fin" && said["sending"] == "sent" {
        assert!(whole, "{context}: {said}: an end that was none");
    }
    assert_ne!(
        said["end"], "timeout",
        "{context}: {said}: nobody said anything"
    );
    assert_ne!(said["sending"], "timeout", "{context}: {said}");
    whole && said["end"] == "fin" && said["sending"] == "sent"
}

/// Each round an accident; each of them at moments that differ from round to round.
fn accidents(name: &str, rounds: Range<u64>) {
    let Some(mut world) = World::new(name, &Link::new(20.0, 30.0)) else {
        return;
    };
    let programs = Programs::new(&world);
    let _server = programs.serve(&world);
    let calm = world.testbed.link().expect("a link");
    let mut whole = 0;
    for round in rounds.clone() {
        world.hook_port(PORT);
        let before = programs.lines();
        let mut flows = Vec::new();
        let go = world.path("go");
        for carrier in CARRIERS {
            for server in world.servers() {
                let said = world.path(&format!("said-{}", flows.len()));
                let process = programs.call(&world, carrier, server, &go, &said);
                flows.push((carrier, process, said));
            }
        }
        // `vtl run` itself cannot do without its daemon.
        until("all programs are captured", || {
            let hooks = &world.status(Host::Client)["hooks"];
            hooks.as_array().map_or(0, Vec::len) == flows.len()
        });
        fs::write(&go, "").expect("written");
        let accident = Accident::ALL[round as usize % Accident::ALL.len()];
        // From the connects to some time behind the last byte.
        let moment =
            Duration::from_millis((round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0x7ff);
        thread::sleep(moment);
        let context = format!("round {round}, {accident:?} after {moment:?}");
        let happened = Instant::now();
        match accident {
            Accident::Kill(host) => world.take_daemon(host).kill(),
            Accident::Terminate => {
                let mut daemon = world.take_daemon(Host::Server);
                daemon.signal(Signal::SIGTERM);
                assert!(daemon.wait().success(), "{context}");
            }
            Accident::TakeOver(host) => world.take_over(host),
            Accident::Drop(protocol) => world.block(Some(protocol)),
            Accident::Outage => {
                world.set_loss(100.0);
                thread::sleep(Duration::from_millis(1_500));
                world.set_loss(0.0);
            }
        }
        // Some flows may never get as far as the server, whose program speaks at once.
        let mut reached = 0;
        for (carrier, mut process, said) in flows {
            let context = format!("{context}, {carrier}, client");
            assert!(process.wait().success(), "{context}");
            let said = fs::read_to_string(said).expect("what it said");
            let said: Value = serde_json::from_str(&said).expect("JSON");
            let came_through = judge(&said, &context);
            assert!(came_through || !accident.is_survived(), "{context}: {said}");
            whole += u64::from(came_through);
            reached += usize::from(said["received"].as_u64() > Some(0));
        }
        let took = happened.elapsed();
        world.testbed.set(&calm).expect("set");
        if accident.is_survived() {
            until("the server's program has said it all", || {
                programs.lines() >= before + reached
            });
        }
        world.stop_daemons();
        let said = fs::read_to_string(&programs.served).expect("what it said");
        for line in said.lines().skip(before) {
            judge(
                &serde_json::from_str(line).expect("JSON"),
                &format!("{context}, server"),
            );
        }
        println!("{context}: all ended {took:?} later");
        fs::remove_file(go).expect("there");
        world.start_both(&[]);
    }
    let flows = (rounds.end - rounds.start) * 2 * CARRIERS.len() as u64;
    println!("{whole} of {flows} flows were carried to their end");
}

#[test]
fn accidents__of_every_kind() {
    accidents("accidents", 0..Accident::ALL.len() as u64);
}

#[test]
#[ignore = "takes minutes: make soak; ROUNDS=100..200 for other moments"]
fn accidents__hundreds() {
    let rounds = std::env::var("ROUNDS").unwrap_or_else(|_| "0..100".to_owned());
    let (from, to) = rounds.split_once("..").expect("FROM..TO");
    let number = |text: &str| text.parse().expect("a number");
    accidents("accidents-hundreds", number(from)..number(to));
}
