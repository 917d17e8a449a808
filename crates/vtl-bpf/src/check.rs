//! Runs the verifier on programs of grafts, and on what vtld loads besides, one by one, without
//! installing any.

use std::{
    ffi::{OsStr, c_char},
    time::{Duration, Instant},
};

use libbpf_rs::{AsRawLibbpf, ObjectBuilder, OpenObject};

use crate::{
    Error, Result,
    load::{Loader, prepare},
    objects,
    plane::DataPlane,
};

/// The verifier's result for one program.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The program.
    pub program: String,
    /// Whether it may be loaded.
    pub accepted: bool,
    /// Its instructions, without those of functions that it calls.
    pub instructions: usize,
    /// Instructions that the verifier processed, on all paths; 0 if unknown.
    pub processed: u64,
    /// Time for verification and compilation.
    pub took: Duration,
    /// The end of the verifier's log, with source lines if the object has them. For an accepted
    /// program, only statistics.
    pub log: String,
}

/// Size of the log that is kept: its end, with the reason (Linux 6.4).
const LOG: usize = 1 << 20;
/// `BPF_LOG_LEVEL1`: every instruction of the path, and source lines.
const TRACE: u32 = 1;
/// `BPF_LOG_STATS`.
const FIGURES: u32 = 4;

/// Has the kernel verify each program of a graft's object against the maps that `loader` knows.
///
/// # Errors
/// [`crate::Error::BadGraft`] if the object contains anything not on the allow list,
/// [`crate::Error::Load`] if libbpf cannot parse it. A rejection by the verifier is no error.
pub fn check(loader: &Loader, image: &[u8]) -> Result<Vec<Verdict>> {
    check_opened(|| loader.open(image), |object| prepare(object, "the graft"))
}

/// Objects without which vtld carries no programs that do not know VTL.
const NEEDED: [(&str, &[u8]); 2] = [("hooker", objects::HOOKER), ("rules", objects::RULES)];

/// Objects that vtld loads for what not everybody uses.
const OPTIONAL: [(&str, &[u8]); 3] = [
    ("gateway", objects::GATEWAY),
    ("carrier", objects::CARRIER),
    ("fence", objects::FENCE),
];

/// Has the kernel verify each program that vtld loads besides grafts, with every option of its
/// configuration switched on. Programs' names begin with their object's.
///
/// # Errors
/// [`crate::Error::Load`] if libbpf cannot parse an object. A rejection by the verifier is no error.
pub fn check_others() -> Result<Vec<Verdict>> {
    let mut all = Vec::new();
    for (object, image) in NEEDED.into_iter().chain(OPTIONAL) {
        all.extend(check_other(object, image, 1)?);
    }
    Ok(all)
}

/// Has the kernel verify what VTL does not do without: the root programs, the graft `stream`, the
/// Hooker and its rules. Their options are left off where they are refused, as vtld does.
///
/// # Errors
/// As [`check_others`], and if the root programs are refused.
pub fn check_needed() -> Result<Vec<Verdict>> {
    let plane = DataPlane::load()?;
    let stream = objects::graft("stream").expect("it comes with VTL");
    let mut all = check(plane.loader(), stream)?;
    for (object, image) in NEEDED {
        let mut verdicts = check_other(object, image, 1)?;
        if verdicts.iter().any(|verdict| !verdict.accepted) {
            verdicts = check_other(object, image, 0)?;
        }
        all.extend(verdicts);
    }
    Ok(all)
}

fn check_other(object: &str, image: &[u8], fill: u8) -> Result<Vec<Verdict>> {
    let open = || configured(image, fill).map_err(|error| Error::load(object, error));
    let mut verdicts = check_opened(open, |_| Ok(()))?;
    for verdict in &mut verdicts {
        verdict.program = format!("{object} {}", verdict.program);
    }
    Ok(verdicts)
}

/// Opens an object, and fills its configuration.
fn configured(image: &[u8], fill: u8) -> libbpf_rs::Result<OpenObject> {
    let mut object = ObjectBuilder::default().open_memory(image)?;
    for mut map in object.maps_mut() {
        if map.name() == ".rodata.config"
            && let Some(value) = map.initial_value_mut()
        {
            value.fill(fill);
        }
    }
    Ok(object)
}

/// As [`check`], for the object that `open` opens, once for each program. `prepare` is called before
/// each is loaded.
fn check_opened(
    open: impl Fn() -> Result<OpenObject>,
    prepare: impl Fn(&OpenObject) -> Result<()>,
) -> Result<Vec<Verdict>> {
    let names: Vec<_> = open()?.progs().map(|p| p.name().to_owned()).collect();
    names
        .iter()
        .map(|name| {
            let verdict = verify(open()?, &prepare, name, FIGURES)?;
            if verdict.accepted {
                return Ok(verdict);
            }
            verify(open()?, &prepare, name, TRACE)
        })
        .collect()
}

