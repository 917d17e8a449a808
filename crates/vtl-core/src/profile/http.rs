//! Protocols whose first line is a request: HTTP/1 (RFC 9112), RTSP (RFC 7826), SIP (RFC 3261), Icecast's sources.

use super::{
    Profile,
    bytes::{Match, Seen, Step, begins},
};
use Profile::{LossSensitive, TimeAndLossSensitive, TimeSensitive};

/// Bytes of a body that make it a file.
const FILE: u64 = 1 << 20;
/// Headers of a message that are looked at.
const HEADERS: usize = 48;
/// Methods of versioned and shared files (RFC 4918, RFC 3253).
const WEBDAV: &[&str] = &["PROPFIND", "REPORT", "MKCOL", "CHECKOUT", "MERGE"];
/// How the user agents of players begin.
const PLAYERS: &[&str] = &[
    "Lavf/",
    "VLC/",
    "mpv",
    "GStreamer",
    "NSPlayer",
    "AppleCoreMedia/",
];
/// Endings of playlists and segments (RFC 8216, ISO/IEC 23009-1).
const STREAMS: &[&str] = &[".m3u8", ".mpd", ".m4s", ".ts"];
/// Types of what is streamed besides `video/` and `audio/`.
const STREAMED: &[&str] = &[
    "application/vnd.apple.mpegurl",
    "application/x-mpegurl",
    "application/dash+xml",
    "application/ogg",
    "multipart/x-mixed-replace",
];
/// Types of files that nobody looks at while they come.
const FILES: &[&str] = &[
    "application/octet-stream",
    "application/zip",
    "application/gzip",
    "application/x-gzip",
    "application/x-tar",
    "application/x-xz",
    "application/zstd",
    "application/x-bzip2",
    "application/x-7z-compressed",
    "application/x-iso9660-image",
    "application/vnd.debian.binary-package",
    "application/x-debian-package",
    "application/x-rpm",
    "application/java-archive",
    "binary/octet-stream",
];

/// The first line's method, target and protocol. `Err`: there are none (`No`), or not yet (`More`).
fn first_line<'a>(seen: &Seen<'a>) -> Result<(&'a str, &'a str), Step> {
    let bytes = seen.opener;
    let method = bytes
        .iter()
        .take(18)
        .take_while(|b| b.is_ascii_uppercase() || **b == b'_' || **b == b'-')
        .count();
    match bytes.get(method) {
        None if method < 18 && !seen.opener_ended => return Err(Step::More),
        Some(b' ') if (3..18).contains(&method) => {}
        _ => return Err(Step::No),
    }
    let end = bytes.iter().position(|b| *b == b'\n');
    let line = &bytes[..end.unwrap_or(bytes.len())];
    // Visible ASCII: what is no text is no request.
    if line.iter().any(|b| !matches!(b, b' '..=b'~' | b'\r')) {
        return Err(Step::No);
    }
    if end.is_none() && !seen.opener_ended {
        return Err(Step::More);
    }
    let line = std::str::from_utf8(line).map_err(|_| Step::No)?.trim_end();
    let (_, rest) = line.split_once(' ').ok_or(Step::No)?;
    let (target, protocol) = rest.rsplit_once(' ').unwrap_or((rest, ""));
    Ok((target, protocol))
}

