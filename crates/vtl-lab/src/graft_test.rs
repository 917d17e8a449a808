//! The last part of `vtl graft test`, which starts it: the graft in the kernel, with real packets between two hosts.

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use vtl::{Listener, Mode, Services, Socket};
use vtl_cli::graft::project::Project;
use vtl_cli::{doctor, output};
use vtl_control::{Client, Deployed, Request};
use vtl_pool::Package;
use vtl_pool::key::SecretKey;
use vtl_pool::manifest::Manifest;
use vtl_testbed::{Host, Lifetime, Link, Testbed};

use crate::daemons::{self, Daemons, Options};
use crate::interrupt::Interrupt;
use crate::nginx::Scratch;
use crate::payload::{self, Checker};
use crate::programs::Programs;

/// The link: long enough that a window matters, and bad enough that something must go again.
const RTT_MS: f64 = 10.0;
const RATE_MBIT: f64 = 100.0;
const LOSS_PCT: f64 = 1.0;
const PORT: u16 = 5_203;
/// Bytes that a reliable graft carries, unless it takes too long for them.
const BYTES: u64 = 2 << 20;
/// How long it may send.
const TIME: Duration = Duration::from_secs(5);
/// How long anything else may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Messages that a graft carries which is not reliable, some at a time, at about 20 Mbit/s: without
/// congestion control it would send as fast as it can.
const MESSAGES: u64 = 2_000;
const MESSAGE: u64 = 1_000;
const AT_A_TIME: u64 = 10;
const PAUSE: Duration = Duration::from_millis(4);

/// Arguments of `vtl-lab graft-test`.
#[derive(Debug, Args)]
pub(crate) struct GraftTestArgs {
    /// The graft's directory, with its graft.toml; it was built
    dir: PathBuf,
}

/// Carries data over the graft between two namespaces, or says why it cannot.
pub(crate) fn run(args: &GraftTestArgs) -> anyhow::Result<()> {
    let programs = match able() {
        Ok(programs) => programs,
        Err(why) => {
            eprintln!("namespaces: skipped: {why:#}");
            return Ok(());
        }
    };
    let project = Project::open(&args.dir)?;
    let object = project.object()?;
    let manifest = project.describe(&object)?;
    let said = carry(&manifest, &object, &programs).context("between two namespaces")?;
    let path = format!("{RTT_MS} ms, {RATE_MBIT} Mbit/s, {LOSS_PCT} % loss");
    Ok(output::print(&format!("namespaces: {path}: {said}\n"))?)
}

/// What it is done with, or why this machine or user cannot.
fn able() -> anyhow::Result<Programs> {
    doctor::require_fit()?;
    Programs::find()
}

/// Both hosts, with the graft in their kernels.
fn carry(manifest: &Manifest, object: &[u8], programs: &Programs) -> anyhow::Result<String> {
    let scratch = Scratch::new()?;
    let at = |name: &str| scratch.path().join(name);
    let (pool, keys, package) = (at("pool"), at("keys"), at("package.vtlg"));
    fs::create_dir(&pool)?;
    fs::create_dir(&keys)?;
    let key = SecretKey::generate()?;
    key.write(&keys, "test")?;
    fs::write(&package, Package::sign(manifest, object, &key)?)?;

    let interrupt = Interrupt::catch()?;
    let link = Link {
        loss_pct: LOSS_PCT,
        ..Link::new(RTT_MS, RATE_MBIT)
    };
    // Of its own: somebody who develops a graft may have another one up.
    let name = format!("graft-{}", std::process::id());
    let testbed = Testbed::up(&name, &link, Lifetime::Guarded)?;
    let path = |path: &Path| path.display().to_string();
    let options = Options {
        arguments: vec!["--pool".into(), path(&pool), "--keys".into(), path(&keys)],
        ..daemons::Options::default()
    };
    let place = scratch.path();
    let daemons = Daemons::start(&testbed, programs, &options, place, place, &interrupt)?;
    for host in [Host::Client, Host::Server] {
        let deploy = Request::GraftDeploy { name: None };
        let file = File::open(&package)?;
        let daemon = Client::connect(daemons.socket(host))?;
        let _: Deployed = daemon.call_handing(&deploy, &[file.as_fd()])?;
    }
    let mut listener = Listener::bind(PORT, daemons.socket(Host::Server))?;
    let to = SocketAddr::new(IpAddr::V4(testbed.addr4(Host::Server)), PORT);
    let mut client = Socket::init(Mode::Initiator, to, daemons.socket(Host::Client))?;
    client.set_timeout(Some(PATIENCE));
    client.negotiate_over(&manifest.name, &[])?;
    let mut server = listener.accept()?;
    server.set_timeout(Some(PATIENCE));
    let both = Services::RELIABLE | Services::ORDERED;
    if manifest.services.contains(both) {
        stream(client, server, &interrupt)
    } else {
        let ordered = manifest.services.contains(Services::ORDERED);
        messages(client, server, ordered, &interrupt)
    }
}

