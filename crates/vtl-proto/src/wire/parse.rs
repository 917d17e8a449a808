//! Parsing packets: everything that a peer may send is checked here, once.

use core::mem::{offset_of, size_of};

use super::{
    Ack, Data, Extensions, Few, Gids, Header, MAX_EXTENSIONS, MIN_PAYLOAD, Nego, Packet, Param,
    Size, Ticket, WireError, checksum, get,
};
use crate::intf;

impl<'a> Packet<'a> {
    /// Validates and decodes a complete packet.
    ///
    /// # Errors
    /// Every deviation from the wire format, the checksum last.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let packet = Self::parse_unverified(bytes)?;
        let padded = padding(packet.kind(), packet.body_len());
        let used = &bytes[..bytes.len() - padded];
        if checksum(used) != stored_checksum(used) {
            return Err(WireError::Checksum);
        }
        Ok(packet)
    }

    /// As [`Packet::parse`], for packets whose checksum the kernel has verified.
    ///
    /// # Errors
    /// Every deviation from the wire format, except the checksum's.
    pub fn parse_unverified(bytes: &'a [u8]) -> Result<Self, WireError> {
        split(bytes, size_of::<intf::vtl_hdr>())?;
        let version_type = get!(bytes, vtl_hdr, version_type);
        if u32::from(version_type >> 4) != intf::VTL_VERSION {
            return Err(WireError::Version(version_type >> 4));
        }
        let kind = version_type & 15;
        let size = header_len(u32::from(kind)).ok_or(WireError::Type(kind))?;
        let (head, rest) = split(bytes, size)?;
        let field = usize::from(get!(head, vtl_hdr, len));
        let body = rest
            .get(..field)
            .filter(|body| rest.len() - body.len() == padding(u32::from(kind), field))
            .ok_or(WireError::Length {
                field,
                follow: rest.len(),
            })?;
        check_body(u32::from(kind), body.len())?;
        Ok(match u32::from(kind) {
            intf::VTL_DATA => Self::Data(data(head, body)),
            intf::VTL_PROBE => Self::Probe(data(head, body)),
            intf::VTL_ACK => {
                let ack = ack(head, body);
                check_ack(&ack)?;
                Self::Ack(ack)
            }
            intf::VTL_CLOSE => Self::Close(header(head)),
            intf::VTL_SIZE => Self::Size(Size {
                header: header(head),
                // check_body bounds it far below 2^16.
                zeros: body.len() as u16,
                answers: get!(head, vtl_hdr, aux),
            }),
            nego_kind => {
                let nego = nego(head, Extensions::parse(body)?)?;
                check_nego(nego_kind, &nego)?;
                match nego_kind {
                    intf::VTL_NEGO => Self::Nego(nego),
                    intf::VTL_NEGO_ACK => Self::NegoAck(nego),
                    _ => Self::NegoNack(nego),
                }
            }
        })
    }
}

/// Length of the header of packets of type `kind`, in bytes.
pub(super) fn header_len(kind: u32) -> Option<usize> {
    Some(match kind {
        intf::VTL_DATA | intf::VTL_PROBE => size_of::<intf::vtl_data_hdr>(),
        intf::VTL_ACK => size_of::<intf::vtl_ack_hdr>(),
        intf::VTL_NEGO | intf::VTL_NEGO_ACK | intf::VTL_NEGO_NACK => size_of::<intf::vtl_nego>(),
        intf::VTL_CLOSE | intf::VTL_SIZE => size_of::<intf::vtl_hdr>(),
        _ => return None,
    })
}

/// Bytes of padding behind `body` bytes of a packet of type `kind`. Zero when sent, ignored when
/// received: the checksum counts them as zero.
pub(super) fn padding(kind: u32, body: usize) -> usize {
    match kind {
        intf::VTL_DATA | intf::VTL_PROBE => {
            (intf::VTL_MIN_PACKET as usize).saturating_sub(size_of::<intf::vtl_data_hdr>() + body)
        }
        _ => 0,
    }
}

/// Maximum zeros behind a SIZE, which is then as long as the longest DATA.
const MAX_ZEROS: usize =
    intf::VTL_MAX_PAYLOAD as usize + size_of::<intf::vtl_data_hdr>() - size_of::<intf::vtl_hdr>();

/// Checks the length of the body of a packet of type `kind`.
pub(super) fn check_body(kind: u32, len: usize) -> Result<(), WireError> {
    let (fits, error) = match kind {
        intf::VTL_DATA => (
            (1..=intf::VTL_MAX_PAYLOAD as usize).contains(&len),
            WireError::Payload(len),
        ),
        intf::VTL_ACK => {
            let fits = len <= intf::VTL_ACK_MAX_BITMAP as usize && len.is_multiple_of(8);
            (fits, WireError::Bitmap(len))
        }
        intf::VTL_SIZE => (len <= MAX_ZEROS, WireError::Payload(len)),
        intf::VTL_NEGO | intf::VTL_NEGO_ACK | intf::VTL_NEGO_NACK => {
            (len <= MAX_EXTENSIONS, WireError::Payload(len))
        }
        _ => (len == 0, WireError::Payload(len)),
    };
    if fits { Ok(()) } else { Err(error) }
}

