//! The management interface, as a controller uses it: events, and rules that it installs (docs/management.md).

use std::{
    io::BufRead,
    num::NonZeroU32,
    sync::mpsc::{Receiver, channel},
    thread,
};

use nix::unistd::Gid;
use serde_json::{Map, Value, json};
use vtl_control::{Client, Done, Error, Events, Request, What};
use vtl_testbed::{Host, Link};

use crate::{
    harness::{Process, Spoken, World, python3, refused, source, until, words},
    users::NOBODY,
};

/// Slow enough for what is to happen in the middle, Mbit/s, and how many bytes.
const CRAWL: f64 = 8.0;
const SIZE: usize = 6 << 20;

/// A request for events.
fn events(since: Option<u64>, kinds: &[&str], wait_ms: Option<u32>) -> Request {
    Request::Events {
        since,
        kinds: kinds.iter().map(|&kind| kind.to_owned()).collect(),
        wait_ms,
    }
}

/// A request that installs a rule, for so many seconds.
fn install(rule: Value, seconds: u32) -> Request {
    let Value::Object(rule) = rule else {
        panic!("{rule}");
    };
    Request::RuleInstall {
        rule,
        for_s: NonZeroU32::new(seconds).expect("some"),
    }
}

impl World {
    /// The names of rules in force on the client, and whether each was installed.
    fn installed(&self) -> Vec<(String, bool)> {
        let list = self.call(Host::Client, &Request::RuleList { from: 0 });
        let rules = list["rules"].as_array().expect("a list");
        let row = |rule: &Value| {
            let name = rule["name"].as_str().expect("a name").to_owned();
            (name, rule["installed"] == true)
        };
        rules.iter().map(row).collect()
    }
}

/// The document's example: it lists, installs a rule, and prints events.
struct Example {
    _program: Process,
    lines: Receiver<String>,
}

impl Example {
    fn start(world: &World) -> Self {
        let mut command = world
            .testbed
            .command(Host::Client, python3())
            .expect("a namespace");
        command.arg(source("../examples/management.py"));
        command.arg(world.socket(Host::Client));
        let Spoken {
            process,
            told: _,
            says,
        } = Spoken::start(command);
        let (tell, lines) = channel();
        thread::spawn(move || {
            for line in says.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            _program: process,
            lines,
        }
    }

    /// Waits for a line with all of these words, which comes behind what was waited for before.
    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let mut found = None;
        until(&format!("{words:?}"), || {
            found = self
                .lines
                .try_iter()
                .find(|line| words.iter().all(|word| line.contains(word)));
            found.is_some()
        });
        found.expect("until")
    }
}

