//! What the verifier says of a graft's programs, one by one, without putting any of them to use.

use std::{
    ffi::c_char,
    time::{Duration, Instant},
};

use libbpf_rs::{AsRawLibbpf, ObjectBuilder, OpenObject};

use crate::{Error, Result, plane::DataPlane};

/// The verifier's words on one program.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The program.
    pub program: String,
    /// May it be loaded?
    pub accepted: bool,
    /// Its instructions, those of functions that it calls not counted.
    pub instructions: usize,
    /// Instructions that the verifier looked at, on all paths; 0 if it does not say.
    pub processed: u64,
    /// How long it took, the kernel's compiler included.
    pub took: Duration,
    /// The end of its log, with the source's lines if the object has them. Of an accepted program
    /// a few figures.
    pub log: String,
}

/// Bytes of the log that are kept: the end, where the reason stands (Linux 6.4).
const LOG: usize = 1 << 20;
/// `BPF_LOG_LEVEL1`: every instruction of the path, and source lines.
const TRACE: u32 = 1;
/// `BPF_LOG_STATS`.
const FIGURES: u32 = 4;

/// Has the kernel verify each program of a graft's object against the maps of `plane`.
///
/// # Errors
/// [`Error::Load`] if libbpf does not understand the object. A refusal by the verifier is no error.
pub fn check(plane: &DataPlane, image: &[u8]) -> Result<Vec<Verdict>> {
    let names: Vec<_> = open(plane, image)?
        .progs()
        .map(|p| p.name().to_owned())
        .collect();
    names
        .iter()
        .map(|name| {
            let verdict = verify(plane, image, name, FIGURES)?;
            if verdict.accepted {
                return Ok(verdict);
            }
            verify(plane, image, name, TRACE)
        })
        .collect()
}

fn open(plane: &DataPlane, image: &[u8]) -> Result<OpenObject> {
    let refused = |e| Error::load("the graft", e);
    let mut open = ObjectBuilder::default()
        .open_memory(image)
        .map_err(refused)?;
    plane.share_maps(&mut open).map_err(refused)?;
    Ok(open)
}

fn verify(plane: &DataPlane, image: &[u8], name: &std::ffi::OsStr, level: u32) -> Result<Verdict> {
    let mut object = open(plane, image)?;
    let mut log = vec![0_u8; LOG];
    let mut instructions = 0;
    for mut program in object.progs_mut() {
        let wanted = program.name() == name;
        program.set_autoload(wanted);
        if wanted {
            instructions = program.insn_cnt();
            program.set_log_level(level);
            // SAFETY: the buffer lives until after the load below; libbpf writes within its size.
            let r = unsafe {
                libbpf_sys::bpf_program__set_log_buf(
                    program.as_libbpf_object().as_ptr(),
                    log.as_mut_ptr().cast::<c_char>(),
                    log.len() as _,
                )
            };
            debug_assert_eq!(r, 0, "only of loaded programs");
        }
    }
    let start = Instant::now();
    let loaded = object.load();
    let took = start.elapsed();
    let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]).into_owned();
    Ok(Verdict {
        program: name.to_string_lossy().into_owned(),
        accepted: loaded.is_ok(),
        instructions,
        processed: processed(&log),
        took,
        log,
    })
}

/// From "processed 12 insns (limit 1000000) …".
fn processed(log: &str) -> u64 {
    let line = log.lines().rev().find_map(|l| l.strip_prefix("processed "));
    line.and_then(|l| l.split(' ').next()?.parse().ok())
        .unwrap_or(0)
}
