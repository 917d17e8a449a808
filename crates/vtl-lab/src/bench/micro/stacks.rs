//! From a payload in a session's ring to the packet, by each graft.

use vtl_bpf::objects;
use vtl_bpf::trial::{Kernel, SID};
use vtl_proto::ip;

use super::{PAYLOAD, Sheet};

/// Packets of each; as many as its window lets out are counted.
const PACKETS: u64 = 32;
/// The ethertype of IPv4: what a frame has that a graft has made a packet of.
const IPV4: [u8; 2] = [8, 0];

/// Times egress of every graft that comes with VTL, on tcx.
pub(super) fn run(sheet: &mut Sheet<'_>) {
    for (name, object) in objects::GRAFTS {
        let kernel = Kernel::with(object).expect("it comes with VTL");
        // The interface is learned from the peer otherwise.
        kernel.alter(|s| s.ifindex = 1);
        let send = |seq| {
            kernel.write(seq, &[1; PAYLOAD]);
            let ran = kernel.run("vtl_root_out_tc", &kernel.pump(SID), 1);
            (ran.frame[ip::field::ETHERTYPE] == IPV4).then(|| f64::from(ran.ns))
        };
        sheet.add_median("tcx egress", *name, (0..PACKETS).filter_map(send));
    }
}
