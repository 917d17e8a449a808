//! The allow list for the content of a graft's object. The kernel's verifier keeps a program from
//! crashing the kernel, but not from probing it, or from writing another process's memory. So even
//! a signed graft gets no more of the kernel than VTL's headers need.
//!
//! [`check`] reads the object as compiled, without privilege. `vtl-bpf` applies the same list to
//! libbpf's output ([`check_code`]): relocations change instructions.

use crate::{
    Error, Result,
    elf::{self, Section, Symbol},
};

/// Allowed programs, with their sections, which determine their types (`SCHED_CLS` and XDP).
pub const PROGRAMS: [(&str, &str); 7] = [
    ("vtl_ingress_tc", "tcx/ingress"),
    ("vtl_listener_tc", "tcx/ingress"),
    ("vtl_ingress_xdp", "xdp"),
    ("vtl_listener_xdp", "xdp"),
    ("vtl_egress_tc", "tcx/egress"),
    ("vtl_egress_direct", "tcx/egress"),
    ("vtl_egress_xdp", "xdp"),
];

/// Allowed kernel helpers: those of VTL's headers, by number in `enum bpf_func_id`.
pub const HELPERS: [(i32, &str); 14] = [
    (1, "bpf_map_lookup_elem"),
    (5, "bpf_ktime_get_ns"),
    (9, "bpf_skb_store_bytes"),
    (13, "bpf_clone_redirect"),
    (23, "bpf_redirect"),
    (26, "bpf_skb_load_bytes"),
    (38, "bpf_skb_change_tail"),
    (39, "bpf_skb_pull_data"),
    (44, "bpf_xdp_adjust_head"),
    (65, "bpf_xdp_adjust_tail"),
    (130, "bpf_ringbuf_output"),
    (188, "bpf_xdp_get_buff_len"),
    (189, "bpf_xdp_load_bytes"),
    (190, "bpf_xdp_store_bytes"),
];

/// Refused helpers that messages name, as developers may look for them.
const KNOWN: [(i32, &str); 14] = [
    (2, "bpf_map_update_elem"),
    (3, "bpf_map_delete_elem"),
    (4, "bpf_probe_read"),
    (6, "bpf_trace_printk"),
    (7, "bpf_get_prandom_u32"),
    (8, "bpf_get_smp_processor_id"),
    (12, "bpf_tail_call"),
    (25, "bpf_perf_event_output"),
    (36, "bpf_probe_write_user"),
    (58, "bpf_override_return"),
    (109, "bpf_send_signal"),
    (112, "bpf_probe_read_user"),
    (113, "bpf_probe_read_kernel"),
    (181, "bpf_loop"),
];

/// Allowed kfuncs: the loop of `vtl_for`.
pub const KFUNCS: [&str; 3] = [
    "bpf_iter_num_new",
    "bpf_iter_num_next",
    "bpf_iter_num_destroy",
];

/// Allowed maps: those of `vtl/env_bpf.h`, made by the daemon and shared by all grafts.
pub const MAPS: [&str; 15] = [
    "vtl_sessions",
    "vtl_pump",
    "vtl_tx_rings",
    "vtl_rx_rings",
    "vtl_scoreboards",
    "vtl_events",
    "vtl_wakes",
    "vtl_callers",
    "vtl_stats",
    "vtl_scratch",
    "vtl_in_tc",
    "vtl_in_xdp",
    "vtl_out_tc",
    "vtl_out_xdp",
    "vtl_out_direct",
];

/// Maximum size of an object's own constants and variables, bytes, in total.
pub const MAX_DATA: u64 = 64 << 10;

/// Section of subprograms.
const TEXT: &str = ".text";
/// Allowed sections besides code and data.
const PLAIN: [&str; 12] = [
    "",
    ".strtab",
    ".shstrtab",
    ".symtab",
    "license",
    ".maps",
    ".vtl.graft",
    ".vtl.tf",
    ".BTF",
    ".BTF.ext",
    ".llvm_addrsig",
    ".comment",
];

const SHT_PROGBITS: u32 = 1;
const SHT_RELA: u32 = 4;
const SHT_REL: u32 = 9;
const SHF_EXECINSTR: u64 = 4;
const STT_FUNC: u8 = 2;

