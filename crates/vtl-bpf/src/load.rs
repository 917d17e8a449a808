//! Loads a graft's programs: libbpf prepares them once, the kernel verifies several in parallel.
//! Both take milliseconds, so threads that move packets must not wait: a [`Loader`] works on any
//! thread.

use std::{
    ffi::{CString, OsStr, OsString},
    io,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    slice,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use libbpf_rs::{AsRawLibbpf, OpenObject};
use libbpf_sys::{bpf_func_info, bpf_insn, bpf_line_info, bpf_program};
use vtl_pool::object::{self, Description};

use crate::{
    Error, Result, admit,
    link::{self, Hook},
    netdev::Interface,
    plane::{GraftInfo, Ingress, SLOT_PROGRAMS, XDP_INGRESS},
};

/// Threads that load one graft. Nearly all the time is the verifier's, which runs on several
/// programs in parallel.
const LOADERS: usize = 4;

/// Time of each step of a deployment.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// Reading the object's description.
    pub describe: Duration,
    /// libbpf parses the object.
    pub open: Duration,
    /// libbpf resolves the kernel's functions in the kernel's BTF, which it reads anew for each
    /// object, relocates, and loads the object's own BTF.
    pub prepare: Duration,
    /// The kernel verifies and compiles all programs, several in parallel.
    pub verify: Duration,
    /// The same per program, in source order.
    pub programs: Vec<(String, Duration)>,
    /// Filling the `PROG_ARRAY`s.
    pub fill: Duration,
}

impl Steps {
    /// Sum of the steps.
    pub fn total(&self) -> Duration {
        self.describe + self.open + self.prepare + self.verify + self.fill
    }
}

/// A program loaded into the kernel.
struct Loaded {
    name: OsString,
    fd: OwnedFd,
    instructions: usize,
}

/// A verified graft that is not installed yet.
pub struct LoadedGraft {
    pub(crate) info: GraftInfo,
    /// In the order of [`SLOT_PROGRAMS`]; `None`: not needed here.
    pub(crate) programs: Vec<Option<OwnedFd>>,
}

/// The root programs on an interface; dropping it detaches them.
pub struct Attachment {
    /// The interface.
    pub interface: Interface,
    #[expect(
        dead_code,
        reason = "the attachments last as long as their descriptors"
    )]
    pub(crate) links: Vec<OwnedFd>,
}

/// Loads grafts for a data plane, and attaches its root programs to interfaces.
pub struct Loader {
    /// The root programs' maps, which all grafts share.
    pub(crate) maps: Vec<(OsString, OwnedFd)>,
    /// In the order of [`ROOT_PROGRAMS`].
    pub(crate) programs: [OwnedFd; 3],
    /// Whether interfaces may be attached to by XDP: only then do grafts need their programs for that, a quarter of
    /// what the verifier takes.
    pub(crate) has_xdp: bool,
}

/// The root programs for interfaces: ingress at either hook, and egress.
pub(crate) const ROOT_PROGRAMS: [&str; 3] =
    ["vtl_root_in_tc", "vtl_root_in_xdp", "vtl_root_out_tc"];

impl Loader {
    /// Has the kernel verify and load a graft.
    ///
    /// # Errors
    /// [`Error::BadGraft`] if the object does not describe a graft, or contains anything not on the
    /// allow list; [`Error::Load`] if the verifier rejects it.
    pub fn load(&self, image: &[u8], steps: &mut Steps) -> Result<LoadedGraft> {
        let started = Instant::now();
        let description = Description::read(image)?;
        let what = format!("graft \"{}\"", description.name);
        steps.describe = started.elapsed();
        let mut loaded = self.verify(image, &what, steps)?;
        let info = GraftInfo {
            name: description.name,
            gid: description.gid,
            services: description.services,
            halves: description.halves,
            instructions: loaded.iter().map(|p| p.instructions).sum(),
        };
        let mut programs = Vec::with_capacity(SLOT_PROGRAMS.len());
        for (program, ..) in SLOT_PROGRAMS {
            if !self.needs(program.as_ref()) {
                programs.push(None);
                continue;
            }
            let at = loaded.iter().position(|p| p.name == program);
            let at =
                at.ok_or_else(|| Error::BadGraft(format!("{what} has no program {program}")))?;
            programs.push(Some(loaded.swap_remove(at).fd));
        }
        Ok(LoadedGraft { info, programs })
    }

