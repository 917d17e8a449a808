//! Another version of VTL at one of the hosts.

use std::path::PathBuf;

use vtl_testbed::{Host, Link};

use crate::harness::{World, payload, until};

const MB: usize = 1 << 20;

/// Programs get what the other version has, or plain TCP, and never an error.
#[test]
#[ignore = "needs vtld of another version: VTL_OTHER=/path/to/vtld"]
fn versions__live_together() {
    let other = std::env::var_os("VTL_OTHER").map(PathBuf::from);
    let other = other.expect("VTL_OTHER: the path of another vtld");
    for old in [Host::Client, Host::Server] {
        let Some(mut world) = World::bare("versions", &Link::new(10.0, 50.0)) else {
            return;
        };
        world.start_web();
        for host in [Host::Server, Host::Client] {
            match host == old {
                true => world.start_other(host, &other),
                false => world.start(host, &[]),
            }
        }
        world.hook();
        world.serve("f", 4 * MB);
        let carriers: [&[&str]; 6] = [
            &[],
            &["--carrier", "graft:stream"],
            &["--carrier", "graft:cubic"],
            &["--carrier", "quic"],
            &["--carrier", "sctp"],
            &["--carrier", "kcp"],
        ];
        for carrier in carriers {
            for server in world.servers() {
                // Of first contact, and of hosts that know each other.
                for _ in 0..3 {
                    let mut download = world.start_download_run(carrier, server, "f");
                    let status = download.process.wait();
                    assert!(status.success(), "{old:?} {carrier:?}: {status}");
                    download.check();
                }
                world.upload_run(carrier, server, "up", &payload(4 * MB, 7));
            }
            let carried = world.sum(Host::Client, "bytes_received");
            println!("old {old:?}, {carrier:?}: {carried} bytes by VTL so far");
        }
        until("no flow is left", || world.sum(Host::Client, "flows") == 0);
    }
}
