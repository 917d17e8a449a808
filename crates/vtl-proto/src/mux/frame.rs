//! Frames: `struct vtl_frame` and its bodies.

use core::{
    mem::{offset_of, size_of},
    net::{Ipv6Addr, SocketAddr, SocketAddrV6},
};

use super::{MuxError, StreamId};
use crate::{
    intf,
    wire::{get, put},
};

/// Bytes of a frame's header.
pub(super) const HEADER: usize = size_of::<intf::vtl_frame>();
/// Bytes of an OPEN frame's body.
pub(super) const OPEN: usize = size_of::<intf::vtl_open>();

/// One frame, as found in a packet, without regard to its stream's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The stream.
    pub stream: StreamId,
    /// `intf::VTL_FRAME_*`.
    pub kind: u32,
    /// Bits, `intf::VTL_FRAME_URGENT`; others mean nothing.
    pub flags: u8,
    /// Its meaning depends on `kind`.
    pub offset: u64,
    /// As long as `kind` wants it.
    pub body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Takes the first frame off `payload`, which is not empty.
    ///
    /// # Errors
    /// [`MuxError::Truncated`], [`MuxError::UnknownType`], [`MuxError::BodyLength`].
    pub fn take(payload: &mut &'a [u8]) -> Result<Self, MuxError> {
        let (head, rest) = payload
            .split_at_checked(HEADER)
            .ok_or(MuxError::Truncated)?;
        let len = usize::from(get!(head, vtl_frame, len));
        let kind = u32::from(get!(head, vtl_frame, type_));
        let expected = match kind {
            intf::VTL_FRAME_DATA => len,
            intf::VTL_FRAME_OPEN => OPEN,
            intf::VTL_FRAME_OPENED
            | intf::VTL_FRAME_FIN
            | intf::VTL_FRAME_RESET
            | intf::VTL_FRAME_CREDIT
            | intf::VTL_FRAME_SENT => 0,
            _ => return Err(MuxError::UnknownType(kind as u8)),
        };
        // Before the body: who reads frames off a byte stream need not wait for it.
        if len != expected {
            return Err(MuxError::BodyLength {
                kind: kind as u8,
                len,
            });
        }
        let (body, rest) = rest.split_at_checked(len).ok_or(MuxError::Truncated)?;
        *payload = rest;
        let stream = StreamId(get!(head, vtl_frame, stream));
        Ok(Self {
            stream,
            kind,
            flags: get!(head, vtl_frame, flags),
            offset: get!(head, vtl_frame, offset),
            body,
        })
    }
}

/// The header of a frame with `len` bytes of body.
pub(super) fn header(stream: StreamId, kind: u32, offset: u64, len: u16) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    put!(&mut bytes, vtl_frame, stream, stream.0);
    put!(&mut bytes, vtl_frame, len, len);
    put!(&mut bytes, vtl_frame, type_, kind as u8);
    put!(&mut bytes, vtl_frame, offset, offset);
    bytes
}

/// The same for DATA of which the last byte is urgent.
pub(super) fn urgent_header(stream: StreamId, offset: u64, len: u16) -> [u8; HEADER] {
    let mut bytes = header(stream, intf::VTL_FRAME_DATA, offset, len);
    put!(&mut bytes, vtl_frame, flags, intf::VTL_FRAME_URGENT as u8);
    bytes
}

/// The body of an OPEN frame.
pub(super) fn open_body(dst: SocketAddr, src: SocketAddr) -> [u8; OPEN] {
    let mut bytes = [0; OPEN];
    put!(&mut bytes, vtl_open, dst_port, dst.port());
    put!(&mut bytes, vtl_open, src_port, src.port());
    for (addr, at) in [
        (dst, offset_of!(intf::vtl_open, dst)),
        (src, offset_of!(intf::vtl_open, src)),
    ] {
        let octets = match addr {
            SocketAddr::V4(addr) => addr.ip().to_ipv6_mapped().octets(),
            SocketAddr::V6(addr) => addr.ip().octets(),
        };
        bytes[at..at + octets.len()].copy_from_slice(&octets);
    }
    bytes
}

/// Destination and source in the body of an OPEN frame, of [`Frame::take`].
pub(super) fn open_addrs(body: &[u8]) -> (SocketAddr, SocketAddr) {
    let addr = |at: usize, port| {
        let mut octets = [0; size_of::<Ipv6Addr>()];
        octets.copy_from_slice(&body[at..at + size_of::<Ipv6Addr>()]);
        let ip = Ipv6Addr::from(octets);
        match ip.to_ipv4_mapped() {
            Some(ip) => SocketAddr::from((ip, port)),
            None => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, 0)),
        }
    };
    (
        addr(
            offset_of!(intf::vtl_open, dst),
            get!(body, vtl_open, dst_port),
        ),
        addr(
            offset_of!(intf::vtl_open, src),
            get!(body, vtl_open, src_port),
        ),
    )
}

/// Frames written one behind the other.
pub(super) struct Out<'a> {
    pub(super) buffer: &'a mut [u8],
    pub(super) used: usize,
}

impl Out<'_> {
    pub(super) fn fits(&self, body: usize) -> bool {
        self.buffer.len() - self.used >= HEADER + body
    }

    pub(super) fn push(&mut self, id: StreamId, kind: u32, offset: u64, body: &[u8]) -> bool {
        if !self.fits(body.len()) {
            return false;
        }
        let (head, rest) = self.buffer[self.used..].split_at_mut(HEADER);
        // Bodies are empty or of OPEN bytes.
        head.copy_from_slice(&header(id, kind, offset, body.len() as u16));
        rest[..body.len()].copy_from_slice(body);
        self.used += HEADER + body.len();
        true
    }
}
