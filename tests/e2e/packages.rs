//! Packages from a developer's hands into running kernels, and what is refused on the way.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use vtl_control::Request;
use vtl_testbed::{Host, Link};
use vtl_testing::turn;

use crate::harness::{Process, World, payload, refused, repository, same, until, vtl, words};

/// A client with a daemon, a pool, a key that it trusts, and room for grafts.
struct Shop {
    world: World,
}

impl Shop {
    fn new(name: &str) -> Option<Self> {
        let mut world = World::bare(name, &Link::new(5.0, 100.0))?;
        fs::create_dir(world.path("keys")).expect("a directory");
        let keys = world.path("keys");
        let key = run(&world.path(""), &["graft", "key", "new", "me"]);
        assert!(key.status.success(), "{}", words(&key));
        fs::copy(world.path("me.pub"), keys.join("me.pub")).expect("copied");
        let keys = keys.to_str().expect("UTF-8").to_owned();
        for host in [Host::Client, Host::Server] {
            let pool = world.path(&format!("pool-{}", host.name()));
            let args = ["--keys", &keys, "--pool", pool.to_str().expect("UTF-8")];
            world.start(host, &args);
        }
        Some(Self { world })
    }

    /// A new graft's directory, built.
    fn graft(&self, name: &str, gid: &str) -> PathBuf {
        let folder = self.world.path("");
        success(&run(&folder, &["graft", "new", name, "--gid", gid]));
        let dir = folder.join(name);
        success(&run(&dir, &["graft", "build"]));
        dir
    }

    fn sign(&self, dir: &Path) -> Output {
        let key = self.world.path("me.key");
        run(
            dir,
            &["graft", "sign", "--key", key.to_str().expect("UTF-8")],
        )
    }

    fn deploy(&self, host: Host, package: &Path) -> Output {
        let package = package.to_str().expect("UTF-8");
        let mut command = self.world.vtl(host, &["graft", "deploy", package]);
        command.output().expect("vtl runs")
    }

    /// `vtl graft swap` at the client.
    fn swap(&self, package: &Path) -> Output {
        let package = package.to_str().expect("UTF-8");
        let mut command = self.world.vtl(Host::Client, &["graft", "swap", package]);
        command.output().expect("vtl runs")
    }

    fn list(&self) -> Value {
        self.world.call(Host::Client, &Request::GraftList)
    }

    /// Nothing changed, and the running grafts still carry.
    fn untouched(&self, before: &Value) {
        let rows = |list: &Value| list["grafts"].clone();
        assert_eq!(rows(&self.list()), rows(before));
    }
}

/// The command in a directory of this host's own.
fn run(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(vtl());
    command
        .args(args)
        .current_dir(dir)
        .output()
        .expect("vtl runs")
}

#[track_caller]
fn success(output: &Output) {
    assert!(output.status.success(), "{}", words(output));
}

fn change(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).expect("there");
    assert!(text.contains(from), "{from} in {}", path.display());
    fs::write(path, text.replacen(from, to, 1)).expect("written");
}

#[test]
fn package__from_template_to_a_file_and_a_new_version() {
    let Some(shop) = Shop::new("pack") else {
        return;
    };
    let world = &shop.world;
    let dir = shop.graft("mine", "40");
    success(&shop.sign(&dir));
    let package = dir.join("mine-0.1.0.vtlg");
    for host in [Host::Client, Host::Server] {
        success(&shop.deploy(host, &package));
    }
    assert!(world.path("pool-client/mine-0.1.0.vtlg").exists());
    let file = world.path("file");
    fs::write(&file, payload(200_000, 3)).expect("written");
    let to = world.servers()[0].to_string();
    let carry = |name: &str| {
        let got = world.path(name);
        let recv = world.start_recv(&got, &[]);
        let args = [
            "send",
            file.to_str().expect("UTF-8"),
            &to,
            "--graft",
            "mine",
        ];
        success(&world.vtl(Host::Client, &args).output().expect("vtl runs"));
        success(&recv.output());
        same(&file, &got);
    };
    carry("got-1");
    // Another version in its place, and what is not compatible with it only without sessions.
    change(&dir.join("graft.toml"), "0.1.0", "0.1.1");
    success(&shop.sign(&dir));
    let package = dir.join("mine-0.1.1.vtlg");
    success(&shop.swap(&package));
    let name = "mine".to_owned();
    let shown = world.call(Host::Client, &Request::GraftShow { name });
    assert_eq!(
        (&shown["version"], &shown["deployed"]),
        (&json!("0.1.1"), &json!(true))
    );
    assert_eq!(shown["signer"], "me");
    assert_eq!(shown["parameters"][0]["name"], "window");
    for graft in ["mine", "udp", package.to_str().expect("UTF-8")] {
        let show = ["graft", "show", graft, "--measure", "--json"];
        let shown = world.vtl(Host::Client, &show).output().expect("vtl runs");
        let shown: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        assert!(shown["instructions"].as_u64() > Some(100), "{shown}");
        let ns = &shown["ns_per_packet"];
        assert!(ns["egress"].as_f64() > Some(1.0), "{shown}");
        assert!(ns["listener"].as_f64() > Some(1.0), "{shown}");
    }
    carry("got-2");
    let back = ["graft", "swap", "mine@0.1.0"];
    success(&world.vtl(Host::Client, &back).output().expect("vtl runs"));
    // Published and pulled, it is the same.
    let shared = world.path("shared");
    let shared = shared.to_str().expect("UTF-8");
    success(&run(&dir, &["graft", "publish", "mine-0.1.0.vtlg", shared]));
    success(&run(&dir, &["graft", "publish", "mine-0.1.1.vtlg", shared]));
    let pulled = world.path("pulled");
    success(&run(
        &dir,
        &[
            "graft",
            "pull",
            "mine",
            shared,
            "--output",
            pulled.to_str().expect("UTF-8"),
        ],
    ));
    same(&package, &pulled.join("mine-0.1.1.vtlg"));
    refused(
        &run(&dir, &["graft", "pull", "mine@3.0.0", shared]),
        1,
        "no package of mine@3.0.0",
    );
}

