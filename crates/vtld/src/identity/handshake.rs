//! The TLS 1.3 handshake inside NEGO and its answers, which yields a session's keys: PROTOCOL.md, section 4, "Keys". As
//! in QUIC (RFC 9001) there are no records: flights are sent as they are, their confidential parts sealed with the
//! handshake keys. The rest of the negotiation is authenticated in the extension for QUIC's transport parameters.

use std::{io, sync::Arc};

use rustls::{
    CipherSuite, ClientConfig, ServerConfig,
    quic::{
        ClientConnection, Connection, DirectionalKeys, KeyChange, PacketKey, ServerConnection,
        Version,
    },
};
use vtl_pool::key::PublicKey;
use vtl_proto::{
    keys::{Keys, Secret, Suite},
    nego::{EXPORTERS, join_answer, split_answer},
    wire::{TAG_KEY, TagKey},
};

use super::tls;

/// Size of the tag keys, bytes: of the initiator's headers, then of the responder's. The responder generates them and
/// sends them after its negotiation data, sealed likewise: so it can verify the initiator's packets by their tags
/// before the handshake is complete.
pub(crate) const TAG_KEYS: usize = 2 * TAG_KEY;

/// The keys of header tags.
#[derive(Clone)]
pub(crate) struct Tags {
    pub(crate) send: TagKey,
    pub(crate) receive: TagKey,
}

impl Tags {
    /// The initiator's view.
    fn new(keys: &[u8; TAG_KEYS]) -> Self {
        let (keys, _) = keys.as_chunks::<TAG_KEY>();
        Self {
            send: keys[0].into(),
            receive: keys[1].into(),
        }
    }

    /// The other side's view.
    fn reversed(self) -> Self {
        Self {
            send: self.receive,
            receive: self.send,
        }
    }
}

/// Result of a handshake.
pub(crate) struct Agreed {
    pub(crate) keys: Keys,
    pub(crate) tags: Tags,
    /// The public key of the other side, which has proved possession.
    pub(crate) peer: PublicKey,
}

/// The initiator, waiting for the answer.
pub(crate) struct Initiator(Connection);

/// The responder, waiting for the last flight.
pub(crate) struct Responder {
    tls: Connection,
    tags: Tags,
    /// Opens the initiator's last flight.
    remote: Box<dyn PacketKey>,
}

impl Initiator {
    /// Starts a handshake that authenticates `bound`. Returns the first flight.
    pub(super) fn new(config: &Arc<ClientConfig>, bound: Vec<u8>) -> io::Result<(Self, Vec<u8>)> {
        let name = tls::name().map_err(io::Error::other)?;
        let tls = ClientConnection::new(Arc::clone(config), Version::V1, name, bound);
        let mut tls = Connection::from(tls.map_err(io::Error::other)?);
        let mut flight = Vec::new();
        tls.write_hs(&mut flight);
        Ok((Self(tls), flight))
    }

    /// Processes the responder's flight; `bound`: negotiation data that it must have authenticated. Returns the last
    /// flight.
    ///
    /// # Errors
    /// The flight is malformed or was tampered with.
    pub(crate) fn answered(mut self, flight: &[u8], bound: &[u8]) -> io::Result<(Agreed, Vec<u8>)> {
        let (clear, sealed) = split_answer(flight).ok_or_else(malformed)?;
        self.0.read_hs(clear).map_err(io::Error::other)?;
        let mut flight = Vec::new();
        let keys = handshake_keys(&mut self.0, &mut flight)?;
        let mut sealed = sealed.to_vec();
        let opened = keys.remote.decrypt_in_place(0, &[], &mut sealed);
        let opened = opened.map_err(io::Error::other)?;
        self.0.read_hs(opened).map_err(io::Error::other)?;
        let behind = check_bound(&self.0, bound)?;
        let tags = Tags::new(behind.try_into().map_err(|_| malformed())?);
        self.0.write_hs(&mut flight);
        seal(&*keys.local, &mut flight)?;
        Ok((agreed(&self.0, tags, EXPORTERS)?, flight))
    }
}

