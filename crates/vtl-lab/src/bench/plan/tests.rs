use std::path::Path;

use vtl_testbed::{LossModel, Medium};

use super::*;

const GOOD: &str = "transports = [\"tcp-cubic\", \"graft:stream\"]
runs = 3
[link]
profile = \"terrestrial\"
loss_pct = 2
seed = 7
[workload]
kind = \"file\"
bytes = 33554432
";

fn parse(text: &str) -> Result<Plan, Error> {
    Plan::parse(Path::new("plans/p.toml"), text)
}

/// A download.
fn file(bytes: u64) -> Workload {
    Workload::File {
        bytes,
        direction: Direction::Down,
    }
}

#[test]
fn parse__the_documented_example() {
    let plan = parse(GOOD).expect("valid");
    assert_eq!(
        (plan.name.as_str(), plan.runs, plan.cells.len()),
        ("p", 3, 1)
    );
    assert_eq!(plan.transfers(), 6);
    let cell = &plan.cells[0];
    assert_eq!(cell.profile, Some(Profile::Terrestrial));
    assert_eq!(
        (cell.link.rtt_ms, cell.link.loss_pct, cell.link.seed),
        (100.0, 2.0, 7)
    );
    assert_eq!(cell.workload, file(33_554_432));
    assert_eq!(
        (cell.time_limit_s, cell.known, cell.curl),
        (60.0, false, false)
    );
}

#[test]
fn parse__rules_are_those_of_transports() {
    let rule = "[rules.far]\ncarrier = \"graft:go-back-n?window=16\"\nwhen = { if = \"rtt >= 300ms for 200ms\", \
                carrier = \"graft:partial-reliability?max-loss=100\" }\n";
    let text = GOOD.replace("\"graft:stream\"", "\"hook:rule:far\", \"graft:rule:far\"") + rule;
    let plan = parse(&text).expect("valid");
    let cell = &plan.cells[0];
    let file = cell.rules["far"].file(5201);
    for words in [
        "port = 5201\n",
        "carrier = \"graft:go-back-n?window=16\"\n",
        "loss_tolerant = true\n",
        "if = \"rtt >= 300ms for 200ms\"",
        "carrier = \"graft:partial-reliability?max-loss=100\"",
    ] {
        assert!(file.contains(words), "{file}");
    }
    let hooks = cell
        .transports
        .iter()
        .map(|t| (t.is_hook(), t.is_lossy_hook()));
    let hooks: Vec<_> = hooks.collect();
    assert_eq!(hooks, [(false, false), (true, true), (false, false)]);
    for (from, to, about) in [
        ("rules.far", "rules.near", "[rules.far]"),
        ("300ms for", "300 for", "no unit of rtt"),
        ("max-loss=100", "max-loss=1001", "no parameter max-loss"),
        ("window=16", "windows=16", "no parameter windows"),
        (
            "graft:go-back-n",
            "graft:go-back",
            "there is no graft \"go-back\"",
        ),
        ("graft:go-back-n", "quic", "graft:NAME"),
        (
            "\"file\"\nbytes = 33554432",
            "\"stream\"\nseconds = 1",
            "only \"file\"",
        ),
    ] {
        let error = parse(&text.replace(from, to)).expect_err(about).to_string();
        assert!(error.contains(about), "{error}");
    }
}

#[test]
fn parse__lists_multiply() {
    let text = GOOD
        .replace("\"terrestrial\"", "[\"terrestrial\", \"campus\"]")
        .replace(
            "loss_pct = 2",
            "loss_pct = [0, 1, 5]\nloss_model = [\"uniform\", \"gilbert-elliott\"]",
        )
        .replace(
            "bytes = 33554432",
            "bytes = [4096, 65536]\nknown = [false, true]",
        );
    let plan = parse(&text).expect("valid");
    assert_eq!(plan.cells.len(), 2 * 3 * 2 * 2 * 2);
    assert!(
        plan.cells
            .iter()
            .any(|c| c.link.loss_model == LossModel::BURSTS && c.known)
    );
}

#[test]
fn parse__one_transport_needs_no_list() {
    let one = parse(&GOOD.replace("[\"tcp-cubic\", \"graft:stream\"]", "\"udp\"")).expect("valid");
    assert_eq!(one.cells[0].transports, [Transport::Udp]);
}

