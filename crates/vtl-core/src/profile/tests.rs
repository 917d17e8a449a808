//! Tables of bytes and verdicts.

use proptest::prelude::*;

use super::*;
use Profile::{Insensitive, LossSensitive, TimeAndLossSensitive, TimeSensitive};

const MS: u64 = 1_000_000;

/// What one side sends: `>` the opener, `<` the accepter.
type Said = (char, Vec<u8>);

fn opener(bytes: impl AsRef<[u8]>) -> Vec<Said> {
    vec![('>', bytes.as_ref().to_vec())]
}

fn both(one: (char, &str), other: (char, &str)) -> Vec<Said> {
    vec![(one.0, one.1.into()), (other.0, other.1.into())]
}

fn get(request: &str, response: &str) -> Vec<Said> {
    let request = format!("{request}\r\nHost: example.org\r\n\r\n");
    both(('>', &request), ('<', &format!("{response}\r\n\r\n")))
}

/// A ClientHello with these extensions, in records of so many bytes.
fn client_hello(extensions: &[u8], record: usize) -> Vec<u8> {
    let vector = |len: usize, bytes: &[u8]| [&bytes.len().to_be_bytes()[8 - len..], bytes].concat();
    let body = [
        &[3, 3][..],
        &[7; 32],
        &vector(1, &[5; 32]),
        &vector(2, &[0x13, 1]),
        &vector(1, &[0]),
        &vector(2, extensions),
    ]
    .concat();
    let message = [&[1][..], &vector(3, &body)].concat();
    let records = message
        .chunks(record)
        .map(|part| [&[22, 3, 1][..], &vector(2, part)].concat());
    records.collect::<Vec<_>>().concat()
}

fn sni(name: &str) -> Vec<u8> {
    let n = name.len() as u8;
    [&[0, 0, 0, n + 5, 0, n + 3, 0, 0, n][..], name.as_bytes()].concat()
}

fn alpn(names: &[&str]) -> Vec<u8> {
    let names = names
        .iter()
        .flat_map(|name| [&[name.len() as u8][..], name.as_bytes()].concat());
    let names: Vec<_> = names.collect();
    let n = names.len() as u8;
    [&[0, 16, 0, n + 2, 0, n][..], &names].concat()
}

fn tls(name: &str, offers: &[&str]) -> Vec<Said> {
    opener(client_hello(&[sni(name), alpn(offers)].concat(), 4000))
}

/// Feeds a conversation, a packet each 10 ms, every one cut behind `cut` bytes.
fn feed(classifier: &mut Classifier, said: &[Said], cut: usize) {
    for (at, (by, bytes)) in said.iter().enumerate() {
        let (first, rest) = bytes.split_at(cut.min(bytes.len()));
        for part in [first, rest] {
            let now = at as u64 * 10 * MS;
            match by {
                '>' => classifier.sent(now, part),
                _ => classifier.received(now, part),
            }
        }
    }
}

type Row = (
    Vec<Said>,
    u16,
    Option<&'static str>,
    Option<(Profile, &'static str, &'static str)>,
);

/// Requests, answers, and what the flow then is.
const HTTP_ROWS: &[(&str, &str, Profile, &str, &str)] = &[
    (
        "GET / HTTP/1.1",
        JSON,
        TimeAndLossSensitive,
        "HTTP",
        "HTTP answer with application/json",
    ),
    (
        "GET /f.zip HTTP/1.0",
        ZIP,
        LossSensitive,
        "HTTP",
        "HTTP answer with a file, 70000000 bytes",
    ),
    (
        "GET /v HTTP/1.1",
        HINTS_AND_VIDEO,
        TimeSensitive,
        "HTTP",
        "HTTP answer with video/mp4",
    ),
    (
        "GET /live/a.m3u8?x=1 HTTP/1.1",
        "",
        TimeSensitive,
        "HTTP",
        "HTTP request for a stream",
    ),
    (
        "GET /r HTTP/1.0",
        "ICY 200 OK",
        TimeSensitive,
        "Icecast",
        "Icecast answer",
    ),
    (
        "PUT /x HTTP/1.1\r\nContent-Length: 5000000",
        JSON,
        LossSensitive,
        "HTTP",
        "HTTP upload of 5000000 bytes",
    ),
    (
        "GET /c HTTP/1.1\r\nUpgrade: websocket",
        "",
        TimeAndLossSensitive,
        "WebSocket",
        "WebSocket upgrade",
    ),
    (
        "GET /r/info/refs?service=git-upload-pack HTTP/1.1",
        "",
        LossSensitive,
        "git",
        "git over HTTP",
    ),
    (
        "PROPFIND /dav HTTP/1.1",
        "",
        LossSensitive,
        "WebDAV",
        "WebDAV request",
    ),
];
const JSON: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20";
const ZIP: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/zip\r\ncontent-length: 70000000";
const HINTS_AND_VIDEO: &str =
    "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: VIDEO/mp4; codecs=x";

