//! TLS, by its ClientHello (RFC 8446, section 4.1.2): the server's name (RFC 6066) and the protocols offered (RFC 7301).
//!
//! Ours rather than a crate's: `tls-parser` wants whole records, builds all of a message and brings nom and a build script,
//! where two extensions of a message that may be cut anywhere are wanted.

use super::{
    Profile,
    bytes::{Match, Seen, Step},
};
use Profile::{LossSensitive, TimeAndLossSensitive, TimeSensitive};

/// Protocols (of IANA's list) that applications offer besides those of the web.
const ALPN: &[(&str, &str, Profile)] = &[
    ("imap", "IMAP", LossSensitive),
    ("pop3", "POP3", LossSensitive),
    ("smtp", "SMTP", LossSensitive),
    ("ftp", "FTP", LossSensitive),
    ("nntp", "NNTP", LossSensitive),
    ("nnsp", "NNTP", LossSensitive),
    ("irc", "IRC", LossSensitive),
    ("managesieve", "ManageSieve", LossSensitive),
    ("xmpp-client", "XMPP", LossSensitive),
    ("xmpp-server", "XMPP", LossSensitive),
    ("mqtt", "MQTT", LossSensitive),
    ("smb", "SMB", LossSensitive),
    ("sunrpc", "ONC RPC", LossSensitive),
    ("sip/2", "SIP", TimeSensitive),
    ("webrtc", "WebRTC", TimeSensitive),
    ("c-webrtc", "WebRTC", TimeSensitive),
    ("stun.turn", "STUN", TimeSensitive),
    ("stun.nat-discovery", "STUN", TimeSensitive),
    ("dot", "DNS", TimeAndLossSensitive),
    ("postgresql", "PostgreSQL", TimeAndLossSensitive),
    ("h2", "HTTPS", TimeAndLossSensitive),
    ("http/1.1", "HTTPS", TimeAndLossSensitive),
    ("http/1.0", "HTTPS", TimeAndLossSensitive),
];

/// Whose servers send moving pictures or calls and nothing else: those of the thesis's examples.
const STREAMING: &[&str] = &["googlevideo.com", "nflxvideo.net", "ttvnw.net", "zoom.us"];

/// What a ClientHello says, as far as it is legible.
#[derive(Debug, Default, PartialEq, Eq)]
struct Hello<'a> {
    server: Option<&'a str>,
    /// The first protocol that is in the table, or the first of all.
    offers: Option<&'a str>,
}

/// Takes fields from the front; `None`: there is not so much.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// A number of 1 to 3 bytes.
    fn number(&mut self, bytes: usize) -> Option<usize> {
        let bytes = self.take(bytes)?;
        Some(
            bytes
                .iter()
                .fold(0, |number, byte| number << 8 | usize::from(*byte)),
        )
    }

    /// A vector behind its length; of one that was cut, what there is.
    fn vector(&mut self, bytes: usize) -> Option<Reader<'a>> {
        let len = self.number(bytes)?;
        Some(Reader(self.take(len.min(self.0.len()))?))
    }
}

/// The handshake's bytes, out of as many records as they were put in. `None`: some are no records of a handshake.
fn handshake(opener: &[u8]) -> Option<Vec<u8>> {
    let mut handshake = Vec::with_capacity(opener.len());
    let mut records = Reader(opener);
    while let Some(header) = records.take(3) {
        if header[0] != 22 || header[1] != 3 {
            return None;
        }
        let Some(record) = records.vector(2) else {
            break;
        };
        handshake.extend_from_slice(record.0);
        // All of the message: what follows may be anything.
        let mut message = Reader(&handshake);
        let len = message.take(1).and_then(|_| message.number(3));
        if len.is_some_and(|len| message.0.len() >= len) {
            break;
        }
    }
    Some(handshake)
}

fn hello(body: &[u8]) -> Hello<'_> {
    let mut hello = Hello::default();
    // What is wrong in it, its server sees to.
    let _ = extensions(body, &mut hello);
    hello
}

