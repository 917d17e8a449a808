//! Protocols, by the first bytes of each direction.
//!
//! A signature looks at what has come so far and says yes, no, or that it needs more. It may only say yes or no
//! to what further bytes cannot change, and none behind it is asked while it needs more: so a verdict
//! does not depend on how the bytes were cut.

use super::{Profile, http, tls};
use Profile::{Insensitive, LossSensitive, TimeAndLossSensitive, TimeSensitive};

/// What has come so far.
pub(super) struct Seen<'a> {
    /// The beginnings of what the opener and the accepter of the connection have sent.
    pub(super) opener: &'a [u8],
    pub(super) accepter: &'a [u8],
    /// Nothing will be added to these.
    pub(super) opener_ended: bool,
    pub(super) accepter_ended: bool,
    /// All that the opener has sent, bytes.
    pub(super) opener_total: u64,
    /// The accepter has spoken before the opener did.
    pub(super) accepter_first: bool,
    /// The connection's destination port.
    pub(super) port: u16,
}

/// A protocol that was recognised.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Match {
    pub(super) protocol: &'static str,
    pub(super) profile: Profile,
    pub(super) evidence: String,
    /// It carries applications of every kind.
    pub(super) general: bool,
}

impl Match {
    pub(super) fn new(
        protocol: &'static str,
        profile: Profile,
        evidence: impl Into<String>,
    ) -> Self {
        Self {
            protocol,
            profile,
            evidence: evidence.into(),
            general: false,
        }
    }

    pub(super) fn general(self) -> Self {
        Self {
            general: true,
            ..self
        }
    }
}

/// What a signature says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    No,
    More,
    Yes(Match),
}

type Signature = fn(&Seen<'_>) -> Step;

/// Of openers. The cheap ones come first.
const OPENERS: &[Signature] = &[
    ssh,
    opener_words,
    tls::identify,
    http::identify,
    postgresql,
    smb,
    stun,
    tpkt_or_rtmp,
    mqtt,
    rpc,
    redis,
    git,
    telnet,
    xmpp,
    memcached,
    ldap,
    x11,
    tds,
    dns,
    mongodb,
];

/// Of accepters that speak first.
const GREETINGS: &[Signature] = &[ssh, greeting_words, reply_220, telnet_greeting, mysql];

/// Protocols whose openers begin with these bytes.
const OPENER_WORDS: &[(&[u8], &str, Profile)] = &[
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/2",
        TimeAndLossSensitive,
    ),
    (b"\x13BitTorrent protocol", "BitTorrent", LossSensitive),
    (b"@RSYNCD: ", "rsync", LossSensitive),
    (b"AMQP\0", "AMQP", LossSensitive),
    (b"AMQP\x03", "AMQP", LossSensitive),
    (b"CAP LS", "IRC", LossSensitive),
    (b"NICK ", "IRC", LossSensitive),
];

/// Protocols whose accepters greet with these bytes.
const GREETING_WORDS: &[(&[u8], &str, Profile)] = &[
    (b"RFB 003.", "VNC", TimeAndLossSensitive),
    (b"+OK", "POP3", LossSensitive),
    (b"* OK", "IMAP", LossSensitive),
    (b"* PREAUTH", "IMAP", LossSensitive),
    (b"* BYE", "IMAP", LossSensitive),
    (b"@RSYNCD: ", "rsync", LossSensitive),
    (b"( success ( ", "Subversion", LossSensitive),
    (b"INFO {", "NATS", LossSensitive),
];

/// Whether connections to a port show what they are, in the clear or inside TLS: bytes there that no signature
/// knows are something else.
pub(super) fn recognises(port: u16) -> bool {
    // Telnet's and rlogin's successors, RTP, data connections of FTP and games have nothing to be known by.
    !matches!(port, 20 | 23 | 513 | 5004..=5005 | 6881..=6889 | 27015..=27050)
}

/// Which signatures have said no: they will not say anything else.
#[derive(Debug, Default)]
pub(super) struct RuledOut {
    openers: bool,
    greetings: bool,
}

