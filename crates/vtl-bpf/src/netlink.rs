//! Messages to the kernel over netlink (RFC 3549).

use std::{
    io,
    mem::offset_of,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{
    self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType,
};

/// An attribute, padded to its alignment.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((value.len() as u16 + 4).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The attributes in the body of a message behind its own header, without the flags of their types: type and value. What
/// is cut off ends them.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const HEAD: usize = 4;
    const FLAGS: u16 = (libc::NLA_F_NESTED | libc::NLA_F_NET_BYTEORDER) as u16;
    std::iter::from_fn(move || {
        let length: [u8; 2] = value(bytes)?;
        let kind: [u8; 2] = value(bytes.get(2..)?)?;
        let length = usize::from(u16::from_ne_bytes(length));
        let found = bytes.get(HEAD..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(kind) & !FLAGS, found))
    })
}

/// The first bytes of a value, of a number.
pub fn value<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.first_chunk().copied()
}

/// Size of a message's header, a multiple of the alignment of messages.
const HEADER: usize = size_of::<libc::nlmsghdr>();
const LENGTH: Range<usize> = offset_of!(libc::nlmsghdr, nlmsg_len)..KIND.start;
const KIND: Range<usize> = offset_of!(libc::nlmsghdr, nlmsg_type)..FLAGS.start;
const FLAGS: Range<usize> =
    offset_of!(libc::nlmsghdr, nlmsg_flags)..offset_of!(libc::nlmsghdr, nlmsg_seq);

/// A socket for requests to one part of the kernel.
pub fn open(protocol: SockProtocol) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socket::socket(
        AddressFamily::Netlink,
        SockType::Raw,
        flags,
        Some(protocol),
    )?)
}

fn send(socket: &OwnedFd, kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    let mut message = vec![0; HEADER];
    message.extend(body);
    let length = message.len() as u32;
    message[LENGTH].copy_from_slice(&length.to_ne_bytes());
    message[KIND].copy_from_slice(&kind.to_ne_bytes());
    message[FLAGS].copy_from_slice(&(flags as u16).to_ne_bytes());
    let kernel = NetlinkAddr::new(0, 0);
    socket::sendto(socket.as_raw_fd(), &message, &kernel, MsgFlags::empty())?;
    Ok(())
}

/// Makes a request, and returns its outcome.
///
/// # Errors
/// What the kernel says.
pub fn request(socket: &OwnedFd, kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    let flags = flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    send(socket, kind, flags, body)?;
    let (kind, body) = answer(socket)?;
    match libc::c_int::from(kind) {
        libc::NLMSG_ERROR => outcome(&body),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Asks for one object, and returns the body of the answer.
///
/// # Errors
/// What the kernel says.
pub fn get(socket: &OwnedFd, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
    send(socket, kind, libc::NLM_F_REQUEST, body)?;
    let (kind, body) = answer(socket)?;
    if libc::c_int::from(kind) == libc::NLMSG_ERROR {
        outcome(&body)?;
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(body)
}

/// Type and body of an answer of one message. The kernel answers synchronously.
fn answer(socket: &OwnedFd) -> io::Result<(u16, Vec<u8>)> {
    let mut answer = [0; 4096];
    let got = socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    let (kind, body, _) = split(&answer[..got]).ok_or(io::ErrorKind::InvalidData)?;
    Ok((kind, body.to_vec()))
}

/// The outcome in the body of an `NLMSG_ERROR`, which success has, too.
fn outcome(body: &[u8]) -> io::Result<()> {
    match body.first_chunk().map(|errno| i32::from_ne_bytes(*errno)) {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Requests a dump, and gives the body of each message of it to `each`.
///
/// # Errors
/// What the kernel says.
pub fn dump(
    socket: &OwnedFd,
    kind: u16,
    body: &[u8],
    mut each: impl FnMut(&[u8]),
) -> io::Result<()> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
    send(socket, kind, flags, body)?;
    // The kernel fills no more than this at once.
    let mut answer = vec![0; 32 << 10];
    loop {
        let got = socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
        let mut rest = &answer[..got];
        while !rest.is_empty() {
            let (kind, body, next) = split(rest).ok_or(io::ErrorKind::InvalidData)?;
            match libc::c_int::from(kind) {
                libc::NLMSG_DONE => return Ok(()),
                libc::NLMSG_ERROR => return outcome(body),
                _ => each(body),
            }
            rest = next;
        }
    }
}

/// The first of some messages: its type and body; and the rest.
fn split(messages: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = messages.get(LENGTH)?.first_chunk()?;
    let length = u32::from_ne_bytes(*length) as usize;
    let kind = u16::from_ne_bytes(*messages.get(KIND)?.first_chunk()?);
    let body = messages.get(HEADER..length)?;
    let next = length.next_multiple_of(4).min(messages.len());
    Some((kind, body, &messages[next..]))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn attribute__is_aligned_and_its_length_is_not() {
        let bytes = attribute(7, b"veth\0");
        assert_eq!(bytes[..2], 9_u16.to_ne_bytes());
        assert_eq!(bytes[2..4], 7_u16.to_ne_bytes());
        assert_eq!(&bytes[4..], b"veth\0\0\0\0");
        assert_eq!(attribute(1, &[]).len(), 4);
    }

    #[test]
    fn attributes__reads_what_attribute_writes() {
        let nested = libc::NLA_F_NESTED as u16;
        let bytes = [
            attribute(7, b"veth\0"),
            attribute(nested | 2, &[]),
            attribute(3, &[1, 2]),
        ];
        let bytes = bytes.concat();
        let all: Vec<_> = attributes(&bytes).collect();
        assert_eq!(all, [(7, &b"veth\0"[..]), (2, &[]), (3, &[1, 2])]);
        // Cut off, or with lengths that cannot be.
        assert_eq!(attributes(&bytes[..bytes.len() - 3]).count(), 2);
        assert_eq!(attributes(&[3, 0, 1, 0]).count(), 0);
        assert_eq!(attributes(&[0; 64]).count(), 0);
        assert_eq!(value::<4>(&[1, 2, 3]), None);
    }

    #[test]
    fn split__messages_are_aligned_and_bounded() {
        let message = |length: u32, body: &[u8]| {
            let mut bytes = vec![0; HEADER];
            bytes[LENGTH].copy_from_slice(&length.to_ne_bytes());
            bytes[KIND].copy_from_slice(&20_u16.to_ne_bytes());
            bytes.extend(body);
            bytes
        };
        let first = message(HEADER as u32 + 5, b"first\0\0\0");
        let both = [first.clone(), message(HEADER as u32 + 2, b"no")].concat();
        let (kind, body, rest) = split(&both).expect("a message");
        assert_eq!((kind, body), (20, &b"first"[..]));
        assert_eq!(
            split(rest).map(|(_, body, rest)| (body, rest)),
            Some((&b"no"[..], &b""[..]))
        );
        for wrong in [0, HEADER as u32 - 1, first.len() as u32 + 1, u32::MAX] {
            assert!(split(&message(wrong, b"first\0\0\0")).is_none(), "{wrong}");
        }
        assert!(split(&first[..3]).is_none());
    }

    #[test]
    fn outcome__of_answers_and_of_what_is_none() {
        assert!(outcome(&0_i32.to_ne_bytes()).is_ok());
        let refused = outcome(&(-libc::EPERM).to_ne_bytes()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        for bad in [&[0; 3][..], &[]] {
            let refused = outcome(bad).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        }
    }
}
