//! The allow list: objects with anything else in them are refused before any system call.
#![allow(missing_docs, non_snake_case)]

use std::{fs, path::PathBuf, process::Command, thread};

use vtl_bpf::{Error, admit, check::check, flags, load::Steps, objects, plane::DataPlane};

/// A directory of headers that vanishes with its owner.
struct Compiler(PathBuf);

impl Compiler {
    /// `change`: text in the headers, and its replacement.
    fn new(name: &str, change: (&str, &str)) -> Self {
        let path = std::env::temp_dir().join(format!("vtl-admit-{name}-{}", std::process::id()));
        let api = libbpf_sys::API_HEADERS.iter();
        let api = api.map(|(name, text)| (format!("bpf/{name}"), (*text).to_owned()));
        let own = objects::HEADERS
            .iter()
            .map(|(name, text)| ((*name).to_owned(), text.replace(change.0, change.1)));
        for (name, text) in own.chain(api) {
            let file = path.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        Self(path)
    }

    /// The objects of grafts with more in them, one for each text.
    fn compile_each<'a>(&self, texts: impl Iterator<Item = &'a str>) -> Vec<Vec<u8>> {
        thread::scope(|scope| {
            let compile = |(i, more): (usize, &'a str)| {
                scope.spawn(move || self.compile_as(&i.to_string(), more))
            };
            let running: Vec<_> = texts.enumerate().map(compile).collect();
            let done = running.into_iter().map(|thread| thread.join().unwrap());
            done.collect()
        })
    }

    fn compile(&self, more: &str) -> Vec<u8> {
        self.compile_as("graft", more)
    }

