//! What `vtl top` shows, as lines of text.

use serde::Serialize;
use serde_json::{Map, Value};
use vtl_control::PathStatus;

use crate::{flow::Row, output, path};

/// What the daemon tells at one time, the latest paths and the busiest flows first.
#[derive(Debug, Default, Serialize)]
pub(super) struct Frame {
    paths: Vec<PathStatus>,
    flows: Vec<Row>,
}

impl Frame {
    pub(super) fn new(mut paths: Vec<PathStatus>, mut flows: Vec<Row>) -> Self {
        let rate = |row: &Row| row.flow.sends_mbit + row.flow.receives_mbit;
        flows.sort_by(|a, b| rate(b).total_cmp(&rate(a)).then(a.flow.id.cmp(&b.flow.id)));
        paths.sort_by(|a, b| a.age_s.total_cmp(&b.age_s).then(a.peer.cmp(&b.peer)));
        Self { paths, flows }
    }

    /// All of it, as text.
    pub(super) fn text(&self) -> String {
        let flows = flows(&self.flows);
        format!(
            "{}\n\n{}\n{flows}",
            self.headline(),
            path::listed(&self.paths)
        )
    }

    /// As many lines as a terminal of that size has. `first`: the flow to begin with, which is set back where
    /// fewer are left than there is place for.
    pub(super) fn lines(&self, (columns, lines): (usize, usize), first: &mut usize) -> Vec<String> {
        // A headline, an empty line, headings, an empty line, and what the keys do.
        let rows = lines.saturating_sub(6);
        let wanted = self.flows.len().min(rows - rows / 3);
        let paths = self.paths.len().min(rows - wanted);
        let place = rows - paths;
        *first = (*first).min(self.flows.len().saturating_sub(place.max(1)));
        let shown = *first..self.flows.len().min(*first + place);
        let mut all = vec![self.headline(), String::new()];
        all.extend(
            path::listed(&self.paths[..paths])
                .lines()
                .map(str::to_owned),
        );
        all.push(String::new());
        all.extend(flows(&self.flows[shown.clone()]).lines().map(str::to_owned));
        all.resize(lines.saturating_sub(1), String::new());
        let mut keys = "  q: quit".to_owned();
        if self.paths.len() > paths {
            keys += &format!("   paths 1 to {paths} of {}", self.paths.len());
        }
        if shown.len() < self.flows.len() {
            let (from, to) = (shown.start + 1, shown.end);
            keys += &format!("   flows {from} to {to} of {}: up, down", self.flows.len());
        }
        all.push(keys);
        all.iter()
            .map(|line| line.chars().take(columns).collect())
            .collect()
    }

    fn headline(&self) -> String {
        let sum = |rate: fn(&Row) -> f64| self.flows.iter().map(rate).fold(0.0, |a, b| a + b);
        format!(
            "  flows: {}, sending {:.1} Mbit/s, receiving {:.1} Mbit/s",
            self.flows.len(),
            sum(|row| row.flow.sends_mbit),
            sum(|row| row.flow.receives_mbit),
        )
    }
}

fn flows(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "flows: none\n".to_owned();
    }
    let columns = [
        "id",
        "program",
        "peer",
        "sends_by",
        "sends_mbit",
        "receives_by",
        "receives_mbit",
        "size",
        "burstiness",
        "profile",
        "age",
    ];
    let rows: Vec<_> = rows.iter().map(cells).collect();
    output::table(&rows.iter().collect::<Vec<_>>(), &columns)
}