    /// Whether a program of a graft is needed here.
    fn needs(&self, program: &OsStr) -> bool {
        self.has_xdp || !XDP_INGRESS.iter().any(|name| program == *name)
    }

    /// Attaches the root programs to an interface of the calling thread's namespace.
    ///
    /// # Errors
    /// See [`link::attach`].
    ///
    /// # Panics
    /// By XDP, if the data plane was loaded without.
    pub fn attach(&self, interface: &Interface, ingress: Ingress) -> Result<Attachment> {
        let [tc, xdp, out] = &self.programs;
        let (program, hook) = match ingress {
            Ingress::Tcx => (tc, Hook::TcxIngress),
            Ingress::Xdp => (xdp, Hook::XdpNative),
        };
        assert!(self.has_xdp || ingress == Ingress::Tcx);
        Ok(Attachment {
            interface: interface.clone(),
            links: vec![
                link::attach(program.as_fd(), interface.index, hook)?,
                link::attach(out.as_fd(), interface.index, Hook::TcxEgress)?,
            ],
        })
    }

    /// Makes an object use the maps of the root programs.
    pub(crate) fn share_maps(&self, open: &mut OpenObject) -> libbpf_rs::Result<()> {
        for mut map in open.maps_mut() {
            let name = map.name().to_owned();
            if let Some((_, shared)) = self.maps.iter().find(|(known, _)| *known == name) {
                map.reuse_fd(shared.as_fd())?;
            }
        }
        Ok(())
    }

    /// Opens a graft's object, if it passes the allow list, with the shared maps.
    ///
    /// # Errors
    /// See [`admit::open`]; [`Error::Load`] if a map differs from the shared one.
    pub(crate) fn open(&self, image: &[u8]) -> Result<OpenObject> {
        let mut open = admit::open(image)?;
        let shared = self.share_maps(&mut open);
        shared.map_err(|e| Error::load("the graft", e))?;
        Ok(open)
    }

    /// Has the kernel verify and load the programs of an object that are needed.
    fn verify(&self, image: &[u8], what: &str, steps: &mut Steps) -> Result<Vec<Loaded>> {
        let started = Instant::now();
        let open = self.open(image)?;
        steps.open = started.elapsed();

        let started = Instant::now();
        prepare(&open, what)?;
        let object = open.as_libbpf_object().as_ptr();
        // SAFETY: an open object; nobody else uses it.
        let types = unsafe { libbpf_sys::bpf_object__btf_fd(object) };
        let licence = CString::new(object::licence(image)).expect("it ends at the first zero byte");
        let mut programs: Vec<Prepared<'_>> = open
            .progs()
            .filter(|program| self.needs(program.name()))
            .map(|program| {
                let name = program.name().to_owned();
                // SAFETY: a program of `open`, which outlives what is borrowed and is not changed.
                unsafe { Prepared::of(program.as_libbpf_object().as_ptr(), name) }
            })
            .collect();
        steps.prepare = started.elapsed();

        let started = Instant::now();
        let order: Vec<OsString> = programs.iter().map(|p| p.name.clone()).collect();
        // Longest first, for an even load of the threads.
        programs.sort_by_key(|p| std::cmp::Reverse(p.instructions.len()));
        let loaded = load_all(&programs, types, &licence);
        let mut loaded = loaded.map_err(|e| Error::load(what, e.into()))?;
        loaded.sort_by_key(|(program, _)| order.iter().position(|name| *name == program.name));
        steps.verify = started.elapsed();
        let time = |(p, took): &(Loaded, Duration)| (p.name.to_string_lossy().into_owned(), *took);
        steps.programs = loaded.iter().map(time).collect();
        Ok(loaded.into_iter().map(|(program, _)| program).collect())
    }
}

