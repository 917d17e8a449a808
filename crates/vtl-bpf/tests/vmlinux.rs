//! `bpf/include/vmlinux.h` against the headers of the system: each constant has the same value there,
//! each field the same place and size. Needs neither root nor a kernel.
#![allow(missing_docs, non_snake_case)]

use std::{env, fmt::Write as _, fs, path::Path, process::Command};

/// What vmlinux.h stands for.
const SYSTEM: [&str; 10] = [
    "bpf.h",
    "if_ether.h",
    "if_packet.h",
    "in.h",
    "in6.h",
    "ip.h",
    "ipv6.h",
    "pkt_cls.h",
    "tcp.h",
    "udp.h",
];
/// Newer than the oldest headers (Linux 6.1, Debian 12).
const NEW: &str = "bpf_iter_num";

/// What a header defines.
#[derive(Debug, Default)]
struct Defined {
    constants: Vec<String>,
    /// Structure and member, but no bit fields.
    members: Vec<(String, String)>,
}

fn identifier(text: &str) -> Option<&str> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let word = &text[..end.unwrap_or(text.len())];
    (!word.is_empty()).then_some(word)
}

/// The name that a declaration declares; the last word before an array's bounds.
fn declared(declaration: &str) -> Option<&str> {
    let declaration = declaration.split('[').next()?.trim_end_matches(')');
    let start = declaration.rfind([' ', '*'])? + 1;
    identifier(&declaration[start..])
}

/// Reads a header in this project's style: a declaration a line, or enumerations on one.
fn parse(text: &str) -> Defined {
    let mut found = Defined::default();
    // Structure, and the named structures within it, innermost last.
    let mut within: Option<(String, usize)> = None;
    let mut enumeration = false;
    let mut pending = Vec::new();
    for line in text.lines() {
        let line = line.split("/*").next().expect("the first").trim();
        if let Some(rest) = line.strip_prefix("#define ") {
            let name = identifier(rest).expect("a name");
            let is_value = !name.starts_with("__") && rest.len() > name.len();
            if is_value && !rest[name.len()..].starts_with('(') {
                found.constants.push(name.to_owned());
            }
        } else if let Some((name, depth)) = &mut within {
            if line.ends_with('{') {
                *depth += 1;
            } else if line.starts_with('}') {
                *depth -= 1;
                let inner = identifier(line.trim_start_matches('}'));
                let inner = inner.filter(|word| *word != "__attribute__");
                let prefix = inner.map_or_else(String::new, |inner| format!("{inner}."));
                for (level, member) in &mut pending {
                    if *level > *depth {
                        *member = format!("{prefix}{member}");
                        *level = *depth;
                    }
                }
                if *depth == 0 {
                    let members = pending.drain(..).map(|(_, member)| (name.clone(), member));
                    found.members.extend(members);
                    within = None;
                }
            } else if !line.contains(':') && line.ends_with(';') {
                let member = declared(line.trim_end_matches(';')).expect("a member");
                pending.push((*depth, member.to_owned()));
            }
        } else if line.starts_with("struct ") && line.ends_with('{') {
            let name = identifier(&line["struct ".len()..]).expect("a name");
            within = Some((name.to_owned(), 1));
        } else if enumeration || line.starts_with("enum ") {
            let body = line.split_once('{').map_or(line, |(_, body)| body);
            let names = body
                .split(',')
                .filter_map(|one| Some(one.split_once('=')?.0));
            found
                .constants
                .extend(names.filter_map(identifier).map(str::to_owned));
            enumeration = !line.contains('}');
        }
    }
    found
}

/// A program that prints all of it.
fn program(includes: &str, defined: &Defined) -> String {
    let mut text = format!("{includes}\nint printf(const char *, ...);\nint main(void) {{\n");
    for name in &defined.constants {
        let _ = writeln!(text, "printf(\"{name} %lld\\n\", (long long)({name}));");
    }
    for (of, member) in &defined.members {
        let _ = writeln!(
            text,
            "printf(\"{of}.{member} at %zu, %zu bytes\\n\", \
             __builtin_offsetof(struct {of}, {member}), sizeof(((struct {of} *)0)->{member}));"
        );
    }
    text + "}\n"
}

fn output(name: &str, text: &str, include: &Path) -> String {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (directory.join(format!("{name}.c")), directory.join(name));
    fs::write(&source, text).expect("written");
    let compiled = Command::new("clang-19")
        .args(["-w", "-o"])
        .args([&program, &source])
        .arg(format!("-I{}", include.display()))
        .output()
        .expect("clang-19 runs");
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&program).output().expect("it runs");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn vmlinux__agrees_with_the_systems_headers() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf/include");
    let text = fs::read_to_string(include.join("vmlinux.h")).expect("the header");
    let mut defined = parse(&text);
    defined.members.retain(|(of, _)| of != NEW);
    assert!(defined.constants.len() > 40, "{defined:?}");
    assert!(defined.members.len() > 150, "{defined:?}");
    let ours = output(
        "vmlinux-ours",
        &program("#include \"vmlinux.h\"", &defined),
        &include,
    );
    let system = SYSTEM.map(|name| format!("#include <linux/{name}>\n"));
    let theirs = output(
        "vmlinux-system",
        &program(&system.concat(), &defined),
        &include,
    );
    assert_eq!(
        ours.lines().count(),
        defined.constants.len() + defined.members.len()
    );
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs, "vmlinux.h, and /usr/include/linux");
    }
    assert_eq!(ours.len(), theirs.len());
}

#[test]
fn parse__finds_constants_and_members() {
    let found = parse(
        "#ifndef __X_H__\n#define __X_H__\n#define A 1 /* one */\n#define F(x) x\n\
         enum { B = 1 << 2, C = 3 };\nenum named {\n    D = 4,\n};\n\
         struct s {\n    __u8 b; /* last */\n    __u32 c[4];\n    __u16 : 16;\n    \
         __bpf_md_ptr(struct t *, d);\n    union {\n        struct {\n            __u8 e;\n        \
         } f;\n        __u8 g;\n    };\n} __attribute__((packed));\n",
    );
    assert_eq!(found.constants, ["A", "B", "C", "D"]);
    let members: Vec<&str> = found.members.iter().map(|(_, m)| &**m).collect();
    assert_eq!(members, ["b", "c", "d", "f.e", "g"]);
}
