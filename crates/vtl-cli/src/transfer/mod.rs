//! `vtl send` and `vtl recv`: a file from one host to another, over the protocol that its bytes
//! need. Both ends hash what they read and wrote; the receiver compares.

mod incoming;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Error, bail};
use sha2::{Digest, Sha256};
use vtl_proto::file::{Offer, Verdict};

use crate::output::hex;
use crate::progress::Progress;
use incoming::Incoming;

/// Bytes read and written at a time.
const CHUNK: usize = 256 * 1024;

/// Sends the file over a connection, and waits until the receiver has it.
pub(crate) fn send(path: &Path, connection: &mut (impl Read + Write)) -> anyhow::Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        bail!(
            "{} is not a regular file: pack a directory with tar first",
            path.display()
        );
    }
    let name = path
        .file_name()
        .context("the path names no file")?
        .to_string_lossy();
    let offer = Offer {
        size: metadata.len(),
        name: name.clone().into_owned(),
    };
    offer
        .write(connection)
        .context("cannot reach the receiver")?;
    Verdict::read(connection)
        .context("the receiver did not answer")?
        .into_result()
        .map_err(Error::msg)?;

    let mut progress = Progress::start(name, Some(offer.size));
    let started = Instant::now();
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut sent = 0;
    while sent < offer.size {
        let max = usize::try_from(offer.size - sent)
            .unwrap_or(CHUNK)
            .min(CHUNK);
        let n = file
            .read(&mut chunk[..max])
            .with_context(|| format!("cannot read {}", path.display()))?;
        if n == 0 {
            bail!("{} became shorter while it was sent", path.display());
        }
        hash.update(&chunk[..n]);
        if let Err(err) = connection.write_all(&chunk[..n]) {
            // The receiver may have said why.
            if let Ok(verdict) = Verdict::read(connection) {
                verdict.into_result().map_err(Error::msg)?;
            }
            return Err(err).context("the connection broke");
        }
        sent += n as u64;
        progress.update(sent);
    }
    let digest: [u8; 32] = hash.finalize().into();
    connection.write_all(&digest)?;
    connection.flush()?;
    Verdict::read(connection)
        .context("the receiver did not confirm the file")?
        .into_result()
        .map_err(Error::msg)?;
    progress.finish(&rate(sent, started));
    println!("sha256 {}", hex(&digest));
    Ok(())
}

/// Where a received file goes, and what may be overwritten.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    /// A directory, in which the file gets the sender's name for it, or the file itself.
    pub(crate) path: PathBuf,
    /// Whether an existing file is replaced.
    pub(crate) force: bool,
}

impl Destination {
    /// The file's path. The sender chooses only the last part, and that without a separator.
    fn resolve(&self, offered: &str) -> anyhow::Result<PathBuf> {
        if !self.path.is_dir() {
            return Ok(self.path.clone());
        }
        match Path::new(offered).file_name() {
            Some(name) if name == offered => Ok(self.path.join(name)),
            _ => bail!(
                "the sender's name for the file, {offered:?}, is not a file name: choose one with --output"
            ),
        }
    }
}

/// Receives one file from a connection. The file appears under its name only when it is whole.
pub(crate) fn receive(
    destination: &Destination,
    connection: &mut (impl Read + Write),
) -> anyhow::Result<PathBuf> {
    let offer = Offer::read(connection).context("the peer does not send a file")?;
    let prepared = destination
        .resolve(&offer.name)
        .and_then(|path| Incoming::create(path, destination.force));
    let mut incoming = match prepared {
        Ok(incoming) => incoming,
        Err(err) => {
            Verdict::Refused(format!("the receiver refused: {err:#}")).write(connection)?;
            return Err(err);
        }
    };
    Verdict::Accepted.write(connection)?;

    let mut progress = Progress::start(offer.name.as_str(), Some(offer.size));
    let started = Instant::now();
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut received = 0;
    while received < offer.size {
        let max = usize::try_from(offer.size - received)
            .unwrap_or(CHUNK)
            .min(CHUNK);
        let n = connection
            .read(&mut chunk[..max])
            .context("the connection broke")?;
        if n == 0 {
            bail!(
                "the sender stopped after {received} of {} bytes; nothing was kept",
                offer.size
            );
        }
        hash.update(&chunk[..n]);
        if let Err(err) = incoming.write_all(&chunk[..n]) {
            refuse(connection, &err);
            return Err(err);
        }
        received += n as u64;
        progress.update(received);
    }
    let mut theirs = [0; 32];
    connection
        .read_exact(&mut theirs)
        .context("the sender stopped before the end")?;
    let ours: [u8; 32] = hash.finalize().into();
    if ours != theirs {
        let words = "the file arrived changed: its SHA-256 differs; nothing was kept";
        Verdict::Refused(words.to_owned()).write(connection)?;
        bail!(words);
    }
    match incoming.keep() {
        Ok(path) => {
            Verdict::Accepted.write(connection)?;
            progress.finish(&rate(received, started));
            println!("sha256 {}  {}", hex(&ours), path.display());
            Ok(path)
        }
        Err(err) => {
            refuse(connection, &err);
            Err(err)
        }
    }
}

