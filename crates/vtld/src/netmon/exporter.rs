//! `vtld --metrics`: the paths for Prometheus, over HTTP on a loopback address.
//!
//! Any program of this host may ask, and so may a web page in a browser here, with a name that leads to the loopback: its
//! Host header gives it away. So requests are bounded in size, time and number, figures are made once a second at most, and
//! nothing else is there.

use std::{
    fmt::{self, Write as _},
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Evidence, NetMonitor};
use vtl_core::netmon::Metrics;

/// Maximum size of a request's head, bytes.
const MAX_HEAD: usize = 4096;
/// Maximum number of a request's headers.
const MAX_HEADERS: usize = 32;
/// Time for a request, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of requests at a time.
const MAX_REQUESTS: usize = 16;
/// How long figures serve other requests, too.
const AGE: Duration = Duration::from_secs(1);
/// Pause after a failed accept: out of descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// A loopback address and a port, where figures may be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(SocketAddr);

impl fmt::Display for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Loopback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<SocketAddr>() {
            Ok(at) if at.ip().to_canonical().is_loopback() && at.port() != 0 => Ok(Self(at)),
            Ok(at) if at.port() == 0 => Err("the port must be from 1 to 65535".into()),
            Ok(at) => Err(format!(
                "{} is no loopback address: metrics are for programs of this host, so take 127.0.0.1:{} or [::1]:{}",
                at.ip(),
                at.port(),
                at.port()
            )),
            Err(_) => Err("must be a loopback address and a port, like 127.0.0.1:9300".into()),
        }
    }
}

/// Serves the figures until the process ends.
///
/// # Errors
/// The port is taken, or no thread can be started.
pub fn serve(at: Loopback, monitor: Arc<NetMonitor>) -> io::Result<()> {
    let listener = TcpListener::bind(at.0)?;
    let started = thread::Builder::new().name("vtl-metrics".into());
    let figures = Arc::new(Figures::new(monitor));
    started.spawn(move || accept(&listener, &figures, &Arc::default()))?;
    Ok(())
}

/// One of the requests at a time.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The figures, as text.
struct Figures {
    monitor: Arc<NetMonitor>,
    /// The latest ones, and when they were made.
    latest: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Figures {
    fn new(monitor: Arc<NetMonitor>) -> Self {
        Self {
            monitor,
            latest: Mutex::default(),
        }
    }

    fn text(&self) -> Arc<str> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = latest.take_if(|(made, _)| made.elapsed() >= AGE);
        let make = || (Instant::now(), text(&self.monitor.told()).into());
        Arc::clone(&latest.get_or_insert_with(make).1)
    }
}

/// Answers each request on a thread of its own. `count`: requests that are being answered.
fn accept(listener: &TcpListener, figures: &Arc<Figures>, count: &Arc<AtomicUsize>) {
    loop {
        let Ok((client, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        // Counted before it is compared, so that dropping it is right in any case.
        let is_full = count.fetch_add(1, Ordering::Relaxed) >= MAX_REQUESTS;
        let place = Place(Arc::clone(count));
        if is_full {
            continue;
        }
        let figures = Arc::clone(figures);
        let work = move || {
            // It fails if the client has gone, or is too slow.
            let _ = answer(client, &figures);
            drop(place);
        };
        let started = thread::Builder::new().name("vtl-metrics".into());
        if let Err(error) = started.stack_size(256 << 10).spawn(work) {
            tracing::warn!(%error, "metrics: no thread for a request");
        }
    }
}

fn answer(mut client: TcpStream, figures: &Figures) -> io::Result<()> {
    let ends = Instant::now() + PATIENCE;
    let left = || match ends.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::from(io::ErrorKind::TimedOut)),
        left => Ok(left),
    };
    let mut head = Vec::with_capacity(MAX_HEAD);
    let asked = loop {
        let mut more = [0; 1024];
        client.set_read_timeout(Some(left()?))?;
        let room = more.len().min(MAX_HEAD - head.len());
        let read = client.read(&mut more[..room])?;
        head.extend_from_slice(&more[..read]);
        match asked(&head) {
            Some(asked) => break asked,
            None if read == 0 || head.len() >= MAX_HEAD => break Err("400 Bad Request"),
            None => {}
        }
    };
    let (status, body) = match asked {
        Ok(()) => ("200 OK", figures.text()),
        Err(status) => (
            status,
            format!("{status}: GET /metrics of a loopback address is all there is\n").into(),
        ),
    };
    let mut said = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    said.push_str(&body);
    let mut rest = said.as_bytes();
    let ends = Instant::now() + PATIENCE;
    while !rest.is_empty() {
        let left = ends.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_write_timeout(Some(left))?;
        let written = client.write(rest)?;
        rest = &rest[written..];
    }
    Ok(())
}