#[test]
fn parse__seconds_worth_follows_the_rate() {
    let text = GOOD
        .replace("\"terrestrial\"", "[\"terrestrial\", \"satellite\"]")
        .replace("bytes = 33554432", "seconds_worth = 10");
    let cells = parse(&text).expect("valid").cells;
    assert_eq!(cells[0].workload, file(125_000_000));
    assert_eq!(cells[1].workload, file(5_000_000));
}

#[test]
fn parse__timeline_builds_on_what_was_before() {
    let text = GOOD.to_owned()
        + "[[link.timeline]]\nat_s = 5\nrate_mbit = 50\n[[link.timeline]]\nat_s = 9.5\nloss_pct = 0\n";
    let cell = &parse(&text).expect("valid").cells[0];
    assert_eq!(cell.timeline.len(), 2);
    let last = &cell.timeline[1];
    assert_eq!(
        (last.at_s, last.link.rate_mbit, last.link.loss_pct),
        (9.5, 50.0, 0.0)
    );
}

#[test]
fn parse__compete_runs_all_at_once() {
    let text = GOOD.replace(
        "kind = \"file\"\nbytes = 33554432",
        "kind = \"compete\"\nseconds = 60\nstart_s = [0, 5]",
    );
    let plan = parse(&text).expect("valid");
    assert_eq!(plan.transfers(), 3);
    assert_eq!(plan.cells[0].legs().len(), 1);
    assert_eq!(plan.cells[0].longest_s(), 65.0);
}

/// What to change in the good plan, where the complaint must point, and words that it must have.
const WRONG: [(&str, &str, usize, &[&str]); 33] = [
    (
        "loss_pct = 2",
        "los_pct = 2",
        5,
        &["los_pct", "loss_pct", "queue_packets"],
    ),
    ("runs = 3", "rums = 3", 2, &["rums", "transports", "runs"]),
    (
        "bytes = 33554432",
        "size = 3",
        9,
        &["size", "seconds_worth"],
    ),
    ("runs = 3", "runs = 0", 2, &["runs", "1,000"]),
    (
        "runs = 3",
        "runs = \"x\"",
        2,
        &["`runs`", "\"x\"", "whole number"],
    ),
    ("runs = 3", "runs = ", 2, &[]),
    (
        "\"tcp-cubic\"",
        "\"tcp-vegas\"",
        1,
        &["tcp-vegas", "tcp-reno", "hook:graft:NAME"],
    ),
    (
        "\"tcp-cubic\", \"graft:stream\"",
        "",
        1,
        &["transports", "empty"],
    ),
    (
        "\"tcp-cubic\"",
        "\"hook:graft:strem\"",
        1,
        &["graft \"strem\"", "valid are", "stream"],
    ),
    (
        "\"tcp-cubic\"",
        "\"hook:graft:udp\"",
        1,
        &["the graft \"udp\" carries no streams"],
    ),
    ("terrestrial", "wifi", 4, &["wifi", "satellite", "wire"]),
    (
        "profile = \"terrestrial\"",
        "rtt_ms = 5",
        3,
        &["profile", "rate_mbit"],
    ),
    ("terrestrial\"", "wire\"\nrate_mbit = 5", 4, &["wire"]),
    (
        "loss_pct = 2",
        "loss_pct = 101",
        3,
        &["`link`: loss of 101 %"],
    ),
    (
        "loss_pct = 2",
        "loss_pct = true",
        5,
        &["`loss_pct`", "expected a number"],
    ),
    (
        "loss_pct = 2",
        "loss_pct = [1, \"2\"]",
        5,
        &["`loss_pct`", "\"2\"", "expected a number"],
    ),
    (
        "loss_pct = 2",
        "loss_pct = { mean = 2 }",
        5,
        &["`loss_pct`", "a value or a list"],
    ),
    (
        "bytes = 33554432",
        "bytes = \"32M\"",
        9,
        &["`bytes`", "\"32M\"", "whole number"],
    ),
    (
        "loss_pct = 2",
        "loss_model = \"x\"",
        5,
        &["\"x\"", "gilbert-elliott"],
    ),
    (
        "\"file\"",
        "\"files\"",
        8,
        &["files", "request-response", "compete"],
    ),
    ("bytes = 33554432", "", 8, &["\"file\" needs `bytes`"]),
    ("bytes = 33554432", "bytes = 0", 9, &["bytes"]),
    (
        "loss_pct = 2\nseed = 7\n[workload]\nkind = \"file\"\nbytes = 33554432",
        "rate_mbit = 10000\n[workload]\nkind = \"file\"\nseconds_worth = 86400",
        8,
        &["seconds_worth", "2^44"],
    ),
    (
        "bytes = 33554432",
        "bytes = 9\ncount = 7",
        10,
        &["count", "\"file\"", "seconds_worth"],
    ),
    (
        "bytes = 33554432",
        "bytes = 9\napp = \"wget\"",
        10,
        &["wget", "curl"],
    ),
    (
        "bytes = 33554432",
        "bytes = 9\ntime_limit_s = -1",
        10,
        &["time_limit_s"],
    ),
    (
        "\"file\"\nbytes = 33554432",
        "\"stream\"",
        8,
        &["\"stream\" needs `seconds`"],
    ),
    ("\"file\"", "\"flows\"", 8, &["\"flows\" needs `count`"]),
    (
        "\"file\"\nbytes = 33554432",
        "\"compete\"\nseconds = 9\nstart_s = [1]",
        10,
        &["start_s", "2 times"],
    ),
    ("runs = 3", "cores = 3", 2, &["cores", "1", "2"]),
    (
        "runs = 3",
        "runs = 3\n[vtl]\ndriver = \"fast\"",
        4,
        &["fast", "live"],
    ),
    (
        "runs = 3",
        "runs = 3\n[vtl]\nring_slots = 100",
        4,
        &["ring_slots", "power of two"],
    ),
    (
        "kind = \"file\"\nbytes = 33554432",
        "kind = \"file\"\nbytes = 9\n[[link.timeline]]\nat_s = 9\n[[link.timeline]]\nat_s = 8",
        11,
        &["at_s", "order"],
    ),
];

