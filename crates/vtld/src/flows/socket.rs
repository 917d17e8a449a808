//! TCP sockets of flows.

use std::{
    io::{self, Read},
    net::TcpStream,
};

use bytes::{Bytes, BytesMut};

use crate::urgent::{self, Ahead};

/// What reading gave.
pub(super) enum Got {
    /// Bytes, the last of which is TCP's urgent byte or not.
    Bytes(Bytes, bool),
    End,
}

/// Reads at most `max` bytes of what is there.
pub(super) fn read(mut socket: &TcpStream, max: usize) -> io::Result<Got> {
    let (max, is_urgent) = match urgent::ahead(socket)? {
        Ahead::End => return Ok(Got::End),
        Ahead::Urgent => (1, true),
        Ahead::Bytes => (max.min(urgent::waiting(socket).max(1)), false),
    };
    let mut bytes = BytesMut::zeroed(max);
    match socket.read(&mut bytes)? {
        0 => Ok(Got::End),
        n => {
            bytes.truncate(n);
            Ok(Got::Bytes(bytes.freeze(), is_urgent))
        }
    }
}