/// Whether a request is for the figures, or why not: an HTTP status. `None` while its head is incomplete.
fn asked(head: &[u8]) -> Option<Result<(), &'static str>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Err(_) => return Some(Err("400 Bad Request")),
    }
    let mut hosts = request
        .headers
        .iter()
        .filter(|header| header.name.eq_ignore_ascii_case("host"));
    let path = request.path.unwrap_or_default().split('?').next();
    Some(if !hosts.all(|header| is_here(header.value)) {
        Err("403 Forbidden")
    } else if request.method != Some("GET") {
        Err("405 Method Not Allowed")
    } else if path != Some("/metrics") {
        Err("404 Not Found")
    } else {
        Ok(())
    })
}

/// Whether a Host header names the loopback: else it is from a page whose name was pointed there (DNS rebinding).
fn is_here(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else {
        return false;
    };
    let host = host.trim();
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) && !name.ends_with(':') => name,
        _ => host,
    };
    let ip = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'))
        .unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || ip
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// What one kind of connection has told of the path to a host, how long ago.
pub(super) type Row = (IpAddr, Evidence, Duration, Metrics);

/// A metric: its name, its help, and its value.
type Metric = (
    &'static str,
    &'static str,
    fn(&Duration, &Metrics) -> Option<f64>,
);

const METRICS: [Metric; 13] = [
    (
        "age_seconds",
        "Time since these connections had something new.",
        |age, _| Some(age.as_secs_f64()),
    ),
    (
        "min_rtt_seconds",
        "Minimum round-trip time lately.",
        |_, m| seconds(m.min_rtt),
    ),
    ("rtt_seconds", "Smoothed round-trip time.", |_, m| {
        seconds(m.rtt)
    }),
    (
        "rtt_variance_seconds",
        "Mean deviation of round-trip times.",
        |_, m| seconds(m.rtt_variance),
    ),
    ("packets", "Packets that the loss is of.", |_, m| {
        Some(m.packets as f64)
    }),
    ("loss_ratio", "Share of lost packets.", |_, m| m.loss),
    (
        "clear_loss_ratio",
        "Share of lost packets of those sent while no queue stood.",
        |_, m| m.clear_loss,
    ),
    (
        "loss_burst_packets",
        "How many of these are lost in a row, on average.",
        |_, m| m.loss_burst,
    ),
    (
        "reordering_ratio",
        "Share of packets that arrive behind later ones.",
        |_, m| m.reordering,
    ),
    (
        "delivery_bytes_per_second",
        "Rate of delivery of payload.",
        |_, m| Some(m.delivery_rate? as f64 / 8.0),
    ),
    (
        "bandwidth_bytes_per_second",
        "Rate that the path has for this host, of payload.",
        |_, m| Some(m.bandwidth?.rate as f64 / 8.0),
    ),
    (
        "bandwidth_at_least",
        "1 if the bandwidth is a lower bound, as less was sent.",
        |_, m| Some(f64::from(u8::from(m.bandwidth?.at_least))),
    ),
    (
        "looks_wireless",
        "1 if packets get lost in bursts while no queue stands.",
        |_, m| Some(f64::from(u8::from(m.looks_wireless()?))),
    ),
];

fn seconds(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64())
}

