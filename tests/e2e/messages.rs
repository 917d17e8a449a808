//! Messages of several packets, over links that lose some: programs in C, Rust and Python echo each
//! other's.

use std::{
    net::IpAddr,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use nix::sys::signal::{Signal, kill};
use vtl::{Error, Mode, Preference, Requirements, Services, Socket};
use vtl_testbed::{Host, Link};

use crate::{
    api::{Build, compile},
    harness::{PATIENCE, Process, World, payload, ready, repository, until},
    python::python,
};

/// Of the echoes.
const PORT: u16 = 7100;
const LONGEST: usize = 64 << 20;

fn lossy() -> Link {
    Link {
        loss_pct: 1.0,
        reorder_pct: 1.0,
        ..Link::new(5.0, 1000.0)
    }
}

fn on(world: &World, host: Host, mut words: Vec<String>) -> Command {
    let program = words.remove(0);
    let mut command = world.testbed.command(host, program).expect("there");
    command.args(words).env("VTL_SOCKET", world.socket(host));
    command
}

fn serve(world: &World, words: Vec<String>) -> Process {
    let mut server = Process::start(on(world, Host::Server, words).stdout(Stdio::piped()));
    ready(server.child());
    server
}

#[track_caller]
fn send(world: &World, words: Vec<String>) {
    let client = Process::piped(&mut on(world, Host::Client, words)).output();
    let words = String::from_utf8_lossy(&client.stderr);
    assert!(client.status.success(), "{words}");
}

fn program(world: &World, words: &[&str]) -> Vec<String> {
    let program = compile(world, Build::Shared).display().to_string();
    let words = words.iter().map(|word| (*word).to_owned());
    std::iter::once(program).chain(words).collect()
}

/// A script in Python with its words.
fn script(words: &[&str]) -> Vec<String> {
    let script = repository().join("python/tests/messages.py");
    let first = [python(), &script].map(|path| path.display().to_string());
    let words = words.iter().map(|word| (*word).to_owned());
    first.into_iter().chain(words).collect()
}

/// Sends messages of all lengths that are special, and wants them back.
fn exchange(socket: &mut Socket, max: usize) {
    let packet = socket.max_packet();
    assert_eq!(socket.max_message(), LONGEST);
    let mut buffer = vec![0; max];
    let sizes = [1, packet - 1, packet, packet + 1, 3 * packet, 1 << 20];
    for size in sizes.into_iter().filter(|size| *size < max).chain([max]) {
        let message = payload(size, 7);
        socket.send_message(&message).expect("sent");
        let got = socket.recv_message(&mut buffer).expect("received");
        assert!(buffer[..got] == message, "{got} bytes for {size}");
    }
}

fn echo(mut socket: Socket) {
    socket.validate().expect("a session");
    let mut buffer = vec![0; LONGEST];
    loop {
        let size = socket.recv_message(&mut buffer).expect("received");
        if size == 0 {
            return;
        }
        socket.send_message(&buffer[..size]).expect("sent");
    }
}

#[test]
fn messages__of_64_mb_from_rust_to_c_and_back() {
    let Some(world) = World::with_daemons("msg-c", &lossy()) else {
        return;
    };
    let mut server = serve(&world, program(&world, &["serve-messages"]));
    let mut client = world.aware(Mode::Initiator, PORT);
    client.negotiate(&Requirements::STREAM).expect("a session");
    let error = client.send_message(&vec![0; LONGEST + 1]);
    assert!(matches!(error, Err(Error::MessageSize { .. })), "{error:?}");
    exchange(&mut client, LONGEST);
    client.close().expect("closed");
    assert!(server.wait().success());
}

#[test]
fn messages__from_c_and_python_to_rust_and_back() {
    let Some(world) = World::with_daemons("msg-rust", &lossy()) else {
        return;
    };
    let address = world.servers()[0].to_string();
    let max = (4 << 20).to_string();
    let clients = [
        program(&world, &["messages", &address, &max]),
        script(&[&address, &max]),
        script(&["asyncio", &address, &max]),
    ];
    for client in clients {
        let server = world.aware(Mode::Responder, PORT);
        let server = thread::spawn(move || echo(server));
        send(&world, client);
        server.join().expect("the echo");
    }
}

#[test]
fn messages__from_rust_to_python_and_back() {
    let Some(world) = World::with_daemons("msg-python", &lossy()) else {
        return;
    };
    let mut server = serve(&world, script(&["serve"]));
    // It says that it is ready before it waits.
    until("the script waits at its port", || {
        world.status(Host::Server)["listeners"][0].is_number()
    });
    let mut client = world.aware(Mode::Initiator, PORT);
    client.negotiate(&Requirements::STREAM).expect("a session");
    exchange(&mut client, 16 << 20);
    client.close().expect("closed");
    assert!(server.wait().success());
}

#[test]
fn messages__over_every_graft_with_reliability_and_order_and_no_other() {
    let Some(world) = World::with_daemons("msg-grafts", &lossy()) else {
        return;
    };
    for graft in vtl_bpf::objects::GRAFTS.iter().map(|(name, _)| *name) {
        let server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        // Without congestion control it would rather fill the link.
        let params: &[(&str, u32)] = match graft {
            "udp-plus" => &[("rate", 100_000)],
            _ => &[],
        };
        let agreed = client.negotiate_over(graft, params).expect("a session");
        let whole = Services::RELIABLE | Services::ORDERED;
        if agreed.services.contains(whole) {
            let server = thread::spawn(move || echo(server));
            let slow = graft == "stop-and-wait";
            exchange(&mut client, if slow { 100_000 } else { 1 << 20 });
            client.close().expect("closed");
            server.join().expect("the echo");
            continue;
        }
        let packet = client.max_packet();
        assert_eq!(client.max_message(), packet, "{graft}");
        let error = client
            .send_message(&vec![0; packet + 1])
            .expect_err("too long");
        let sentence = format!(
            "a message has 1 to {packet} bytes in this session, not {}",
            packet + 1
        );
        assert_eq!(error.to_string(), sentence);
    }
}

#[test]
fn messages__in_lanes_overtake_those_of_others_only() {
    const LANES: u32 = 16;
    const EACH: u32 = 2000;
    let Some(world) = World::with_daemons("msg-lanes", &lossy()) else {
        return;
    };
    let mut server = world.aware(Mode::Responder, PORT);
    let mut client = world.aware(Mode::Initiator, PORT);
    let mut wanted = Requirements {
        services: Services::RELIABLE | Services::PARTIAL_ORDER,
        ..Requirements::default()
    };
    wanted.set(Services::ORDERED, Preference::Avoid);
    let agreed = client.negotiate(&wanted).expect("a session");
    assert_eq!(agreed.graft, "partial-order");
    let reader = thread::spawn(move || {
        server.validate().expect("a session");
        let mut buffer = vec![0; server.max_packet()];
        let mut lanes = [0_u32; LANES as usize];
        let (mut newest, mut overtaken) = (0, 0);
        loop {
            let size = server.recv_message(&mut buffer).expect("received");
            if size == 0 {
                return (lanes, overtaken);
            }
            let word = |at: usize| u32::from_le_bytes(buffer[at..at + 4].try_into().expect("four"));
            let (lane, number) = (word(0), word(4));
            assert_eq!(number, lanes[lane as usize], "lane {lane}");
            assert_eq!(buffer[8..size], payload(size - 8, number.into()));
            lanes[lane as usize] += 1;
            let place = number * LANES + lane;
            overtaken += u32::from(place < newest);
            newest = newest.max(place);
        }
    });
    for place in 0..LANES * EACH {
        let (number, lane) = (place / LANES, place % LANES);
        let mut message = [lane.to_le_bytes(), number.to_le_bytes()].concat();
        message.extend(payload((place % 1000) as usize, number.into()));
        client.send_in_lane(lane, &message).expect("sent");
    }
    client.close().expect("closed");
    let (lanes, overtaken) = reader.join().expect("the reader");
    assert_eq!(lanes, [EACH; LANES as usize]);
    assert!(overtaken > 100, "{overtaken} were overtaken");
}

#[test]
fn messages__cut_off_by_the_senders_end_are_no_messages() {
    let Some(world) = World::with_daemons("msg-cut", &Link::new(20.0, 50.0)) else {
        return;
    };
    let message = payload(LONGEST, 7);
    for how in ["close", "drop"] {
        let mut server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        client.negotiate(&Requirements::STREAM).expect("a session");
        client.send_message(b"whole").expect("sent");
        server.validate().expect("a session");
        client.set_timeout(Some(Duration::from_millis(300)));
        let error = client.send_message(&message);
        assert!(matches!(error, Err(Error::TimedOut)), "{error:?}");
        let mut buffer = vec![0; LONGEST];
        assert_eq!(server.recv_message(&mut buffer).expect("received"), 5);
        server.set_timeout(Some(Duration::from_millis(50)));
        let error = server.recv_message(&mut buffer);
        assert!(matches!(error, Err(Error::TimedOut)), "{error:?}");
        server.set_timeout(Some(PATIENCE));
        if how == "close" {
            let error = client.close();
            assert!(matches!(error, Err(Error::Misuse(_))), "{error:?}");
        } else {
            drop(client);
        }
        let end = server.recv_message(&mut buffer);
        assert!(matches!(end, Err(Error::Broken(_))), "{how}: {end:?}");
    }
    // A program that is killed.
    let mut server = world.aware(Mode::Responder, PORT);
    let address: IpAddr = world.servers()[0];
    let max = LONGEST.to_string();
    let words = program(&world, &["messages", &address.to_string(), &max]);
    let client = Process::piped(&mut on(&world, Host::Client, words));
    server.validate().expect("a session");
    let mut buffer = vec![0; LONGEST];
    let end = loop {
        match server.recv_message(&mut buffer) {
            Ok(size) if size > 0 => {
                // It may be gone already.
                let _ = server.send_message(&buffer[..size]);
                if size == 1 << 20 {
                    server.set_timeout(Some(Duration::from_millis(500)));
                }
            }
            Err(Error::TimedOut) => {
                let pid = nix::unistd::Pid::from_raw(client.pid() as i32);
                kill(pid, Signal::SIGKILL).expect("killed");
                server.set_timeout(Some(PATIENCE));
            }
            end => break end,
        }
    };
    assert!(matches!(end, Err(Error::Broken(_))), "{end:?}");
}
