//! The size of every eBPF program against the committed table: a guard that needs neither root nor
//! a quiet machine.
#![allow(missing_docs, non_snake_case)]

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::Path};

use libbpf_rs::ObjectBuilder;
use vtl_bpf::objects;

/// Growth that needs no explanation, per cent.
const TOLERATED_PCT: usize = 10;
const HEAD: &str = "\
# eBPF instructions of each program as compiled, functions that are called not counted.
# UPDATE_RESULTS=1 cargo test -p vtl-bpf --test instructions   writes this file anew.
";

/// Instructions by "object program".
type Counts = BTreeMap<String, usize>;

fn compiled() -> Counts {
    let fixed = [
        ("root", objects::ROOT),
        ("hooker", objects::HOOKER),
        ("rules", objects::RULES),
        ("fence", objects::FENCE),
    ];
    let mut counts = Counts::new();
    for (name, image) in fixed.into_iter().chain(objects::GRAFTS.iter().copied()) {
        let object = ObjectBuilder::default()
            .open_memory(image)
            .expect("an object that libbpf understands");
        for program in object.progs() {
            let key = format!("{name} {}", program.name().to_string_lossy());
            counts.insert(key, program.insn_cnt());
        }
    }
    counts
}

fn parse(text: &str) -> Counts {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let entry = |line: &str| {
        let (key, count) = line.rsplit_once(' ')?;
        Some((key.trim_end().to_owned(), count.parse().ok()?))
    };
    lines.filter_map(entry).collect()
}

/// What is wrong, a line each.
fn compare(is: &Counts, was: &Counts) -> String {
    let mut wrong = String::new();
    for (program, count) in is {
        let _ = match was.get(program) {
            None => writeln!(wrong, "{program}: not in the table"),
            Some(before) if count * 100 > before * (100 + TOLERATED_PCT) => {
                writeln!(wrong, "{program}: {count} instructions, were {before}")
            }
            Some(_) => Ok(()),
        };
    }
    for program in was.keys().filter(|program| !is.contains_key(*program)) {
        let _ = writeln!(wrong, "{program}: is gone");
    }
    wrong
}

#[test]
fn programs__are_no_larger_than_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.txt");
    let is = compiled();
    if env::var_os("UPDATE_RESULTS").is_some() {
        let lines = is
            .iter()
            .map(|(program, count)| format!("{program} {count}\n"));
        fs::write(&path, HEAD.to_owned() + &lines.collect::<String>()).expect("written");
        return;
    }
    let was = parse(&fs::read_to_string(&path).expect("the committed table"));
    let wrong = compare(&is, &was);
    assert!(
        wrong.is_empty(),
        "{wrong}If that is meant, run\n  \
         UPDATE_RESULTS=1 cargo test -p vtl-bpf --test instructions\nand commit the table."
    );
}

#[test]
fn compare__sees_growth_and_missing_programs() {
    let counts = |text: &str| parse(text);
    let was = counts("# a comment\nroot a 100\nroot b 100\n");
    assert_eq!(compare(&counts("root a 110\nroot b 5\n"), &was), "");
    let wrong = compare(&counts("root a 111\nroot c 1\n"), &was);
    for words in [
        "root a: 111 instructions, were 100",
        "root c: not",
        "root b: is gone",
    ] {
        assert!(wrong.contains(words), "{wrong}");
    }
}