/// The figures in Prometheus's text format, version 0.0.4.
fn text(rows: &[Row]) -> String {
    let mut out = String::new();
    for (name, help, value) in METRICS {
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "# HELP vtl_path_{name} {help}\n# TYPE vtl_path_{name} gauge"
        );
        for (peer, evidence, age, metrics) in rows {
            if let Some(value) = value(age, metrics) {
                let _ = writeln!(
                    out,
                    "vtl_path_{name}{{peer=\"{peer}\",evidence=\"{evidence}\"}} {value}"
                );
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn loopback__no_other_address() {
        let parsed = |text: &str| text.parse::<Loopback>();
        assert!(parsed("127.0.0.1:9300").is_ok());
        assert!(parsed("[::1]:9300").is_ok());
        assert!(parsed("[::ffff:127.0.0.1]:9300").is_ok());
        for bad in ["0.0.0.0:9300", "[::]:9300", "192.0.2.1:9300"] {
            let why = parsed(bad).unwrap_err();
            assert!(
                why.contains("is no loopback address") && why.contains("127.0.0.1:9300"),
                "{why}"
            );
        }
        for bad in [
            "9300",
            "localhost:9300",
            "127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:70000",
            "",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn asked__only_for_the_figures_and_only_from_here() {
        let said = |text: &str| asked(text.as_bytes());
        let get = |rest: &str| said(&format!("GET /metrics HTTP/1.1\r\n{rest}\r\n"));
        assert_eq!(get(""), Some(Ok(())));
        for here in [
            "127.0.0.1",
            "127.0.0.1:9300",
            "localhost:9300",
            "[::1]:9300",
            "[::1]",
            "[::ffff:127.0.0.1]:9300",
            "LocalHost",
        ] {
            assert_eq!(get(&format!("Host: {here}\r\n")), Some(Ok(())), "{here}");
        }
        for other in [
            "evil.example",
            "evil.example:9300",
            "127.0.0.1.evil.example",
            "192.0.2.1",
            "localhost.evil",
            "\u{ff}",
            ":9300",
        ] {
            assert_eq!(
                get(&format!("Host: {other}\r\n")),
                Some(Err("403 Forbidden")),
                "{other}"
            );
        }
        let both = "Host: localhost\r\nhost: evil.example\r\n";
        assert_eq!(get(both), Some(Err("403 Forbidden")));
        assert_eq!(said("GET /metrics?a=b HTTP/1.1\r\n\r\n"), Some(Ok(())));
        assert_eq!(said("GET / HTTP/1.1\r\n\r\n"), Some(Err("404 Not Found")));
        assert_eq!(
            said("POST /metrics HTTP/1.1\r\n\r\n"),
            Some(Err("405 Method Not Allowed"))
        );
        assert_eq!(said("hello\r\n\r\n"), Some(Err("400 Bad Request")));
        assert_eq!(said("GET /metrics HTTP/1.1\r\nHost: loc"), None);
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        assert_eq!(get(&many), Some(Err("400 Bad Request")));
    }

    #[test]
    fn text__names_units_and_what_is_known() {
        let metrics = Metrics {
            min_rtt: Some(Duration::from_millis(20)),
            packets: 7,
            ..Metrics::default()
        };
        let row = (
            Ipv4Addr::new(192, 0, 2, 7).into(),
            Evidence::Tcp,
            Duration::from_secs(1),
            metrics,
        );
        let said = text(&[row]);
        assert!(said.contains("# TYPE vtl_path_min_rtt_seconds gauge\nvtl_path_min_rtt_seconds{peer=\"192.0.2.7\",evidence=\"tcp\"} 0.02\n"), "{said}");
        assert!(!said.contains("vtl_path_rtt_seconds{"), "{said}");
        assert!(!text(&[]).contains('{'));
    }

    /// Asks a server on a free port.
    fn ask(at: SocketAddr, request: &[u8]) -> String {
        let mut client = TcpStream::connect(at).unwrap();
        // The server may close before all was written.
        let _ = client.write_all(request);
        let mut said = Vec::new();
        let _ = client.read_to_end(&mut said);
        String::from_utf8(said).unwrap()
    }

    #[test]
    fn serve__answers_and_closes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let figures = Arc::new(Figures::new(Arc::default()));
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        thread::spawn(move || accept(&listener, &figures, &counted));
        let said = ask(at, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(said.starts_with("HTTP/1.1 200 OK\r\n"), "{said}");
        let (head, body) = said.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("Content-Length: {}\r\n", body.len())),
            "{head}"
        );
        assert!(body.starts_with("# HELP vtl_path_age_seconds"), "{body}");
        // What never ends is refused once it is too long: nothing is left to read that would reset the answer.
        let mut endless = b"GET /metrics HTTP/1.1\r\nX: ".to_vec();
        endless.resize(MAX_HEAD, b'x');
        let said = ask(at, &endless);
        assert!(said.starts_with("HTTP/1.1 400 "), "{said}");
        vtl_testing::until("all places are free", || count.load(Ordering::Relaxed) == 0);
        count.store(MAX_REQUESTS, Ordering::Relaxed);
        let get = b"GET /metrics HTTP/1.0\r\n\r\n";
        assert_eq!(ask(at, get), "", "all places are taken");
        count.store(0, Ordering::Relaxed);
        assert!(ask(at, get).starts_with("HTTP/1.1 200 OK\r\n"));
    }

    #[test]
    fn answer__gives_up_on_who_says_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (client, _) = listener.accept().unwrap();
        let figures = Figures::new(Arc::default());
        assert!(answer(client, &figures).is_err());
    }

    #[test]
    fn text__is_made_once_a_second() {
        let figures = Figures {
            monitor: Arc::default(),
            latest: Mutex::new(Some((Instant::now(), "before".into()))),
        };
        assert_eq!(&*figures.text(), "before");
        let long_ago = Instant::now().checked_sub(AGE).unwrap();
        *figures.latest.lock().unwrap() = Some((long_ago, "before".into()));
        assert!(figures.text().starts_with("# HELP"));
    }

    proptest! {
        #[test]
        fn asked__any_bytes(head in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = asked(&head);
            let _ = is_here(&head);
        }
    }
}