    fn compile_as(&self, name: &str, more: &str) -> Vec<u8> {
        let (_, text) = objects::SOURCES
            .iter()
            .find(|(name, _)| *name == "selective-repeat")
            .unwrap();
        let text = (*text).to_owned() + more;
        let file = |end: &str| self.0.join(format!("{name}.bpf.{end}"));
        let (source, object) = (file("c"), file("o"));
        fs::write(&source, text).unwrap();
        let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang-19".into());
        let compiled = Command::new(clang)
            .args(["-target", "bpf", "-g"])
            .args(flags::CLANG)
            .arg(format!("-I{}", self.0.display()))
            .args(["-c", "-o"])
            .args([&object, &source])
            .status();
        assert!(compiled.unwrap().success());
        fs::read(object).unwrap()
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const NO_CHANGE: (&str, &str) = ("#ifndef", "#ifndef");

fn refusal(image: &[u8]) -> String {
    let refused = admit::open(image).map(|_| ());
    let why = refused.expect_err("it is refused");
    assert!(matches!(why, Error::BadGraft(_)), "{why}");
    let why = why.to_string();
    assert!(
        !why.contains('\n') && why.contains("not allowed in a graft: "),
        "{why}"
    );
    why
}

#[test]
fn open__takes_the_built_in_grafts() {
    for (name, image) in objects::GRAFTS {
        let open = admit::open(image);
        assert!(open.is_ok(), "{name}: {:?}", open.err());
    }
}

#[test]
fn open__takes_debug_information_and_data() {
    let compiler = Compiler::new("own", NO_CHANGE);
    let image = compiler
        .compile("int mine = 3; int zero; VTL_GLOBAL int get(void) { return mine++ + zero++; }");
    assert!(admit::open(&image).is_ok());
    if !vtl_testing::is_root() {
        return;
    }
    let plane = DataPlane::load().unwrap();
    plane.loader().load(&image, &mut Steps::default()).unwrap();
    assert!(
        check(plane.loader(), &image)
            .unwrap()
            .iter()
            .all(|v| v.accepted)
    );
}

#[test]
fn open__refuses_what_is_not_on_the_list() {
    let compiler = Compiler::new("more", NO_CHANGE);
    let call = |declaration: &str, call: &str| {
        format!("{declaration} VTL_GLOBAL int poke(void) {{ {call}; return 0; }}")
    };
    let cases = [
        (
            "SEC(\"kprobe/do_unlinkat\") int probe(void *ctx) { return !ctx; }".to_owned(),
            "programs in section \"kprobe/do_unlinkat\"",
        ),
        (
            "SEC(\"?xdp\") int vtl_ingress_xdq(void *ctx) { return !ctx; }".to_owned(),
            "programs in section \"?xdp\"",
        ),
        (
            "SEC(\"xdp\") int mine(struct xdp_md *ctx) { return !ctx; }".to_owned(),
            "program mine in section \"xdp\"",
        ),
        (
            call("", "char c = 0; bpf_probe_write_user((void *)4096, &c, 1)"),
            "poke calls the kernel's helper bpf_probe_write_user, number 36",
        ),
        (
            call(
                "",
                "__u32 i = 0; bpf_map_update_elem(&vtl_callers, &i, &i, 0)",
            ),
            "poke calls the kernel's helper bpf_map_update_elem, number 2",
        ),
        (
            "struct { __uint(type, 7 /* stack traces */); __uint(max_entries, 9); \
             __uint(key_size, 4); __uint(value_size, 8); } mine SEC(\".maps\");"
                .to_owned(),
            "map mine: ",
        ),
        (
            call(
                "extern void bpf_rcu_read_lock(void) __ksym;",
                "bpf_rcu_read_lock()",
            ),
            "bpf_rcu_read_lock of the kernel",
        ),
        (
            call(
                "extern const void jiffies __ksym;",
                "vtl_env_count((long)&jiffies)",
            ),
            "jiffies of the kernel",
        ),
        (
            call(
                "extern int LINUX_KERNEL_VERSION __kconfig;",
                "vtl_env_count(LINUX_KERNEL_VERSION)",
            ),
            "LINUX_KERNEL_VERSION of the kernel",
        ),
        (
            "struct ops { int (*f)(void); }; \
             SEC(\".struct_ops.link\") struct ops mine = {};"
                .to_owned(),
            "section \".struct_ops.link\"",
        ),
        (
            "char large[100000]; VTL_GLOBAL int get(int i) { return large[i & 1023]; }".to_owned(),
            "bytes of constants and variables",
        ),
    ];
    let images = compiler.compile_each(cases.iter().map(|(more, _)| more.as_str()));
    for (image, (_, words)) in images.iter().zip(&cases) {
        let why = refusal(image);
        assert!(why.contains(words), "{why}");
        println!("{why}");
    }
    if !vtl_testing::is_root() {
        return;
    }
    let plane = DataPlane::load().unwrap();
    for image in images {
        let loaded = plane.loader().load(&image, &mut Steps::default());
        assert!(matches!(loaded.map(|_| ()), Err(Error::BadGraft(_))));
        assert!(matches!(
            check(plane.loader(), &image),
            Err(Error::BadGraft(_))
        ));
    }
}

#[test]
fn open__refuses_an_extern_whose_section_has_a_name() {
    let compiler = Compiler::new("extern", NO_CHANGE);
    let mut image = compiler.compile(
        "extern const void jiffies __ksym; \
         VTL_GLOBAL int poke(void) { vtl_env_count((long)&jiffies); return 0; }",
    );
    // The null section gets that of the next one.
    let table = u64::from_le_bytes(image[40..48].try_into().unwrap()) as usize;
    image.copy_within(table + 64..table + 68, table);
    let why = refusal(&image);
    assert!(why.contains("jiffies of the kernel"), "{why}");
}

#[test]
fn open__refuses_shared_maps_that_are_pinned_or_filled() {
    let plain = "} vtl_callers SEC(\".maps\");";
    let pinned = format!("__uint(pinning, LIBBPF_PIN_BY_NAME); {plain}");
    let compiler = Compiler::new("pinned", (plain, &pinned));
    let why = refusal(&compiler.compile(""));
    assert!(why.contains("map vtl_callers is pinned to "), "{why}");

    let plain = "VTL_PROGRAMS(vtl_out_direct, VTL_MAX_GRAFTS);";
    let filled = "int vtl_egress_xdp(struct xdp_md *); struct { \
         __uint(type, BPF_MAP_TYPE_PROG_ARRAY); __uint(max_entries, VTL_MAX_GRAFTS); \
         __type(key, __u32); __array(values, int(void *)); } vtl_out_direct SEC(\".maps\") = { \
         .values = {[0] = (void *)&vtl_egress_xdp}};";
    let compiler = Compiler::new("filled", (plain, filled));
    let why = refusal(&compiler.compile(""));
    assert!(why.contains("relocations in section \".maps\""), "{why}");

    let compiler = Compiler::new("flags", ("SEC(\"xdp\")", "SEC(\"xdp.frags\")"));
    let why = refusal(&compiler.compile(""));
    assert!(why.contains("programs in section \"xdp.frags\""), "{why}");
}