/// Servers, what clients offer, ports, executables, and what the flow then is.
type TlsRow = (
    &'static str,
    &'static [&'static str],
    u16,
    Option<&'static str>,
    Profile,
    &'static str,
    &'static str,
);
const TLS_ROWS: &[TlsRow] = &[
    (
        "example.org",
        &["h2", "http/1.1"],
        443,
        None,
        TimeAndLossSensitive,
        "HTTPS",
        "TLS to example.org offers h2",
    ),
    (
        "example.org",
        &["h2"],
        443,
        Some("wget"),
        LossSensitive,
        "HTTPS",
        "TLS to example.org offers h2, by wget",
    ),
    (
        "m.example.org",
        &["x", "imap"],
        443,
        None,
        LossSensitive,
        "IMAP",
        "TLS to m.example.org offers imap",
    ),
    (
        "r1.googlevideo.com",
        &["h2"],
        443,
        None,
        TimeSensitive,
        "TLS",
        "TLS to r1.googlevideo.com",
    ),
    (
        "notzoom.us",
        &["h2"],
        443,
        None,
        TimeAndLossSensitive,
        "HTTPS",
        "TLS to notzoom.us offers h2",
    ),
    (
        "m.example.org",
        &["odd"],
        993,
        None,
        LossSensitive,
        "TLS",
        "TLS to m.example.org, port 993",
    ),
    (
        "example.org",
        &["odd"],
        7,
        None,
        TimeAndLossSensitive,
        "TLS",
        "TLS to example.org offers odd",
    ),
    (
        "bad\nname",
        &["h2"],
        7,
        None,
        TimeAndLossSensitive,
        "HTTPS",
        "TLS offers h2",
    ),
];

/// What openers begin with.
const OPENER_ROWS: &[(&[u8], Profile, &str, &str)] = &[
    (
        b"SSH-2.0-OpenSSH_9.2\r\n",
        TimeAndLossSensitive,
        "SSH",
        "SSH banner",
    ),
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        TimeAndLossSensitive,
        "HTTP/2",
        "HTTP/2 handshake",
    ),
    (
        b"OPTIONS rtsp://h/s RTSP/1.0\r\nCSeq: 1\r\n\r\n",
        TimeSensitive,
        "RTSP",
        "RTSP request",
    ),
    (
        b"INVITE sip:a@b SIP/2.0\r\n",
        TimeSensitive,
        "SIP",
        "SIP request",
    ),
    (
        b"SOURCE /m ICE/1.0\r\n",
        TimeSensitive,
        "Icecast",
        "Icecast source",
    ),
    (
        b"\xff\xfb\x18",
        TimeAndLossSensitive,
        "Telnet",
        "Telnet options",
    ),
    (
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        TimeAndLossSensitive,
        "PostgreSQL",
        "PostgreSQL start-up",
    ),
    (
        b"\0\0\0\x20\0\x03\0\0user\0a\0",
        TimeAndLossSensitive,
        "PostgreSQL",
        "PostgreSQL start-up",
    ),
    (
        b"\0\0\0\xa0\xfeSMB@\0",
        LossSensitive,
        "SMB",
        "SMB negotiation",
    ),
    (
        b"\0\x01\0\x08\x21\x12\xa4\x42",
        TimeSensitive,
        "STUN",
        "STUN request",
    ),
    (
        b"\x03\0\0\x13\x0e\xe0\0\0\0\0\0",
        TimeAndLossSensitive,
        "RDP",
        "RDP connection request",
    ),
    (
        b"\x10\x25\0\x04MQTT\x04",
        LossSensitive,
        "MQTT",
        "MQTT CONNECT",
    ),
    (
        b"\x10\xa5\x01\0\x06MQIsdp\x03",
        LossSensitive,
        "MQTT",
        "MQTT CONNECT",
    ),
    (
        b"\x80\0\0\x28abcd\0\0\0\0\0\0\0\x02\0\x01\x86\xa3\0\0\0\x03",
        LossSensitive,
        "ONC RPC",
        "NFS call",
    ),
    (
        b"*2\r\n$3\r\nGET\r\n",
        TimeAndLossSensitive,
        "Redis",
        "Redis command",
    ),
    (b"PING\r\n", TimeAndLossSensitive, "Redis", "Redis command"),
    (
        b"002fgit-upload-pack /r\0host=h\0",
        LossSensitive,
        "git",
        "git request",
    ),
    (
        b"<?xml version='1.0'?><stream:stream to='x'>",
        LossSensitive,
        "XMPP",
        "XMPP stream",
    ),
    (
        b"set k 0 60 3\r\nabc\r\n",
        TimeAndLossSensitive,
        "memcached",
        "memcached command",
    ),
    (
        b"\x30\x0c\x02\x01\x01\x60\x07",
        TimeAndLossSensitive,
        "LDAP",
        "LDAP request",
    ),
    (
        b"\x30\x84\0\0\0\x10\x02\x01\x01\x63\x07",
        TimeAndLossSensitive,
        "LDAP",
        "LDAP request",
    ),
    (
        b"l\0\x0b\0\0\0\0\0",
        TimeAndLossSensitive,
        "X11",
        "X11 set-up",
    ),
    (
        b"\x12\x01\0\x2f\0\0\0\0\0\0\x1a",
        TimeAndLossSensitive,
        "TDS",
        "TDS PRELOGIN",
    ),
    (
        b"\0\x1d\x01\x02\x01\0\0\x01\0\0\0\0\0\0\x07example\x03org\0\0\x01\0\x01",
        TimeAndLossSensitive,
        "DNS",
        "DNS query",
    ),
    (
        b"\x3c\0\0\0abcd\0\0\0\0\xdd\x07\0\0rest",
        TimeAndLossSensitive,
        "MongoDB",
        "MongoDB message",
    ),
    (
        b"\x13BitTorrent protocol\0\0",
        LossSensitive,
        "BitTorrent",
        "BitTorrent handshake",
    ),
    (b"NICK a\r\n", LossSensitive, "IRC", "IRC handshake"),
    (b"AMQP\0\0\x09\x01", LossSensitive, "AMQP", "AMQP handshake"),
];