/// Has libbpf prepare maps and instructions for the kernel, and checks the instructions.
pub(crate) fn prepare(open: &OpenObject, what: &str) -> Result<()> {
    // SAFETY: an open object; nobody else uses it.
    let result = unsafe { libbpf_sys::bpf_object__prepare(open.as_libbpf_object().as_ptr()) };
    if result < 0 {
        let error = io::Error::from_raw_os_error(-result);
        return Err(Error::load(what, error.into()));
    }
    admit::check_linked(open)
}

/// Loads the programs on several threads, each taking the next one.
fn load_all(
    programs: &[Prepared<'_>],
    types: i32,
    licence: &CString,
) -> io::Result<Vec<(Loaded, Duration)>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut loaded = Vec::new();
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let started = Instant::now();
            let program = program.load(types, licence)?;
            loaded.push((program, started.elapsed()));
        }
        Ok(loaded)
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..processors.min(LOADERS))
            .map(|_| scope.spawn(work))
            .collect();
        let mut all: io::Result<Vec<_>> = work();
        for helper in helpers {
            let more = helper.join().expect("it returns its errors");
            if let Ok(all) = &mut all {
                all.extend(more?);
            }
        }
        all
    })
}

/// A program ready to be loaded.
struct Prepared<'a> {
    name: OsString,
    kind: libbpf_sys::bpf_prog_type,
    attach: libbpf_sys::bpf_attach_type,
    flags: u32,
    instructions: &'a [bpf_insn],
    functions: &'a [bpf_func_info],
    lines: &'a [bpf_line_info],
}

impl Prepared<'_> {
    /// # Safety
    /// `program` belongs to an object that was prepared, lives longer than `'a`, and is not changed
    /// meanwhile.
    unsafe fn of(program: *const bpf_program, name: OsString) -> Self {
        /// An empty slice for a null pointer.
        unsafe fn all<'a, T>(at: *const T, count: usize) -> &'a [T] {
            if at.is_null() {
                return &[];
            }
            // SAFETY: libbpf's array of this many.
            unsafe { slice::from_raw_parts(at, count) }
        }
        // SAFETY: the caller's promise; the figures are libbpf's own.
        unsafe {
            Self {
                name,
                kind: libbpf_sys::bpf_program__type(program),
                attach: libbpf_sys::bpf_program__expected_attach_type(program),
                flags: libbpf_sys::bpf_program__flags(program),
                instructions: all(
                    libbpf_sys::bpf_program__insns(program),
                    libbpf_sys::bpf_program__insn_cnt(program) as usize,
                ),
                functions: all(
                    libbpf_sys::bpf_program__func_info(program),
                    libbpf_sys::bpf_program__func_info_cnt(program) as usize,
                ),
                lines: all(
                    libbpf_sys::bpf_program__line_info(program),
                    libbpf_sys::bpf_program__line_info_cnt(program) as usize,
                ),
            }
        }
    }

    fn load(&self, types: i32, licence: &CString) -> io::Result<Loaded> {
        let name = CString::new(self.name.as_bytes()).expect("it was a C string");
        let mut options = libbpf_sys::bpf_prog_load_opts {
            sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _,
            expected_attach_type: self.attach,
            prog_flags: self.flags,
            ..Default::default()
        };
        if let Ok(types) = u32::try_from(types) {
            options.prog_btf_fd = types;
            options.func_info = self.functions.as_ptr().cast();
            options.func_info_cnt = self.functions.len() as u32;
            options.func_info_rec_size = size_of::<bpf_func_info>() as u32;
            options.line_info = self.lines.as_ptr().cast();
            options.line_info_cnt = self.lines.len() as u32;
            options.line_info_rec_size = size_of::<bpf_line_info>() as u32;
        }
        // SAFETY: all that the options and arguments point to outlives the call.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                self.kind,
                name.as_ptr(),
                licence.as_ptr(),
                self.instructions.as_ptr(),
                self.instructions.len() as _,
                &raw mut options,
            )
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        Ok(Loaded {
            name: self.name.clone(),
            // SAFETY: a descriptor that the kernel just made for us.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            instructions: self.instructions.len(),
        })
    }
}
