//! Runs a session's egress in the sender's own thread, without the daemon's pump.

use std::os::fd::AsFd;

use vtl_proto::intf;

/// Runs egress for one packet of `length` bytes of payload, through the socket `caller` that the
/// daemon has registered for the session. False if that is impossible here or now.
pub fn run(caller: impl AsFd, length: u32) -> bool {
    const UDP: usize = intf::VTL_UDP_HEADER as usize;
    /// Headers before the payload, less a UDP header: so the kernel need not resize the packet.
    const HEADERS: usize = size_of::<intf::vtl_data_hdr>() - UDP;
    /// A dummy: egress replaces the content.
    static NOTHING: [u8; HEADERS + intf::VTL_MAX_PAYLOAD as usize] =
        [0; HEADERS + intf::VTL_MAX_PAYLOAD as usize];
    let min = intf::VTL_MIN_PACKET as usize - UDP;
    let length = (HEADERS + length as usize).clamp(min, NOTHING.len());
    nix::unistd::write(caller, &NOTHING[..length]).is_ok()
}
