//! Programs that end with the test, and what they leave in the kernel.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, BufRead, BufReader, Read},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{PATIENCE, until};

/// Runs a program to its end, and demands success.
#[track_caller]
pub(crate) fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", words(&output));
}

/// A running program; killed when dropped, and should this process be killed.
pub(crate) struct Process {
    child: Option<Child>,
}

impl Process {
    /// Starts it. It ends with the calling thread at the latest.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_reading(command.stdin(Stdio::null()))
    }

    /// The same with the input that the command names.
    pub(crate) fn start_reading(command: &mut Command) -> Self {
        command.process_group(0);
        // SAFETY: prctl is async-signal-safe, and the closure touches nothing of the parent's.
        unsafe {
            command.pre_exec(|| {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from)
            });
        }
        let child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        Self { child: Some(child) }
    }

    /// Starts it with its output collected.
    pub(crate) fn piped(command: &mut Command) -> Self {
        Self::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        self.child.as_mut().expect("there until the end")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("there until the end").id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).expect("signalled");
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child().try_wait().expect("a child")
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the program's end", || {
            status = self.ended();
            status.is_some()
        });
        status.expect("until")
    }

    /// Waits for its end, and returns what it said.
    #[track_caller]
    pub(crate) fn output(mut self) -> Output {
        fn all(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                if let Some(mut pipe) = pipe {
                    pipe.read_to_end(&mut bytes).expect("a pipe");
                }
                bytes
            })
        }
        let child = self.child();
        let [stdout, stderr] = [all(child.stdout.take()), all(child.stderr.take())];
        let status = self.wait();
        Output {
            status,
            stdout: stdout.join().expect("no panic"),
            stderr: stderr.join().expect("no panic"),
        }
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // The group: what it has started ends too, unless it left the group.
            if matches!(child.try_wait(), Ok(None)) {
                let _ = kill(Pid::from_raw(-(child.id() as i32)), Signal::SIGKILL);
            }
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// A program that is spoken with over its standard streams.
pub(crate) struct Spoken {
    pub(crate) process: Process,
    pub(crate) told: ChildStdin,
    pub(crate) says: BufReader<ChildStdout>,
}

impl Spoken {
    pub(crate) fn start(mut command: Command) -> Self {
        let both = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start_reading(both);
        let told = process.child().stdin.take().expect("piped");
        let says = BufReader::new(process.child().stdout.take().expect("piped"));
        Self {
            process,
            told,
            says,
        }
    }

    /// What it says next.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.says.read_line(&mut line).expect("a pipe");
        assert_ne!(read, 0, "it has ended");
        line.trim_end().to_owned()
    }
}

/// Waits until a server says that it is ready.
#[track_caller]
pub(crate) fn ready(server: &mut Child) {
    let mut line = String::new();
    let output = server.stdout.as_mut().expect("piped");
    BufReader::new(output).read_line(&mut line).expect("a line");
    assert_eq!(line.trim(), "ready");
}

/// Standard error of a program that has ended.
pub(crate) fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// One clear sentence, and not success.
#[track_caller]
pub(crate) fn refused(output: &Output, status: i32, about: &str) {
    let words = words(output);
    assert_eq!(output.status.code(), Some(status), "{words}");
    let sentences: Vec<&str> = words
        .lines()
        .filter(|line| line.starts_with("vtl"))
        .collect();
    assert_eq!(sentences.len(), 1, "one sentence: {words}");
    assert!(sentences[0].contains(about), "{about}: {words}");
    assert!(!words.contains("panicked"), "{words}");
}

/// What a process holds in the kernel's BPF: identities of maps, programs and links.
#[derive(Debug, Default)]
pub(crate) struct Held {
    maps: BTreeSet<u32>,
    programs: BTreeSet<u32>,
    links: BTreeSet<u32>,
}

impl Held {
    /// What a process holds now.
    pub(crate) fn by(pid: u32) -> Self {
        Self::try_by(pid).expect("it runs")
    }

