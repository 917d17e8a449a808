//! A Hooker without the rest of the daemon.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use vtl_proto::frame::FlowName;
use vtld::hooker::{Broker, Carrier, ClientFlow, Config, Handle, HeldConnect, Hooker, ServerFlow};

/// Carries everything over plain TCP, and says what came. Ordered to, it acts as if there were an
/// association with every host.
#[derive(Default)]
struct Plain {
    handle: OnceLock<Handle>,
    knows: AtomicBool,
    last: AtomicU32,
}

impl Broker for Plain {
    fn knows(&self, _host: IpAddr) -> bool {
        self.knows.load(Ordering::Relaxed)
    }

    fn name_flow(&self, _held: &HeldConnect) -> FlowName {
        FlowName {
            tag: 7,
            number: self.last.fetch_add(1, Ordering::Relaxed) + 1,
        }
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
            "knows" => {
                broker.knows.store(true, Ordering::Relaxed);
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
