//! Emitting packets.

use core::mem::{offset_of, size_of};

use super::parse::{check_ack, check_body, check_nego, header_len, padding};
use super::{Ack, Data, EmitError, Extensions, Header, Nego, Packet, checksum, put};
use crate::intf;

impl Packet<'_> {
    /// The packet's `enum vtl_type`.
    pub fn kind(&self) -> u32 {
        match self {
            Self::Data(_) => intf::VTL_DATA,
            Self::Ack(_) => intf::VTL_ACK,
            Self::Probe(_) => intf::VTL_PROBE,
            Self::Nego(_) => intf::VTL_NEGO,
            Self::NegoAck(_) => intf::VTL_NEGO_ACK,
            Self::NegoNack(_) => intf::VTL_NEGO_NACK,
            Self::Close(_) => intf::VTL_CLOSE,
            Self::Size(_) => intf::VTL_SIZE,
        }
    }

    /// The common part.
    pub fn header(&self) -> &Header {
        match self {
            Self::Data(data) | Self::Probe(data) => &data.header,
            Self::Ack(ack) => &ack.header,
            Self::Nego(nego) | Self::NegoAck(nego) | Self::NegoNack(nego) => &nego.header,
            Self::Close(header) => header,
            Self::Size(size) => &size.header,
        }
    }

    /// Replaces the extensions of a NEGO, or of an answer to one.
    #[must_use]
    pub fn with_extensions<'a>(self, extensions: Extensions<'a>) -> Packet<'a>
    where
        Self: 'a,
    {
        let with = |nego| Nego { extensions, ..nego };
        match self {
            Self::Nego(nego) => Packet::Nego(with(nego)),
            Self::NegoAck(nego) => Packet::NegoAck(with(nego)),
            Self::NegoNack(nego) => Packet::NegoNack(with(nego)),
            other => other,
        }
    }

    /// Bytes that [`Packet::emit`] writes.
    pub fn wire_len(&self) -> usize {
        let (kind, body) = (self.kind(), self.body_len());
        header_len(kind).unwrap_or_default() + body + padding(kind, body)
    }

    /// Writes the packet with its checksum and its padding to the beginning of `buffer` and returns
    /// its length.
    ///
    /// # Errors
    /// The buffer is too short, or [`Packet::parse`] would refuse the result.
    pub fn emit(&self, buffer: &mut [u8]) -> Result<usize, EmitError> {
        let (have, need) = (buffer.len(), self.wire_len());
        let bytes = buffer
            .get_mut(..need)
            .ok_or(EmitError::Buffer { have, need })?;
        let (body, length) = (self.body(), self.body_len());
        check_body(self.kind(), length)?;
        bytes.fill(0);
        let size = need - length - padding(self.kind(), length);
        let (head, tail) = bytes.split_at_mut(size);
        tail[..body.len()].copy_from_slice(body);
        put!(
            head,
            vtl_hdr,
            version_type,
            (intf::VTL_VERSION << 4 | self.kind()) as u8
        );
        // check_body bounds it far below 2^16.
        put!(head, vtl_hdr, len, length as u16);
        emit_header(head, self.header());
        match self {
            Self::Data(data) | Self::Probe(data) => emit_data(head, data),
            Self::Ack(ack) => {
                check_ack(ack)?;
                emit_ack(head, ack);
            }
            Self::Nego(nego) | Self::NegoAck(nego) | Self::NegoNack(nego) => {
                check_nego(self.kind(), nego)?;
                emit_nego(head, nego);
            }
            Self::Close(_) => {}
            Self::Size(size) => put!(head, vtl_hdr, aux, size.answers),
        }
        let sum = checksum(bytes);
        put!(bytes, vtl_hdr, csum, sum.swap_bytes());
        Ok(need)
    }

    /// Bytes that follow the header, without padding.
    pub(super) fn body_len(&self) -> usize {
        match self {
            Self::Size(size) => size.zeros.into(),
            _ => self.body().len(),
        }
    }

    /// The part of these bytes that is not all zero.
    fn body(&self) -> &[u8] {
        match self {
            Self::Data(data) | Self::Probe(data) => data.payload,
            Self::Ack(ack) => ack.bitmap,
            Self::Nego(nego) | Self::NegoAck(nego) | Self::NegoNack(nego) => {
                nego.extensions.as_bytes()
            }
            _ => &[],
        }
    }
}

fn emit_header(b: &mut [u8], header: &Header) {
    put!(b, vtl_hdr, flags, header.flags);
    put!(b, vtl_hdr, gid, header.gid);
    put!(b, vtl_hdr, sid, header.sid);
    put!(b, vtl_hdr, token, header.token);
}

fn emit_data(b: &mut [u8], data: &Data<'_>) {
    put!(b, vtl_data_hdr, seq, data.seq);
    put!(b, vtl_data_hdr, xid, data.xid);
    put!(b, vtl_data_hdr, ts, data.ts);
}

fn emit_ack(b: &mut [u8], ack: &Ack<'_>) {
    put!(b, vtl_ack_hdr, cum, ack.cum);
    put!(b, vtl_ack_hdr, limit, ack.limit);
    put!(b, vtl_ack_hdr, received, ack.received);
    put!(b, vtl_ack_hdr, echo_seq, ack.echo_seq);
    put!(b, vtl_ack_hdr, echo_xid, ack.echo_xid);
    put!(b, vtl_ack_hdr, echo_ts, ack.echo_ts);
    put!(b, vtl_ack_hdr, dups, ack.dups);
    put!(b, vtl_ack_hdr, skip, ack.skip);
}

fn emit_nego(b: &mut [u8], nego: &Nego<'_>) {
    put!(b, vtl_nego, token, nego.token);
    put!(b, vtl_nego, peer_token, nego.peer_token);
    put!(b, vtl_nego, sid, nego.sid);
    put!(b, vtl_nego, ring_slots, nego.ring_slots);
    put!(b, vtl_nego, max_payload, nego.max_payload);
    put!(b, vtl_nego, port, nego.port);
    put!(b, vtl_nego, services, nego.services);
    put!(b, vtl_nego, reason, nego.reason);
    // Few holds at most 8.
    put!(b, vtl_nego, grafts, nego.gids.len() as u8);
    let list = &mut b[offset_of!(intf::vtl_nego, gids)..];
    for (bytes, gid) in list
        .chunks_exact_mut(size_of::<u16>())
        .zip(nego.gids.iter())
    {
        bytes.copy_from_slice(&gid.to_be_bytes());
    }
    put!(b, vtl_nego, ticket_time, nego.ticket.time);
    put!(b, vtl_nego, ticket_mac, nego.ticket.mac);
    put!(b, vtl_nego, ticket_sid, nego.ticket.sid);
    put!(b, vtl_nego, params, nego.params.len() as u8);
    let list = &mut b[offset_of!(intf::vtl_nego, param)..];
    for (bytes, param) in list
        .chunks_mut(size_of::<intf::vtl_nego_param>())
        .zip(nego.params.iter())
    {
        put!(bytes, vtl_nego_param, graft, param.graft);
        put!(bytes, vtl_nego_param, index, param.index);
        put!(bytes, vtl_nego_param, value, param.value);
    }
}