/// Checks a compiled object against the allow list.
///
/// # Errors
/// [`Error::NotAllowed`], with the violation, its place and a remedy; [`Error::BadObject`] if it is
/// no eBPF object.
pub fn check(image: &[u8]) -> Result<()> {
    let damaged = || Error::BadObject("its ELF headers make no sense".into());
    let (sections, symbols) = elf::parse(image).ok_or_else(damaged)?;
    let mut data = 0_u64;
    for (index, section) in sections.iter().enumerate() {
        check_section(section, &sections)?;
        if is_data(section.name) {
            data = data.saturating_add(section.size);
        }
        if is_code(section.name) {
            let place = |at: usize| place(&symbols, index, section, at);
            check_code(section.bytes, Stage::Compiled, &place)?;
        }
    }
    check_data(data)?;
    let name_of = |symbol: &Symbol<'_>| sections.get(symbol.section).map_or("", |s| s.name);
    for symbol in symbols.iter().filter(|s| !s.name.is_empty()) {
        match name_of(symbol) {
            // Undefined: resolved by the kernel. The null section's header may have any name.
            _ if symbol.section == 0 => check_extern(symbol.name)?,
            ".maps" => check_map(symbol.name)?,
            TEXT => {}
            code if is_code(code) && symbol.kind == STT_FUNC => check_program(symbol.name, code)?,
            _ => {}
        }
    }
    Ok(())
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::NotAllowed(why))
}

fn is_code(section: &str) -> bool {
    section == TEXT || PROGRAMS.iter().any(|(_, known)| *known == section)
}

/// Whether libbpf makes a map of a section, given its name or the map's.
fn is_data(section: &str) -> bool {
    [".rodata", ".data", ".bss"].iter().any(|kind| {
        let rest = section.strip_prefix(kind);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// libbpf goes by names and types, so both must be on the list.
fn check_section(section: &Section<'_>, sections: &[Section<'_>]) -> Result<()> {
    let name = section.name;
    if section.kind == SHT_REL || section.kind == SHT_RELA {
        let target = sections.get(section.info as usize).map_or("", |s| s.name);
        let is_debug = target.starts_with(".debug_") || target.starts_with(".BTF");
        if is_debug || (is_code(target) && section.kind == SHT_REL) {
            return Ok(());
        }
        return refuse(format!(
            "relocations in section \"{target}\": maps must not be filled, nor constants hold \
             addresses; remove the initializer"
        ));
    }
    let executable = section.flags & SHF_EXECINSTR != 0;
    if is_code(name) && executable && section.kind == SHT_PROGBITS {
        return Ok(());
    }
    if executable || is_code(name) {
        return refuse(format!(
            "programs in section \"{name}\": a graft has the seven programs of vtl/graft.h and \
             no others; remove them"
        ));
    }
    if PLAIN.contains(&name) || name.starts_with(".debug_") || is_data(name) {
        return Ok(());
    }
    refuse(format!(
        "section \"{name}\": it is not one that VTL's headers make; remove what is in it"
    ))
}

/// Checks a program's name and section.
///
/// # Errors
/// [`Error::NotAllowed`].
pub fn check_program(name: &str, section: &str) -> Result<()> {
    if PROGRAMS.contains(&(name, section)) {
        return Ok(());
    }
    refuse(format!(
        "program {name} in section \"{section}\": a graft has the seven programs of vtl/graft.h \
         and no others; remove it"
    ))
}

/// Checks the name of a map other than the object's own data.
///
/// # Errors
/// [`Error::NotAllowed`].
pub fn check_map(name: &str) -> Result<()> {
    if MAPS.contains(&name) {
        return Ok(());
    }
    refuse(format!(
        "map {name}: a graft has the maps of vtl/env_bpf.h and no others; keep state in the \
         session (`own`), or in a global variable"
    ))
}

/// Checks the size of an object's own constants and variables.
///
/// # Errors
/// [`Error::NotAllowed`].
pub fn check_data(bytes: u64) -> Result<()> {
    if bytes <= MAX_DATA {
        return Ok(());
    }
    refuse(format!(
        "{bytes} bytes of constants and variables: a graft has at most {MAX_DATA}; make its \
         tables smaller"
    ))
}

/// Checks the name of a symbol that the kernel resolves: a kfunc, or a kernel variable.
fn check_extern(name: &str) -> Result<()> {
    if KFUNCS.contains(&name) {
        return Ok(());
    }
    refuse(format!(
        "{name} of the kernel: a graft uses {} and nothing else by name; remove it",
        KFUNCS.join(", ")
    ))
}

/// Describes an instruction's place: its function, else its section.
fn place(symbols: &[Symbol<'_>], index: usize, section: &Section<'_>, at: usize) -> String {
    let at = at as u64;
    let holds = |s: &&Symbol<'_>| {
        let inside = at.checked_sub(s.value).is_some_and(|at| at < s.size);
        s.kind == STT_FUNC && s.section == index && inside
    };
    let found = symbols.iter().find(holds);
    found.map_or_else(
        || format!("section \"{}\"", section.name),
        |s| s.name.to_owned(),
    )
}

/// Processing stage of instructions.
#[derive(Clone, Copy, Debug)]
pub enum Stage<'a> {
    /// As compiled: references to maps and to the kernel are relocations.
    Compiled,
    /// As passed to the kernel.
    Linked {
        /// Descriptors of the object's maps.
        maps: &'a [i32],
        /// BTF ids of [`KFUNCS`] in this kernel.
        kfuncs: &'a [i32],
    },
}

/// Checks instructions: their calls and references to maps. `place` describes the instruction at an
/// offset.
///
/// # Errors
/// [`Error::NotAllowed`].
pub fn check_code(code: &[u8], stage: Stage<'_>, place: &dyn Fn(usize) -> String) -> Result<()> {
    const CALL: u8 = 0x85;
    const LOAD_ADDRESS: u8 = 0x18;
    let (instructions, rest) = code.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(Error::BadObject("half an instruction".into()));
    }
    for (i, [opcode, registers, offset @ .., _, _, _, _]) in instructions.iter().enumerate() {
        let immediate = i32::from_le_bytes(*instructions[i].last_chunk().expect("of eight bytes"));
        let (source, offset) = (registers >> 4, i16::from_le_bytes(*offset));
        let wrong = match *opcode {
            CALL => wrong_call(stage, source, offset, immediate),
            LOAD_ADDRESS => wrong_address(stage, source, immediate),
            // CALL of other kinds and JA by register, of the classes JMP and JMP32.
            0x86 | 0x8d | 0x8e | 0x0d | 0x0e => {
                Some("calls or jumps to an address in a register; call functions by name".into())
            }
            _ => None,
        };
        if let Some(wrong) = wrong {
            return refuse(format!("{} {wrong}", place(i * 8)));
        }
    }
    Ok(())
}