    fn try_by(pid: u32) -> io::Result<Self> {
        let mut held = Self::default();
        for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))?.flatten() {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            for line in text.lines() {
                let Some((key, value)) = line.split_once(':') else {
                    continue;
                };
                let Ok(id) = value.trim().parse() else {
                    continue;
                };
                let kind = match key {
                    "map_id" => &mut held.maps,
                    "prog_id" => &mut held.programs,
                    "link_id" => &mut held.links,
                    _ => continue,
                };
                kind.insert(id);
            }
        }
        Ok(held)
    }

    pub(crate) fn links(&self) -> usize {
        self.links.len()
    }

    pub(crate) fn maps(&self) -> usize {
        self.maps.len()
    }

    /// None of it must exist any more, soon.
    ///
    /// Looks without touching: `prog_array_map_clear` of the kernel takes a reference for work that
    /// may be queued already, and leaks it, if somebody opens and closes an array of programs while
    /// its last owner ends.
    #[track_caller]
    pub(crate) fn assert_gone(&self) {
        let exists =
            |next: unsafe extern "C" fn(u32, *mut u32) -> i32, ids: &BTreeSet<u32>| -> Vec<u32> {
                let there = |id: &u32| {
                    let mut found = 0;
                    // SAFETY: the call writes one number to where the pointer points.
                    unsafe { next(*id - 1, &raw mut found) == 0 && found == *id }
                };
                ids.iter().copied().filter(there).collect()
            };
        let left = || {
            [
                exists(libbpf_sys::bpf_link_get_next_id, &self.links),
                exists(libbpf_sys::bpf_prog_get_next_id, &self.programs),
                exists(libbpf_sys::bpf_map_get_next_id, &self.maps),
            ]
        };
        // The kernel frees them behind grace periods.
        let deadline = Instant::now() + PATIENCE;
        while left().iter().any(|ids| !ids.is_empty()) {
            assert!(
                Instant::now() < deadline,
                "left: links, programs, maps {:?}; held by {:?}",
                left(),
                self.holders()
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The processes, other than this one, that have some of it, with their names.
    fn holders(&self) -> Vec<(u32, String)> {
        let pids = fs::read_dir("/proc").expect("there").flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let has = |pid: &u32| {
            let Ok(held) = Self::try_by(*pid) else {
                return false;
            };
            let both = |a: &BTreeSet<u32>, b: &BTreeSet<u32>| !a.is_disjoint(b);
            both(&held.maps, &self.maps)
                || both(&held.programs, &self.programs)
                || both(&held.links, &self.links)
        };
        let name = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        pids.filter(has).map(|pid| (pid, name(pid))).collect()
    }
}

/// Entries of a process's hash map of this name.
pub(crate) fn entries(pid: u32, name: &str) -> usize {
    let held = Held::by(pid);
    let open = |id: &u32| {
        // SAFETY: takes a number and gives a new descriptor, or a negative number.
        let fd = unsafe { libbpf_sys::bpf_map_get_fd_by_id(*id) };
        // SAFETY: a new descriptor that nobody else owns.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let is_it = |fd: &OwnedFd| {
        let mut info = libbpf_sys::bpf_map_info::default();
        let mut size = size_of_val(&info) as u32;
        // SAFETY: the structure and its size, both alive during the call.
        let told = unsafe {
            libbpf_sys::bpf_map_get_info_by_fd(fd.as_raw_fd(), &raw mut info, &raw mut size)
        };
        let letters = info.name.map(|c| c as u8);
        told == 0 && letters.starts_with(name.as_bytes())
    };
    let map = held.maps.iter().filter_map(open).find(is_it);
    let map = map.unwrap_or_else(|| panic!("it has no map {name}"));
    // The kernel reads the key before it writes the next one over it.
    let mut key = [0_u8; 64];
    let mut last = std::ptr::null();
    let mut count = 0;
    // SAFETY: there is room for more than the map's key, and it is alive during the calls.
    while unsafe {
        libbpf_sys::bpf_map_get_next_key(map.as_raw_fd(), last, key.as_mut_ptr().cast()) == 0
    } {
        count += 1;
        last = key.as_ptr().cast();
    }
    count
}

/// A daemon's process of carriers of a kind.
pub(crate) fn process_of_carriers(daemon: u32, kind: &str) -> Option<u32> {
    let parent = format!("\nPPid:\t{daemon}\n");
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        status.contains(&parent) && command.ends_with(format!("--carriers\0{kind}\0").as_bytes())
    })
}

/// The control groups that a daemon made, wherever they are.
pub(crate) fn groups(pid: u32) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders: Vec<_> = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(PathBuf::from)
        .into();
    let prefix = format!("vtl-{pid}-");
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            }
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// The group of a daemon's program with that number.
pub(crate) fn run_group(pid: u32, number: u32) -> Option<PathBuf> {
    let name = format!(".run-{number}");
    let mut groups = groups(pid).into_iter();
    groups.find(|path| path.to_string_lossy().ends_with(&name))
}

/// A control group of a test's own.
pub(crate) struct Group(pub(crate) PathBuf);

impl Group {
    pub(crate) fn new(name: &str) -> Self {
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let root = roots.iter().map(Path::new);
        let root = root.into_iter().find(|r| r.join("cgroup.procs").exists());
        let path = root.expect("cgroup v2 is mounted").join(name);
        fs::create_dir_all(&path).expect("a group");
        Self(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Memory of a process's own, mapped rings included, KiB.
pub(crate) fn memory_kib(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("a size");
    line.trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number")
}

/// Counts memory, also the kernel's, that processes take: a control group of its own.
pub(crate) struct Account {
    group: PathBuf,
    /// Where this process belongs.
    home: PathBuf,
    usage: PathBuf,
}

impl Account {
    /// Opens one, where that can be had.
    pub(crate) fn open(name: &str) -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let of = |controllers: &str| {
            let lines = groups.lines().filter_map(|l| l.split_once(':'));
            lines
                .filter_map(|(_, l)| l.split_once(':'))
                .find_map(|(of, path)| {
                    let path = path.trim_start_matches('/');
                    (of == controllers).then(|| path.to_owned())
                })
        };
        let [first, second] = [
            ("memory", "/sys/fs/cgroup/memory", "memory.usage_in_bytes"),
            ("", "/sys/fs/cgroup", "memory.current"),
        ]
        .map(|(controllers, root, usage)| {
            let root = PathBuf::from(root);
            let group = root.join(format!("vtl-e2e-{name}"));
            let _ = fs::create_dir(&group);
            let usage = group.join(usage);
            let account = Self {
                home: root.join(of(controllers)?),
                group,
                usage,
            };
            account.usage.exists().then_some(account)
        });
        first.or(second)
    }

    /// Counts what is started, and what that starts.
    pub(crate) fn during<T>(&self, start: impl FnOnce() -> T) -> T {
        let enter = |group: &Path| fs::write(group.join("cgroup.procs"), "0").expect("a group");
        enter(&self.group);
        let started = start();
        enter(&self.home);
        started
    }

    /// Bytes that they have now.
    pub(crate) fn bytes(&self) -> u64 {
        let text = fs::read_to_string(&self.usage).expect("there");
        text.trim().parse().expect("a number")
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.group);
    }
}
