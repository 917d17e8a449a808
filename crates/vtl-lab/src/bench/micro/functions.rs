//! Single transport functions, in the kernel.

use vtl_bpf::trial::{Kernel, Micro, data};

use super::{PAYLOAD, Sheet};

/// In the order in which a packet meets them: part of the graft, program of `bpf/micro.bpf.c`, case.
const FUNCTIONS: [(&str, &str, &str); 27] = [
    ("egress", "congestion_start", "after the first packet"),
    ("egress", "pace_wait", "nothing to wait for"),
    ("egress", "choose", "a new packet"),
    ("egress", "fetch", "slot and scoreboard entry"),
    ("egress", "number", "a new packet"),
    ("egress", "pace_charge", ""),
    ("egress", "copy_out", "1,440 bytes, with their sum"),
    ("egress", "checksum_add", "header, and the payload's sum"),
    ("ingress", "receive_admit", "a new packet"),
    ("ingress", "copy_in", "1,440 bytes, with their sum"),
    (
        "ingress",
        "checksum_verify",
        "header, and the payload's sum",
    ),
    ("ingress", "receive_place", "in order"),
    (
        "ingress",
        "receive_place_last",
        "in order, asks for an acknowledgement: a fence",
    ),
    ("ingress", "ack_note", ""),
    ("ingress", "reverse_note", "something is under way"),
    ("ingress", "ack_build", "no bitmap"),
    ("ingress", "ack_build_bitmap", "bitmap of 1,024 packets"),
    ("listener", "ack_verify", "no bitmap"),
    ("listener", "ack_cumulative", "16 packets more"),
    ("listener", "loss_reordering", ""),
    ("listener", "loss_selective", "nothing missing"),
    (
        "listener",
        "loss_selective_bitmap",
        "bitmap of 1,024 packets, 16 of them lost",
    ),
    ("listener", "rtt", ""),
    ("listener", "reverse", ""),
    ("listener", "rate", ""),
    ("listener", "congestion_bbr", "16 packets more"),
    ("any", "nothing", "what the method adds"),
];

pub(super) fn run(sheet: &mut Sheet<'_>) {
    let frame = data(0, 0, &[1; PAYLOAD]);
    for (role, function, case) in FUNCTIONS {
        // What one function leaves behind is not the next one's to start with.
        let kernel = Kernel::new();
        kernel.write(200, &[1; PAYLOAD]);
        kernel.alter(|s| {
            s.ifindex = 1;
            s.tx.acks = 1;
            s.tx.cwnd = 1 << 20;
            s.tx.pacing_gap_ns = 1_000;
            s.tx.srtt_us = 1_000;
            s.tx.rttvar_us = 100;
        });
        let micro = Micro::load(&kernel);
        let name = if case.is_empty() {
            function.to_owned()
        } else {
            format!("{function}: {case}")
        };
        sheet.add(role, name, micro.ns(function, &frame));
    }
}