fn ask(seen: &Seen<'_>, signatures: &[Signature], ruled_out: &mut bool) -> Step {
    if *ruled_out {
        return Step::No;
    }
    for signature in signatures {
        match signature(seen) {
            Step::No => {}
            step => return step,
        }
    }
    *ruled_out = true;
    Step::No
}

/// The protocol, if what has come shows it.
pub(super) fn identify(seen: &Seen<'_>, ruled_out: &mut RuledOut) -> Step {
    let RuledOut { openers, greetings } = ruled_out;
    let mut openers = || ask(seen, OPENERS, openers);
    let mut greetings = || ask(seen, GREETINGS, greetings);
    // Some clients do not wait for the greeting of their server, and their requests may not be known by themselves.
    match seen.accepter_first {
        true => match greetings() {
            // It may take a request to be sure of it.
            Step::More => match openers() {
                Step::No => Step::More,
                other => other,
            },
            Step::No => openers(),
            found => found,
        },
        false => match openers() {
            Step::No => greetings(),
            // A greeting may be needed to be sure of it.
            other => other,
        },
    }
}

/// Whether bytes begin with a word, as far as they have come.
pub(super) fn begins(bytes: &[u8], word: &[u8]) -> Option<bool> {
    if bytes.is_empty() {
        // An empty vector points nowhere: some processors take 100 ns to compare nothing there.
        return None;
    }
    let common = bytes.len().min(word.len());
    match bytes[..common] == word[..common] {
        false => Some(false),
        true if bytes.len() < word.len() => None,
        true => Some(true),
    }
}