/// What accepters begin with that speak first.
const GREETING_ROWS: &[(&[u8], Profile, &str, &str)] = &[
    (b"SSH-2.0-x\r\n", TimeAndLossSensitive, "SSH", "SSH banner"),
    (
        b"220 mx ESMTP Postfix\r\n",
        LossSensitive,
        "SMTP",
        "SMTP greeting",
    ),
    (
        b"220 (vsFTPd 3.0.3)\r\n",
        LossSensitive,
        "FTP",
        "FTP greeting",
    ),
    (
        b"220 h server (HylaFAX (tm) Version 6.0.7) ready.\r\n",
        Insensitive,
        "HylaFAX",
        "HylaFAX greeting",
    ),
    (b"+OK POP3\r\n", LossSensitive, "POP3", "POP3 greeting"),
    (
        b"* OK IMAP4rev1\r\n",
        LossSensitive,
        "IMAP",
        "IMAP greeting",
    ),
    (b"@RSYNCD: 31.0\n", LossSensitive, "rsync", "rsync greeting"),
    (
        b"RFB 003.008\n",
        TimeAndLossSensitive,
        "VNC",
        "VNC greeting",
    ),
    (
        b"J\0\0\0\x0a8.0.36\0",
        TimeAndLossSensitive,
        "MySQL",
        "MySQL greeting",
    ),
    (b"INFO {\"a\":1}", LossSensitive, "NATS", "NATS greeting"),
    (
        b"\xff\xfd\x18",
        TimeAndLossSensitive,
        "Telnet",
        "Telnet options",
    ),
    (
        b"( success ( 2 2 ( ) ) )",
        LossSensitive,
        "Subversion",
        "Subversion greeting",
    ),
];

