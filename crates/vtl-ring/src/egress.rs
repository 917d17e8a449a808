//! Runs a session's egress in the sender's own thread, without the daemon's pump.

use std::os::fd::AsFd;

use vtl_proto::intf;

/// Runs the egress of the session that the daemon has registered the socket `caller` for, to send
/// one packet of `length` bytes of payload. False if that is not possible here or now.
pub fn run(caller: impl AsFd, length: u32) -> bool {
    /// What precedes the payload, less what precedes that of a UDP packet: then the kernel need
    /// not change the packet's length.
    const HEADERS: usize = size_of::<intf::vtl_data_hdr>() - 8;
    /// What is sent is replaced.
    static NOTHING: [u8; HEADERS + intf::VTL_MAX_PAYLOAD as usize] =
        [0; HEADERS + intf::VTL_MAX_PAYLOAD as usize];
    let least = intf::VTL_MIN_PACKET as usize - 8;
    let length = (HEADERS + length as usize).clamp(least, NOTHING.len());
    nix::unistd::write(caller, &NOTHING[..length]).is_ok()
}
