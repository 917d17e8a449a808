#![allow(clippy::too_many_lines, reason = "tables of cases")]

use proptest::prelude::*;

use super::*;

fn uid(name: &str) -> Option<u32> {
    match name {
        "root" => Some(0),
        "backup" => Some(34),
        _ => None,
    }
}

fn good(text: &str) -> Vec<Rule> {
    parse(text, uid).unwrap_or_else(|wrong| panic!("{wrong}: {text}"))
}

const ALL: &str = r#"
# Of each kind one, or several.
[[rule]]
name = "everything"
cgroup = ["/system.slice//x/", "/user.slice"]
user = ["root", 34, "backup"]
exe = "/usr/bin/rsync"
port = [22, "8000-8100", "0873"]
to = ["10.1.2.3/8", "2001:db8::1/32", "192.0.2.7", "::ffff:10.0.0.0/104"]
profile = "loss-sensitive"
carrier = "graft:cubic"

[[rule]]
name = "local"
to = "127.0.0.1"
local = true
carrier = "tcp:reno"

[[rule]]
name = "dns"
port = 0x35
bypass = true

[[rule]]
name = "web"
listen = [443, 80]

[[rule]]
name = "mail"
listen = 25
carrier = "tcp:hybla"

[[rule]]
name = "rest"
carrier = "best"

[[rule]]
name = "services"
services = { require = "encryption", prefer = ["multipath+partial-order"], max_delay_ms = 50, min_throughput_mbit = 1.5 }
"#;

#[test]
fn parse__expiry_is_a_date_in_utc() {
    let rule = |rest: &str| format!("[[rule]]\nname = \"a\"\ncarrier = \"best\"\n{rest}\n");
    let rules = good(&rule("expires = 2027-01-31T18:00:00Z"));
    let at = humantime::parse_rfc3339("2027-01-31T18:00:00Z").expect("right");
    let second = std::time::Duration::from_secs(1);
    assert!(rules[0].has_expired(at) && !rules[0].has_expired(at - second));
    assert!(!good(&rule(""))[0].has_expired(at));
    for wrong in [
        "2027-01-31",
        "18:00:00",
        "2027-01-31T18:00:00",
        "2027-01-31T18:00:00+02:00",
        "1901-01-31T18:00:00Z",
        "\"2027-01-31T18:00:00Z\"",
        "8",
    ] {
        let wrong = parse(&rule(&format!("expires = {wrong}")), uid).expect_err(wrong);
        assert_eq!((wrong.place.line, wrong.place.column), (4, 11), "{wrong}");
        assert!(wrong.text.contains("in UTC"), "{wrong}");
    }
}

#[test]
fn parse__reads_everything_that_a_rule_can_say() {
    let rules = good(ALL);
    let names: Vec<_> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "everything",
            "local",
            "dns",
            "web",
            "mail",
            "rest",
            "services"
        ]
    );
    let About::Opened(matches, action) = &rules[0].about else {
        panic!("{:?}", rules[0]);
    };
    assert_eq!(*action, Action::Carry(Carrier::Graft("cubic".into())));
    assert_eq!(matches.cgroup[0], Path::new("/system.slice/x"));
    let users: Vec<_> = matches
        .user
        .iter()
        .map(|u| (u.id, u.text.as_str()))
        .collect();
    assert_eq!(users, [(0, "root"), (34, "34"), (34, "backup")]);
    assert_eq!(matches.port, [22..=22, 8000..=8100, 873..=873]);
    let to: Vec<_> = matches.to.iter().map(ToString::to_string).collect();
    assert_eq!(
        to,
        ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7/32", "10.0.0.0/8"]
    );
    assert!(matches!(&rules[1].about, About::Opened(m, _) if m.local));
    assert!(matches!(&rules[2].about, About::Opened(_, Action::Bypass)));
    assert_eq!(
        rules[3].about,
        About::Accepted(vec![80, 443], Carrier::Best)
    );
    let nothing = About::Opened(Matches::default(), Action::Carry(Carrier::Best));
    assert_eq!(rules[5].about, nothing);
    assert_eq!(
        rules[5].place,
        Place {
            line: 35,
            column: 11
        }
    );
    let About::Opened(_, action) = &rules[6].about else {
        panic!("{:?}", rules[6]);
    };
    assert_eq!(
        action.to_string(),
        "services require encryption, prefer partial-order+multipath, max_delay_ms 50, \
         min_throughput_mbit 1.5"
    );
    let tolerant = [
        with("listen = 80\nloss_tolerant = true"),
        with("carrier = \"udp\"\nloss_tolerant = true"),
    ];
    let [served, opened] = tolerant.map(|text| good(&text).remove(0).about);
    assert_eq!(served, About::Accepted(vec![80], Carrier::Tolerant));
    let others = good(&with("listen = 80\nothers = \"tcp:stream\""))
        .remove(0)
        .about;
    let stream = Carrier::Others(Box::new(Carrier::Best), "stream".to_owned());
    assert_eq!(others, About::Accepted(vec![80], stream));
    let carry = Action::Carry(Carrier::Lossy("udp".into()));
    assert_eq!(opened, About::Opened(Matches::default(), carry));
    for action in [
        "carrier = \"quic\"",
        "services = { prefer = \"encryption\" }",
    ] {
        let text = with(&format!("{action}\nrequire_carrier = true"));
        let About::Opened(_, action) = good(&text).remove(0).about else {
            panic!("{text}");
        };
        assert!(action.to_string().ends_with(", required"), "{action}");
    }
    assert!(good("").is_empty());
    assert!(good("# nothing\n").is_empty());
    assert_eq!(good("rule = [{ name = \"a\", bypass = true }]").len(), 1);
}

