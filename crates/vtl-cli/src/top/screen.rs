//! A terminal whose whole screen a program draws: keys are read one by one and not echoed, and everything is as before
//! at the end, also when a signal ends the program.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{self, SigHandler, SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use nix::unistd::read;

use crate::output;

/// Switches to the terminal's alternate screen, as xterm has it, and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Shows the cursor, and switches back.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Goes to the start of the first line (ECMA-48).
const HOME: &str = "\x1b[H";
/// Clears the rest of a line, and goes to the next one.
const CLEAR_LINE: &str = "\x1b[K\n";
/// Clears the rest of the screen.
const CLEAR_REST: &str = "\x1b[J";

/// Columns and lines if the terminal does not tell them.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// What ends a wait.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The time has come, or the descriptor is ready.
    Over,
    /// The terminal has another size.
    Resized,
    /// A key; of one that sends several bytes, these.
    Key(Vec<u8>),
    /// A signal that ends programs.
    Signal(Signal),
}

/// The terminal at standard output.
pub(super) struct Screen {
    /// How keys were read before; `None`: standard input is no terminal.
    before: Option<Termios>,
    /// Blocked while this lives, and read instead.
    signals: SignalFd,
    blocked: SigSet,
}

impl Screen {
    /// Takes the terminal.
    pub(super) fn open() -> nix::Result<Self> {
        let mut blocked = SigSet::empty();
        for signal in [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGWINCH,
        ] {
            blocked.add(signal);
        }
        blocked.thread_block()?;
        let signals =
            SignalFd::with_flags(&blocked, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let stdin = io::stdin();
        let before = match stdin.is_terminal() {
            true => Some(tcgetattr(&stdin)?),
            false => None,
        };
        if let Some(before) = &before {
            let mut keys = before.clone();
            keys.local_flags -= LocalFlags::ICANON | LocalFlags::ECHO;
            // A stopped program would leave its page on the terminal.
            keys.control_chars[SpecialCharacterIndices::VSUSP as usize] = libc::_POSIX_VDISABLE;
            tcsetattr(&stdin, SetArg::TCSANOW, &keys)?;
        }
        let _ = write(ENTER);
        Ok(Self {
            before,
            signals,
            blocked,
        })
    }

    /// Columns and lines.
    pub(super) fn size() -> (usize, usize) {
        let mut size = libc::winsize {
            ws_row: 0,
            ws_col: 0,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the request writes one `winsize`, which lives.
        let answer = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
        let known = answer == 0 && size.ws_col > 0 && size.ws_row > 0;
        let (columns, lines) = if known {
            (size.ws_col, size.ws_row)
        } else {
            DEFAULT_SIZE
        };
        (columns.into(), lines.into())
    }

    /// Shows these lines in the place of what is there.
    ///
    /// # Errors
    /// The terminal has gone.
    pub(super) fn draw(&self, lines: &[String]) -> io::Result<()> {
        write(&format!("{HOME}{}{CLEAR_REST}", lines.join(CLEAR_LINE)))
    }

    /// Waits for a key or a signal, at most until that time.
    ///
    /// # Errors
    /// The terminal has gone.
    pub(super) fn wait_until(&self, until: Instant) -> io::Result<Event> {
        self.wait(Some(until), None)
    }

    /// Waits for a key or a signal, at most until `fd` is readable or hung up.
    ///
    /// # Errors
    /// The terminal has gone.
    pub(super) fn wait_for(&self, fd: BorrowedFd<'_>) -> io::Result<Event> {
        self.wait(None, Some(fd))
    }

    fn wait(&self, until: Option<Instant>, other: Option<BorrowedFd<'_>>) -> io::Result<Event> {
        let stdin = io::stdin();
        loop {
            let timeout = until.map_or(PollTimeout::NONE, |until| {
                let left = until.saturating_duration_since(Instant::now());
                // Rounded up, lest the end of the wait be spent without sleeping.
                let timeout = PollTimeout::try_from(left + Duration::from_micros(999));
                timeout.unwrap_or(PollTimeout::MAX)
            });
            let keys = self.before.is_some().then(|| stdin.as_fd());
            let watched = [Some(self.signals.as_fd()), keys, other];
            let watching = watched.iter().flatten();
            let mut fds: Vec<_> = watching
                .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
                .collect();
            match poll(&mut fds, timeout) {
                Ok(0) => return Ok(Event::Over),
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let mut polled = fds.iter();
            let [signal, key, over] = watched.map(|fd| {
                fd.and_then(|_| polled.next())
                    .is_some_and(|fd| fd.any().unwrap_or(false))
            });
            if signal && let Some(signal) = self.signal()? {
                return Ok(signal);
            }
            if key {
                return read_key(stdin.as_fd());
            }
            if over {
                return Ok(Event::Over);
            }
        }
    }

    fn signal(&self) -> io::Result<Option<Event>> {
        let Some(info) = self.signals.read_signal()? else {
            return Ok(None);
        };
        let number = i32::try_from(info.ssi_signo).unwrap_or(0);
        Ok(Some(match Signal::try_from(number)? {
            Signal::SIGWINCH => Event::Resized,
            signal => Event::Signal(signal),
        }))
    }

    /// Gives the terminal back, and ends this process as the signal would have, also where whoever started it ignores that.
    pub(super) fn end_by(self, signal: Signal) {
        drop(self);
        // SAFETY: the default action runs no code of this process.
        let _ = unsafe { signal::signal(signal, SigHandler::SigDfl) };
        let _ = raise(signal);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write(LEAVE);
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, before);
        }
        let _ = self.blocked.thread_unblock();
    }
}

/// Writes and flushes: the text ends in no newline, and a signal may end this process before anything else flushes.
fn write(text: &str) -> io::Result<()> {
    output::print(text)?;
    io::stdout().flush()
}

fn read_key(stdin: BorrowedFd<'_>) -> io::Result<Event> {
    let mut bytes = [0; 16];
    match read(stdin, &mut bytes)? {
        0 => Err(io::ErrorKind::BrokenPipe.into()), // hung up
        n => Ok(Event::Key(bytes[..n].to_vec())),
    }
}
