//! An application that opens many sessions, and holds them until it is killed.

use std::{net::SocketAddr, thread, time::Duration};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use vtl::{Error, Listener, Mode, Requirements, Socket, control};

/// Says "ready" once it listens, or is about to connect, and "all" once it has all sessions.
pub(crate) fn run(role: &str, at: &str, count: &str) {
    let (_, max) = getrlimit(Resource::RLIMIT_NOFILE).expect("there is a limit");
    setrlimit(Resource::RLIMIT_NOFILE, max, max).expect("within the limit");
    let at: SocketAddr = at.parse().expect("an address");
    let count: usize = count.parse().expect("a number");
    let daemon = control::socket_path(None);
    let mut held = Vec::new();
    match role {
        "listen" => {
            let mut listener = Listener::bind(at.port(), &daemon).expect("a port");
            println!("ready");
            held.extend((0..count).map(|_| listener.accept().expect("a session")));
        }
        "connect" => {
            println!("ready");
            let open = || -> Result<Socket, Error> {
                let mut socket = Socket::init(Mode::Initiator, at, &daemon)?;
                socket.negotiate(&Requirements::STREAM)?;
                Ok(socket)
            };
            held.extend((0..count).map(|_| open().expect("a session")));
        }
        _ => panic!("{role} is no role"),
    }
    println!("all");
    // One that its peer has closed would be readable.
    loop {
        thread::sleep(Duration::from_secs(1));
        for socket in &mut held {
            let got = socket.try_recv_data(&mut [0]).expect("open");
            assert_eq!(got, None);
        }
    }
}
