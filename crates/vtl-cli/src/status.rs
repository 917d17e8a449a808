//! `vtl status`: what the daemon is carrying.

use std::fmt::Write;

use serde_json::Value;
use vtl_control::Client;

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Asks the daemon, and prints its answer.
pub(crate) fn run(socket: &SocketArgs, json: bool) -> anyhow::Result<()> {
    let status = daemon::ask(&socket.socket, Client::status)?;
    if json {
        output::show(&status, true)?;
    } else {
        output::print(&text(&serde_json::to_value(status)?))?;
    }
    Ok(())
}

/// What an operator looks for; the JSON form has everything.
fn text(status: &Value) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "vtld {}, up {:.0} s, Linux {}",
        status["version"].as_str().unwrap_or("?"),
        status["uptime_s"].as_f64().unwrap_or(0.0),
        status["kernel"].as_str().unwrap_or("?"),
    );
    section(
        &mut out,
        "interfaces",
        &status["interfaces"],
        &["name", "mtu", "driver", "why"],
    );
    section(
        &mut out,
        "sessions",
        &status["sessions"],
        &[
            "sid",
            "peer",
            "phase",
            "graft",
            "way",
            "cipher",
            "rtt_ms",
            "rate_mbit",
            "loss_pct",
            "sent",
            "retransmitted",
            "received",
        ],
    );
    section(
        &mut out,
        "carriers",
        &status["carriers"],
        &[
            "peer",
            "carrier",
            "encrypted",
            "role",
            "flows",
            "rtt_ms",
            "sent",
            "lost",
            "bytes_sent",
            "bytes_received",
            "skipped_bytes",
        ],
    );
    section(
        &mut out,
        "hooks",
        &status["hooks"],
        &[
            "id",
            "run",
            "port",
            "cgroup",
            "carrier",
            "processes",
            "connections",
            "rule",
        ],
    );
    if status["gateways"].is_array() {
        let columns = [
            "interface",
            "to",
            "ports",
            "carrier",
            "absent",
            "connections",
        ];
        section(&mut out, "gateways", &status["gateways"], &columns);
    }
    if let Some(near) = status["near"].as_array() {
        let hosts: Vec<&str> = near.iter().filter_map(Value::as_str).collect();
        let _ = writeln!(out, "near, past vtld: {}", hosts.join(", "));
    }
    for title in ["negotiation", "packets"] {
        let _ = writeln!(out, "{title}: {}", counts(&status[title]));
    }
    out
}

/// Those that are not 0.
fn counts(counters: &Value) -> String {
    let counters = counters.as_object().into_iter().flatten();
    let counts: Vec<String> = counters
        .filter(|(_, count)| count.as_u64() != Some(0))
        .map(|(name, count)| format!("{} {count}", output::words(name)))
        .collect();
    if counts.is_empty() {
        "none".to_owned()
    } else {
        counts.join(", ")
    }
}

fn section(out: &mut String, title: &str, rows: &Value, columns: &[&str]) {
    let rows: Vec<_> = rows
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_object)
        .collect();
    if rows.is_empty() {
        let _ = writeln!(out, "{title}: none");
    } else {
        let _ = write!(out, "{title}:\n{}", output::table(&rows, columns));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text__shows_what_is_there_and_says_what_is_not() {
        let status = json!({
            "version": "1.2.3", "uptime_s": 3.7, "kernel": "6.18",
            "interfaces": [{ "name": "eth0", "mtu": 1500, "driver": "live", "why": "it can" }],
            "sessions": [], "carriers": [], "hooks": [{ "id": 1, "port": 80 }],
            "gateways": [{ "interface": "wan0", "connections": 2 }],
            "near": ["192.0.2.1", "2001:db8::1"],
            "packets": { "received": 5, "malformed": 0 },
        });
        assert_eq!(
            text(&status),
            "vtld 1.2.3, up 4 s, Linux 6.18\n\
             interfaces:\n  name  mtu   driver  why\n  eth0  1500  live    it can\n\
             sessions: none\n\
             carriers: none\n\
             hooks:\n  id  port\n  1   80\n\
             gateways:\n  interface  connections\n  wan0       2\n\
             near, past vtld: 192.0.2.1, 2001:db8::1\n\
             negotiation: none\n\
             packets: received 5\n"
        );
    }
}