/// A rule with these lines after its name.
fn with(lines: &str) -> String {
    format!("[[rule]]\nname = \"a\"\n{lines}")
}

#[test]
fn parse__refuses_with_place_and_reason() {
    let best = "\ncarrier = \"best\"";
    let cases: Vec<(String, usize, usize, &str)> = vec![
        // Invalid TOML.
        ("[[rule]]\nname = \"x".into(), 2, 10, "string"),
        ("[[rule]]\nname = a".into(), 2, 8, ""),
        (
            "[[rule]]\nname = \"a\"\nname = \"b\"".into(),
            3,
            1,
            "duplicate",
        ),
        // Unknown keys, and keys in the wrong place.
        ("[rules]\n".into(), 1, 2, "there is no \"rules\" here"),
        ("[rule]\nname = \"a\"".into(), 1, 2, "[[rule]]"),
        ("rule = [7]".into(), 1, 9, "a table"),
        (
            with("  cariier = \"best\""),
            3,
            3,
            "a rule has no \"cariier\"",
        ),
        ("[[rule]]\ncarrier = \"best\"".into(), 1, 1, "needs a name"),
        (with("port = 80"), 1, 1, "add carrier"),
        (
            with("carrier = \"best\"\nbypass = true"),
            4,
            1,
            "two actions",
        ),
        (
            "[[rule]]\nname = \"\"\nbypass = true".into(),
            2,
            8,
            "1 to 64",
        ),
        (
            "[[rule]]\nname = 7\nbypass = true".into(),
            2,
            8,
            "text in quotes",
        ),
        (
            with("bypass = true\n[[rule]]\nname = \"a\"\nbypass = true"),
            5,
            8,
            "two rules",
        ),
        (with("bypass = false"), 3, 10, "bypass = true"),
        (with("bypass = \"yes\""), 3, 10, "true or false"),
        // The mark loss-tolerant: required for lossy carriers, rejected with others.
        (with("carrier = \"udp\""), 3, 11, "(loss_tolerant = true)"),
        (
            with("carrier = \"udp\"\nloss_tolerant = false"),
            3,
            11,
            "(loss_tolerant = true)",
        ),
        (
            with("carrier = \"quic\"\nloss_tolerant = true"),
            4,
            1,
            "quic has no use",
        ),
        (
            with("loss_tolerant = true\nbypass = true"),
            3,
            1,
            "bypass has no use",
        ),
        (
            with("listen = 80\ncarrier = \"udp\"\nloss_tolerant = true"),
            4,
            11,
            "who connects chooses it",
        ),
        (
            with("carrier = \"tcp:cubic\"\nrequire_carrier = true"),
            4,
            1,
            "cannot be required (require_carrier = true)",
        ),
        (
            with("require_carrier = true\nbypass = true"),
            3,
            1,
            "bypass excludes",
        ),
        (
            with("listen = 80\nrequire_carrier = true"),
            4,
            1,
            "who connects requires",
        ),
        (
            with("carrier = \"best\"\nothers = \"tcp:stream\""),
            4,
            10,
            "goes with \"listen\"",
        ),
        (
            with("listen = 80\nothers = \"quic\""),
            4,
            10,
            "others takes tcp:CONTROL",
        ),
        (
            with("listen = 80\ncarrier = \"tcp:bbr\"\nothers = \"tcp:stream\""),
            5,
            10,
            "already",
        ),
        // Values.
        (with(&format!("port = 0{best}")), 3, 8, "1 to 65535"),
        (
            with(&format!("port = [80, 70000]{best}")),
            3,
            13,
            "1 to 65535",
        ),
        (with(&format!("port = \"9-8\"{best}")), 3, 8, "1 to 65535"),
        (with(&format!("port = -1{best}")), 3, 8, "1 to 65535"),
        (with(&format!("port = []{best}")), 3, 8, "matches nothing"),
        (with(&format!("port = [[80]]{best}")), 3, 9, "1 to 65535"),
        (
            with(&format!("to = \"10.0.0.0/33\"{best}")),
            3,
            6,
            "10.0.0.0/8",
        ),
        (
            with(&format!("to = [\"10.0.0.1\", \"host\"]{best}")),
            3,
            19,
            "\"host\"",
        ),
        (with(&format!("to = \"::/\"{best}")), 3, 6, "no address"),
        (
            with(&format!("to = 10{best}")),
            3,
            6,
            "text in quotes, not a number",
        ),
        (
            with(&format!("user = \"nobody-here\"{best}")),
            3,
            8,
            "no user \"nobody-here\"",
        ),
        (
            with(&format!("user = 4294967296{best}")),
            3,
            8,
            "a name in quotes, or a number",
        ),
        (
            with(&format!("exe = \"rsync\"{best}")),
            3,
            7,
            "/usr/bin/rsync",
        ),
        (
            with(&format!("exe = \"/usr/../rsync\"{best}")),
            3,
            7,
            "whole path",
        ),
        (
            with(&format!("cgroup = \"x\"{best}")),
            3,
            10,
            "a cgroup is a whole path",
        ),
        (
            with(&format!("profile = \"fast\"{best}")),
            3,
            11,
            "time-sensitive",
        ),
        (
            with(&format!("local = 1{best}")),
            3,
            9,
            "true or false, not a number",
        ),
        (with(&format!("local = true{best}")), 3, 1, "two hosts"),
        (
            with("carrier = \"pigeon\""),
            3,
            11,
            "there is no carrier \"pigeon\"",
        ),
        (with("carrier = 7"), 3, 11, "text in quotes"),
        (with("services = \"x\""), 3, 12, "a table"),
        (
            with("services = { prefer = \"speed\" }"),
            3,
            23,
            "no service",
        ),
        (
            with("services = { avoid = \"reliable\" }"),
            3,
            12,
            "TCP connections require",
        ),
        (with("services = { max_delay_ms = 0 }"), 3, 29, "from 1"),
        (
            with("services = { min_throughput_mbit = -1.0 }"),
            3,
            36,
            "above 0",
        ),
        (
            with("services = { max_loss_pct = 1 }"),
            3,
            14,
            "there are require",
        ),
        (with("listen = 80\nservices = {}"), 4, 12, "who connects"),
        // Ports of servers.
        (with("listen = 80\nuser = 0"), 4, 1, "exclude each other"),
        (with("listen = \"80\""), 3, 10, "1 to 65535"),
        (with("listen = [80, 80]"), 3, 1, "twice"),
        (
            with("listen = 80\nbypass = true"),
            4,
            1,
            "left alone already",
        ),
        (
            with("listen = 80\ncarrier = \"tcp\""),
            4,
            11,
            "plain TCP already",
        ),
        (
            with("listen = 80\ncarrier = \"graft:x\""),
            4,
            11,
            "who connects",
        ),
        (
            with("listen = 80\n[[rule]]\nname = \"b\"\nlisten = [1, 80]"),
            6,
            14,
            "\"a\" has",
        ),
        // The first of several, counted in characters.
        (
            with("user = 0 # \u{e4}\u{f6}\nport = 0\nto = 7"),
            4,
            8,
            "1 to 65535",
        ),
        (
            "rule = [{ name = \"\u{e4}\", port = 0 }]".into(),
            1,
            30,
            "1 to 65535",
        ),
    ];
    let mut other = String::new();
    for (text, line, column, about) in cases {
        let wrong = parse(&text, uid).map(|r| format!("{r:?}")).unwrap_err();
        let said = wrong.to_string();
        if !said.starts_with(&format!("{line}:{column}: "))
            || !said.contains(about)
            || said.contains('\n')
        {
            other += &format!("{text}\n-> {said}\nnot {line}:{column}: {about}\n\n");
        }
    }
    assert!(other.is_empty(), "{other}");
}