fn extensions<'a>(body: &'a [u8], hello: &mut Hello<'a>) -> Option<()> {
    let mut body = Reader(body);
    // Version and random, session, cipher suites, compression.
    body.take(34)?;
    body.vector(1)?;
    body.vector(2)?;
    body.vector(1)?;
    let mut extensions = body.vector(2)?;
    loop {
        let kind = extensions.number(2)?;
        let mut extension = extensions.vector(2)?;
        match kind {
            0 => {
                let mut names = extension.vector(2)?;
                if names.number(1)? == 0 {
                    hello.server = hello.server.or(name(names.vector(2)?.0));
                }
            }
            16 => {
                let mut names = extension.vector(2)?;
                while let Some(offered) = names.vector(1) {
                    let Some(offered) = name(offered.0) else {
                        continue;
                    };
                    let known = |name: &str| ALPN.iter().any(|(alpn, ..)| *alpn == name);
                    if hello
                        .offers
                        .is_none_or(|former| !known(former) && known(offered))
                    {
                        hello.offers = Some(offered);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A name that can be shown.
fn name(bytes: &[u8]) -> Option<&str> {
    let legible = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_/".contains(byte);
    let right = (1..=253).contains(&bytes.len()) && bytes.iter().all(legible);
    right.then(|| std::str::from_utf8(bytes).ok())?
}

/// TLS by its first message.
pub(super) fn identify(seen: &Seen<'_>) -> Step {
    let opener = seen.opener;
    let right = |at: usize, byte: u8| match at {
        0 => byte == 22,
        1 => byte == 3,
        2 => byte <= 4,
        5 => byte == 1,
        _ => true,
    };
    if opener
        .iter()
        .take(6)
        .enumerate()
        .any(|(at, byte)| !right(at, *byte))
    {
        return Step::No;
    }
    if opener.len() < 6 && !seen.opener_ended {
        return Step::More;
    }
    if opener.len() < 6 {
        return Step::No;
    }
    let handshake = handshake(opener).unwrap_or_default();
    let mut message = Reader(&handshake);
    let body = message
        .take(1)
        .and_then(|_| message.number(3))
        .map(|len| (len, message.0));
    match body {
        None if !seen.opener_ended && !handshake.is_empty() => Step::More,
        Some((len, body)) if body.len() < len && !seen.opener_ended => Step::More,
        _ => Step::Yes(verdict(
            &hello(body.map_or(&[], |(_, body)| body)),
            seen.port,
        )),
    }
}

fn verdict(hello: &Hello<'_>, port: u16) -> Match {
    let to = hello
        .server
        .map_or(String::new(), |server| format!(" to {server}"));
    let known = hello
        .offers
        .and_then(|offered| ALPN.iter().find(|(alpn, ..)| *alpn == offered));
    let under = |domain: &&str| {
        let host = hello.server.and_then(|server| server.strip_suffix(*domain));
        host.is_some_and(|host| host.is_empty() || host.ends_with('.'))
    };
    if STREAMING.iter().any(under) {
        return Match::new("TLS", TimeSensitive, format!("TLS{to}"));
    }
    match (known, hello.offers, Profile::of(port)) {
        (Some((alpn, protocol, profile)), ..) => {
            let found = Match::new(protocol, *profile, format!("TLS{to} offers {alpn}"));
            if *protocol == "HTTPS" {
                found.general()
            } else {
                found
            }
        }
        (None, _, Some(profile)) => {
            Match::new("TLS", profile, format!("TLS{to}, port {port}")).general()
        }
        (None, Some(offered), None) => Match::new(
            "TLS",
            TimeAndLossSensitive,
            format!("TLS{to} offers {offered}"),
        )
        .general(),
        (None, None, None) => Match::new("TLS", TimeAndLossSensitive, format!("TLS{to}")).general(),
    }
}