#[test]
fn management__a_controller_follows_a_flow_and_installs_rules() {
    let Some(mut world) = World::new("management", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.meet();
    let socket = world.socket(Host::Client);
    let client = Client::connect(&socket).expect("a daemon");
    let example = Example::start(&world);
    example.says(&[
        "'event': 'rule_added'",
        "'rule': 'far'",
        "'installed': True",
    ]);
    assert_eq!(world.installed(), [("far".to_owned(), true)]);

    // A flow that moves, by hand for some time, back, and ends.
    world.set_rate(CRAWL);
    world.serve("big", SIZE);
    let server = world.servers()[0];
    let mut download = world.start_download(server, "big");
    let opened = example.says(&["'event': 'flow_opened'", &format!("'peer': '{server}:80'")]);
    assert!(opened.contains("'role': 'client'"), "{opened}");
    let id = opened
        .split("'flow': ")
        .nth(1)
        .and_then(|rest| rest.split(',').next());
    let id = id.expect("its id").to_owned();
    let moves = |from: &str, to: &str, why: &str| {
        let words = [
            format!("'flow': {id},"),
            format!("'from': '{from}'"),
            format!("'to': '{to}'"),
            format!("'why': '{why}"),
        ];
        example.says(&words.each_ref().map(String::as_str));
    };
    moves("tcp", "graft", "the best carrier");
    download.reaches(100_000);
    let move_away = ["flow", "move", &id, "--carrier", "tcp", "--for", "1s"];
    let moved = world
        .vtl(Host::Client, &move_away)
        .output()
        .expect("vtl runs");
    assert!(moved.status.success(), "{}", words(&moved));
    moves("graft", "tcp", "moved by hand");
    moves("tcp", "graft", "the best carrier");
    world.set_rate(100.0);
    assert!(download.process.wait().success());
    download.check();
    let ended = example.says(&["'event': 'flow_ended'", "'how': 'closed'"]);
    assert!(ended.contains(&format!("'flow': {id},")), "{ended}");

    // A rule that ends by itself; what is wrong is refused.
    let brief = json!({ "name": "brief", "to": "203.0.113.0/24", "carrier": "tcp:cubic" });
    let _: Done = client.call(&install(brief, 1)).expect("installed");
    example.says(&["'event': 'rule_added'", "'rule': 'brief'", "'expires': '2"]);
    example.says(&["'event': 'rule_expired'", "'rule': 'brief'"]);
    assert_eq!(world.installed(), [("far".to_owned(), true)]);
    for (rule, about) in [
        (json!({ "name": "x" }), "not what is to happen"),
        (
            json!({ "name": "x", "carrier": "best", "expires": "now" }),
            "for_s",
        ),
        (
            json!({ "name": "x", "carrier": "best", "from": "10.0.0.1" }),
            "goes with \"via\"",
        ),
    ] {
        let error = client.call::<Done>(&install(rule, 1)).expect_err("wrong");
        assert!(error.to_string().contains(about), "{error}");
    }
    // Installed again it takes its place, and a new daemon takes it over; not what it has missed.
    let far = json!({ "name": "far", "to": "198.51.100.0/24", "carrier": "tcp:cubic" });
    let _: Done = client.call(&install(far, 600)).expect("installed");
    example.says(&["'event': 'rule_changed'", "'action': 'tcp:cubic'"]);
    let events_of_former: Events = client.call(&events(Some(0), &[], Some(0))).expect("events");
    world.take_over(Host::Client);
    assert_eq!(world.installed(), [("far".to_owned(), true)]);
    let client = Client::connect(&socket).expect("a daemon");
    let since = Some(events_of_former.last);
    let Events { events: seen, last } = client.call(&events(since, &[], None)).expect("events");
    assert_eq!(seen[0].what, What::Missed { events: None });
    assert!(last > events_of_former.last);
    world.rule_ok(&["remove", "far"]);
    assert_eq!(world.installed(), []);
    let removed = client.call::<Events>(&events(Some(last), &["rule_removed"], None));
    assert_eq!(removed.expect("events").events.len(), 1);
    world.stop_daemons();
}

#[test]
fn management__slow_readers_and_others_than_root() {
    let Some(mut world) = World::bare("managementslow", &Link::new(1.0, 100.0)) else {
        return;
    };
    const GROUP: &str = "users";
    world.start(Host::Client, &["--group", GROUP]);
    let socket = world.socket(Host::Client);
    let connect = || Client::connect(&socket).expect("a daemon");
    let slow = connect();
    let last = slow
        .call::<Events>(&events(None, &[], Some(0)))
        .expect("events")
        .last;
    // They ask, and neither wait for the answer nor take it.
    let (gone, hung) = (connect(), connect());
    for reader in [&gone, &hung] {
        reader.ask(&events(None, &[], None)).expect("asked");
    }
    drop(gone);
    // More than there is room for; about what a gateway forwards, which the kernel's table is not made anew for.
    let controller = connect();
    const MANY: u64 = 4500;
    for i in 0..MANY {
        let carrier = ["quic", "kcp"][i as usize % 2];
        let rule = json!({ "name": "hop", "via": "none0", "carrier": carrier });
        let _: Done = controller.call(&install(rule, 600)).expect("installed");
    }
    let mut since = last;
    let mut count = 0;
    loop {
        let answer: Events = slow
            .call(&events(Some(since), &[], Some(0)))
            .expect("events");
        if answer.events.is_empty() {
            break;
        }
        for event in answer.events {
            count += match event.what {
                What::Missed { events } => {
                    assert_eq!(since, last, "at the beginning");
                    let missed = events.expect("of this daemon");
                    assert!(missed > 300, "{missed}");
                    missed
                }
                _ => 1,
            };
        }
        since = answer.last;
    }
    assert!((MANY..MANY + 20).contains(&count), "{count} of {MANY}");
    drop(hung);

    // Members of the group see events, and change nothing.
    let gid = nix::unistd::Group::from_name(GROUP)
        .expect("a look-up")
        .expect("there")
        .gid;
    let vtl_as = |gid: Gid, args: &[&str]| {
        let output = world.vtl_as(Host::Client, gid, args).output();
        output.expect("vtl runs")
    };
    let args = [
        "events",
        "--since",
        "0",
        "--no-wait",
        "--json",
        "--kind",
        "rule_changed",
    ];
    let seen = vtl_as(gid, &args);
    assert!(seen.status.success(), "{}", words(&seen));
    let lines = String::from_utf8_lossy(&seen.stdout);
    let first: Map<String, Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .find(|event: &Map<String, Value>| event["event"] != "missed")
        .expect("a change");
    assert_eq!(
        (&first["rule"], &first["installed"]),
        (&json!("hop"), &json!(true))
    );
    refused(&vtl_as(gid, &["rule", "remove", "hop"]), 77, "is for root");
    refused(
        &vtl_as(gid, &["events", "--kind", "moon"]),
        1,
        "no kind \"moon\"",
    );
    refused(
        &vtl_as(Gid::from_raw(NOBODY), &args),
        77,
        "members of its group",
    );
    // One who speaks another version is told.
    let unknown = controller.call::<Done>(&Request::RuleWithdraw { name: "hop".into() });
    assert!(unknown.is_ok());
    assert!(matches!(
        controller.call::<Done>(&Request::RuleWithdraw { name: "hop".into() }),
        Err(Error::Refused(why)) if why.contains("no rule \"hop\" is installed")
    ));
    world.stop_daemons();
}
