//! A Hooker without the rest of the daemon.

use std::{
    io::Write,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use nix::sys::socket::{setsockopt, sockopt};
use vtld::hooker::{
    Broker, Carrier, ClientFlow, Config, ConnectError, Handle, HeldConnect, Hooker, ServerFlow,
};

/// Carries everything over plain TCP, and says what came. Ordered to, it acts as if there were a
/// session to every host, and answers from another thread.
#[derive(Default)]
struct Plain {
    handle: OnceLock<Handle>,
    session: Mutex<String>,
}

impl Broker for Plain {
    fn knows(&self, _host: IpAddr) -> bool {
        *self.session.lock().unwrap() == "full"
    }

    fn try_session(&self, held: HeldConnect) -> Result<(), HeldConnect> {
        let mode = self.session.lock().unwrap().clone();
        let answer: Box<dyn FnOnce(HeldConnect) + Send> = match mode.as_str() {
            "" | "full" => return Err(held),
            "accept" => Box::new(|held| {
                let greeting = format!("{} {}", held.src(), held.dest());
                held.accept(move |app| {
                    let mut app = app.unwrap();
                    app.write_all(greeting.as_bytes()).unwrap();
                    setsockopt(&app, sockopt::Linger, &NO_LINGER).unwrap();
                });
            }),
            "fall back" => Box::new(HeldConnect::fall_back),
            "drop" => Box::new(drop),
            "refuse" => Box::new(|held| held.refuse(ConnectError::Refused)),
            "unreachable" => Box::new(|held| held.refuse(ConnectError::HostUnreachable)),
            "timeout" => Box::new(|held| held.refuse(ConnectError::TimedOut)),
            _ => panic!("{mode}"),
        };
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            answer(held);
        });
        Ok(())
    }

    fn client(&self, flow: ClientFlow) {
        println!("client {} {}", flow.src, flow.dest);
        let handle = self.handle.get().unwrap().clone();
        let peer = flow.peer;
        flow.app.accept(move |app| {
            if let Ok(app) = app {
                handle.carry(app, peer, None);
            }
        });
    }

    fn server(&self, flow: ServerFlow) {
        println!("server {} {}", flow.client, flow.dest);
        let handle = self.handle.get().unwrap();
        let (app, guard) = handle.connect_local_app(flow.dest, flow.client).unwrap();
        handle.carry(flow.peer, app, Some(guard));
    }
}

const NO_LINGER: nix::libc::linger = nix::libc::linger {
    l_onoff: 0,
    l_linger: 0,
};

/// Does what its standard input says, a line at a time, and answers each on its standard output, where it
/// also tells of connections.
pub(crate) fn serve() {
    let broker = Arc::new(Plain::default());
    let config = Config {
        plain_ttl: Duration::from_secs(600),
        ..Config::default()
    };
    let hooker = Hooker::start(config, broker.clone(), &mut None).unwrap();
    assert!(broker.handle.set(hooker.handle()).is_ok());
    hooker.begin();
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, object) = line.split_once(' ').unwrap_or((&line, ""));
        let begin = Instant::now();
        let result = match verb {
            "pid" => hooker
                .hook_pid(object.parse().unwrap(), &Carrier::Best)
                .map(|id| id.to_string()),
            "port" => hooker
                .hook_port(object.parse().unwrap(), &Carrier::Best)
                .map(|id| id.to_string()),
            "cgroup" => hooker
                .hook_cgroup(object.as_ref(), &Carrier::Best)
                .map(|id| id.to_string()),
            "unhook" => hooker
                .unhook(object.parse().unwrap())
                .map(|()| String::new()),
            "forget" => {
                hooker
                    .handle()
                    .forget_plain(object.parse::<SocketAddr>().unwrap());
                Ok(String::new())
            }
            "session" => {
                object.clone_into(&mut broker.session.lock().unwrap());
                Ok(String::new())
            }
            "list" => Ok(format!("{:?}", hooker.list())),
            _ => panic!("{line}"),
        };
        match result {
            Ok(text) => println!("ok {text} {} us", begin.elapsed().as_micros()),
            Err(error) => println!("error {error}"),
        }
    }
    drop(hooker);
}