#[test]
fn swap__under_open_sessions() {
    let Some(mut shop) = Shop::new("swap") else {
        return;
    };
    let dir = shop.graft("mine", "40");
    let source = dir.join("graft.bpf.c");
    let manifest = dir.join("graft.toml");
    let release = |shop: &Shop, from: &str, to: &str| {
        change(&manifest, from, to);
        success(&run(&dir, &["graft", "build"]));
        success(&shop.sign(&dir));
        dir.join(format!("mine-{to}.vtlg"))
    };
    success(&shop.sign(&dir));
    let first = dir.join("mine-0.1.0.vtlg");
    for host in [Host::Client, Host::Server] {
        success(&shop.deploy(host, &first));
    }
    // One that sends nothing: whether it is what runs can be seen.
    let choice = "GRAFT_CHOOSE(o) tf_window_choose(o)\n";
    let mute = "GRAFT_CHOOSE(o) ((o)->s->gid ? VTL_STOP : tf_window_choose(o))\n";
    change(&source, choice, mute);
    let silent = release(&shop, "0.1.0", "0.1.1");
    change(&source, mute, choice);
    let third = release(&shop, "0.1.1", "0.2.0");

    let world = &shop.world;
    let file = world.path("file");
    fs::write(&file, payload(16_000_000, 3)).expect("written");
    let got = world.path("got");
    let recv = world.start_recv(&got, &[]);
    let (from, to) = (
        file.to_str().expect("UTF-8"),
        world.servers()[0].to_string(),
    );
    let send = ["send", from, &to, "--graft", "mine"];
    let mut send = Process::piped(&mut world.vtl(Host::Client, &send));
    let received = || world.sum(Host::Server, "received");
    until("it is under way", || received() > 500);
    success(&shop.swap(&silent));
    let mut before = 0;
    until("it sends nothing", || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let now = received();
        let is_same = now == before;
        before = now;
        is_same
    });
    assert!((1..10_000).contains(&before), "it was over too soon");
    refused(&shop.swap(&third), 1, "carries 1 sessions of applications");
    success(&shop.swap(&first));
    assert!(send.wait().success());
    success(&recv.output());
    same(&file, &got);

    // Flows change over to one that is not compatible, by way of TCP.
    let dir = shop.graft("ours", "41");
    let repository = repository().join("bpf/grafts");
    for (name, file) in [("cubic.bpf.c", "graft.bpf.c"), ("classic.h", "classic.h")] {
        let text = fs::read_to_string(repository.join(name)).expect("there");
        let text = text.replace("\"../tf/", "\"tf/");
        let text = text.replace("\"cubic\", 13,", "\"ours\", 41,");
        fs::write(dir.join(file), text).expect("written");
    }
    change(
        &dir.join("graft.toml"),
        "\"flow-control\"",
        "\"flow-control\", \"congestion-control\"",
    );
    success(&run(&dir, &["graft", "build"]));
    success(&shop.sign(&dir));
    let first = dir.join("ours-0.1.0.vtlg");
    change(&dir.join("graft.toml"), "0.1.0", "0.2.0");
    success(&shop.sign(&dir));
    let second = dir.join("ours-0.2.0.vtlg");
    for host in [Host::Client, Host::Server] {
        success(&shop.deploy(host, &first));
    }
    shop.world.start_web();
    shop.world.hook();
    let world = &shop.world;
    world.serve("f", 100_000_000);
    let server = world.servers()[0];
    let run = ["--carrier", "graft:ours"];
    world.meet_by(&run);
    let mut download = world.start_download_run(&run, server, "f");
    let mut seen = Vec::new();
    let mut another = || {
        let status = world.status(Host::Client);
        let all = status["sessions"].as_array().expect("a list");
        let carries = |row: &&Value| {
            row["graft"] == "ours" && row["phase"] == "open" && row["received"].as_u64() > Some(100)
        };
        let mut sids = all.iter().filter(carries).map(|row| row["sid"].clone());
        let new = sids.find(|sid| !seen.contains(sid));
        seen.extend(new.clone());
        new.is_some()
    };
    until("it is on the graft", &mut another);
    for package in [&second, &first] {
        success(&shop.swap(package));
        until("it is on another session", &mut another);
    }
    assert!(download.process.ended().is_none(), "it was over too soon");
    assert!(download.process.wait().success());
    download.check();
}