fn cells(row: &Row) -> Map<String, Value> {
    let flow = &row.flow;
    let program = row.program.clone().zip(row.pid);
    let cells = [
        ("id", Some(flow.id.to_string())),
        (
            "program",
            program.map(|(name, pid)| format!("{name} ({pid})")),
        ),
        ("peer", Some(flow.peer.to_string())),
        ("sends_by", Some(flow.sends_by.clone())),
        ("sends_mbit", Some(format!("{:.1}", flow.sends_mbit))),
        ("receives_by", Some(flow.receives_by.clone())),
        ("receives_mbit", Some(format!("{:.1}", flow.receives_mbit))),
        ("size", flow.size.clone()),
        ("burstiness", flow.burstiness.map(|of| format!("{of:.1}"))),
        ("profile", flow.profile.clone()),
        ("age", Some(format!("{:.0} s", flow.age_s))),
    ];
    let known = cells
        .into_iter()
        .filter_map(|(key, cell)| Some((key.to_owned(), cell?.into())));
    known.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn flow(id: u64, mbit: f64) -> Row {
        let flow = serde_json::from_value(json!({
            "id": id, "local": "10.0.0.1:4000", "peer": "10.0.0.2:80", "role": "client", "sends_by": "quic",
            "receives_by": "tcp", "bytes_sent": 1, "bytes_received": 2, "sends_mbit": 0.5, "receives_mbit": mbit,
            "age_s": 3.2, "why": "the best",
        }));
        Row {
            program: Some("curl".to_owned()),
            pid: Some(7),
            flow: flow.unwrap(),
        }
    }

    fn path(age: f64) -> PathStatus {
        serde_json::from_value(json!({
            "peer": format!("10.0.0.{age}"), "evidence": "quic", "age_s": age, "packets": 3000, "loss_pct": 2.0,
        }))
        .unwrap()
    }

    #[test]
    fn text__the_busiest_flow_comes_first() {
        let frame = Frame::new(vec![path(1.0)], vec![flow(3, 1.0), flow(4, 30.0)]);
        assert_eq!(
            frame.text(),
            "  flows: 2, sending 1.0 Mbit/s, receiving 31.0 Mbit/s\n\n\
             \x20 peer      evidence  age  loss\n  10.0.0.1  quic      1 s  2.00 %\n\n\
             \x20 id  program   peer         sends by  sends mbit  receives by  receives mbit  age\n\
             \x20 4   curl (7)  10.0.0.2:80  quic      0.5         tcp          30.0           3 s\n\
             \x20 3   curl (7)  10.0.0.2:80  quic      0.5         tcp          1.0            3 s\n"
        );
    }

    #[test]
    fn lines__fill_any_terminal_exactly() {
        for (paths, flows) in [(0, 0), (1, 0), (0, 1), (3, 4), (50, 0), (0, 50), (50, 50)] {
            let paths = (0..paths).map(|age| path(f64::from(age))).collect();
            let frame = Frame::new(paths, (0..flows).map(|id| flow(id, 1.0)).collect());
            for (columns, lines) in [(80, 24), (20, 7), (200, 60), (1, 6), (300, 1)] {
                for mut first in [0, 10, 1000] {
                    let shown = frame.lines((columns, lines), &mut first);
                    assert_eq!(shown.len(), lines);
                    assert!(shown.iter().all(|line| line.chars().count() <= columns));
                    assert!(first == 0 || first < frame.flows.len());
                }
            }
        }
    }

    #[test]
    fn lines__leave_place_for_paths_and_for_flows() {
        let paths = (0..50).map(|age| path(f64::from(age))).collect();
        let frame = Frame::new(paths, (0..50).map(|id| flow(id, 1.0)).collect());
        let mut first = 45;
        let shown = frame.lines((100, 24), &mut first);
        assert_eq!(first, 38);
        assert_eq!(
            shown[23],
            "  q: quit   paths 1 to 6 of 50   flows 39 to 50 of 50: up, down"
        );
        assert!(shown[2].starts_with("  peer"), "{shown:?}");
        assert!(shown[8].starts_with("  10.0.0.5"), "{shown:?}");
        assert!(shown[10].starts_with("  id"), "{shown:?}");
        assert!(shown[22].starts_with("  49"), "{shown:?}");
    }
}
