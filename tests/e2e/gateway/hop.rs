//! Rules for a hop and for a flow, at a gateway.

use std::num::NonZeroU32;

use serde_json::{Value, json};
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use super::{Behind, add_gateway};
use crate::harness::{Process, Spoken, World, python3, until};

/// Opens a connection from a port, and keeps it until it is told to end.
const CLIENT: &str = "
import socket, sys
to, port = sys.argv[1], int(sys.argv[2])
stream = socket.create_connection((to, 80), source_address=('', port))
stream.sendall(b'echo  ')
print('ready', flush=True)
for line in sys.stdin:
    stream.sendall(b'some bytes')
    print(len(stream.recv(10, socket.MSG_WAITALL)), flush=True)
";

/// The row of the gateway's flow from a port.
fn flow(world: &World, port: u16) -> Option<Value> {
    let list = world.call(Host::Client, &Request::FlowList { from: 0 });
    let flows = list["flows"].as_array().expect("a list").clone();
    let is_it = |flow: &Value| {
        let local = flow["local"].as_str().expect("an address");
        local.ends_with(&format!(":{port}"))
    };
    flows.into_iter().find(is_it)
}

#[test]
fn gateway__rules_for_a_hop_and_for_a_flow() {
    let Some(mut world) = World::with_daemons("gatewayrules", &Link::new(5.0, 100.0)) else {
        return;
    };
    let client = Behind::new(&world, Host::Client);
    let server = Behind::new(&world, Host::Server);
    for host in [Host::Client, Host::Server] {
        add_gateway(&world, host, &[]);
    }
    let (from, to) = (client.addresses[0], server.addresses[0]);
    let _served = server.serve(to, 80);
    let device = world.testbed.device(Host::Client).to_owned();
    let install = |rule: Value| {
        let rule = rule.as_object().expect("an object").clone();
        let for_s = NonZeroU32::new(600).expect("some");
        world.call(Host::Client, &Request::RuleInstall { rule, for_s });
    };
    let open = |port: u16| {
        let mut command = client.command(python3());
        command.args(["-c", CLIENT, &to.to_string(), &port.to_string()]);
        let mut stream = Spoken::start(command);
        assert_eq!(stream.line(), "ready");
        stream
    };
    let goes_by = |stream: &mut Spoken, port: u16, carrier: &str| {
        until(&format!("{port} goes by {carrier}"), || {
            use std::io::Write;
            stream.told.write_all(b"\n").expect("a pipe");
            assert_eq!(stream.line(), "10");
            flow(&world, port).is_some_and(|flow| flow["sends_by"] == carrier)
        });
    };
    // The hop, to hosts behind the next gateway; one flow by its four-tuple, which comes first.
    let flow_rule = json!({
        "name": "flow", "via": &device, "from": from.to_string(), "from_port": 40_001, "to": to.to_string(),
        "port": 80, "carrier": "kcp",
    });
    install(flow_rule);
    install(json!({ "name": "hop", "via": &device, "to": "10.98.2.0/24", "carrier": "quic" }));
    install(json!({ "name": "elsewhere", "via": "none0", "carrier": "sctp" }));
    let mut streams = [(40_001, "kcp"), (40_002, "quic")].map(|(port, by)| (port, by, open(port)));
    for (port, carrier, stream) in &mut streams {
        goes_by(stream, *port, carrier);
    }
    let explain = |from_port: u16| {
        let (from, to) = (format!("{from}:{from_port}"), format!("{to}:80"));
        let args = ["explain", "--via", &device, "--from", &from, "--to", &to];
        let text = world.rule_ok(&args);
        text.lines().last().expect("a line").to_owned()
    };
    assert_eq!(explain(40_001), "rule \"flow\" decides: kcp");
    assert_eq!(explain(40_002), "rule \"hop\" decides: quic");
    // Counted, and without it the gateway's own carrier.
    let list = world.call(Host::Client, &Request::RuleList { from: 0 });
    let rules = list["rules"].as_array().expect("a list");
    let counts: Vec<_> = rules
        .iter()
        .map(|rule| rule["connections"].as_u64())
        .collect();
    assert_eq!(counts, [Some(1), Some(1), Some(0)]);
    for name in ["flow", "hop"] {
        world.rule_ok(&["remove", name]);
    }
    let mut plain = open(40_003);
    goes_by(&mut plain, 40_003, "graft");
    for (port, carrier, stream) in &mut streams {
        goes_by(stream, *port, carrier);
    }
    for process in streams.map(|(.., stream)| stream.process) {
        Process::kill(process);
    }
    world.stop_daemons();
}
