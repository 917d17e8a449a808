//! `vtl top`: paths and flows, live.

mod screen;
mod view;

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use nix::unistd::pipe;
use vtl_control::Client;

use crate::daemon::{self, SocketArgs};
use crate::{flow, output};
use screen::{Event, Screen};
use view::Frame;

/// Lines that a page key goes on by.
const PAGE: usize = 10;

/// Arguments of `vtl top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds in between
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// End after it was shown so many times
    #[arg(long, value_name = "TIMES", default_value_t = u64::MAX, hide_default_value = true, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Write a line of JSON each time
    #[arg(long)]
    json: bool,
}

/// Shows paths and flows until the user or a signal ends it.
pub(crate) fn run(args: &TopArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    // Before the terminal is taken, as a daemon that does not run is noticed here.
    let mut frame = ask(socket)?;
    if !args.json && io::stdout().is_terminal() {
        return live(args, socket, frame);
    }
    for left in (0..args.count).rev() {
        let text = match args.json {
            true => serde_json::to_string(&frame)?,
            false => frame.text(),
        };
        output::print(&format!("{text}\n"))?;
        if left > 0 {
            thread::sleep(Duration::from_secs(args.interval));
            frame = ask(socket)?;
        }
    }
    Ok(())
}

/// The same on a terminal.
fn live(args: &TopArgs, socket: &SocketArgs, mut frame: Frame) -> anyhow::Result<()> {
    let screen = Screen::open().context("cannot draw on this terminal (try --json)")?;
    let mut first = 0;
    for _ in 0..args.count {
        let until = Instant::now() + Duration::from_secs(args.interval);
        let mut next: Option<NextFrame> = None;
        loop {
            screen.draw(&frame.lines(Screen::size(), &mut first))?;
            let event = match &next {
                None => screen.wait_until(until)?,
                Some(next) => screen.wait_for(next.ready.as_fd())?,
            };
            match event {
                Event::Over if next.is_some() => break,
                Event::Over => next = Some(NextFrame::ask(socket)?),
                Event::Resized => {}
                Event::Key(key) => match key.as_slice() {
                    b"q" | b"Q" => return Ok(()),
                    b"k" | b"\x1b[A" => first = first.saturating_sub(1),
                    b"j" | b"\x1b[B" => first += 1,
                    b"\x1b[5~" => first = first.saturating_sub(PAGE),
                    b" " | b"\x1b[6~" => first += PAGE,
                    _ => {}
                },
                Event::Signal(signal) => {
                    screen.end_by(signal);
                    return Ok(());
                }
            }
        }
        if let Some(next) = next {
            frame = next.take()?;
        }
    }
    Ok(())
}

/// A frame that a thread asks the daemon for, so that keys and signals act even if the daemon hangs.
struct NextFrame {
    asking: JoinHandle<anyhow::Result<Frame>>,
    /// Hangs up when the thread has its answer.
    ready: OwnedFd,
}

impl NextFrame {
    fn ask(socket: &SocketArgs) -> anyhow::Result<Self> {
        let (ready, unready) = pipe()?;
        let socket = socket.clone();
        // Inherits the blocked signals of `Screen`.
        let asking = thread::Builder::new().spawn(move || {
            let _unready = unready;
            ask(&socket)
        })?;
        Ok(Self { asking, ready })
    }

    /// Takes the frame, and waits for it.
    fn take(self) -> anyhow::Result<Frame> {
        let frame = self.asking.join();
        frame.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn ask(socket: &SocketArgs) -> anyhow::Result<Frame> {
    let (paths, flows) = daemon::ask(&socket.socket, |daemon: &Client| {
        Ok((daemon.paths()?.paths, daemon.flows()?.flows))
    })?;
    Ok(Frame::new(paths, flow::rows(flows)))
}
