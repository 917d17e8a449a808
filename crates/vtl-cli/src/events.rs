//! `vtl events`: what happens, as it happens.

use std::fmt::Write;

use clap::Args;
use serde_json::{Map, Value};
use vtl_control::{Client, Request};

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Arguments of `vtl events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Only these: a subject (flow, association, carrier, session, path, address, peer, graft, gateway, rule,
    /// condition, selection), or an event, such as `flow_moved`
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    kind: Vec<String>,
    /// Also what happened after the event with this id, as far as vtld still has it (4,096 events); 0: all that it has
    #[arg(long, value_name = "ID")]
    since: Option<u64>,
    /// End after so many
    #[arg(long, value_name = "EVENTS", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Do not wait for more than there is
    #[arg(long)]
    no_wait: bool,
    /// Write a line of JSON for each
    #[arg(long)]
    json: bool,
}

/// What the daemon answers. Its events stay as they are: this command may be older.
#[derive(serde::Deserialize)]
struct Answer {
    events: Vec<Map<String, Value>>,
    last: u64,
}

/// Shows events until the user, or the daemon, ends it.
pub(crate) fn run(args: &EventsArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    let daemon = Client::connect(&socket.socket).map_err(daemon::explain)?;
    let mut since = args.since;
    // At first what there is: whether the daemon answers at all shows at once.
    let mut wait_ms = Some(0);
    let mut left = args.count.unwrap_or(u64::MAX);
    loop {
        let request = Request::Events {
            since,
            kinds: args.kind.clone(),
            wait_ms,
        };
        let answer: Answer = daemon.call(&request).map_err(daemon::explain)?;
        let is_over = args.no_wait && answer.events.is_empty();
        for event in answer.events {
            let line = match args.json {
                true => serde_json::to_string(&event)?,
                false => text(&event),
            };
            output::print(&format!("{line}\n"))?;
            left -= 1;
            if left == 0 {
                return Ok(());
            }
        }
        if is_over {
            return Ok(());
        }
        since = Some(answer.last);
        wait_ms = args.no_wait.then_some(0);
    }
}

/// An event on one line: when, what, and its fields.
fn text(event: &Map<String, Value>) -> String {
    let word = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or_default();
    let mut line = format!("{} {:<18}", word("time"), output::words(word("event")));
    for (key, value) in event {
        if !["id", "time", "event"].contains(&key.as_str()) {
            let value = match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let _ = write!(line, " {}: {value};", output::words(key));
        }
    }
    line.trim_end_matches(';').trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text__has_all_fields_on_one_line() {
        let event = json!({
            "id": 7, "time": "2026-11-28T14:00:00.123Z", "event": "flow_moved", "flow": 3, "from": "tcp",
            "to": "graft", "why": "moved by hand",
        });
        assert_eq!(
            text(event.as_object().expect("an object")),
            "2026-11-28T14:00:00.123Z flow moved         flow: 3; from: tcp; to: graft; why: moved by hand"
        );
    }
}