fn rows() -> Vec<Row> {
    let row =
        |said, (profile, protocol, evidence)| (said, 7, None, Some((profile, protocol, evidence)));
    let http = HTTP_ROWS
        .iter()
        .map(|(request, answer, a, b, c)| row(get(request, answer), (*a, *b, *c)));
    let tls = TLS_ROWS
        .iter()
        .map(|(server, offers, port, executable, a, b, c)| {
            (tls(server, offers), *port, *executable, Some((*a, *b, *c)))
        });
    let openers = OPENER_ROWS
        .iter()
        .map(|(bytes, a, b, c)| row(opener(bytes), (*a, *b, *c)));
    let greetings = GREETING_ROWS
        .iter()
        .map(|(bytes, a, b, c)| row(vec![('<', bytes.to_vec())], (*a, *b, *c)));
    let mut rows: Vec<_> = http.chain(tls).chain(openers).chain(greetings).collect();

    let smtp = (LossSensitive, "SMTP", "SMTP greeting");
    rows.push(row(
        both(('<', "220-mx\r\n220 go\r\n"), ('>', "ehlo me\r\n")),
        smtp,
    ));
    rows.push(row(
        both(('<', "220 ready\r\n"), ('>', "USER a\r\n")),
        (LossSensitive, "FTP", "FTP greeting"),
    ));
    let nats = (LossSensitive, "NATS", "NATS greeting");
    rows.push(row(both(('>', "CONNECT {}\r\n"), ('<', "INFO {}")), nats));
    let rtmp = vec![('>', [&[3][..], &[0; 1536]].concat()), ('<', vec![3; 900])];
    rows.push(row(rtmp, (TimeSensitive, "RTMP", "RTMP handshake")));
    let long = opener(format!("GET /{} HTTP/1.1\r\n", "a".repeat(4000)));
    rows.push(row(long, (TimeAndLossSensitive, "HTTP", "HTTP request")));
    // In many records; with a name behind what is kept.
    let many = opener(client_hello(&sni("example.org"), 30));
    rows.push(row(
        many,
        (TimeAndLossSensitive, "TLS", "TLS to example.org"),
    ));
    let late = client_hello(
        &[&[0, 99, 8, 0][..], &[1; 2048], &sni("late")].concat(),
        9000,
    );
    rows.push(row(opener(late), (TimeAndLossSensitive, "TLS", "TLS")));
    let by_aria2 = Some((
        LossSensitive,
        "HTTP",
        "HTTP answer with application/json, by aria2c",
    ));
    rows.push((
        get("GET / HTTP/1.1", JSON),
        9,
        Some("/usr/bin/aria2c"),
        by_aria2,
    ));
    rows
}

#[test]
fn verdict__table_however_the_bytes_are_cut() {
    for (said, port, executable, want) in rows() {
        let longest = said.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
        for cut in 0..=longest {
            let mut classifier = Classifier::new(executable, port);
            feed(&mut classifier, &said, cut);
            classifier.conclude();
            let got = classifier
                .verdict()
                .map(|v| (v.profile, v.protocol.unwrap_or(""), &*v.evidence));
            assert_eq!(got, want, "cut behind {cut} bytes of {said:?}");
        }
    }
}

#[test]
fn verdict__byte_by_byte() {
    for (said, port, executable, want) in rows() {
        let mut classifier = Classifier::new(executable, port);
        for (at, (by, bytes)) in said.iter().enumerate() {
            for byte in bytes {
                match by {
                    '>' => classifier.sent(at as u64 * 10 * MS, &[*byte]),
                    _ => classifier.received(at as u64 * 10 * MS, &[*byte]),
                }
            }
        }
        classifier.conclude();
        let got = classifier
            .verdict()
            .map(|v| (v.profile, v.protocol.unwrap_or(""), &*v.evidence));
        assert_eq!(got, want, "{said:?}");
    }
}

/// What looks like a protocol and is none.
#[test]
fn verdict__not_of_others() {
    let none: [&[u8]; 14] = [
        b"GET /path\r\n",
        b"got /x HTTP/1.1\n",
        b"\x16\x03\x09\0\x05\x01\0\0\x01\0",
        b"\x16\x03\x01\0\x05\x02\0\0\x01\0",
        b"SSX-2.0",
        b"00zzgit-upload-pack",
        b"\x10\xff\xff\xff\xff\xff\xff\xff\xff",
        b"*x\r\n$1",
        b"\0\0\0\x09\x04\xd2\x16\x2f",
        b"\x80\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x02\0\0\0\0",
        b"\x30\x99\x02\x01",
        b"get\r\n",
        b"<?xml version='1.0'?><html>",
        b"\0\x20\0\0\x01\0\0\x01\0\0\0\0\0\0\xc0\x0c",
    ];
    for bytes in none {
        let mut classifier = Classifier::new(None, 443);
        classifier.sent(0, bytes);
        classifier.conclude();
        assert_eq!(classifier.verdict(), None, "{}", bytes.escape_ascii());
    }
}

