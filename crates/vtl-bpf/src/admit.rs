//! Applies the allow list of [`vtl_pool::allowlist`] to libbpf's view of a graft's object. libbpf
//! parses ELF and BTF in its own way, so its result is checked, before any system call; and
//! relocations change instructions, so the final ones are checked.

use std::{
    ffi::{CStr, CString, c_char},
    slice,
    sync::OnceLock,
};

use libbpf_rs::{AsRawLibbpf, ObjectBuilder, OpenObject};
use libbpf_sys::{bpf_insn, bpf_map, bpf_program};
use vtl_pool::allowlist::{
    KFUNCS, PROGRAMS, Stage, check, check_code, check_data, check_map, check_program,
};

use crate::{Error, Result};

/// Opens a graft's object if all of it is on the allow list. Needs no privilege.
///
/// # Errors
/// [`Error::BadGraft`] naming the first violation; [`Error::Load`] if libbpf cannot parse it.
pub fn open(image: &[u8]) -> Result<OpenObject> {
    check(image)?;
    let open = ObjectBuilder::default().open_memory(image);
    let open = open.map_err(|e| Error::load("the graft", e))?;
    check_programs(&open)?;
    check_maps(&open)?;
    Ok(open)
}

/// # Safety
/// `at` is null, or a C string that lives as long as the object.
unsafe fn text<'a>(at: *const c_char) -> &'a str {
    if at.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str().unwrap_or("?")
}

/// Checks the programs: complete, in their sections, of their types, without flags.
fn check_programs(open: &OpenObject) -> Result<()> {
    let mut missing: Vec<&str> = PROGRAMS.iter().map(|(name, _)| *name).collect();
    for program in open.progs() {
        let program: *const bpf_program = program.as_libbpf_object().as_ptr();
        // SAFETY: a program of `open`, which outlives this, and its own strings.
        let (name, section, kind, flags) = unsafe {
            (
                text(libbpf_sys::bpf_program__name(program)),
                text(libbpf_sys::bpf_program__section_name(program)),
                libbpf_sys::bpf_program__type(program),
                libbpf_sys::bpf_program__flags(program),
            )
        };
        check_program(name, section)?;
        let expected = match section {
            "xdp" => libbpf_sys::BPF_PROG_TYPE_XDP,
            _ => libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
        };
        let at = missing.iter().position(|known| *known == name);
        match at {
            Some(at) if kind == expected && flags == 0 => missing.swap_remove(at),
            _ => {
                return Err(Error::BadGraft(format!(
                    "not allowed in a graft: program {name} is there twice, or of another type \
                     than its section's; remove it"
                )));
            }
        };
    }
    match missing.first() {
        Some(name) => Err(Error::BadGraft(format!("the graft has no program {name}"))),
        None => Ok(()),
    }
}

/// Checks the maps: only shared ones, not pinned; and the object's own data, within bounds.
fn check_maps(open: &OpenObject) -> Result<()> {
    let mut data = 0;
    for map in open.maps() {
        let map: *const bpf_map = map.as_libbpf_object().as_ptr();
        // SAFETY: a map of `open`, which outlives this, and its own strings.
        let (name, internal, pin, kind, bytes, entries) = unsafe {
            (
                text(libbpf_sys::bpf_map__name(map)),
                libbpf_sys::bpf_map__is_internal(map),
                text(libbpf_sys::bpf_map__pin_path(map)),
                libbpf_sys::bpf_map__type(map),
                libbpf_sys::bpf_map__value_size(map),
                libbpf_sys::bpf_map__max_entries(map),
            )
        };
        if !pin.is_empty() {
            return Err(Error::BadGraft(format!(
                "not allowed in a graft: map {name} is pinned to {pin}; remove that"
            )));
        }
        let is_data = internal && kind == libbpf_sys::BPF_MAP_TYPE_ARRAY && entries == 1;
        if is_data && !name.ends_with(".kconfig") {
            data += u64::from(bytes);
        } else {
            check_map(name)?;
        }
    }
    Ok(check_data(data)?)
}

/// BTF ids of the allowed kfuncs in this kernel. Read once: it takes milliseconds.
fn kfuncs() -> &'static [i32] {
    static KNOWN: OnceLock<Vec<i32>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        // SAFETY: the kernel's type information is ours until it is freed; `find` only reads it.
        unsafe {
            let btf = libbpf_sys::btf__load_vmlinux_btf();
            if btf.is_null() {
                return Vec::new();
            }
            let find = |name: &&str| {
                let name = CString::new(*name).expect("no zero bytes");
                libbpf_sys::btf__find_by_name_kind(btf, name.as_ptr(), libbpf_sys::BTF_KIND_FUNC)
            };
            let ids = KFUNCS.iter().map(find).filter(|id| *id > 0).collect();
            libbpf_sys::btf__free(btf);
            ids
        }
    })
}

/// Checks the final instructions, once libbpf has prepared the object.
pub(crate) fn check_linked(open: &OpenObject) -> Result<()> {
    // SAFETY: a map of `open`, which outlives this.
    let fd = |map: *const bpf_map| unsafe { libbpf_sys::bpf_map__fd(map) };
    let maps = open.maps();
    let maps: Vec<i32> = maps
        .map(|map| fd(map.as_libbpf_object().as_ptr()))
        .filter(|fd| *fd >= 0)
        .collect();
    let stage = Stage::Linked {
        maps: &maps,
        kfuncs: kfuncs(),
    };
    for program in open.progs() {
        let name = program.name().to_string_lossy().into_owned();
        let program: *const bpf_program = program.as_libbpf_object().as_ptr();
        // SAFETY: libbpf's array of this many, of a program of `open` that does not change
        // meanwhile; an instruction is eight bytes, all of them set.
        let code = unsafe {
            if !libbpf_sys::bpf_program__autoload(program) {
                continue;
            }
            slice::from_raw_parts(
                libbpf_sys::bpf_program__insns(program).cast::<u8>(),
                libbpf_sys::bpf_program__insn_cnt(program) as usize * size_of::<bpf_insn>(),
            )
        };
        check_code(code, stage, &|_| name.clone())?;
    }
    Ok(())
}
