//! Hooks, the control groups that they make, and what is left of both.

use vtl_testbed::Host;

use super::{
    net::{Hooker, echo_server, hosts, server_ips},
    tcp::check_addresses,
};
use crate::harness::{groups, run_group, until};

#[test]
fn hooks__come_and_go() {
    let Some(world) = hosts("hooks") else {
        return;
    };
    let mut hooker = Hooker::start(&world, Host::Client);
    let pid = hooker.pid();
    let mut sleeper = hooker.run(&["sleep", "infinity"]);
    assert!(run_group(pid, 1).is_some());
    assert!(hooker.order("list").contains("processes: 1"));
    // Leaving the hook is no harm to the program.
    hooker.order("unhook 1");
    assert!(run_group(pid, 1).is_none());
    assert!(sleeper.ended().is_none());
    // The group of a program that ended goes away by itself.
    hooker.output(&["true"]);
    until("its group is gone", || run_group(pid, 2).is_none());
    assert_eq!(
        hooker.refused("unhook 77"),
        "there is no hook 77: `vtl hook list` shows those there are"
    );
    hooker.order("port 80");
    assert_eq!(hooker.refused("port 80"), "port 80 is hooked already");
    let refusal = hooker.refused("cgroup /no/such/group");
    assert!(refusal.contains("/no/such/group"), "{refusal}");
    let mut sleeper = hooker.run(&["sleep", "infinity"]);
    hooker.stop();
    assert!(groups(pid).is_empty());
    assert!(sleeper.ended().is_none());
}

#[test]
fn hooks__need_no_visible_hierarchy() {
    let Some(world) = hosts("no-sys") else {
        return;
    };
    let mut hooker = Hooker::start_without_sys(&world, Host::Client);
    let _peers = echo_server(&world, &server_ips(&world)[0], 8000);
    check_addresses(&mut hooker, &world, 0, 8000);
    let pid = hooker.pid();
    assert!(!groups(pid).is_empty());
    hooker.stop();
    assert!(groups(pid).is_empty());
}