/// HTTP/1 by its request, and by the answer where the request leaves it open; RTSP, SIP and Icecast by their requests.
pub(super) fn identify(seen: &Seen<'_>) -> Step {
    let (target, protocol) = match first_line(seen) {
        Ok(line) => line,
        Err(step) => return step,
    };
    if protocol.starts_with("RTSP/") {
        return Step::Yes(Match::new("RTSP", TimeSensitive, "RTSP request"));
    }
    if protocol.starts_with("SIP/") {
        return Step::Yes(Match::new("SIP", TimeSensitive, "SIP request"));
    }
    if protocol.starts_with("ICE/") {
        return Step::Yes(Match::new("Icecast", TimeSensitive, "Icecast source"));
    }
    // A target longer than what is kept leaves no protocol.
    let cut = seen.opener_ended && !seen.opener.contains(&b'\n');
    let is_http = protocol.starts_with("HTTP/1.") || (cut && target.starts_with('/'));
    if !is_http {
        return Step::No;
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(seen.opener) {
        Ok(httparse::Status::Partial) if !seen.opener_ended => return Step::More,
        // Of a request that is too long or malformed, what was parsed counts.
        _ => {}
    }
    if let Some(found) = by_request(&request, target) {
        return Step::Yes(found);
    }
    by_response(seen)
}

fn header<'a>(headers: &'a [httparse::Header<'_>], name: &str) -> Option<&'a str> {
    let header = headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(header.value).ok()
}

fn length(headers: &[httparse::Header<'_>]) -> Option<u64> {
    header(headers, "content-length")?.trim().parse().ok()
}

fn by_request(request: &httparse::Request<'_, '_>, target: &str) -> Option<Match> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let upgrade = header(request.headers, "upgrade");
    if upgrade.is_some_and(|to| to.eq_ignore_ascii_case("websocket")) {
        return Some(Match::new("WebSocket", TimeAndLossSensitive, "WebSocket upgrade").general());
    }
    let agent = header(request.headers, "user-agent").unwrap_or_default();
    if query.starts_with("service=git-")
        || path.contains("/git-upload-pack")
        || agent.starts_with("git/")
    {
        return Some(Match::new("git", LossSensitive, "git over HTTP"));
    }
    if agent.starts_with("SVN/")
        || request
            .method
            .is_some_and(|method| WEBDAV.contains(&method))
    {
        return Some(Match::new("WebDAV", LossSensitive, "WebDAV request"));
    }
    if PLAYERS.iter().any(|player| agent.starts_with(player)) {
        return Some(Match::new(
            "HTTP",
            TimeSensitive,
            "HTTP request of a player",
        ));
    }
    if STREAMS.iter().any(|ending| path.ends_with(ending)) {
        return Some(Match::new(
            "HTTP",
            TimeSensitive,
            "HTTP request for a stream",
        ));
    }
    let upload = length(request.headers).filter(|len| *len >= FILE);
    upload.map(|len| Match::new("HTTP", LossSensitive, format!("HTTP upload of {len} bytes")))
}

fn by_response(seen: &Seen<'_>) -> Step {
    let mut bytes = seen.accepter;
    let web =
        |evidence: &str| Step::Yes(Match::new("HTTP", TimeAndLossSensitive, evidence).general());
    // As Icecast's predecessor has it.
    match begins(bytes, b"ICY ") {
        Some(true) => return Step::Yes(Match::new("Icecast", TimeSensitive, "Icecast answer")),
        None if !seen.accepter_ended => return Step::More,
        _ => {}
    }
    loop {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(bytes) {
            // An interim one.
            Ok(httparse::Status::Complete(len)) if matches!(response.code, Some(100..=199)) => {
                bytes = &bytes[len..];
            }
            Ok(httparse::Status::Partial) if !seen.accepter_ended => return Step::More,
            Ok(_) if response.code.is_some() => return Step::Yes(by_headers(response.headers)),
            _ => return web("HTTP request"),
        }
    }
}

fn by_headers(headers: &[httparse::Header<'_>]) -> Match {
    let kind = header(headers, "content-type").unwrap_or_default();
    let kind = kind
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    let shown: String = kind
        .chars()
        .filter(char::is_ascii_graphic)
        .take(60)
        .collect();
    let len = length(headers);
    let media = kind.starts_with("video/") || kind.starts_with("audio/");
    if media || STREAMED.contains(&&*kind) {
        return Match::new("HTTP", TimeSensitive, format!("HTTP answer with {shown}"));
    }
    let attached = header(headers, "content-disposition").is_some_and(|how| {
        how.get(..10)
            .is_some_and(|how| how.eq_ignore_ascii_case("attachment"))
    });
    // Scripts and pictures of a page are small; a type that says nothing needs a length that does.
    let page = kind.starts_with("text/html") || kind.starts_with("image/");
    let file = FILES.contains(&&*kind) && len.is_none_or(|len| len >= FILE / 16);
    if attached || file || (!page && len.is_some_and(|len| len >= FILE)) {
        let len = len.map_or(String::new(), |len| format!(", {len} bytes"));
        return Match::new(
            "HTTP",
            LossSensitive,
            format!("HTTP answer with a file{len}"),
        );
    }
    let shown = if shown.is_empty() {
        "no type".into()
    } else {
        shown
    };
    Match::new(
        "HTTP",
        TimeAndLossSensitive,
        format!("HTTP answer with {shown}"),
    )
    .general()
}