impl Responder {
    /// Processes the first flight, which must have authenticated `theirs`. Returns the answer, which authenticates
    /// `ours`.
    pub(super) fn new(
        config: &Arc<ServerConfig>,
        hello: &[u8],
        theirs: &[u8],
        mut ours: Vec<u8>,
        tag_keys: &[u8; TAG_KEYS],
    ) -> io::Result<(Self, Vec<u8>)> {
        ours.extend_from_slice(tag_keys);
        let tls = ServerConnection::new(Arc::clone(config), Version::V1, ours);
        let mut tls = Connection::from(tls.map_err(io::Error::other)?);
        tls.read_hs(hello).map_err(io::Error::other)?;
        if !check_bound(&tls, theirs)?.is_empty() {
            return Err(malformed());
        }
        let mut clear = Vec::new();
        let keys = handshake_keys(&mut tls, &mut clear)?;
        let mut sealed = Vec::new();
        tls.write_hs(&mut sealed);
        seal(&*keys.local, &mut sealed)?;
        let flight = join_answer(&clear, &sealed).ok_or_else(malformed)?;
        let responder = Self {
            tls,
            tags: Tags::new(tag_keys).reversed(),
            remote: keys.remote,
        };
        Ok((responder, flight))
    }

    /// The keys of header tags, which the initiator gets with the answer.
    pub(crate) fn tags(&self) -> &Tags {
        &self.tags
    }

    /// Processes the initiator's last flight.
    ///
    /// # Errors
    /// The flight is not the initiator's; the handshake may continue with another one.
    pub(crate) fn finished(&mut self, flight: &[u8]) -> io::Result<Agreed> {
        let mut sealed = flight.to_vec();
        let opened = self.remote.decrypt_in_place(0, &[], &mut sealed);
        // If it opens, the initiator has sealed it.
        let opened = opened.map_err(io::Error::other)?;
        self.tls.read_hs(opened).map_err(io::Error::other)?;
        let [initiator, responder] = EXPORTERS;
        agreed(&self.tls, self.tags.clone(), [responder, initiator])
    }
}

/// The handshake keys of each direction.
struct HandshakeKeys {
    local: Box<dyn PacketKey>,
    remote: Box<dyn PacketKey>,
}

/// Writes the cleartext part of the flight. Returns the handshake keys.
fn handshake_keys(tls: &mut Connection, flight: &mut Vec<u8>) -> io::Result<HandshakeKeys> {
    match tls.write_hs(flight) {
        Some(KeyChange::Handshake { keys }) => {
            let packet = |keys: DirectionalKeys| keys.packet;
            Ok(HandshakeKeys {
                local: packet(keys.local),
                remote: packet(keys.remote),
            })
        }
        _ => Err(malformed()),
    }
}

/// Seals a flight. Each key is used once, so the packet number is 0.
fn seal(key: &dyn PacketKey, flight: &mut Vec<u8>) -> io::Result<()> {
    let tag = key.encrypt_in_place(0, &[], flight);
    flight.extend_from_slice(tag.map_err(io::Error::other)?.as_ref());
    Ok(())
}

/// Checks that the other side has authenticated `bound`. Returns the bytes after it.
fn check_bound<'a>(tls: &'a Connection, bound: &[u8]) -> io::Result<&'a [u8]> {
    let theirs = tls.quic_transport_parameters();
    theirs
        .and_then(|theirs| theirs.strip_prefix(bound))
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "somebody has changed what was negotiated",
            )
        })
}