/// Tells the sender why its file is not kept, if it is still there.
fn refuse(connection: &mut impl Write, err: &anyhow::Error) {
    let words = format!("the receiver could not keep the file: {err:#}");
    let _ = Verdict::Refused(words).write(connection);
}

fn rate(bytes: u64, started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64();
    let mbit = bytes as f64 * 8.0 / 1e6 / seconds.max(1e-9);
    format!(
        "{:.1} MB in {seconds:.2} s, {mbit:.1} Mbit/s",
        bytes as f64 / 1e6
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("vtl-transfer-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("in")).expect("made");
        path
    }

    /// Sends `file` to a receiver with this destination.
    fn transfer(
        file: &Path,
        destination: Destination,
    ) -> (anyhow::Result<()>, anyhow::Result<PathBuf>) {
        let (mut a, mut b) = UnixStream::pair().expect("pair");
        let receiver = thread::spawn(move || receive(&destination, &mut b));
        let sent = send(file, &mut a);
        drop(a);
        (sent, receiver.join().expect("no panic"))
    }

    #[test]
    fn transfer__delivers_files_of_any_size() {
        let dir = scratch("sizes");
        for size in [0usize, 1, CHUNK, 3 * CHUNK + 17] {
            let file = dir.join(format!("f{size}"));
            let bytes: Vec<u8> = (0..size).map(|i| (i * 31 % 251) as u8).collect();
            fs::write(&file, &bytes).expect("written");
            let (sent, received) = transfer(
                &file,
                Destination {
                    path: dir.join("in"),
                    force: false,
                },
            );
            sent.expect("sent");
            assert_eq!(fs::read(received.expect("received")).expect("read"), bytes);
        }
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn transfer__never_overwrites_without_force() {
        let dir = scratch("force");
        let (file, old) = (dir.join("f"), dir.join("in/f"));
        fs::write(&file, "new").expect("written");
        fs::write(&old, "old").expect("written");
        let (sent, received) = transfer(
            &file,
            Destination {
                path: dir.join("in"),
                force: false,
            },
        );
        for words in [
            sent.expect_err("refused").to_string(),
            format!("{:#}", received.expect_err("refused")),
        ] {
            assert!(words.contains("--force"), "{words}");
        }
        assert_eq!(fs::read_to_string(&old).expect("read"), "old");
        let (sent, _) = transfer(
            &file,
            Destination {
                path: dir.join("in"),
                force: true,
            },
        );
        sent.expect("sent");
        assert_eq!(fs::read_to_string(&old).expect("read"), "new");
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn receive__a_sender_that_stops_leaves_nothing() {
        let dir = scratch("stops");
        let (mut a, mut b) = UnixStream::pair().expect("pair");
        let destination = Destination {
            path: dir.join("in"),
            force: false,
        };
        let receiver = thread::spawn(move || receive(&destination, &mut b));
        Offer {
            size: 100,
            name: "f".into(),
        }
        .write(&mut a)
        .expect("offered");
        Verdict::read(&mut a)
            .expect("answered")
            .into_result()
            .expect("accepted");
        a.write_all(b"only this").expect("sent");
        drop(a);
        let err = receiver.join().expect("no panic").expect_err("fails");
        assert!(err.to_string().contains("9 of 100"), "{err}");
        assert_eq!(fs::read_dir(dir.join("in")).expect("listed").count(), 0);
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn receive__changed_bytes_are_not_kept() {
        let dir = scratch("changed");
        let (mut a, mut b) = UnixStream::pair().expect("pair");
        let destination = Destination {
            path: dir.join("in"),
            force: false,
        };
        let receiver = thread::spawn(move || receive(&destination, &mut b));
        Offer {
            size: 4,
            name: "f".into(),
        }
        .write(&mut a)
        .expect("offered");
        Verdict::read(&mut a)
            .expect("answered")
            .into_result()
            .expect("accepted");
        a.write_all(b"data").expect("sent");
        a.write_all(&[0; 32]).expect("sent");
        let err = Verdict::read(&mut a)
            .expect("answered")
            .into_result()
            .expect_err("refused");
        assert!(err.to_string().contains("SHA-256"), "{err}");
        receiver.join().expect("no panic").expect_err("fails");
        assert_eq!(fs::read_dir(dir.join("in")).expect("listed").count(), 0);
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn resolve__the_sender_cannot_leave_the_directory() {
        let destination = Destination {
            path: std::env::temp_dir(),
            force: false,
        };
        for name in ["../f", "/etc/passwd", "..", "", "a/b", "a/"] {
            assert!(destination.resolve(name).is_err(), "{name}");
        }
        assert!(destination.resolve("f").is_ok());
    }
}