#[test]
fn parse__refuses_more_than_it_takes() {
    let rules: String = (0..=MAX_RULES)
        .map(|i| format!("[[rule]]\nname = \"{i}\"\nbypass = true\n"))
        .collect();
    let wrong = parse(&rules, uid).unwrap_err();
    assert_eq!(wrong.place.line, MAX_RULES * 3 + 1, "{wrong}");
    let long = "#".repeat(LONGEST_FILE + 1);
    assert!(parse(&long, uid).is_err());
}

fn inside(text: &str) {
    if let Err(wrong) = parse(text, uid) {
        let lines = text.lines().count().max(1) + 1;
        assert!((1..=lines).contains(&wrong.place.line), "{wrong}: {text}");
        assert!(!wrong.text.is_empty());
    }
}

proptest! {
    #[test]
    fn parse__survives_anything(text in ".{0,200}") {
        inside(&text);
    }

    #[test]
    fn parse__survives_broken_files(at in 0..ALL.len(), len in 0_usize..20, new in "[-\\[\\]{}\"'=,.#\n0-9a-z/:]{0,6}") {
        let mut bytes = ALL.as_bytes().to_vec();
        let end = (at + len).min(bytes.len());
        bytes.splice(at..end, new.bytes());
        inside(&String::from_utf8_lossy(&bytes));
    }
}
