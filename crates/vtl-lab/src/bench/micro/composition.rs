//! What composing transport functions costs, against the same logic in one function.

use vtl_bpf::trial::{Kernel, Micro, data};

use super::{PAYLOAD, Sheet};

/// Each is measured so often, in turn: the difference is smaller than that of two measurements.
const ROUNDS: usize = 7;
/// Parts of `selective-repeat`, by the ends of the names in `bpf/micro.bpf.c`.
const PARTS: [(&str, &str); 3] = [
    ("egress", "send"),
    ("ingress", "receive"),
    ("listener", "hear"),
];
const WAYS: [(&str, &str); 2] = [
    ("composed", "of transport functions"),
    ("hand", "in one function"),
];

pub(super) fn run(ns: &mut Sheet<'_>) {
    let frame = data(0, 0, &[1; PAYLOAD]);
    for (role, part) in PARTS {
        let mut times = [const { Vec::new() }; WAYS.len()];
        let mut code = [0; WAYS.len()];
        for _ in 0..ROUNDS {
            for (i, (way, _)) in WAYS.iter().enumerate() {
                let kernel = Kernel::new();
                kernel.write(0, &[1; PAYLOAD]);
                let micro = Micro::load(&kernel);
                let function = format!("{way}_{part}");
                times[i].push(micro.ns(&function, &frame));
                code[i] = micro.code(&function);
            }
        }
        for ((_, words), (times, code)) in WAYS.iter().zip(times.into_iter().zip(code)) {
            let what = format!("{words}, {code} bytes of machine code");
            ns.add_median(role, what, times);
        }
    }
}
