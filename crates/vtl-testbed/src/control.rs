//! The emulator's control socket: a request and its response are one line of JSON each.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vtl_link::Link;

use crate::emulator::Stats;
use crate::error::{Error, Result};
use crate::state;

/// A request to an emulator.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// Change the link.
    Set(Link),
    /// Report the link's counters.
    Stats,
    /// Exit.
    Stop,
}

/// An emulator's response.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Response {
    Done,
    Stats(Box<Stats>),
    Refused(String),
}

/// Maximum length of a request, bytes.
const REQUEST_MAX: usize = 16 * 1024;
/// Timeout of a client for the response.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a request to the emulator of a testbed, and returns its response.
pub(crate) fn ask(testbed: &str, request: &Request) -> Result<Response> {
    let failed = |problem: String| Error::Emulator {
        name: testbed.to_owned(),
        problem,
    };
    let exchange = || -> io::Result<Response> {
        let mut stream = UnixStream::connect(state::socket_path(testbed))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        stream.write_all(line.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    };
    match exchange() {
        Ok(Response::Refused(why)) => Err(failed(format!("refused: {why}"))),
        Ok(response) => Ok(response),
        Err(e) => Err(failed(format!("does not answer: {e}"))),
    }
}

struct Client {
    stream: UnixStream,
    request: Vec<u8>,
}

/// The listening side. Never blocks: the emulator's loop serves it between packets.
pub(crate) struct Server {
    listener: UnixListener,
    clients: Vec<Client>,
}

impl Server {
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        // An emulator that died may have left its socket.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).map_err(Error::file("listen on", path))?;
        listener
            .set_nonblocking(true)
            .map_err(Error::file("listen on", path))?;
        Ok(Server {
            listener,
            clients: Vec::new(),
        })
    }

    /// Descriptors to poll for reading.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd()).chain(self.clients.iter().map(|c| c.stream.as_fd()))
    }

    /// Answers every complete request.
    pub(crate) fn serve(&mut self, mut answer: impl FnMut(Request) -> Response) {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.clients.push(Client {
                    stream,
                    request: Vec::new(),
                });
            }
        }
        self.clients.retain_mut(|client| {
            let mut chunk = [0; 4096];
            match client.stream.read(&mut chunk) {
                Ok(0) => false,
                Ok(n) => {
                    client.request.extend_from_slice(&chunk[..n]);
                    if !client.request.ends_with(b"\n") {
                        return client.request.len() < REQUEST_MAX;
                    }
                    let response = match serde_json::from_slice(&client.request) {
                        Ok(request) => answer(request),
                        Err(e) => Response::Refused(format!("not a request: {e}")),
                    };
                    if let Ok(mut line) = serde_json::to_vec(&response) {
                        line.push(b'\n');
                        // A response fits into a new socket's buffer; a client that is gone does not matter.
                        let _ = client.stream.write_all(&line);
                    }
                    false
                }
                Err(e) => e.kind() == io::ErrorKind::WouldBlock,
            }
        });
    }
}
