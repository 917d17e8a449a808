//! An unmodified curl and an unmodified nginx.

use std::fs;

use vtl_testbed::{Host, Link};

use crate::harness::{World, memory_kib, same, until, url, words};

const MB: usize = 1 << 20;

#[test]
fn web__every_byte_over_a_bad_link() {
    let Some(world) = World::new("web", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.meet();
    world.spoil();
    let sizes = [0, 1, MB, 8 * MB];
    for size in sizes {
        world.serve(&format!("f{size}"), size);
    }
    let mut total = 0;
    for server in world.servers() {
        for size in sizes {
            world.download(server, &format!("f{size}"));
            total += size;
        }
        // Side by side in one session.
        let names = ["f1048576", "f1", "f1048576", "f0", "f1048576"];
        let mut downloads = names.map(|name| world.start_download(server, name));
        for download in &mut downloads {
            assert!(download.process.wait().success());
            download.check();
        }
        total += 3 * MB + 1;
    }
    // VTL carried it, and nothing went around it.
    let carried = world.sum(Host::Client, "bytes_received");
    assert!(carried >= total as u64, "{carried} of {total} bytes");
    let status = world.status(Host::Client);
    let sessions = status["sessions"].as_array().expect("a list");
    assert_eq!(sessions.len(), 2, "one a family: {sessions:?}");
    assert!(
        status["packets"]["bad_checksum"].as_u64() > Some(0),
        "{}",
        status["packets"]
    );
}

#[test]
fn web__uploads_over_a_bad_link() {
    let Some(world) = World::new("put", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.spoil();
    let file = world.path("upload");
    fs::write(&file, crate::harness::payload(4 * MB, 7)).expect("written");
    world.meet();
    for (i, server) in world.servers().into_iter().enumerate() {
        let name = format!("up{i}");
        let from = file.to_str().expect("UTF-8");
        let output = world
            .curl(&["-T", from, &url(server, &name)])
            .output()
            .expect("curl runs");
        assert!(output.status.success(), "{}", words(&output));
        same(&file, &world.path("www").join(name));
    }
    // One may begin by TCP, which is how a server hears of a connection whose handshake's last ACK was lost.
    assert!(world.sum(Host::Client, "bytes_sent") > 4 * MB as u64);
}

#[test]
fn web__peer_without_vtl_gets_plain_tcp() {
    let Some(mut world) = World::bare("plain", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    world.serve("f", MB);
    for server in world.servers() {
        world.download(server, "f");
        world.download(server, "f");
        // As without VTL: 7 is curl's "failed to connect".
        let closed = url(server, "f").replace(":80/", ":81/");
        let output = world.curl(&[&closed]).output().expect("curl runs");
        assert_eq!(output.status.code(), Some(7), "{}", words(&output));
    }
    assert_eq!(
        world.status(Host::Client)["sessions"]
            .as_array()
            .map(Vec::len),
        Some(0)
    );
}

/// The kernel waits for 200 ms before it sends a tail again, since other hosts may delay acknowledgements as long.
#[test]
fn web__timeouts_are_shorter_where_the_peer_is_known() {
    let Some(mut world) = World::bare("timeout", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Client, &[]);
    world.serve("f", 64 * MB);
    // Of several connections the least: those on the server itself have the kernel's.
    let timeout = |world: &World, host, filter: &str| {
        let mut ss = world.testbed.command(host, "ss").expect("a namespace");
        let filter = ["-tinH", "state", "established", filter];
        let output = ss.args(filter).output().expect("ss runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let ms = (text.split_whitespace()).filter_map(|w| w.strip_prefix("rto:")?.parse().ok());
        ms.reduce(f64::min)
            .unwrap_or_else(|| panic!("no connection: {text:?}"))
    };
    world.set_rate(10.0);
    let [plain, peer] = world.servers();
    let mut download = world.start_download(plain, "f");
    download.reaches(64 << 10);
    let ms = timeout(
        &world,
        Host::Client,
        &format!("dst {plain} and dport = :80"),
    );
    assert!((200.0..=500.0).contains(&ms), "{ms} ms");
    download.process.kill();

    world.start(Host::Server, &[]);
    world.hook();
    let mut download = world.start_download(peer, "f");
    download.reaches(64 << 10);
    let ms = timeout(&world, Host::Server, "sport = :80");
    assert!((60.0..200.0).contains(&ms), "{ms} ms");
    download.process.kill();
}

#[test]
fn web__peer_is_found_though_its_first_answer_is_lost() {
    let Some(world) = World::new("answer", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", 8 * MB);
    for server in world.servers() {
        let lost = || world.testbed.stats().expect("an emulator").down.lost;
        let before = lost();
        world.mute_server(true);
        let mut download = world.start_download(server, "f");
        until("an answer is lost", || lost() > before);
        // TCP asks again after a second.
        world.mute_server(false);
        assert!(download.process.wait().success());
        download.check();
    }
    // The beginnings go by TCP.
    let carried = world.sum(Host::Client, "bytes_received");
    assert!(carried >= 8 * MB as u64, "VTL carried {carried} bytes");
}

/// Where the handshake's last segment is lost, and what answers to the server's repetitions too, the server hears of
/// the flow by its first bytes: the client sends them by TCP as well.
#[test]
fn web__peer_hears_of_a_flow_by_its_first_bytes() {
    let Some(world) = World::new("last", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.serve("f", MB);
    world.meet();
    let rules = "table inet last {
        chain out {
            type filter hook postrouting priority 0;
            tcp dport 80 tcp flags & (syn | ack | psh | fin | rst) == ack meta length < 120 drop
        }
    }";
    world.filter(Host::Client, rules);
    for server in world.servers() {
        let before = world.sum(Host::Client, "bytes_received");
        world.download(server, "f");
        let carried = world.sum(Host::Client, "bytes_received") - before;
        assert!(carried >= MB as u64, "VTL carried {carried} bytes");
    }
    let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
    assert_eq!(log.matches("may not know the flow").count(), 2);
}

#[test]
fn web__port_not_hooked_or_closed() {
    let Some(mut world) = World::bare("web-hooks", &Link::new(5.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.start(Host::Server, &[]);
    world.start(Host::Client, &[]);
    world.serve("f", MB);
    // A daemon there, the port not hooked.
    for server in world.servers() {
        world.download(server, "f");
    }
    assert_eq!(world.sum(Host::Client, "bytes_received"), 0);
    // A hooked port on which nobody listens, with and without a session.
    for add in ["81", "82"] {
        let output = world
            .vtl(Host::Server, &["hook", "add", "--port", add])
            .output()
            .expect("vtl");
        assert!(output.status.success(), "{}", words(&output));
    }
    for server in world.servers() {
        for port in ["81", "82"] {
            let closed = url(server, "f").replace(":80/", &format!(":{port}/"));
            let output = world.curl(&[&closed]).output().expect("curl runs");
            assert_eq!(output.status.code(), Some(7), "{}", words(&output));
        }
    }
}

#[test]
fn web__slow_readers_hold_the_sender_back() {
    let Some(mut world) = World::bare("slow", &Link::new(5.0, 200.0)) else {
        return;
    };
    world.start_web();
    world.start_both(&["--ring-slots", "64"]);
    world.serve("f", 6 * MB);
    world.serve("small", MB / 4);
    let [server, _] = world.servers();
    world.download(server, "small");
    let before = [Host::Client, Host::Server].map(|h| memory_kib(world.daemon(h).pid()));
    let slow = ["--limit-rate", "2M"];
    let mut downloads = [0, 1].map(|_| world.start_download_by(server, "f", &slow));
    downloads[0].reaches(MB as u64);
    // Others do not wait for the slow ones.
    world.download(server, "small");
    let after = [Host::Client, Host::Server].map(|h| memory_kib(world.daemon(h).pid()));
    for download in &mut downloads {
        assert!(download.process.wait().success());
        download.check();
    }
    for (before, after) in before.into_iter().zip(after) {
        assert!(after < before + 16 * 1024, "{before} KiB became {after}");
    }
}

#[test]
fn drivers__each_is_exact_on_each_hook() {
    for (driver, ingress) in [
        ("live", "tcx"),
        ("live", "xdp"),
        ("tc", "tcx"),
        ("tc", "xdp"),
    ] {
        let Some(mut world) = World::bare("driver", &Link::new(10.0, 100.0)) else {
            return;
        };
        world.start_web();
        let how = ["--driver", driver, "--ingress", ingress, "--shards", "2"];
        world.start_both(&how);
        world.meet();
        world.spoil();
        world.serve("f", MB);
        for server in world.servers() {
            world.download(server, "f");
        }
        let carried = world.sum(Host::Client, "bytes_received");
        assert!(carried >= 2 * MB as u64, "{driver}, {ingress}: {carried}");
        for host in [Host::Client, Host::Server] {
            let status = world.status(host);
            let interfaces = status["interfaces"].as_array().expect("a list");
            let used: Vec<_> = interfaces
                .iter()
                .filter_map(|i| i["driver"].as_str())
                .collect();
            assert!(
                used.iter().all(|name| name.contains(driver)) && !used.is_empty(),
                "{status}"
            );
        }
    }
}