/// The violation of a call, if any.
fn wrong_call(stage: Stage<'_>, source: u8, offset: i16, immediate: i32) -> Option<String> {
    const HELPER: u8 = 0;
    const SUBPROGRAM: u8 = 1;
    const KFUNC: u8 = 2;
    /// Placeholders of libbpf for code whose types or functions this kernel lacks. The verifier
    /// rejects them if reachable.
    const POISON: [std::ops::Range<i32>; 2] =
        [195_896_080..195_896_081, 2_001_000_000..2_003_000_000];
    let (linked, kfuncs) = match stage {
        Stage::Compiled => (false, &[][..]),
        Stage::Linked { kfuncs, .. } => (true, kfuncs),
    };
    match source {
        HELPER if HELPERS.iter().any(|(id, _)| *id == immediate) => None,
        HELPER if linked && POISON.iter().any(|range| range.contains(&immediate)) => None,
        HELPER => {
            let known = KNOWN.iter().find(|(id, _)| *id == immediate);
            let name = known.map_or_else(String::new, |(_, name)| format!("{name}, "));
            Some(format!(
                "calls the kernel's helper {name}number {immediate}; a graft calls those that \
                 VTL's headers call and no others, so remove the call"
            ))
        }
        SUBPROGRAM => None,
        // Kfuncs of modules have an offset.
        KFUNC if offset == 0 && kfuncs.contains(&immediate) => None,
        _ => Some(format!(
            "calls a function of the kernel by number ({immediate}); use vtl_for instead"
        )),
    }
}

