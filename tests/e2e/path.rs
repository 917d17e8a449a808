//! A path that takes smaller packets from some moment on, and says nothing.

use std::{thread, time::Duration};

use vtl::{Error, Mode, Socket};
use vtl_testbed::{Host, Link};

use crate::harness::{World, payload, same, until, words};

/// So much goes each way.
const SIZE: usize = 12 << 20;
const PORT: u16 = 7200;

/// The link's devices drop longer packets from now on.
#[track_caller]
fn shrink(world: &World, mtu: u32) {
    for device in ["to-client", "to-server"] {
        let mut command = world.testbed.command(Host::Router, "ip").expect("there");
        let mtu = mtu.to_string();
        let output = command
            .args(["link", "set", "dev", device, "mtu", &mtu])
            .output()
            .expect("ip runs");
        assert!(output.status.success(), "{}", words(&output));
    }
}

#[test]
fn path__shrinks_under_transfers() {
    let Some(world) = World::new("path", &Link::new(10.0, 50.0)) else {
        return;
    };
    world.serve("f", SIZE);
    for (i, server) in world.servers().into_iter().enumerate() {
        let file = world.path("file");
        std::fs::write(&file, payload(SIZE, 3)).expect("written");
        let got = world.path(&format!("got{i}"));
        let recv = world.start_recv(&got, &[]);
        let mut send = world.start_send(&file, &server.to_string());
        let mut download = world.start_download(server, "f");
        download.reaches(1_000_000);
        until("the transfer is under way", || {
            assert!(send.ended().is_none(), "vtl send has ended");
            world.sum(Host::Server, "received") > 500
        });
        shrink(&world, if i == 0 { 1400 } else { 1280 });
        let sent = send.output();
        assert!(sent.status.success(), "{}", words(&sent));
        assert!(recv.output().status.success());
        same(&file, &got);
        assert!(download.process.wait().success());
        download.check();
        shrink(&world, 1500);
        // Each end has found it out for what it sends.
        for host in [Host::Client, Host::Server] {
            let log = std::fs::read_to_string(world.log_path(host)).expect("a log");
            assert!(log.matches("path MTU reduced").count() > i, "{log}");
        }
    }
}

/// Interfaces of which the MTU is raised while vtld runs: frames are as long as the sessions opened from then on need.
#[test]
fn path__grows_between_sessions() {
    let link = Link {
        direct: true,
        ..Link::new(0.0, 0.0)
    };
    let Some(world) = World::with_daemons("path-grows", &link) else {
        return;
    };
    let echoed = || {
        let mut server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        client
            .negotiate(&vtl::Requirements::STREAM)
            .expect("a session");
        server.validate().expect("a session");
        let server = thread::spawn(move || echo(server));
        let mut buffer = vec![0; 1 << 20];
        client.send_message(&payload(1 << 20, 7)).expect("sent");
        let len = client.recv_message(&mut buffer).expect("its echo");
        assert!(buffer[..len] == payload(1 << 20, 7));
        let longest = client.max_packet();
        client.close().expect("closed");
        server.join().expect("the echo");
        longest
    };
    let before = echoed();
    for host in [Host::Client, Host::Server] {
        let mut command = world.testbed.command(host, "ip").expect("there");
        let set = ["link", "set", "dev", "eth0", "mtu", "1900"];
        let output = command.args(set).output().expect("ip runs");
        assert!(output.status.success(), "{}", words(&output));
    }
    until("sessions with longer packets", || echoed() >= before + 300);
}

