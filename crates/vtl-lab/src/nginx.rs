//! The unmodified web server that downloads come from.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use vtl_testbed::{Host, Testbed};

use crate::child::Background;
use crate::interrupt::Interrupt;
use crate::payload;
use vtl_cli::programs::find_program;

/// The port it listens on.
pub(crate) const PORT: u16 = 80;
/// The name of the file that it serves.
pub(crate) const FILE: &str = "file";
/// How long it may take to listen.
const START: Duration = Duration::from_secs(10);

/// What the names of scratch directories begin with; a process id and a number follow.
const SCRATCH: &str = "vtl-bench-";

/// A directory that vanishes with its owner.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes a directory that only this user can read, and removes those of processes that were
    /// killed.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub(crate) fn new() -> anyhow::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{SCRATCH}{}.{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make the directory {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the scratch directories of processes that no longer run: SIGKILL leaves no time to clean up.
fn sweep() {
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(SCRATCH));
        let owner = owner.and_then(|rest| rest.split('.').next());
        let Some(owner) = owner.and_then(|pid| pid.parse::<u32>().ok()) else {
            continue;
        };
        if !Path::new("/proc").join(owner.to_string()).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Starts nginx in the server's namespace with `files`, names and sizes of payloads, and
/// waits until it listens.
///
/// # Errors
/// It cannot be started, or does not listen: then with its own words.
pub(crate) fn start(
    testbed: &Testbed,
    scratch: &Scratch,
    files: &[(&str, u64)],
    interrupt: &Interrupt,
) -> anyhow::Result<Background> {
    let dir = scratch.path();
    let root = dir.join("www");
    // A scratch directory may serve several times.
    let _ = fs::remove_dir_all(&root);
    fs::create_dir(&root)?;
    for (name, size) in files {
        payload::write(&root.join(name), *size)
            .with_context(|| format!("cannot write the file to serve below {}", dir.display()))?;
    }
    let config = dir.join("nginx.conf");
    fs::write(&config, configuration(dir))?;
    let log = dir.join("error.log");

    let mut command = testbed.command(Host::Server, find_program("nginx")?)?;
    command
        .arg("-p")
        .arg(dir)
        .arg("-c")
        .arg(&config)
        .arg("-e")
        .arg(&log)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut nginx = Background::start("nginx", &mut command)?;

    let started = Instant::now();
    while !listens(testbed)? {
        interrupt.check()?;
        if nginx.ended()?.is_some() || started.elapsed() > START {
            let words = fs::read_to_string(&log).unwrap_or_default();
            let words = words.lines().next_back().unwrap_or("it gave no reason");
            bail!("{} does not listen on port {PORT}: {words}", nginx.name());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(nginx)
}

/// Everything nginx writes stays below `dir`; root, because only root can read `dir`.
fn configuration(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        "daemon off;\n\
         user root;\n\
         worker_processes 1;\n\
         pid {dir}/nginx.pid;\n\
         error_log {dir}/error.log;\n\
         events {{ worker_connections 64; }}\n\
         http {{\n\
         \x20   access_log off;\n\
         \x20   sendfile on;\n\
         \x20   tcp_nopush on;\n\
         \x20   default_type application/octet-stream;\n\
         \x20   client_body_temp_path {dir}/client;\n\
         \x20   proxy_temp_path {dir}/proxy;\n\
         \x20   fastcgi_temp_path {dir}/fastcgi;\n\
         \x20   uwsgi_temp_path {dir}/uwsgi;\n\
         \x20   scgi_temp_path {dir}/scgi;\n\
         \x20   server {{\n\
         \x20       listen {PORT};\n\
         \x20       listen [::]:{PORT};\n\
         \x20       root {dir}/www;\n\
         \x20   }}\n\
         }}\n"
    )
}

fn listens(testbed: &Testbed) -> anyhow::Result<bool> {
    let filter = format!("sport = :{PORT}");
    let output = testbed
        .command(Host::Server, "ss")?
        .args(["-Htln", &filter])
        .output()
        .context("cannot run `ss` (package iproute2)")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().count() >= 2)
}