/// The violation of loading an address or a 64-bit constant, if any.
fn wrong_address(stage: Stage<'_>, source: u8, immediate: i32) -> Option<String> {
    const CONSTANT: u8 = 0;
    const MAP: u8 = 1;
    const MAP_VALUE: u8 = 2;
    const FUNCTION: u8 = 4;
    match (stage, source) {
        (_, CONSTANT) | (Stage::Linked { .. }, FUNCTION) => None,
        (Stage::Linked { maps, .. }, MAP | MAP_VALUE) if maps.contains(&immediate) => None,
        _ => Some("refers to a map or a variable of the kernel by number; use its name".into()),
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::collections::BTreeSet;

    use vtl_bpf::objects;

    use super::*;

    fn refusal(code: &[u8], stage: Stage<'_>) -> String {
        let refused = check_code(code, stage, &|at| format!("here+{at}"));
        refused.map_or_else(|why| why.to_string(), |()| String::new())
    }

    fn linked() -> Stage<'static> {
        Stage::Linked {
            maps: &[7],
            kfuncs: &[1000],
        }
    }

    /// `opcode`, source register, offset, immediate.
    fn instruction(opcode: u8, source: u8, offset: i16, immediate: i32) -> Vec<u8> {
        let mut bytes = vec![opcode, source << 4];
        bytes.extend(offset.to_le_bytes());
        bytes.extend(immediate.to_le_bytes());
        bytes
    }

    #[test]
    fn check__built_in_grafts_need_the_whole_list_and_no_more() {
        let (mut all, mut kfuncs, mut maps) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (name, image) in objects::GRAFTS {
            check(image).unwrap();
            let (sections, symbols) = elf::parse(image).unwrap();
            let mut helpers = BTreeSet::new();
            for code in sections.iter().filter(|s| is_code(s.name)) {
                for i in code.bytes.as_chunks::<8>().0 {
                    if i[0] == 0x85 && i[1] >> 4 == 0 {
                        helpers.insert(i32::from_le_bytes(*i.last_chunk().unwrap()));
                    }
                }
            }
            println!("{name}: helpers {helpers:?}");
            all.extend(helpers);
            for symbol in symbols.iter().filter(|s| !s.name.is_empty()) {
                match sections.get(symbol.section).map_or("", |s| s.name) {
                    "" if symbol.section == 0 => kfuncs.insert(symbol.name),
                    ".maps" => maps.insert(symbol.name),
                    _ => false,
                };
            }
        }
        assert_eq!(all, HELPERS.iter().map(|(id, _)| *id).collect());
        assert_eq!(kfuncs, KFUNCS.into());
        assert_eq!(maps, MAPS.into());
    }

    #[test]
    fn check__other_objects() {
        let why = check(objects::ROOT).unwrap_err().to_string();
        assert!(
            why.contains("calls the kernel's helper number 50;"),
            "{why}"
        );
        let why = check(objects::HOOKER).unwrap_err().to_string();
        assert!(why.contains("not allowed in a graft: "), "{why}");
        for (_, image) in objects::TCP {
            assert!(check(image).is_err());
        }
        assert!(check(b"").is_err());
    }

    #[test]
    fn check_code__calls() {
        for stage in [Stage::Compiled, linked()] {
            assert_eq!(refusal(&instruction(0x85, 0, 0, 1), stage), "");
            assert_eq!(refusal(&instruction(0x85, 1, 0, -1), stage), "");
            let mut code = instruction(0x85, 0, 0, 1);
            code.extend(instruction(0x85, 0, 0, 36));
            let why = refusal(&code, stage);
            let words = "here+8 calls the kernel's helper bpf_probe_write_user, number 36;";
            assert!(why.contains(words), "{why}");
            // By a register; of a module; with a source that no kernel knows.
            for wrong in [
                instruction(0x8d, 0, 0, 1),
                instruction(0x86, 0, 0, 1),
                instruction(0x0d, 0, 0, 0),
                instruction(0x85, 2, 1, 1000),
                instruction(0x85, 2, 0, 1001),
                instruction(0x85, 3, 0, 1),
                instruction(0x85, 0, 0, -1),
            ] {
                assert_ne!(refusal(&wrong, stage), "", "{wrong:?}");
            }
        }
        let kfunc = instruction(0x85, 2, 0, 1000);
        assert_eq!(refusal(&kfunc, linked()), "");
        assert!(refusal(&kfunc, Stage::Compiled).contains("by number (1000)"));
        let poison = instruction(0x85, 0, 0, 195_896_080);
        assert_eq!(refusal(&poison, linked()), "");
        assert_ne!(refusal(&poison, Stage::Compiled), "");
        assert_ne!(refusal(&poison[1..], linked()), "");
    }

    #[test]
    fn check_code__addresses() {
        let (own, others) = (instruction(0x18, 1, 0, 7), instruction(0x18, 2, 0, 8));
        assert_eq!(refusal(&own, linked()), "");
        assert!(refusal(&others, linked()).contains("by number"));
        assert!(refusal(&own, Stage::Compiled).contains("by number"));
        assert_eq!(refusal(&instruction(0x18, 0, 0, 5), Stage::Compiled), "");
        assert_eq!(refusal(&instruction(0x18, 4, 0, 5), linked()), "");
        // A variable of the kernel's.
        assert_ne!(refusal(&instruction(0x18, 3, 0, 7), linked()), "");
    }
}