#[test]
fn path__sessions_that_cannot_follow_end() {
    let Some(mut world) = World::with_daemons("path-end", &Link::new(10.0, 50.0)) else {
        return;
    };
    for graft in ["partial-order", "partial-reliability"] {
        let mut server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        // No packet may be lost for good.
        let params: &[(&str, u32)] = match graft {
            "partial-order" => &[],
            _ => &[("max-loss", 0)],
        };
        client.negotiate_over(graft, params).expect("a session");
        server.validate().expect("a session");
        let server = thread::spawn(move || echo(server));
        let before = client.max_packet();
        shrink(&world, 1300);
        client.send_message(&payload(before, 1)).expect("sent");
        let end = client.recv_message(&mut vec![0; before]);
        assert!(matches!(end, Err(Error::Broken(_))), "{graft}: {end:?}");
        server.join().expect("the echo");
        drop(client);
        // The next one knows.
        let mut server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        client.negotiate_over(graft, params).expect("a session");
        server.validate().expect("a session");
        let server = thread::spawn(move || echo(server));
        let now = client.max_packet();
        assert!((1136..=1240).contains(&now), "{graft}: {now}");
        client.send_message(&payload(now, 2)).expect("sent");
        let mut buffer = vec![0; now];
        assert_eq!(client.recv_message(&mut buffer).expect("its echo"), now);
        assert!(buffer == payload(now, 2));
        client.close().expect("closed");
        server.join().expect("the echo");
        shrink(&world, 1500);
        world.stop_daemons();
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
    }
}

/// Sends back what comes, until the session ends.
fn echo(mut socket: Socket) {
    socket.set_timeout(None);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(size @ 1..) = socket.recv_message(&mut buffer) {
        if socket.send_message(&buffer[..size]).is_err() {
            return;
        }
    }
}

#[test]
fn path__applications_learn_what_a_packet_takes_now() {
    let Some(mut world) = World::with_daemons("path-api", &Link::new(10.0, 50.0)) else {
        return;
    };
    for graft in ["selective-repeat", "udp"] {
        let mut server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        client.negotiate_over(graft, &[]).expect("a session");
        server.validate().expect("a session");
        let server = thread::spawn(move || echo(server));
        let before = client.max_packet();
        shrink(&world, 1300);
        let mut buffer = vec![0; 1 << 20];
        let mut sent = 0;
        until("the path is known", || {
            match client.send_message(&payload(before, sent)) {
                Ok(()) => sent += 1,
                Err(Error::MessageSize { .. }) => assert_eq!(graft, "udp"),
                Err(error) => panic!("{error}"),
            }
            client.max_packet() < before
        });
        let now = client.max_packet();
        assert!((1136..=1240).contains(&now), "{graft}: {now}");
        if graft == "udp" {
            let error = client.send_message(&vec![0; before]).expect_err("too long");
            assert!(matches!(error, Error::MessageSize { .. }), "{error:?}");
            // Nothing that is as long as before has come back; what fits does, though `udp` may lose one.
            client.set_timeout(Some(Duration::from_millis(500)));
            until("its echo", || {
                client.send_message(&payload(now, 7)).expect("sent");
                match client.recv_message(&mut buffer) {
                    Ok(len) => {
                        assert!(buffer[..len] == payload(now, 7));
                        true
                    }
                    Err(Error::TimedOut) => false,
                    Err(error) => panic!("{error}"),
                }
            });
        } else {
            for seed in 0..sent {
                assert_eq!(client.recv_message(&mut buffer).expect("its echo"), before);
                assert!(buffer[..before] == payload(before, seed));
            }
            client.send_message(&payload(1 << 20, 7)).expect("sent");
            assert_eq!(client.recv_message(&mut buffer).expect("its echo"), 1 << 20);
            assert!(buffer == payload(1 << 20, 7));
        }
        client.close().expect("closed");
        server.join().expect("the echo");
        shrink(&world, 1500);
        // What was found out is for everybody who goes there.
        let server = world.aware(Mode::Responder, PORT);
        let mut client = world.aware(Mode::Initiator, PORT);
        client.negotiate_over(graft, &[]).expect("a session");
        assert_eq!(client.max_packet(), now);
        drop((client, server));
        // And forgotten with the daemon.
        world.stop_daemons();
        world.start(Host::Server, &[]);
        world.start(Host::Client, &[]);
    }
}