#[test]
fn deploy__refusals_leave_everything_as_it_was() {
    let Some(shop) = Shop::new("refuse") else {
        return;
    };
    let world = &shop.world;
    let dir = shop.graft("mine", "40");
    success(&shop.sign(&dir));
    let package = dir.join("mine-0.1.0.vtlg");
    success(&shop.deploy(Host::Client, &package));
    let before = shop.list();

    // Tampered.
    let bytes = fs::read(&package).expect("there");
    let mut changed = bytes.clone();
    changed[bytes.len() / 2] ^= 1;
    let bad = world.path("bad.vtlg");
    fs::write(&bad, &changed).expect("written");
    refused(
        &shop.deploy(Host::Client, &bad),
        1,
        "altered after it was signed",
    );
    // Cut, or nothing at all.
    fs::write(&bad, &bytes[..1000]).expect("written");
    refused(&shop.deploy(Host::Client, &bad), 1, "not a graft package");
    // Signed by somebody else.
    success(&run(&world.path(""), &["graft", "key", "new", "eve"]));
    let other = shop.graft("other", "41");
    let eve = world.path("eve.key");
    success(&run(
        &other,
        &["graft", "sign", "--key", eve.to_str().expect("UTF-8")],
    ));
    refused(
        &shop.deploy(Host::Client, &other.join("other-0.1.0.vtlg")),
        1,
        "does not trust",
    );
    // Two with one gid.
    let twin = shop.graft("twin", "40");
    success(&shop.sign(&twin));
    let why = "graft id 40 is taken by \"mine\"";
    refused(
        &shop.deploy(Host::Client, &twin.join("twin-0.1.0.vtlg")),
        1,
        why,
    );
    // A manifest that lies does not even get a signature.
    change(
        &other.join("graft.toml"),
        "\"flow-control\"",
        "\"congestion-control\"",
    );
    refused(&shop.sign(&other), 1, "contradicts the object: services");
    // What the verifier refuses is named with its line, before and at deployment.
    let wild = shop.graft("wild", "42");
    let source = wild.join("graft.bpf.c");
    change(
        &source,
        "#include \"vtl/compose.h\"\n",
        "VTL_INLINE int wild(struct vtl_session *s) {\n    \
         s->tx.lost[s->tx.next] = 1; /* anywhere */\n    \
         return vtl_can_send(s);\n}\n\
         #define GRAFT_CAN_SEND(s) wild(s)\n\
         #include \"vtl/compose.h\"\n",
    );
    success(&run(&wild, &["graft", "build"]));
    let check = run(&wild, &["graft", "check"]);
    assert_eq!(check.status.code(), Some(1), "{}", words(&check));
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(
        said.contains("graft.bpf.c:") && said.contains("s->tx.lost[s->tx.next] = 1"),
        "{said}"
    );
    success(&shop.sign(&wild));
    let deployed = shop.deploy(Host::Client, &wild.join("wild-0.1.0.vtlg"));
    refused(
        &deployed,
        1,
        "the kernel refuses graft \"wild\": graft.bpf.c:",
    );
    assert!(!world.path("pool-client/wild-0.1.0.vtlg").exists());
    shop.untouched(&before);
    // What is not on the allow list does not become a package.
    let probe = shop.graft("probe", "43");
    let mut text = fs::read_to_string(probe.join("graft.bpf.c")).expect("there");
    text.push_str("SEC(\"kprobe/do_unlinkat\") int probe(void *ctx) { return !ctx; }\n");
    fs::write(probe.join("graft.bpf.c"), text).expect("written");
    let why = "not allowed in a graft: programs in section \"kprobe/do_unlinkat\"";
    for command in ["build", "check"] {
        refused(&run(&probe, &["graft", command]), 1, why);
    }
    refused(&shop.sign(&probe), 1, why);

    // Nobody but root.
    refused(
        &run(&world.path(""), &["graft", "check", "nowhere"]),
        1,
        "no graft's directory",
    );
    // In the directory, but not right: the daemon says so, and takes the others.
    fs::write(world.path("pool-client/junk-1.0.0.vtlg"), b"junk").expect("written");
    let list = shop.list();
    assert!(
        list["refused"][0]["why"]
            .as_str()
            .is_some_and(|w| w.contains("not a graft package"))
    );
    let junk = world
        .vtl(Host::Client, &["graft", "deploy", "junk"])
        .output();
    refused(&junk.expect("vtl runs"), 1, "junk-1.0.0.vtlg is refused");
    shop.untouched(&before);
}