/// Checks that a bitmap does not exceed the largest window.
pub(super) fn check_ack(ack: &Ack<'_>) -> Result<(), WireError> {
    let words = ack.bitmap.len() as u64 / 8 + u64::from(ack.skip);
    if words <= u64::from(intf::VTL_WINDOW_WORDS) {
        Ok(())
    } else {
        Err(WireError::Bitmap(ack.bitmap.len()))
    }
}

/// Validates the fields of the three negotiation packets.
pub(super) fn check_nego(kind: u32, nego: &Nego<'_>) -> Result<(), WireError> {
    let nack = kind == intf::VTL_NEGO_NACK;
    let gids_ok = match kind {
        intf::VTL_NEGO => !nego.gids.is_empty(),
        intf::VTL_NEGO_ACK => nego.gids.len() == 1,
        _ => true,
    };
    let known = |p: &Param| {
        usize::from(p.graft) < nego.gids.len() && u32::from(p.index) < intf::VTL_NEGO_PARAMS
    };
    let rules = [
        ("grafts", gids_ok),
        ("params", nego.params.iter().all(known)),
        ("reason", nack == (nego.reason != 0)),
        ("sid", nack || nego.sid != 0),
        ("ring_slots", nack || nego.ring_slots != 0),
        ("max_payload", nack || nego.max_payload >= MIN_PAYLOAD),
    ];
    match rules.iter().find(|(_, ok)| !ok) {
        Some((name, _)) => Err(WireError::Field(name)),
        None => Ok(()),
    }
}

fn split(bytes: &[u8], need: usize) -> Result<(&[u8], &[u8]), WireError> {
    bytes.split_at_checked(need).ok_or(WireError::Truncated {
        have: bytes.len(),
        need,
    })
}

fn stored_checksum(bytes: &[u8]) -> u32 {
    get!(bytes, vtl_hdr, csum).swap_bytes()
}

// The common header opens each of the longer ones.
const _: () = assert!(
    offset_of!(intf::vtl_data_hdr, h) == 0
        && offset_of!(intf::vtl_ack_hdr, h) == 0
        && offset_of!(intf::vtl_nego, h) == 0
);

fn header(b: &[u8]) -> Header {
    Header {
        flags: get!(b, vtl_hdr, flags),
        gid: get!(b, vtl_hdr, gid),
        sid: get!(b, vtl_hdr, sid),
        token: get!(b, vtl_hdr, token),
    }
}

fn data<'a>(b: &[u8], payload: &'a [u8]) -> Data<'a> {
    Data {
        header: header(b),
        seq: get!(b, vtl_data_hdr, seq),
        xid: get!(b, vtl_data_hdr, xid),
        ts: get!(b, vtl_data_hdr, ts),
        payload,
    }
}

fn ack<'a>(b: &[u8], bitmap: &'a [u8]) -> Ack<'a> {
    Ack {
        header: header(b),
        cum: get!(b, vtl_ack_hdr, cum),
        limit: get!(b, vtl_ack_hdr, limit),
        received: get!(b, vtl_ack_hdr, received),
        echo_seq: get!(b, vtl_ack_hdr, echo_seq),
        echo_xid: get!(b, vtl_ack_hdr, echo_xid),
        echo_ts: get!(b, vtl_ack_hdr, echo_ts),
        dups: get!(b, vtl_ack_hdr, dups),
        skip: get!(b, vtl_ack_hdr, skip),
        bitmap,
    }
}

fn nego<'a>(b: &[u8], extensions: Extensions<'a>) -> Result<Nego<'a>, WireError> {
    let count = usize::from(get!(b, vtl_nego, grafts));
    let gids = &b[offset_of!(intf::vtl_nego, gids)..];
    let mut list = [0; intf::VTL_NEGO_GRAFTS as usize];
    for (gid, bytes) in list.iter_mut().zip(gids.as_chunks().0) {
        *gid = u16::from_be_bytes(*bytes);
    }
    let gids = list
        .get(..count)
        .and_then(Gids::new)
        .ok_or(WireError::Field("grafts"))?;
    let params = usize::from(get!(b, vtl_nego, params));
    let entries = b[offset_of!(intf::vtl_nego, param)..].chunks(size_of::<intf::vtl_nego_param>());
    let mut param = [Param::default(); intf::VTL_NEGO_PARAMS as usize];
    for (param, bytes) in param.iter_mut().zip(entries) {
        *param = Param {
            graft: get!(bytes, vtl_nego_param, graft),
            index: get!(bytes, vtl_nego_param, index),
            value: get!(bytes, vtl_nego_param, value),
        };
    }
    let params = param
        .get(..params)
        .and_then(Few::new)
        .ok_or(WireError::Field("params"))?;
    Ok(Nego {
        header: header(b),
        token: get!(b, vtl_nego, token),
        peer_token: get!(b, vtl_nego, peer_token),
        sid: get!(b, vtl_nego, sid),
        ring_slots: get!(b, vtl_nego, ring_slots),
        max_payload: get!(b, vtl_nego, max_payload),
        port: get!(b, vtl_nego, port),
        services: get!(b, vtl_nego, services),
        reason: get!(b, vtl_nego, reason),
        gids,
        ticket: Ticket {
            time: get!(b, vtl_nego, ticket_time),
            mac: get!(b, vtl_nego, ticket_mac),
            sid: get!(b, vtl_nego, ticket_sid),
        },
        params,
        extensions,
    })
}