#[test]
fn verdict__of_unknown_bytes_goes_by_executable_shape_and_port() {
    let run = |executable, port, gap: u64, len: usize| {
        let mut classifier = Classifier::new(executable, port);
        for at in 0..PACKETS as u64 {
            assert!(!classifier.is_done());
            classifier.sent(at * gap, &vec![b'!'; len]);
        }
        assert!(classifier.is_done());
        classifier
            .verdict()
            .map(|verdict| (verdict.profile, verdict.evidence.clone()))
    };
    let is = |profile, evidence: &str| Some((profile, evidence.to_owned()));
    assert_eq!(
        run(Some("rsync"), 5004, 20 * MS, 172),
        is(LossSensitive, "executable rsync")
    );
    // Games cannot be recognised, the web can.
    assert_eq!(
        run(None, 27015, 20 * MS, 172),
        is(TimeAndLossSensitive, "port 27015")
    );
    assert_eq!(
        run(None, 443, 20 * MS, 172),
        is(TimeSensitive, "paced: 172 to 172 bytes every 20 ms")
    );
    assert_eq!(
        run(None, 443, MS, 1448),
        is(LossSensitive, "bulk: 13032 bytes one way, 0 the other")
    );
    assert_eq!(run(None, 443, 900 * MS, 172), None);
    // Nothing was said at all: the port is what there is.
    let mut classifier = Classifier::new(None, 443);
    classifier.conclude();
    assert_eq!(classifier.verdict().map(|v| &*v.evidence), Some("port 443"));
}

#[test]
fn classifier__is_done_once() {
    let mut classifier = Classifier::new(None, 80);
    classifier.sent(0, b"SSH-2.0-x\r\n");
    let verdict = classifier.verdict().cloned();
    assert!(verdict.is_some() && classifier.is_done());
    assert_eq!(
        classifier.opener.bytes.capacity() + classifier.accepter.bytes.capacity(),
        0
    );
    classifier.sent(1, b"GET / HTTP/1.1\r\n\r\n");
    classifier.conclude();
    assert_eq!(classifier.verdict().cloned(), verdict);
}

#[test]
fn classifier__bears_a_clock_that_goes_back() {
    let mut classifier = Classifier::new(None, 443);
    for at in 0..PACKETS as u64 {
        classifier.sent(if at % 2 == 0 { 0 } else { u64::MAX }, &[b'!'; 1448]);
    }
    let profile = classifier.verdict().map(|verdict| verdict.profile);
    assert_eq!(profile, Some(LossSensitive), "bulk, at no pace");
}

/// Bytes that begin like a protocol, and go on anyhow.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let begins: Vec<_> = rows()
        .into_iter()
        .flat_map(|(said, ..)| said)
        .map(|(_, bytes)| bytes)
        .collect();
    let begun = (
        prop::sample::select(begins),
        0..300_usize,
        prop::collection::vec(any::<u8>(), 0..80),
    );
    let begun =
        begun.prop_map(|(begin, len, rest)| [&begin[..len.min(begin.len())], &rest].concat());
    prop_oneof![begun, prop::collection::vec(any::<u8>(), 0..3000)]
}

#[test]
fn classifier__takes_times_that_jump() {
    let mut classifier = Classifier::new(None, 7);
    for at in [0, u64::MAX].repeat(5) {
        classifier.sent(at, b"as long as the others");
    }
    classifier.conclude();
}

proptest! {
    #[test]
    fn classifier__takes_anything(
        said in prop::collection::vec((any::<bool>(), any::<u64>(), hostile()), 0..14),
        port: u16,
    ) {
        let mut classifier = Classifier::new(None, port);
        for (opener, now, bytes) in &said {
            match opener {
                true => classifier.sent(*now, bytes),
                false => classifier.received(*now, bytes),
            }
            prop_assert!(classifier.opener.bytes.len() <= HEAD && classifier.accepter.bytes.len() <= HEAD);
            prop_assert!(!classifier.is_done() || classifier.opener.bytes.capacity() == 0);
        }
        classifier.conclude();
        if let Some(verdict) = classifier.verdict() {
            prop_assert!(verdict.evidence.len() <= 400);
            prop_assert!(verdict.evidence.bytes().all(|b| (b' '..=b'~').contains(&b)), "{}", verdict.evidence);
        }
    }

    #[test]
    fn classifier__says_the_same_however_bytes_are_cut(one in hostile(), other in hostile(), first: bool, cut in 0..400_usize) {
        let by = if first { ['>', '<'] } else { ['<', '>'] };
        let said = [(by[0], one), (by[1], other)];
        let run = |cut| {
            let mut classifier = Classifier::new(None, 7);
            feed(&mut classifier, &said, cut);
            classifier.conclude();
            classifier.verdict().cloned()
        };
        prop_assert_eq!(run(0), run(cut));
    }
}
