//! An unmodified curl and an unmodified nginx.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::bail;
use vtl_testbed::{CongestionControl, Host};

use super::transfer::{Stage, check_settings};
use crate::bench::agent::Outcome;
use crate::bench::cpu;
use crate::bench::plan::{Transport, Workload};
use crate::bench::row::Row;
use crate::child::peak_kb;
use crate::{download, nginx, payload};

/// When the connection's congestion control is looked at: past the handshake.
const LOOK: Duration = Duration::from_millis(500);

impl Stage<'_> {
    /// A download, and the row that it makes.
    pub(super) fn curl(&self, transport: &Transport, row: &mut Row) -> anyhow::Result<()> {
        let bench = self.bench;
        let Workload::File { bytes, .. } = self.cell.workload else {
            bail!("curl downloads files only");
        };
        let files = [(nginx::FILE, bytes)];
        let server = nginx::start(&self.testbed, &bench.scratch, &files, &bench.interrupt)?;
        let carrier = match transport {
            Transport::Hook(carrier) => Some(carrier.as_str()),
            _ => None,
        };
        let captured = carrier.is_some();
        if let (Some(carrier), Some(daemons)) = (transport.hooked(), &self.daemons) {
            daemons.hook(nginx::PORT, carrier, false)?;
        }
        if self.cell.known {
            let patience = Duration::from_secs_f64(self.cell.time_limit_s);
            let mut command = self.curl_command(carrier)?;
            download::run(
                &mut command,
                bytes,
                patience,
                &bench.interrupt,
                |_| {},
                |_, _| Ok(()),
            )?;
            thread::sleep(Duration::from_secs_f64(self.cell.link.rtt_ms * 4e-3));
        }
        let mut command = self.curl_command(carrier)?;
        let since = cpu::Since::now();
        let mut checker = payload::Checker::default();
        let mut control = None;
        let result = download::run(
            &mut command,
            bytes,
            Duration::from_secs_f64(self.cell.time_limit_s),
            &bench.interrupt,
            |data| checker.check(data),
            |elapsed, _| {
                if control.is_none() && elapsed >= LOOK && !captured {
                    let connections = self.testbed.congestion_controls(Host::Server)?;
                    let of_nginx = |c: &CongestionControl| c.local.port() == nginx::PORT;
                    control = connections.into_iter().find(of_nginx).map(|c| c.name);
                }
                Ok(())
            },
        )?;
        let busy = since.busy_s();
        let outcome = Outcome {
            bytes: result.bytes,
            wrong: checker.wrong(),
            complete: result.bytes == bytes,
            cut: result.cut,
            seconds: result.time.as_secs_f64(),
            first_byte_s: Some(result.first_byte.as_secs_f64()),
            half: result.half_time.map(|t| (t.as_secs_f64(), bytes / 2)),
            samples: result
                .samples
                .iter()
                .map(|(time, bytes)| (time.as_secs_f64(), *bytes))
                .collect(),
            ..Outcome::default()
        };
        row.measured(self.cell, transport, &outcome);
        row.cpu(busy);
        let mut memory = result.peak_kb + web_server_kb(server.pid());
        if let Some(daemons) = &self.daemons {
            memory += daemons.peak_kb();
        }
        row.memory_peak_kb = Some(memory);
        if captured {
            row.retransmitted_pct = self.vtl_retransmitted();
            row.settings = self.vtl_settings();
            if !transport.is_auto() {
                self.check_carried(std::slice::from_mut(row))?;
            }
        } else {
            match control {
                Some(name) => {
                    row.settings = format!("{name}, as ss reports it");
                    check_settings(row, transport);
                }
                None => row.settings = "over before it was looked at".to_owned(),
            }
        }
        self.link_figures(row)
    }

    /// A download, captured if it is to travel by a carrier.
    fn curl_command(&self, carrier: Option<&str>) -> anyhow::Result<Command> {
        let mut command = match self.daemons.as_ref().filter(|_| carrier.is_some()) {
            Some(daemons) => {
                let programs = &self.bench.programs;
                daemons.captured(&self.testbed, programs, carrier, false, Path::new("curl"))?
            }
            None => self.testbed.command(Host::Client, "curl")?,
        };
        self.pin(&mut command, Host::Client);
        download::arguments(&mut command, self.testbed.addr4(Host::Server).into());
        Ok(command)
    }
}

/// Of nginx's two processes together.
fn web_server_kb(pid: u32) -> u64 {
    let children = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let pids = children.split_whitespace().filter_map(|p| p.parse().ok());
    peak_kb(pid) + pids.map(peak_kb).sum::<u64>()
}
