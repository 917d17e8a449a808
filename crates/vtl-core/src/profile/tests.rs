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

fn greeting(bytes: impl AsRef<[u8]>) -> Vec<Said> {
    vec![('<', bytes.as_ref().to_vec())]
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

fn web_rows() -> Vec<Row> {
    let json = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20";
    let zip = "HTTP/1.1 200 OK\r\ncontent-type: application/zip\r\ncontent-length: 70000000";
    let continued =
        "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: VIDEO/mp4; codecs=x";
    let web = Some((
        TimeAndLossSensitive,
        "HTTP",
        "HTTP answer with application/json",
    ));
    let file = Some((
        LossSensitive,
        "HTTP",
        "HTTP answer with a file, 70000000 bytes",
    ));
    vec![
        (get("GET / HTTP/1.1", json), 80, None, web),
        (
            get("GET / HTTP/1.1", json),
            9,
            Some("/usr/bin/aria2c"),
            Some((
                LossSensitive,
                "HTTP",
                "HTTP answer with application/json, by aria2c",
            )),
        ),
        (get("GET /f.zip HTTP/1.0", zip), 80, None, file),
        (
            get("GET /v HTTP/1.1", continued),
            80,
            None,
            Some((TimeSensitive, "HTTP", "HTTP answer with video/mp4")),
        ),
        (
            get("GET /live/a.m3u8?x=1 HTTP/1.1", ""),
            80,
            None,
            Some((TimeSensitive, "HTTP", "HTTP request for a stream")),
        ),
        (
            get("GET /r HTTP/1.0", "ICY 200 OK\r\nicy-br:128"),
            80,
            None,
            Some((TimeSensitive, "Icecast", "Icecast answer")),
        ),
        (
            get("PUT /x HTTP/1.1\r\nContent-Length: 5000000", json),
            80,
            None,
            Some((LossSensitive, "HTTP", "HTTP upload of 5000000 bytes")),
        ),
        (
            get("GET /c HTTP/1.1\r\nUpgrade: websocket", ""),
            80,
            None,
            Some((TimeAndLossSensitive, "WebSocket", "WebSocket upgrade")),
        ),
        (
            get("GET /r.git/info/refs?service=git-upload-pack HTTP/1.1", ""),
            80,
            None,
            Some((LossSensitive, "git", "git over HTTP")),
        ),
        (
            get("PROPFIND /dav HTTP/1.1", ""),
            80,
            None,
            Some((LossSensitive, "WebDAV", "WebDAV request")),
        ),
        (
            opener(format!("GET /{} HTTP/1.1\r\n", "a".repeat(4000))),
            80,
            None,
            Some((TimeAndLossSensitive, "HTTP", "HTTP request")),
        ),
        (
            opener("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            80,
            None,
            Some((TimeAndLossSensitive, "HTTP/2", "HTTP/2 handshake")),
        ),
        (
            opener("OPTIONS rtsp://h/s RTSP/1.0\r\nCSeq: 1\r\n\r\n"),
            80,
            None,
            Some((TimeSensitive, "RTSP", "RTSP request")),
        ),
        (
            opener("INVITE sip:a@b SIP/2.0\r\n"),
            80,
            None,
            Some((TimeSensitive, "SIP", "SIP request")),
        ),
        (
            opener("SOURCE /m ICE/1.0\r\n"),
            80,
            None,
            Some((TimeSensitive, "Icecast", "Icecast source")),
        ),
        (
            tls("example.org", &["h2", "http/1.1"]),
            443,
            None,
            Some((
                TimeAndLossSensitive,
                "HTTPS",
                "TLS to example.org offers h2",
            )),
        ),
        (
            tls("example.org", &["h2"]),
            443,
            Some("wget"),
            Some((
                LossSensitive,
                "HTTPS",
                "TLS to example.org offers h2, by wget",
            )),
        ),
        (
            tls("m.example.org", &["x", "imap"]),
            443,
            None,
            Some((LossSensitive, "IMAP", "TLS to m.example.org offers imap")),
        ),
        (
            tls("r1---sn.googlevideo.com", &["h2"]),
            443,
            None,
            Some((TimeSensitive, "TLS", "TLS to r1---sn.googlevideo.com")),
        ),
        (
            tls("notgooglevideo.com", &["h2"]),
            443,
            None,
            Some((
                TimeAndLossSensitive,
                "HTTPS",
                "TLS to notgooglevideo.com offers h2",
            )),
        ),
        (
            opener(client_hello(&sni("mail.example.org"), 30)),
            993,
            None,
            Some((LossSensitive, "TLS", "TLS to mail.example.org, port 993")),
        ),
        (
            opener(client_hello(
                &[&[0, 99, 8, 0][..], &[1; 2048], &sni("late")].concat(),
                9000,
            )),
            7,
            None,
            Some((TimeAndLossSensitive, "TLS", "TLS")),
        ),
        (
            opener(client_hello(&sni("bad\nname"), 900)),
            7,
            None,
            Some((TimeAndLossSensitive, "TLS", "TLS")),
        ),
    ]
}

fn rows() -> Vec<Row> {
    let dns = [
        &[0, 29, 1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 7][..],
        b"example\x03org\0\0\x01\0\x01",
    ]
    .concat();
    let rtmp = vec![('>', [&[3][..], &[0; 1536]].concat()), ('<', vec![3; 900])];
    let mongo = [
        &[60, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0xdd, 7, 0, 0][..],
        &[0; 20],
    ]
    .concat();
    let nfs = [
        0x80, 0, 0, 40, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0x86, 0xa3, 0, 0, 0, 3,
    ];
    let mut rows = web_rows();
    let mut row = |said, profile, protocol, evidence| {
        rows.push((said, 7, None, Some((profile, protocol, evidence))))
    };
    row(
        opener("SSH-2.0-OpenSSH_9.2\r\n"),
        TimeAndLossSensitive,
        "SSH",
        "SSH banner",
    );
    row(
        greeting("SSH-2.0-x\r\n"),
        TimeAndLossSensitive,
        "SSH",
        "SSH banner",
    );
    row(
        greeting("220 mx ESMTP Postfix\r\n"),
        LossSensitive,
        "SMTP",
        "SMTP greeting",
    );
    row(
        both(('<', "220-mx\r\n220 go\r\n"), ('>', "ehlo me\r\n")),
        LossSensitive,
        "SMTP",
        "SMTP greeting",
    );
    row(
        greeting("220 (vsFTPd 3.0.3)\r\n"),
        LossSensitive,
        "FTP",
        "FTP greeting",
    );
    row(
        both(('<', "220 ready\r\n"), ('>', "USER a\r\n")),
        LossSensitive,
        "FTP",
        "FTP greeting",
    );
    row(
        greeting("220 h server (HylaFAX (tm) Version 6.0.7) ready.\r\n"),
        Insensitive,
        "HylaFAX",
        "HylaFAX greeting",
    );
    row(
        greeting("+OK POP3\r\n"),
        LossSensitive,
        "POP3",
        "POP3 greeting",
    );
    row(
        greeting("* OK IMAP4rev1\r\n"),
        LossSensitive,
        "IMAP",
        "IMAP greeting",
    );
    row(
        greeting("@RSYNCD: 31.0\n"),
        LossSensitive,
        "rsync",
        "rsync greeting",
    );
    row(
        greeting("RFB 003.008\n"),
        TimeAndLossSensitive,
        "VNC",
        "VNC greeting",
    );
    row(
        greeting("J\0\0\0\x0a8.0.36\0"),
        TimeAndLossSensitive,
        "MySQL",
        "MySQL greeting",
    );
    row(
        greeting("INFO {\"a\":1}"),
        LossSensitive,
        "NATS",
        "NATS greeting",
    );
    row(
        greeting(b"\xff\xfd\x18"),
        TimeAndLossSensitive,
        "Telnet",
        "Telnet options",
    );
    row(
        opener(b"\xff\xfb\x18"),
        TimeAndLossSensitive,
        "Telnet",
        "Telnet options",
    );
    row(
        opener(b"\0\0\0\x08\x04\xd2\x16\x2f"),
        TimeAndLossSensitive,
        "PostgreSQL",
        "PostgreSQL start-up",
    );
    row(
        opener(b"\0\0\0\x20\0\x03\0\0user\0a\0"),
        TimeAndLossSensitive,
        "PostgreSQL",
        "PostgreSQL start-up",
    );
    row(
        opener(b"\0\0\0\xa0\xfeSMB@\0"),
        LossSensitive,
        "SMB",
        "SMB negotiation",
    );
    row(
        opener(b"\0\x01\0\x08\x21\x12\xa4\x42"),
        TimeSensitive,
        "STUN",
        "STUN request",
    );
    row(
        opener(b"\x03\0\0\x13\x0e\xe0\0\0\0\0\0"),
        TimeAndLossSensitive,
        "RDP",
        "RDP connection request",
    );
    row(rtmp, TimeSensitive, "RTMP", "RTMP handshake");
    row(
        opener(b"\x10\x25\0\x04MQTT\x04"),
        LossSensitive,
        "MQTT",
        "MQTT CONNECT",
    );
    row(
        opener(b"\x10\xa5\x01\0\x06MQIsdp\x03"),
        LossSensitive,
        "MQTT",
        "MQTT CONNECT",
    );
    row(opener(nfs), LossSensitive, "ONC RPC", "NFS call");
    row(
        opener("*2\r\n$3\r\nGET\r\n"),
        TimeAndLossSensitive,
        "Redis",
        "Redis command",
    );
    row(
        opener("PING\r\n"),
        TimeAndLossSensitive,
        "Redis",
        "Redis command",
    );
    row(
        opener("002fgit-upload-pack /r\0host=h\0"),
        LossSensitive,
        "git",
        "git request",
    );
    row(
        opener("<?xml version='1.0'?><stream:stream to='x'>"),
        LossSensitive,
        "XMPP",
        "XMPP stream",
    );
    row(
        opener("set k 0 60 3\r\nabc\r\n"),
        TimeAndLossSensitive,
        "memcached",
        "memcached command",
    );
    row(
        opener(b"\x30\x0c\x02\x01\x01\x60\x07"),
        TimeAndLossSensitive,
        "LDAP",
        "LDAP request",
    );
    row(
        opener(b"\x30\x84\0\0\0\x10\x02\x01\x01\x63\x07"),
        TimeAndLossSensitive,
        "LDAP",
        "LDAP request",
    );
    row(
        opener(b"l\0\x0b\0\0\0\0\0"),
        TimeAndLossSensitive,
        "X11",
        "X11 set-up",
    );
    row(
        opener(b"\x12\x01\0\x2f\0\0\0\0\0\0\x1a"),
        TimeAndLossSensitive,
        "TDS",
        "TDS PRELOGIN",
    );
    row(opener(dns), TimeAndLossSensitive, "DNS", "DNS query");
    row(
        opener(mongo),
        TimeAndLossSensitive,
        "MongoDB",
        "MongoDB message",
    );
    row(
        opener(b"\x13BitTorrent protocol\0\0"),
        LossSensitive,
        "BitTorrent",
        "BitTorrent handshake",
    );
    row(opener("NICK a\r\n"), LossSensitive, "IRC", "IRC handshake");
    row(
        opener("AMQP\0\0\x09\x01"),
        LossSensitive,
        "AMQP",
        "AMQP handshake",
    );
    row(
        greeting("( success ( 2 2 ( ) ) )"),
        LossSensitive,
        "Subversion",
        "Subversion greeting",
    );
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