#[test]
fn revoke__a_version_that_is_in_the_kernel() {
    let Some(shop) = Shop::new("revoke") else {
        return;
    };
    let world = &shop.world;
    let dir = shop.graft("mine", "40");
    success(&shop.sign(&dir));
    let old = dir.join("mine-0.1.0.vtlg");
    for host in [Host::Client, Host::Server] {
        success(&shop.deploy(host, &old));
    }
    change(&dir.join("graft.toml"), "0.1.0", "0.1.1");
    success(&run(&dir, &["graft", "build"]));
    success(&shop.sign(&dir));
    let keys = world.path("keys");
    let keys = keys.to_str().expect("UTF-8");
    let command = |args: &[&str]| {
        let mut command = world.vtl(Host::Client, args);
        command.output().expect("vtl runs")
    };
    let revoked = command(&["graft", "revoke", "mine@0.1.1", "--keys", keys]);
    success(&revoked);
    assert!(!words(&revoked).contains("no vtld"), "{}", words(&revoked));
    let list = shop.list();
    let why = "mine 0.1.0 is revoked: 0.1.1 is the lowest version";
    let said = list["refused"][0]["why"].as_str().unwrap_or_default();
    assert!(said.contains(why), "{list}");
    let rows = list["grafts"].as_array().expect("a list");
    let row = rows.iter().find(|row| row["name"] == "mine");
    let row = row.expect("it is in the kernel");
    assert_eq!(
        (&row["signer"], &row["deployed"]),
        (&json!("revoked"), &json!(true))
    );
    // No session gets it, and it does not come back.
    let to = world.servers()[0].to_string();
    let sent = command(&["send", old.to_str().expect("UTF-8"), &to, "--graft", "mine"]);
    assert!(
        !sent.status.success() && words(&sent).contains("no graft \"mine\""),
        "{}",
        words(&sent)
    );
    refused(&shop.deploy(Host::Client, &old), 1, why);
    let shared = world.path("shared");
    let shared = shared.to_str().expect("UTF-8");
    success(&run(
        &dir,
        &["graft", "publish", old.to_str().expect("UTF-8"), shared],
    ));
    let pull = ["graft", "pull", "mine", shared, "--keys", keys];
    refused(&run(&world.path(""), &pull), 1, why);
    // The next version takes its place.
    let new = dir.join("mine-0.1.1.vtlg");
    success(&shop.swap(&new));
    let name = "mine".to_owned();
    let shown = world.call(Host::Client, &Request::GraftShow { name });
    assert_eq!(
        (&shown["version"], &shown["signer"]),
        (&json!("0.1.1"), &json!("me"))
    );
    // A list that makes no sense might revoke anything.
    fs::write(world.path("keys/revoked.toml"), "key = 1\n").expect("written");
    refused(&shop.swap(&new), 1, "no package is taken before the list");
}

#[test]
fn tutorial__its_commands_work_as_written() {
    if !vtl_testing::is_root() {
        return;
    }
    let _turn = turn();
    let text = repository().join("docs/tutorial-graft.md");
    let text = fs::read_to_string(text).expect("the tutorial");
    let blocks: Vec<&str> = text
        .split("```sh\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(
        blocks.len() >= 10,
        "the tutorial has its commands in blocks"
    );
    let folder = std::env::temp_dir().join(format!("vtl-tutorial-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a directory");
    let script = format!(
        "set -euo pipefail\nsudo() {{ \"$@\"; }}\n\
         trap 'status=$?; vtl testbed down || true; cat *.log 2>/dev/null || true; exit $status' EXIT\n{}",
        blocks.concat()
    );
    let programs = vtl();
    let programs = programs.parent().expect("a directory");
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("bash")
        .args(["-c", &script])
        .current_dir(&folder)
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("VTL_TESTBED", "e2e-tutorial")
        .output()
        .expect("bash runs");
    let _ = fs::remove_dir_all(&folder);
    assert!(
        output.status.success(),
        "{}\n{}",
        words(&output),
        String::from_utf8_lossy(&output.stdout)
    );
}