fn verify(
    mut object: OpenObject,
    prepare: impl Fn(&OpenObject) -> Result<()>,
    name: &OsStr,
    level: u32,
) -> Result<Verdict> {
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
    prepare(&object)?;
    let loaded = object.load();
    let took = start.elapsed();
    let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
    let mut log = String::from_utf8_lossy(&log[..end]).into_owned();
    if let (Err(error), true) = (&loaded, log.is_empty()) {
        log = format!("not the verifier: {error:#}");
    }
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

/// The verifier's reason for a rejection, in terms of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The program.
    pub program: String,
    /// `FILE:LINE` of the source, if the object has line information.
    pub place: Option<String>,
    /// That line's text.
    pub source: Option<String>,
    /// The verifier's message.
    pub says: String,
    /// Its meaning, and the fix.
    pub meaning: Option<&'static str>,
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.place, &self.source) {
            (Some(place), Some(source)) => write!(f, "{place}: `{source}`: ")?,
            _ => write!(f, "{}: ", self.program)?,
        }
        match self.meaning {
            Some(meaning) => write!(f, "{meaning} (verifier: {})", self.says),
            None => f.write_str(&self.says),
        }
    }
}

/// Meanings of the verifier's messages, for the author of the source. The first match counts.
const MEANINGS: [(&str, &str); 17] = [
    (
        "invalid access to packet",
        "this touches the packet beyond what was compared with its end: compare first",
    ),
    (
        "invalid access to map value",
        "an index may lie outside of the array: mask it with a constant right before",
    ),
    (
        "_or_null'",
        "what a lookup returned may be null: compare it with 0 first",
    ),
    (
        "possibly NULL pointer",
        "what a lookup returned may be null: compare it with 0 first",
    ),
    (
        "invalid mem access 'scalar'",
        "a number is used as a pointer here",
    ),
    (
        "invalid access to memory",
        "this reaches beyond the structure that was passed",
    ),
    (
        "passes invalid args",
        "a VTL_GLOBAL function gets a pointer to something shorter than its parameter's type",
    ),
    (
        "infinite loop detected",
        "the verifier sees no end of this loop: use vtl_for",
    ),
    (
        "back-edge",
        "the verifier sees no end of this loop: use vtl_for",
    ),
    (
        "program is too large",
        "too many paths lead through here: put what many of them share into a VTL_GLOBAL function",
    ),
    (
        "sequence of",
        "too many paths lead through here: put what many of them share into a VTL_GLOBAL function",
    ),
    (
        "!read_ok",
        "a variable is used here that has no value on one of the paths",
    ),
    (
        "math between",
        "a number without bounds is added to a pointer here: mask the index with a constant first",
    ),
    (
        "unbounded memory access",
        "a length or index has no upper bound here: compare it with a constant first",
    ),
    (
        "prohibited",
        "arithmetic on this kind of pointer is not allowed",
    ),
    (
        "unknown func",
        "kernels do not offer this helper to programs of this kind",
    ),
    (
        "combined stack size",
        "functions that call each other have more than 512 bytes of local variables together",
    ),
];

impl Verdict {
    /// The reason in terms of the source; `None` if the program was accepted.
    pub fn complaint(&self) -> Option<Complaint> {
        if self.accepted {
            return None;
        }
        let lines: Vec<&str> = self.log.lines().collect();
        let end = lines.iter().rposition(|l| l.starts_with("processed "));
        let lines = &lines[..end.unwrap_or(lines.len())];
        let is_instruction = |line: &&str| {
            let number = line.split_once(": (").map(|(number, _)| number);
            number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        let last = lines.iter().rposition(is_instruction);
        let is_message = |l: &&&str| {
            !l.is_empty() && !l.starts_with(';') && !l.contains(": frame") && !is_instruction(l)
        };
        let said: Vec<&str> = lines[last.map_or(0, |i| i + 1)..]
            .iter()
            .filter(is_message)
            .copied()
            .collect();
        let says = if said.is_empty() {
            "it gives no reason".to_owned()
        } else {
            said.join("; ")
        };
        let at = lines[..last.unwrap_or(0)]
            .iter()
            .rev()
            .find_map(|l| l.strip_prefix("; ")?.rsplit_once(" @ "));
        Some(Complaint {
            program: self.program.clone(),
            place: at.map(|(_, place)| place.trim().to_owned()),
            source: at.map(|(source, _)| source.trim().to_owned()),
            meaning: MEANINGS
                .iter()
                .find(|(words, _)| says.contains(words))
                .map(|(_, meaning)| *meaning),
            says,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(log: &str) -> Complaint {
        let verdict = Verdict {
            program: "p".into(),
            accepted: false,
            instructions: 0,
            processed: 0,
            took: Duration::ZERO,
            log: log.into(),
        };
        verdict.complaint().expect("a refusal")
    }

    #[test]
    fn complaint__names_line_words_and_meaning() {
        let complaint = refused(
            "0: R1=ctx() R10=fp0\n; int f(void) @ a.h:3\n12: (07) r0 += 1\n\
             ; return a[at]; @ env_bpf.h:118\n15: (0f) r0 += r1        ; R0=map_value()\n\
             16: (61) r1 = *(u32 *)(r0 +32)\n\
             invalid access to map value, value_size=528 off=536 size=4\n\
             R0 max value is outside of the allowed memory range\n\
             processed 16 insns (limit 1000000) max_states_per_insn 0\n",
        );
        assert_eq!(complaint.place.as_deref(), Some("env_bpf.h:118"));
        assert_eq!(complaint.source.as_deref(), Some("return a[at];"));
        let text = complaint.to_string();
        for words in ["env_bpf.h:118: `return a[at];`: an index", "size=4; R0 max"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn complaint__without_line_information_or_reason() {
        assert_eq!(refused("").to_string(), "p: it gives no reason");
        let text = refused("3: (95) exit\nR0 !read_ok\nprocessed 4 insns\n").to_string();
        assert!(text.starts_with("p: a variable is used"), "{text}");
    }
}
