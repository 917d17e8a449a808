//! What telling a flow's profile costs, in all: for each capture of `tests/captures`, and for flows made to be expensive.

#[path = "../tests/captures/mod.rs"]
mod captures;

use std::{hint::black_box, time::Instant};

use captures::Capture;
use vtl_core::profile::Profile;

const ROUNDS: u32 = 2000;

/// A beginning that no signature can decide, in ten packets or in as many writes as there are bytes.
fn expensive(name: &str, begin: &[u8], fill: &[u8], piece: usize) -> Capture {
    let bytes: Vec<_> = begin
        .iter()
        .chain(fill.iter().cycle())
        .copied()
        .take(2040)
        .collect();
    let packet = bytes.len().div_ceil(10);
    let reads = bytes.chunks(piece).enumerate();
    let reads = reads.map(|(i, piece_of)| {
        (
            true,
            (i * piece / packet) as u64 * 10_000_000,
            piece_of.to_vec(),
        )
    });
    Capture {
        name: format!("expensive: {name}, {piece} bytes a write"),
        profile: Profile::Insensitive,
        port: 80,
        executable: String::new(),
        reads: reads.collect(),
    }
}

fn main() {
    let mut flows = captures::captures("tuned");
    flows.extend(captures::captures("held-out"));
    for piece in [204, 1] {
        flows.push(expensive(
            "headers of HTTP",
            b"GET / HTTP/1.1\r\n",
            b"A: b\r\n",
            piece,
        ));
        flows.push(expensive("a target of HTTP", b"GET /", b"a", piece));
        flows.push(expensive(
            "a ClientHello",
            b"\x16\x03\x01\x40\0\x01\0\x3f\0\x03\x03",
            b"\0\x07\0\x01",
            piece,
        ));
        flows.push(expensive(
            "ClientHellos in small records",
            b"\x16\x03\x01\0\x01\x01\x16\x03\x01\0\x01\x01",
            b"\x16\x03\x01\0\x01\x7f",
            piece,
        ));
        flows.push(expensive("XML", b"<?xml ", b"<stream:strea", piece));
        flows.push(expensive(
            "bytes without a meaning",
            b"\x07",
            b"\x07 ",
            piece,
        ));
    }
    let mut costs: Vec<_> = flows
        .iter()
        .map(|flow| {
            let tell = || black_box(captures::verdict(flow, flow.port, Some(&flow.executable)));
            tell();
            let start = Instant::now();
            for _ in 0..ROUNDS {
                tell();
            }
            (start.elapsed() / ROUNDS, flow)
        })
        .collect();
    costs.sort_by_key(|(cost, _)| *cost);
    for (cost, flow) in costs {
        println!(
            "{:>8.2} µs  {} ({})",
            cost.as_nanos() as f64 / 1000.0,
            flow.name,
            flow.profile
        );
    }
}