/// Every byte, and nothing else.
fn stream(mut from: Socket, mut to: Socket, interrupt: &Interrupt) -> anyhow::Result<String> {
    let reader = thread::spawn(move || -> Result<Checker, vtl::Error> {
        let mut checker = Checker::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match to.recv_data(&mut buffer)? {
                0 => return Ok(checker),
                n => checker.check(&buffer[..n]),
            }
        }
    });
    let begun = Instant::now();
    let mut send = || -> anyhow::Result<u64> {
        let mut sent = 0;
        while sent < BYTES && begun.elapsed() < TIME {
            interrupt.check()?;
            sent += from.send_data(payload::at(sent, BYTES - sent))? as u64;
        }
        Ok(sent)
    };
    let sent = send();
    let closed = from.close().context("the rest was not acknowledged");
    let seconds = begun.elapsed().as_secs_f64();
    // What the reader found is why its end has closed, if it has.
    let checker = reader.join().expect("it does not panic")?;
    let sent = sent?;
    closed?;
    ensure!(
        (checker.bytes(), checker.wrong()) == (sent, 0),
        "{sent} bytes were sent and acknowledged; {} arrived, of which {} are wrong",
        checker.bytes(),
        checker.wrong()
    );
    let mbit = sent as f64 * 8.0 / 1e6 / seconds;
    Ok(format!("{sent} bytes, exact, {mbit:.1} Mbit/s"))
}

/// Whatever arrives is what was sent, once.
fn messages(
    mut from: Socket,
    mut to: Socket,
    ordered: bool,
    interrupt: &Interrupt,
) -> anyhow::Result<String> {
    let reader = thread::spawn(move || -> anyhow::Result<u64> {
        let mut seen = vec![false; MESSAGES as usize];
        let mut latest = None;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = to.recv_message(&mut buffer)?;
            if length == 0 {
                return Ok(seen.iter().filter(|seen| **seen).count() as u64);
            }
            let number = judge(&buffer[..length]).context("a message arrived changed")?;
            if ordered && latest.is_some_and(|latest| number <= latest) {
                bail!(
                    "message {number} arrived behind message {}",
                    latest.unwrap_or(0)
                );
            }
            latest = Some(number);
            let again = std::mem::replace(&mut seen[number as usize], true);
            ensure!(!again, "message {number} arrived twice");
        }
    });
    let mut send = || -> anyhow::Result<()> {
        for number in 0..MESSAGES {
            interrupt.check()?;
            from.send_message(&message(number))?;
            if number % AT_A_TIME == 0 {
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    };
    let sent = send();
    let closed = from.close().context("the end was not acknowledged");
    // As above.
    let arrived = reader.join().expect("it does not panic")?;
    sent?;
    closed?;
    ensure!(arrived > 0, "not one of {MESSAGES} messages arrived");
    let order = if ordered { ", in order" } else { "" };
    Ok(format!(
        "{arrived} of {MESSAGES} messages, unchanged{order}"
    ))
}

/// Its number, and what follows from that.
fn message(number: u64) -> Vec<u8> {
    let head = number.to_le_bytes();
    let body = payload::at(number * MESSAGE, MESSAGE - head.len() as u64);
    [&head[..], body].concat()
}

/// The number of a message that is whole.
fn judge(bytes: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(*bytes.first_chunk()?);
    (number < MESSAGES && bytes == message(number)).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judge__knows_its_messages() {
        for number in [0, 1, MESSAGES - 1] {
            assert_eq!(judge(&message(number)), Some(number));
        }
        let mut changed = message(7);
        changed[500] ^= 1;
        assert_eq!(judge(&changed), None);
        assert_eq!(judge(&message(7)[1..]), None);
        assert_eq!(judge(&message(MESSAGES)), None);
        assert_eq!(judge(b""), None);
    }
}
