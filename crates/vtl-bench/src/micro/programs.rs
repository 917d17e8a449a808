//! Whole programs on single packets.

use vtl_bpf::trial::{Kernel, SID, SLOTS, TOKEN, VTL, ack, data, seal};

use super::{Sheet, median};

/// Repetitions of what changes nothing.
const TIMES: u32 = 100_000;
/// A full payload, bytes.
const PAYLOAD: usize = 1_440;
/// Packets that the fresh session's window lets out.
const WINDOW: u64 = 32;

/// Times the root programs and the `stream` graft on both hooks.
pub(super) fn run(sheet: &mut Sheet<'_>) {
    let hooks = [
        ("tcx", "vtl_root_in_tc", "vtl_root_out_tc"),
        ("xdp", "vtl_root_in_xdp", "vtl_root_out_xdp"),
    ];
    for (hook, input, output) in hooks {
        let mut add = |role: &str, packet: &str, ns: u32| {
            sheet.add(format!("{hook} {role}"), packet, ns.into());
        };
        let kernel = Kernel::new();
        let mut other = data(0, 0, &[9; 1_400]);
        other[23] = libc::IPPROTO_TCP as u8;
        add(
            "root",
            "TCP, passed on",
            kernel.run(input, &other, TIMES).ns,
        );
        let mut forged = data(0, 0, &[9; 100]);
        forged[VTL + 8] = !TOKEN.to_be_bytes()[0];
        seal(&mut forged);
        add("root", "wrong token", kernel.run(input, &forged, TIMES).ns);
        let beyond = data(1 << 40, 0, &[1; PAYLOAD]);
        add(
            "ingress",
            "beyond the window",
            kernel.run(input, &beyond, TIMES).ns,
        );
        let old = ack(0, 0, 0, &[0; 64]);
        add("listener", "nothing new", kernel.run(input, &old, TIMES).ns);
        let fresh = |flags| {
            let one = |seq: u32| {
                kernel
                    .run(input, &data(seq.into(), flags, &[1; PAYLOAD]), 1)
                    .ns
            };
            median((0..SLOTS).map(one).collect())
        };
        add("ingress", "new, full size", fresh(0));
        add("ingress", "duplicate, answered", fresh(1));

        let kernel = Kernel::new();
        // The way back is learned from a packet of the peer's.
        kernel.run(input, &data(0, 0, &[1]), 1);
        let send = |seq| {
            kernel.write(seq, &[1; PAYLOAD]);
            kernel.run(output, &kernel.pump(SID), 1).ns
        };
        add(
            "egress",
            "full size",
            median((0..WINDOW).map(send).collect()),
        );
        let acknowledge = |cum| kernel.run(input, &ack(cum, cum, cum as u32, &[]), 1).ns;
        let ns = median((1..=WINDOW).map(acknowledge).collect());
        add("listener", "one more packet", ns);
    }
}
