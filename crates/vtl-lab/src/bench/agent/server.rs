//! The end that answers and sends.

use std::io::{self, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::Context;
use vtl::Listener;

use super::conn::{Conn, run_blocking};
use super::graft::Session;
use super::tcp::{self, Tcp};
use super::workload::serve;
use super::{Order, Protocol, READY, Summary, aware, own_peak_kb, quic, say, udp};

/// TCP connections, to look at in the end.
type Watched = Arc<Mutex<Vec<OwnedFd>>>;

pub(super) fn run(order: &Order) -> anyhow::Result<()> {
    let summary: Box<dyn Fn() -> Summary> = match &order.protocol {
        Protocol::Tcp(_) | Protocol::LossyTcp => {
            let (control, lossy) = match &order.protocol {
                Protocol::Tcp(control) => (control.as_deref(), false),
                _ => (None, true),
            };
            let listener = tcp::bind_listener(order.address, control)
                .with_context(|| format!("cannot listen on {}", order.address))?;
            let watched = Watched::default();
            let seen = Arc::clone(&watched);
            thread::spawn(move || accept(&listener, &seen, lossy));
            Box::new(move || tcp_summary(&watched))
        }
        Protocol::Graft { name, daemon, .. } => {
            let rate = order.rate_mbit;
            let mut listener = Listener::bind(order.address.port(), daemon)?;
            thread::spawn(move || {
                let mut failed = false;
                loop {
                    match Session::accept(&mut listener) {
                        Ok(session) if session.is_stream() => serve_apart(session),
                        Ok(session) => apart(move || session.serve_messages(rate)),
                        Err(error) if failed => return eprintln!("no more sessions: {error}"),
                        // Perhaps one session's own fault.
                        Err(error) => {
                            eprintln!("a session is missing: {error}");
                            failed = true;
                            continue;
                        }
                    }
                    failed = false;
                }
            });
            let settings = name.clone();
            Box::new(move || Summary {
                settings: settings.clone(),
                ..Summary::default()
            })
        }
        Protocol::Aware { rule, daemon } => {
            let mut listener = Listener::bind(order.address.port(), daemon)?;
            let served = Arc::new(rule.clone());
            thread::spawn(move || {
                while let Ok(socket) = listener.accept() {
                    let rule = Arc::clone(&served);
                    apart(move || aware::serve(socket, &rule));
                }
            });
            let settings = rule.own.to_string();
            Box::new(move || Summary {
                settings: settings.clone(),
                ..Summary::default()
            })
        }
        Protocol::Quic(control) => {
            let server = quic::Server::start(order, control)?;
            Box::new(move || server.summary())
        }
        Protocol::Udp => {
            let server = udp::Server::start(order)?;
            Box::new(move || server.summary())
        }
    };
    say(&READY)?;
    let _ = io::stdin().lock().read_to_end(&mut Vec::new());
    say(&Summary {
        peak_kb: own_peak_kb(),
        ..summary()
    })?;
    std::process::exit(0);
}

fn accept(listener: &TcpListener, watched: &Watched, lossy: bool) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        if let (Ok(fd), Ok(mut watched)) = (tcp::watch(&stream), watched.lock()) {
            watched.push(fd);
        }
        match Tcp::new(stream) {
            Ok(conn) if lossy => apart(move || conn.serve_what_arrives()),
            Ok(conn) => serve_apart(conn),
            Err(_) => {}
        }
    }
}

fn tcp_summary(watched: &Watched) -> Summary {
    let Ok(watched) = watched.lock() else {
        return Summary::default();
    };
    let mut summary = Summary::default();
    for socket in watched.iter() {
        let (sent, again) = tcp::retransmissions(socket);
        summary.sent += sent;
        summary.again += again;
    }
    if let Some(socket) = watched.last() {
        summary.settings = tcp::settings(socket);
    }
    summary
}

/// Answers a client, on a thread of its own.
fn serve_apart(mut conn: impl Conn + Send + 'static) {
    apart(move || run_blocking(serve(&mut conn)));
}

fn apart(work: impl FnOnce() -> io::Result<()> + Send + 'static) {
    // The client says what went wrong.
    let work = move || drop(work());
    let _ = thread::Builder::new().stack_size(512 * 1024).spawn(work);
}