/// Exports the session's keys. `labels`: exporter labels of the send and the receive direction.
fn agreed(tls: &Connection, tags: Tags, labels: [&[u8]; 2]) -> io::Result<Agreed> {
    let suite = match tls.negotiated_cipher_suite().map(|suite| suite.suite()) {
        Some(CipherSuite::TLS13_AES_128_GCM_SHA256) => Suite::Aes128Gcm,
        Some(CipherSuite::TLS13_AES_256_GCM_SHA384) => Suite::Aes256Gcm,
        Some(CipherSuite::TLS13_CHACHA20_POLY1305_SHA256) => Suite::ChaCha20Poly1305,
        _ => return Err(malformed()),
    };
    // Fails before the handshake has ended.
    let secret = |label| {
        let secret = tls.export_keying_material([0; 32], label, None);
        secret.map(Secret::from).map_err(io::Error::other)
    };
    let keys = Keys {
        suite,
        send: secret(labels[0])?,
        receive: secret(labels[1])?,
    };
    let shown = tls.peer_certificates().and_then(<[_]>::first);
    let peer = shown.and_then(|key| PublicKey::from_spki(key));
    Ok(Agreed {
        keys,
        tags,
        peer: peer.ok_or_else(malformed)?,
    })
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "no flight of the handshake")
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use vtl_pool::key::SecretKey;

    use super::*;

    const TAGS: [u8; TAG_KEYS] = [5; TAG_KEYS];

    struct Hosts {
        keys: [PublicKey; 2],
        client: Arc<ClientConfig>,
        server: Arc<ServerConfig>,
    }

    fn hosts() -> Hosts {
        let keys = [(); 2].map(|()| SecretKey::generate().unwrap());
        Hosts {
            client: tls::configs(&keys[0]).unwrap().0,
            server: tls::configs(&keys[1]).unwrap().1,
            keys: keys.map(|key| key.public()),
        }
    }

    #[test]
    fn handshake__both_have_the_same_keys_and_know_each_other() {
        let hosts = hosts();
        let (initiator, hello) = Initiator::new(&hosts.client, vec![1; 160]).unwrap();
        let (mut responder, answer) =
            Responder::new(&hosts.server, &hello, &[1; 160], vec![2; 160], &TAGS).unwrap();
        let (here, finish) = initiator.answered(&answer, &[2; 160]).unwrap();
        assert!(responder.finished(&finish[1..]).is_err());
        let there = responder.finished(&finish).unwrap();
        assert_eq!(here.keys.suite, there.keys.suite);
        assert!(here.keys.send == there.keys.receive && here.keys.receive == there.keys.send);
        assert!(here.keys.send != here.keys.receive);
        assert!(here.tags.send == there.tags.receive && here.tags.receive == there.tags.send);
        assert_eq!([there.peer, here.peer], hosts.keys);
        // All of them fit into NEGO and NEGO_ACK.
        assert!(hello.len() < 600 && answer.len() < 900 && finish.len() < 400);
        // The identities are encrypted.
        let seen = |bytes: &[u8], key: &PublicKey| {
            let key = &key.to_spki()[12..];
            bytes.windows(key.len()).any(|window| window == key)
        };
        for flight in [&hello, &answer, &finish] {
            assert!(!hosts.keys.iter().any(|key| seen(flight, key)));
        }
    }

    #[test]
    fn handshake__what_was_negotiated_cannot_be_changed() {
        let hosts = hosts();
        let (_, hello) = Initiator::new(&hosts.client, vec![1; 160]).unwrap();
        assert!(Responder::new(&hosts.server, &hello, &[9; 160], vec![2; 160], &TAGS).is_err());
        let (initiator, hello) = Initiator::new(&hosts.client, vec![1; 160]).unwrap();
        let (_, answer) =
            Responder::new(&hosts.server, &hello, &[1; 160], vec![2; 160], &TAGS).unwrap();
        assert!(initiator.answered(&answer, &[9; 160]).is_err());
    }

    #[test]
    fn handshake__damaged_flights_are_refused() {
        let hosts = hosts();
        for at in 0..400 {
            let (initiator, hello) = Initiator::new(&hosts.client, vec![1]).unwrap();
            let (mut responder, mut answer) =
                Responder::new(&hosts.server, &hello, &[1], vec![2], &TAGS).unwrap();
            let place = at % answer.len();
            answer[place] ^= 1;
            assert!(initiator.answered(&answer, &[2]).is_err(), "{place}");
            assert!(responder.finished(&answer).is_err());
        }
        let (initiator, _) = Initiator::new(&hosts.client, vec![1]).unwrap();
        assert!(initiator.answered(&[], &[2]).is_err());
        let (initiator, _) = Initiator::new(&hosts.client, vec![1]).unwrap();
        assert!(initiator.answered(&[255, 255, 0], &[2]).is_err());
        assert!(Responder::new(&hosts.server, b"", &[1], vec![2], &TAGS).is_err());
    }
}
