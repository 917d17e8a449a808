//! An end of a transfer as a process, and what it says.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;

use crate::bench::agent::{Order, READY};
use crate::child::Background;
use crate::interrupt::Interrupt;

/// How often a wait looks whether it should stop.
const TICK: Duration = Duration::from_millis(50);

/// A running end.
pub(super) struct Endpoint {
    process: Background,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Endpoint {
    /// Starts one by `command`, this program without its arguments.
    pub(super) fn start(mut command: Command, order: &Order, log: PathBuf) -> anyhow::Result<Self> {
        command
            .args(["bench", "agent"])
            .arg(serde_json::to_string(order)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?);
        let mut process = Background::start("an endpoint", &mut command)?;
        let stdin = process.child().stdin.take();
        let stdout = process.child().stdout.take().context("no output")?;
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            process,
            stdin,
            lines,
            log,
        })
    }

    /// Waits for its next words; `tick` is called meanwhile.
    pub(super) fn hear<T: DeserializeOwned>(
        &mut self,
        patience: Duration,
        interrupt: &Interrupt,
        mut tick: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + patience;
        loop {
            match self.lines.recv_timeout(TICK) {
                Ok(line) => return Ok(serde_json::from_str(&line)?),
                Err(RecvTimeoutError::Disconnected) => {
                    let words = fs::read_to_string(&self.log).unwrap_or_default();
                    let words = words.lines().next_back().unwrap_or("it gave no reason");
                    bail!("an endpoint ended: {words}");
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            interrupt.check()?;
            tick()?;
            if Instant::now() > deadline {
                bail!("{} did not answer in time", self.process.name());
            }
        }
    }

    /// Waits until it is ready.
    pub(super) fn ready(
        &mut self,
        patience: Duration,
        interrupt: &Interrupt,
    ) -> anyhow::Result<()> {
        let word: String = self.hear(patience, interrupt, || Ok(()))?;
        if word != READY {
            bail!("an endpoint said \"{word}\"");
        }
        Ok(())
    }

    /// Lets a client begin.
    pub(super) fn go(&mut self) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("the endpoint was dismissed")?;
        Ok(stdin.write_all(b"go\n")?)
    }

    /// Lets it come to its end.
    pub(super) fn dismiss(&mut self) {
        self.stdin = None;
    }
}
