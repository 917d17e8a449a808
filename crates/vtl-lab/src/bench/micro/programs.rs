//! Whole programs on single packets.

use vtl_bpf::trial::{Kernel, SID, SLOTS, TOKEN, VTL, ack, data, seal};
use vtl_proto::{field, ip};

use super::{PAYLOAD, Sheet};

/// Repetitions of what changes nothing.
const TIMES: u32 = 100_000;
/// Packets that the fresh session's window lets out.
const WINDOW: u64 = 32;

/// Times the root programs and the `stream` graft on both hooks.
pub(super) fn run(sheet: &mut Sheet<'_>) {
    let hooks = [
        ("tcx", "vtl_root_in_tc", "vtl_root_out_tc"),
        ("xdp", "vtl_root_in_xdp", "vtl_root_out_xdp"),
    ];
    for (hook, input, output) in hooks {
        let place = |role: &str| format!("{hook} {role}");
        let kernel = Kernel::new();
        let mut other = data(0, 0, &[9; 1_400]);
        other[ip::field::V4_PROTOCOL] = libc::IPPROTO_TCP as u8;
        let mut forged = data(0, 0, &[9; 100]);
        forged[VTL + field!(vtl_hdr, token).start] = !TOKEN.to_be_bytes()[0];
        seal(&mut forged);
        for (role, packet, frame) in [
            ("root", "TCP, passed on", other),
            ("root", "wrong token", forged),
            (
                "ingress",
                "beyond the window",
                data(1 << 40, 0, &[1; PAYLOAD]),
            ),
            ("listener", "nothing new", ack(0, 0, 0, &[0; 64])),
        ] {
            let ns = kernel.run(input, &frame, TIMES).ns;
            sheet.add(place(role), packet, ns.into());
        }
        for (packet, flags) in [("new, full size", 0), ("duplicate, answered", 1)] {
            let one = |seq: u32| {
                let frame = data(seq.into(), flags, &[1; PAYLOAD]);
                f64::from(kernel.run(input, &frame, 1).ns)
            };
            sheet.add_median(place("ingress"), packet, (0..SLOTS).map(one));
        }

        let kernel = Kernel::new();
        // The way back is learned from a packet of the peer's.
        kernel.run(input, &data(0, 0, &[1]), 1);
        let send = |seq| {
            kernel.write(seq, &[1; PAYLOAD]);
            f64::from(kernel.run(output, &kernel.pump(SID), 1).ns)
        };
        sheet.add_median(place("egress"), "full size", (0..WINDOW).map(send));
        let acknowledge = |cum| {
            let frame = ack(cum, cum, cum as u32, &[]);
            f64::from(kernel.run(input, &frame, 1).ns)
        };
        let each = (1..=WINDOW).map(acknowledge);
        sheet.add_median(place("listener"), "one more packet", each);
    }
}