fn words(bytes: &[u8], table: &[(&[u8], &'static str, Profile)], kind: &str) -> Step {
    let mut step = Step::No;
    for &(word, protocol, profile) in table {
        match begins(bytes, word) {
            Some(true) => {
                return Step::Yes(Match::new(protocol, profile, format!("{protocol} {kind}")));
            }
            Some(false) => {}
            None => step = Step::More,
        }
    }
    step
}

fn ssh(seen: &Seen<'_>) -> Step {
    // Both sides begin so, neither waits for the other.
    let bytes = match seen.accepter_first {
        true => seen.accepter,
        false => seen.opener,
    };
    match begins(bytes, b"SSH-") {
        None => Step::More,
        Some(false) => Step::No,
        // Remote login, and files besides, which only the program tells.
        Some(true) => Step::Yes(Match::new("SSH", TimeAndLossSensitive, "SSH banner").general()),
    }
}

fn opener_words(seen: &Seen<'_>) -> Step {
    words(seen.opener, OPENER_WORDS, "handshake")
}

fn greeting_words(seen: &Seen<'_>) -> Step {
    words(seen.accepter, GREETING_WORDS, "greeting")
}

/// Asks a condition at a number of bytes, and before that for more.
fn at_least(bytes: &[u8], len: usize, test: impl FnOnce(&[u8]) -> Option<Match>) -> Step {
    match bytes.get(..len) {
        None => Step::More,
        Some(bytes) => test(bytes).map_or(Step::No, Step::Yes),
    }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    u32::from_be_bytes(word.unwrap_or_default())
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    be32(bytes, at).swap_bytes()
}

fn has(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len())
        .any(|part| part.eq_ignore_ascii_case(word))
}

/// Servers of mail, files and fax greet alike (RFC 5321, RFC 959): by its text, else by what the client says, else the port.
fn reply_220(seen: &Seen<'_>) -> Step {
    match begins(seen.accepter, b"220") {
        Some(true) => {}
        Some(false) => return Step::No,
        None => return Step::More,
    }
    let lines = seen.accepter.split_inclusive(|byte| *byte == b'\n');
    let last = lines
        .clone()
        .position(|line| line.starts_with(b"220 ") && line.ends_with(b"\n"));
    let text = match last {
        Some(last) => &seen.accepter[..lines.take(last + 1).map(<[u8]>::len).sum()],
        None if seen.accepter_ended => seen.accepter,
        None => return Step::More,
    };
    let smtp = || Step::Yes(Match::new("SMTP", LossSensitive, "SMTP greeting"));
    let ftp = || Step::Yes(Match::new("FTP", LossSensitive, "FTP greeting"));
    if has(text, b"hylafax") {
        return Step::Yes(Match::new("HylaFAX", Insensitive, "HylaFAX greeting"));
    }
    if has(text, b"smtp") {
        return smtp();
    }
    if has(text, b"ftp") {
        return ftp();
    }
    let Some(command) = seen.opener.get(..4) else {
        return match (seen.opener_ended, seen.port) {
            (false, _) => Step::More,
            (true, 21 | 990) => ftp(),
            (true, 25 | 465 | 587) => smtp(),
            (true, _) => Step::No,
        };
    };
    match &command.to_ascii_uppercase()[..] {
        b"EHLO" | b"HELO" | b"LHLO" => smtp(),
        b"USER" | b"AUTH" | b"FEAT" | b"OPTS" | b"SYST" | b"HOST" => ftp(),
        _ => Step::No,
    }
}

/// MySQL's and MariaDB's first packet: length, number 0, protocol 10, the server's version in print.
fn mysql(seen: &Seen<'_>) -> Step {
    at_least(seen.accepter, 8, |b| {
        let version = b[5..]
            .iter()
            .all(|byte| byte.is_ascii_digit() || *byte == b'.');
        (b[2] == 0 && b[3] == 0 && b[4] == 10 && version)
            .then(|| Match::new("MySQL", TimeAndLossSensitive, "MySQL greeting").general())
    })
}

/// An option (RFC 854): IAC, WILL to DONT, and one that is assigned.
fn iac(bytes: &[u8]) -> Step {
    match begins(bytes, b"\xff") {
        None => return Step::More,
        Some(false) => return Step::No,
        Some(true) => {}
    }
    at_least(bytes, 3, |b| {
        let known = matches!(b[1], 0xfb..=0xfe) && (b[2] <= 49 || b[2] == 255);
        known.then(|| Match::new("Telnet", TimeAndLossSensitive, "Telnet options"))
    })
}

fn telnet(seen: &Seen<'_>) -> Step {
    iac(seen.opener)
}

fn telnet_greeting(seen: &Seen<'_>) -> Step {
    iac(seen.accepter)
}

/// A start-up packet, or a request for TLS, GSSAPI or cancelling.
fn postgresql(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    if begins(b, &[0, 0]) == Some(false) {
        return Step::No;
    }
    at_least(b, 8, |b| {
        let (len, code) = (be32(b, 0), be32(b, 4));
        let known = match code {
            // Versions 3.0 and 3.2.
            0x0003_0000 | 0x0003_0002 => (9..=10_000).contains(&len),
            80_877_103 | 80_877_104 => len == 8,
            80_877_102 => len >= 16,
            _ => false,
        };
        known.then(|| {
            Match::new("PostgreSQL", TimeAndLossSensitive, "PostgreSQL start-up").general()
        })
    })
}

fn smb(seen: &Seen<'_>) -> Step {
    if begins(seen.opener, &[0]) == Some(false) {
        return Step::No;
    }
    at_least(seen.opener, 8, |b| {
        let known = matches!(b[4], 0xfd..=0xff) && &b[5..8] == b"SMB";
        known.then(|| Match::new("SMB", LossSensitive, "SMB negotiation"))
    })
}

/// STUN or TURN over TCP (RFC 8489): what calls begin with.
fn stun(seen: &Seen<'_>) -> Step {
    if begins(seen.opener, &[0]) == Some(false) {
        return Step::No;
    }
    at_least(seen.opener, 8, |b| {
        let known = matches!(b[1], 1 | 3) && be32(b, 4) == 0x2112_a442;
        known.then(|| Match::new("STUN", TimeSensitive, "STUN request"))
    })
}

/// Both begin with 3: RDP's connection request (MS-RDPBCGR 2.2.1.1) in a TPKT, and RTMP's C0, which a C1 of 1,536 bytes
/// follows and an S0 answers.
fn tpkt_or_rtmp(seen: &Seen<'_>) -> Step {
    const C0_AND_C1: u64 = 1 + 1536;
    let b = seen.opener;
    match begins(b, &[3]) {
        None => return Step::More,
        Some(false) => return Step::No,
        Some(true) if b.len() < 6 => return Step::More,
        Some(true) => {}
    }
    let len = u16::from_be_bytes([b[2], b[3]]);
    if b[1] == 0 && len >= 11 && u16::from(b[4]) == len - 5 && b[5] == 0xe0 {
        return Step::Yes(Match::new(
            "RDP",
            TimeAndLossSensitive,
            "RDP connection request",
        ));
    }
    match seen.accepter.first() {
        None => Step::More,
        Some(3) if seen.opener_total >= C0_AND_C1 => {
            Step::Yes(Match::new("RTMP", TimeSensitive, "RTMP handshake"))
        }
        Some(_) => Step::No,
    }
}

/// CONNECT: type, remaining length (1 to 4 bytes), the protocol's name.
fn mqtt(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    if begins(b, &[0x10]) == Some(false) {
        return Step::No;
    }
    let more = b
        .iter()
        .skip(1)
        .take(4)
        .take_while(|byte| **byte >= 0x80)
        .count();
    if more == 4 {
        return Step::No;
    }
    at_least(b, 2 + more + 6, |b| {
        let name = &b[2 + more..];
        let known = name == b"\0\x04MQTT" || name == b"\0\x06MQIs";
        known.then(|| Match::new("MQTT", LossSensitive, "MQTT CONNECT"))
    })
}

/// A call of ONC RPC in its record (RFC 5531): NFS and what comes with it.
fn rpc(seen: &Seen<'_>) -> Step {
    if begins(seen.opener, &[0x80]) == Some(false) {
        return Step::No;
    }
    at_least(seen.opener, 20, |b| {
        let evidence = match be32(b, 16) {
            100_003 => "NFS call",
            100_005 => "NFS mount call",
            _ => "RPC call",
        };
        (be32(b, 8) == 0 && be32(b, 12) == 2)
            .then(|| Match::new("ONC RPC", LossSensitive, evidence))
    })
}

/// A command: `*`, how many words, `$`, how long the first is; or `PING` in a line.
fn redis(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    let yes = || Step::Yes(Match::new("Redis", TimeAndLossSensitive, "Redis command").general());
    match begins(b, b"PING\r\n") {
        Some(true) => return yes(),
        None => return Step::More,
        Some(false) => {}
    }
    if begins(b, b"*") == Some(false) {
        return Step::No;
    }
    let digits = b[1..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    if digits > 7 {
        return Step::No;
    }
    match begins(&b[1 + digits..], b"\r\n$") {
        Some(true) if digits > 0 => yes(),
        Some(_) => Step::No,
        None => Step::More,
    }
}

/// git's own protocol: a pkt-line with a service.
fn git(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    if b.iter().take(4).any(|byte| !byte.is_ascii_hexdigit()) {
        return Step::No;
    }
    match begins(b.get(4..).unwrap_or_default(), b"git-") {
        None => Step::More,
        Some(false) => Step::No,
        Some(true) => Step::Yes(Match::new("git", LossSensitive, "git request")),
    }
}

fn xmpp(seen: &Seen<'_>) -> Step {
    const STREAM: &[u8] = b"<stream:stream";
    let b = &seen.opener[..seen.opener.len().min(512)];
    let (xml, stream) = (begins(b, b"<?xml"), begins(b, STREAM));
    if (xml, stream) == (Some(false), Some(false)) {
        return Step::No;
    }
    let found = b.windows(STREAM.len()).any(|part| part == STREAM);
    match found {
        true => Step::Yes(Match::new("XMPP", LossSensitive, "XMPP stream")),
        false if b.len() == 512 => Step::No,
        false => Step::More,
    }
}

/// A command of the text protocol, up to the end of its line.
fn memcached(seen: &Seen<'_>) -> Step {
    const COMMANDS: [&str; 10] = [
        "get", "gets", "set", "add", "replace", "incr", "decr", "stats", "version", "mg",
    ];
    let b = &seen.opener[..seen.opener.len().min(300)];
    let end = b.windows(2).position(|two| two == b"\r\n");
    let line = match end {
        Some(end) => &b[..end],
        // Its end may be half there.
        None => b.strip_suffix(b"\r").unwrap_or(b),
    };
    let line = std::str::from_utf8(line).unwrap_or("\0");
    let mut words = line.split(' ');
    let command = words.next().unwrap_or_default();
    let known = match (end, line.contains(' ')) {
        (None, false) => COMMANDS.iter().any(|word| word.starts_with(command)),
        _ => COMMANDS.contains(&command),
    };
    if !known || line.bytes().any(|byte| !(b' '..=b'~').contains(&byte)) {
        return Step::No;
    }
    let arguments = words.count();
    let right = match command {
        "set" | "add" | "replace" => (4..=5).contains(&arguments),
        "stats" => arguments <= 2,
        "version" => arguments == 0,
        _ => arguments >= 1,
    };
    match end {
        Some(_) if right => {
            Step::Yes(Match::new("memcached", TimeAndLossSensitive, "memcached command").general())
        }
        None if b.len() < 300 => Step::More,
        _ => Step::No,
    }
}

/// A message of BER with number and request to bind or search (RFC 4511).
fn ldap(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    if begins(b, &[0x30]) == Some(false) {
        return Step::No;
    }
    // Of the length: one byte, or as many as its first one says.
    let extra = match b.get(1) {
        None => return Step::More,
        Some(len @ 0x81..=0x84) => usize::from(len & 0x7f),
        Some(0..=0x7f) => 0,
        Some(_) => return Step::No,
    };
    at_least(b, 2 + extra + 4, |b| {
        let b = &b[2 + extra..];
        let known = b[..2] == [2, 1] && matches!(b[3], 0x60 | 0x63 | 0x77);
        known.then(|| Match::new("LDAP", TimeAndLossSensitive, "LDAP request"))
    })
}

fn x11(seen: &Seen<'_>) -> Step {
    if !matches!(seen.opener.first(), None | Some(b'l' | b'B')) {
        return Step::No;
    }
    at_least(seen.opener, 6, |b| {
        let known = matches!(b, b"l\0\x0b\0\0\0" | b"B\0\0\x0b\0\0");
        known.then(|| Match::new("X11", TimeAndLossSensitive, "X11 set-up"))
    })
}

/// Microsoft SQL Server's PRELOGIN (MS-TDS 2.2.6.5), whose first option is VERSION.
fn tds(seen: &Seen<'_>) -> Step {
    if begins(seen.opener, &[0x12, 1]) == Some(false) {
        return Step::No;
    }
    at_least(seen.opener, 9, |b| {
        let known = b[4..8] == [0; 4] && b[8] == 0;
        known.then(|| Match::new("TDS", TimeAndLossSensitive, "TDS PRELOGIN"))
    })
}

/// A query (RFC 1035, RFC 7766): one question, no answers, and a name of bounded labels.
fn dns(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    // Length below 4,096; a query, opcode 0; one question; nothing but that and additional records.
    let right = |at: usize, byte: u8| match at {
        0 => byte < 16,
        4 => byte & 0xf8 == 0,
        5 => byte & 0x8f == 0,
        7 => byte == 1,
        6 | 8..=12 => byte == 0,
        13 => byte <= 2,
        _ => true,
    };
    if b.iter()
        .take(14)
        .enumerate()
        .any(|(at, byte)| !right(at, *byte))
    {
        return Step::No;
    }
    let mut at = 14;
    loop {
        match b.get(at) {
            None => return Step::More,
            Some(0) => break,
            Some(len @ 1..=63) if at < 14 + 255 => at += 1 + usize::from(*len),
            Some(_) => return Step::No,
        }
    }
    at_least(b, at + 5, |b| {
        let len = usize::from(u16::from_be_bytes([b[0], b[1]]));
        let internet = b[at + 3..] == [0, 1];
        (internet && len + 2 >= b.len())
            .then(|| Match::new("DNS", TimeAndLossSensitive, "DNS query"))
    })
}

/// A message's header: length, numbers, and the code of OP_MSG, OP_QUERY or OP_COMPRESSED.
fn mongodb(seen: &Seen<'_>) -> Step {
    let b = seen.opener;
    if b.len() >= 4 && !(16..48_000_000).contains(&le32(b, 0)) {
        return Step::No;
    }
    at_least(b, 16, |b| {
        let known = le32(b, 8) == 0 && matches!(le32(b, 12), 2004 | 2012 | 2013);
        known.then(|| Match::new("MongoDB", TimeAndLossSensitive, "MongoDB message").general())
    })
}
