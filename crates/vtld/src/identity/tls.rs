//! TLS 1.3 with raw public keys (RFC 8446, RFC 7250) on control connections. Here both sides only prove possession of
//! their keys; [`Identity::judge`](super::Identity::judge) authenticates the peer afterwards.

use std::sync::Arc;

use rustls::{
    CipherSuite, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, ServerConfig, ServerConnection, SignatureScheme,
    client::{
        AlwaysResolvesClientRawPublicKeys,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key},
    pki_types::{
        CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer,
        UnixTime,
    },
    server::{
        AlwaysResolvesServerRawPublicKeys,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::TLS13,
};
use vtl_pool::key::{PublicKey, SecretKey};
use vtl_proto::preamble::{ALPN, ALPN_CERTIFIED, SERVER_NAME};

/// Verifier that accepts any Ed25519 key whose owner has signed the handshake.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl AnyKey {
    fn check(key: &CertificateDer<'_>) -> Result<(), Error> {
        let known = PublicKey::from_spki(key);
        known.map(drop).ok_or(Error::InvalidCertificate(
            rustls::CertificateError::BadEncoding,
        ))
    }
}

/// Verification of the other side's signature, the same for client and server.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _key: &CertificateDer<'_>,
            _signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not spoken here".into()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let key = SubjectPublicKeyInfoDer::from(key.as_ref());
            let algorithms = &self.0.signature_verification_algorithms;
            verify_tls13_signature_with_raw_key(message, &key, signed, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Self::check(key).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Self::check(key).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}

/// Configurations of client and server.
pub(super) type Configs = (Arc<ClientConfig>, Arc<ServerConfig>);

/// Configurations of this host's control connections.
pub(super) fn controls(key: &SecretKey) -> Result<Configs, Error> {
    let (client, server) = configs(key)?;
    let (mut client, mut server) = (ClientConfig::clone(&client), ServerConfig::clone(&server));
    for protocols in [&mut client.alpn_protocols, &mut server.alpn_protocols] {
        // The server's order decides.
        protocols.insert(0, ALPN_CERTIFIED.to_vec());
    }
    Ok((Arc::new(client), Arc::new(server)))
}

/// Configurations of this host's handshakes for sessions.
pub(super) fn configs(key: &SecretKey) -> Result<Configs, Error> {
    let mut provider = ring::default_provider();
    if !has_aes() {
        // Without AES in hardware, ChaCha20 first: the other side takes the first one.
        provider.cipher_suites.reverse();
    } else {
        // A little faster than with 256 bits.
        provider
            .cipher_suites
            .sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    }
    let provider = Arc::new(provider);
    let secret = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.to_pkcs8()));
    let signing = provider.key_provider.load_private_key(secret)?;
    let shown = vec![CertificateDer::from(key.public().to_spki())];
    let certified = Arc::new(CertifiedKey::new(shown, signing));
    let verifier = Arc::new(AnyKey(Arc::clone(&provider)));
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
            Arc::clone(&certified),
        )));
    client.alpn_protocols = vec![ALPN.to_vec()];
    client.enable_sni = false;
    client.resumption = rustls::client::Resumption::disabled();
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
    server.alpn_protocols = vec![ALPN.to_vec()];
    server.send_tls13_tickets = 0;
    Ok((Arc::new(client), Arc::new(server)))
}

/// Whether the processor has AES instructions.
fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes")
}

/// The server name, the same for all hosts.
pub(super) fn name() -> Result<ServerName<'static>, Error> {
    ServerName::try_from(SERVER_NAME).map_err(|_| Error::General("a name that is none".into()))
}

/// The client's end of a connection.
pub(super) fn client(config: &Arc<ClientConfig>) -> Result<Connection, Error> {
    Ok(ClientConnection::new(Arc::clone(config), name()?)?.into())
}

/// The server's end of a connection.
pub(super) fn server(config: &Arc<ServerConfig>) -> Result<Connection, Error> {
    Ok(ServerConnection::new(Arc::clone(config))?.into())
}

/// The public key of the other side, which has proved possession.
pub(crate) fn shown(connection: &Connection) -> Option<PublicKey> {
    PublicKey::from_spki(connection.peer_certificates()?.first()?)
}

/// Whether both sides exchange certificates first (ALPN).
pub(crate) fn certifies(connection: &Connection) -> bool {
    connection.alpn_protocol() == Some(ALPN_CERTIFIED)
}
