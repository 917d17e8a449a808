//! Helpers of the table tests of transport functions.
#![allow(dead_code, unreachable_pub)]

use vtl_proto::intf::{VTL_VERSION, vtl_ack_hdr, vtl_data_hdr, vtl_hdr, vtl_session};
use vtl_sim::{
    ffi,
    host::{Host, SessionConfig},
};

/// The session that the tables use.
pub const SID: u32 = 1;
pub const NOW: u64 = 10_000_000_000;
pub const MS: u64 = 1_000_000;
pub const NEXT: u32 = ffi::VTL_NEXT;
pub const SEND: u32 = ffi::VTL_SEND;
pub const STOP: u32 = ffi::VTL_STOP;

/// A host with one open session of 256 slots, after `change`.
pub fn host(change: impl FnOnce(&mut vtl_session)) -> Host {
    let mut h = Host::new();
    h.open(
        SID,
        0,
        &SessionConfig {
            slots: 256,
            ..Default::default()
        },
    );
    change(h.session_mut(SID));
    h
}

/// The header of a received packet, in network byte order.
pub fn data_header(kind: u32, seq: u64, xid: u32, flags: u32) -> vtl_data_hdr {
    vtl_data_hdr {
        h: vtl_hdr {
            version_type: (VTL_VERSION << 4 | kind) as u8,
            flags: flags as u8,
            ..Default::default()
        },
        seq: seq.to_be(),
        xid: xid.to_be(),
        ts: 0,
    }
}

/// An acknowledgement's fields, in this host's byte order.
#[derive(Clone, Copy, Default)]
pub struct Fields {
    pub flags: u32,
    pub cum: u64,
    pub limit: u64,
    pub received: u64,
    pub echo_seq: u64,
    pub echo_xid: u32,
    pub echo_ts: u32,
    pub dups: u32,
    pub skip: u32,
}

/// The header of a received acknowledgement, in network byte order.
pub fn ack_header(f: Fields) -> vtl_ack_hdr {
    vtl_ack_hdr {
        h: vtl_hdr {
            flags: f.flags as u8,
            ..Default::default()
        },
        cum: f.cum.to_be(),
        limit: f.limit.to_be(),
        received: f.received.to_be(),
        echo_seq: f.echo_seq.to_be(),
        echo_xid: f.echo_xid.to_be(),
        echo_ts: f.echo_ts.to_be(),
        dups: f.dups.to_be(),
        skip: f.skip.to_be(),
    }
}

/// Sequence numbers whose `lost` bits are set, as if the window began at 0.
pub fn lost(s: &vtl_session) -> Vec<u64> {
    (0..u64::from(vtl_proto::intf::VTL_MAX_WINDOW))
        .filter(|seq| s.tx.lost[(seq / 64) as usize] >> (seq % 64) & 1 == 1)
        .collect()
}

/// A bitmap of `words` words with these packets, counted from its base.
pub fn bitmap(words: usize, have: &[u64]) -> Vec<u64> {
    let mut map = vec![0; words];
    for seq in have {
        map[(seq / 64) as usize] |= 1 << (seq % 64);
    }
    map
}