#[test]
fn parse__refuses_with_line_and_words() {
    for (from, to, line, words) in WRONG {
        assert!(GOOD.contains(from), "{from}");
        let error = parse(&GOOD.replace(from, to)).expect_err(to);
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("plans/p.toml:{line}: ")),
            "{to}: {text}"
        );
        for word in words {
            assert!(text.contains(word), "{to}: no {word} in {text}");
        }
    }
}

#[test]
fn parse__refuses_what_a_transport_cannot() {
    let curl = GOOD.replace("bytes = 33554432", "bytes = 9\napp = \"curl\"");
    let text = parse(&curl).expect_err("an aware program").to_string();
    assert!(text.contains("graft:stream cannot carry it"), "{text}");
    let udp = GOOD.replace("tcp-cubic", "udp").replace(
        "kind = \"file\"\nbytes = 33554432",
        "kind = \"request-response\"",
    );
    let text = parse(&udp).expect_err("no messages").to_string();
    assert!(text.contains("udp carries only"), "{text}");
}

#[test]
fn parse__directions_multiply() {
    let text = GOOD.to_owned() + "direction = [\"up\", \"both\"]\n";
    let plan = parse(&text).expect("valid");
    let directions = plan.cells.iter().map(|cell| match cell.workload {
        Workload::File { direction, .. } => direction,
        _ => panic!("{cell}"),
    });
    let directions: Vec<_> = directions.collect();
    assert_eq!(directions, [Direction::Up, Direction::Both]);
    for (from, to, words) in [
        ("\"up\"", "\"sideways\"", "valid are down, up, both"),
        ("tcp-cubic", "udp", "measures \"down\" only"),
        (
            "kind = \"file\"",
            "app = \"curl\"\nkind = \"file\"",
            "measures \"down\" only",
        ),
    ] {
        let error = parse(&text.replace(from, to)).expect_err(to);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn read__names_a_missing_file() {
    let error = Plan::read(Path::new("/nowhere/x.toml")).expect_err("not there");
    assert!(error.to_string().contains("/nowhere/x.toml"));
}

#[test]
fn read__every_plan_of_the_repository() {
    let plans = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/plans");
    let mut count = 0;
    for entry in std::fs::read_dir(plans).expect("bench/plans") {
        let path = entry.expect("an entry").path();
        Plan::read(&path).unwrap_or_else(|error| panic!("{error}"));
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn parse__media_rates_and_delays_multiply() {
    let text = GOOD
        .replace(
            "profile = \"terrestrial\"",
            "medium = [\"ethernet\", \"wifi\", \"lte\"]\nrtt_ms = [0, 20]\nrate_mbit = [1, 10]",
        )
        .replace(
            "\"file\"\nbytes = 33554432",
            "\"stream\"\nseconds = 2\nrate_mbit = 0.1\nrate_share = 0.8",
        );
    let cells = parse(&text).expect("valid").cells;
    assert_eq!(cells.len(), 3 * 2 * 2 * 2);
    let of = |medium: Medium| cells.iter().find(|c| c.medium == Some(medium));
    let model = |medium| of(medium).expect("there").link.loss_model;
    assert_eq!(model(Medium::Ethernet), LossModel::Uniform);
    assert_eq!(model(Medium::Wifi), LossModel::BURSTS);
    let slots = of(Medium::Lte).expect("there").link.slots;
    assert_eq!(slots, Medium::Lte.slots());
    let rates = cells.iter().map(|c| match c.workload {
        Workload::Stream { rate_mbit, .. } => (c.link.rate_mbit, rate_mbit),
        _ => unreachable!(),
    });
    let rates: Vec<_> = rates.collect();
    assert!(rates.contains(&(10.0, 8.0)) && rates.contains(&(1.0, 0.1)));
    for (from, to, about) in [
        ("\"wifi\"", "\"lora\"", "there is no medium \"lora\""),
        ("rate_share = 0.8", "rate_share = 2", "rate_share"),
        ("[1, 10]", "[0, 10]", "rate_share"),
    ] {
        let error = parse(&text.replace(from, to)).expect_err(about).to_string();
        assert!(error.contains(about), "{error}");
    }
}

#[test]
fn parse__a_gateway_needs_a_link_behind_it() {
    let gateway = GOOD.replace("\"graft:stream\"", "\"gateway:graft:udp-plus?rate=path\"");
    let error = parse(&gateway).expect_err("refused").to_string();
    assert!(error.contains("needs a table [core]"), "{error}");
    let core = "[core]\nrtt_ms = 20\nrate_mbit = 1000\n";
    let cell = &parse(&(gateway.clone() + core)).expect("valid").cells[0];
    assert!((cell.rtt_ms() - 120.0).abs() < 1e-9);
    let wire = &parse(&(gateway.clone() + "[core]\n")).expect("valid").cells[0];
    assert!(wire.core.as_ref().is_some_and(|core| core.direct));
    for (core, about) in [
        ("[core]\nrtt_ms = 20\n", "or neither"),
        ("[core]\nrtt_ms = -1\nrate_mbit = 1\n", "RTT"),
    ] {
        let error = parse(&(gateway.clone() + core)).expect_err(about);
        assert!(error.to_string().contains(about), "{error}");
    }
    let lossy = gateway.replace("udp-plus?rate=path", "dccp-ccid2") + "[core]\n";
    assert!(parse(&lossy).is_err(), "a gateway carries streams");
    let curl = gateway.replace("kind = \"file\"", "kind = \"file\"\napp = \"curl\"") + "[core]\n";
    assert!(parse(&curl).is_err());
}

#[test]
fn parse__grafts_that_lose_carry_files_and_streams_at_a_rate() {
    let text = GOOD.replace("graft:stream", "graft:dccp-ccid2");
    let stream = |rate: &str| {
        let workload = format!("\"stream\"\nseconds = 2\n{rate}");
        text.replace("\"file\"\nbytes = 33554432\n", &workload)
    };
    assert!(parse(&text).is_ok());
    assert!(parse(&stream("rate_mbit = 1\n")).is_ok());
    let error = parse(&stream("")).expect_err("refused").to_string();
    assert!(error.contains("may lose packets"), "{error}");
}
