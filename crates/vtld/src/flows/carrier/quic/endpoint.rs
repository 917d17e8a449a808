//! QUIC's endpoint, its certificate, and the tuning of connections.
//!
//! The server's certificate is generated for each process; the client knows its fingerprint from the
//! control connection. The client presents the token of the grant as the server name in its first
//! packet; without it there is no handshake. So a carrier is as authentic as the control
//! connection, and confidential against anybody who cannot modify that.

use std::{
    cell::Cell,
    collections::HashMap,
    io,
    net::{SocketAddr, UdpSocket},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quinn::{
    ClientConfig, Connecting, Connection, Endpoint, EndpointConfig, Incoming, ServerConfig,
    TokioRuntime, TransportConfig, VarInt,
    crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig},
};
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};

use vtl_proto::{
    frame::CRYPTO,
    preamble::{ALPN, name_of, named},
};

use super::{
    super::{DEAD, Expected, library::Certificate},
    counting::CountingConfig,
};

/// Maximum number of concurrent streams of a connection.
const STREAMS: u32 = 4096;
/// Receive window of a stream, bytes: 850 Mbit/s at a round trip of 56 ms, 100 Mbit/s at 480 ms.
const STREAM_WINDOW: u32 = 8 << 20;
/// Receive window of a connection, bytes, which bounds the bytes buffered out of order: initial, when idle, maximum.
pub(super) const FIRST_WINDOW: u32 = 2 << 20;
pub(super) const MIN_WINDOW: u32 = 64 << 10;
pub(super) const MAX_WINDOW: u32 = 128 << 20;
/// Maximum number of unacknowledged bytes of flows.
pub(super) const SEND_WINDOW: u64 = 16 << 20;
/// Keepalive interval.
const KEEPALIVE: Duration = Duration::from_secs(4);
/// Maximum number of concurrent handshakes.
const HALF_OPEN: usize = 64;
/// Handshakes from which on clients must validate their address first (Retry).
const CAREFUL: usize = 16;

/// Outstanding grants, by token.
#[derive(Debug, Default)]
pub(super) struct Grants(Mutex<HashMap<u64, Expected>>);

impl Grants {
    pub(super) fn table(&self) -> MutexGuard<'_, HashMap<u64, Expected>> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Presents the certificate to clients that hold a grant.
#[derive(Debug)]
struct Resolver {
    grants: Arc<Grants>,
    certified: Arc<CertifiedKey>,
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let token = named(hello.server_name()?)?;
        let known = self.grants.table().contains_key(&token);
        known.then(|| Arc::clone(&self.certified))
    }
}

/// The QUIC endpoint of this process, client and server.
pub(super) struct Quic {
    endpoint: Endpoint,
    server: QuicServerConfigs,
    pub(super) grants: Arc<Grants>,
}

type QuicServerConfigs = Arc<QuicServerConfig>;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn transport(rtt: Option<Duration>) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    let idle = VarInt::from_u32(DEAD.as_millis() as u32);
    config
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(FIRST_WINDOW.into())
        .send_window(SEND_WINDOW)
        .max_concurrent_bidi_streams(0_u32.into())
        .max_concurrent_uni_streams(STREAMS.into())
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(Some(idle.into()))
        .keep_alive_interval(Some(KEEPALIVE))
        .congestion_controller_factory(Arc::new(CountingConfig::default()));
    if let Some(rtt) = rtt {
        // Otherwise a lost handshake packet costs a second.
        config.initial_rtt(rtt.max(Duration::from_millis(1)));
    }
    Arc::new(config)
}

impl Quic {
    /// Creates the endpoint. Call it within a tokio runtime.
    pub(super) fn new(socket: UdpSocket, made: &Certificate) -> io::Result<Self> {
        let certificate = CertificateDer::from(made.certificate.to_vec());
        let key = PrivateKeyDer::try_from(made.key.to_vec()).map_err(io::Error::other)?;
        let certified = CertifiedKey::from_der(vec![certificate], key, &provider())
            .map_err(io::Error::other)?;
        let grants = Arc::<Grants>::default();
        let resolver = Resolver {
            grants: Arc::clone(&grants),
            certified: Arc::new(certified),
        };
        let mut crypto = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(resolver));
        crypto.alpn_protocols = vec![ALPN.to_vec()];
        crypto.send_tls13_tickets = 0;
        let crypto = QuicServerConfig::try_from(crypto).map_err(io::Error::other)?;
        let server = Arc::new(crypto);
        let mut config = ServerConfig::with_crypto(server.clone());
        config.transport_config(transport(None));
        config.max_incoming(HALF_OPEN);
        config.incoming_buffer_size_total(1 << 20);
        let endpoint = Endpoint::new(
            EndpointConfig::default(),
            Some(config),
            socket,
            Arc::new(TokioRuntime),
        )?;
        Ok(Self {
            endpoint,
            server,
            grants,
        })
    }

    /// Begins to open a connection to the server of a grant.
    pub(super) fn connect(
        &self,
        to: SocketAddr,
        token: u64,
        fingerprint: [u8; CRYPTO],
        rtt: Option<Duration>,
    ) -> io::Result<Connecting> {
        let verifier = Pinned {
            fingerprint,
            provider: provider(),
        };
        let mut crypto = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        crypto.alpn_protocols = vec![ALPN.to_vec()];
        crypto.resumption = Resumption::disabled();
        let crypto = QuicClientConfig::try_from(crypto).map_err(io::Error::other)?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        config.transport_config(transport(rtt));
        self.endpoint
            .connect_with(config, to, &name_of(token))
            .map_err(io::Error::other)
    }

    /// Waits for the next admissible handshake; `None` when the endpoint is closed.
    pub(super) async fn accept(&self, half_open: &Cell<usize>) -> Option<Connecting> {
        loop {
            let incoming = self.endpoint.accept().await?;
            match self.admit(incoming, half_open.get()) {
                Some(connecting) => return Some(connecting),
                None => continue,
            }
        }
    }

    /// Admits a handshake if there is a grant for its source address, and room; answers nobody else.
    fn admit(&self, incoming: Incoming, half_open: usize) -> Option<Connecting> {
        let from = incoming.remote_address().ip().to_canonical();
        let granted = {
            let table = self.grants.table();
            table.values().find(|g| g.client == from).map(|g| g.rtt)
        };
        let Some(rtt) = granted.filter(|_| half_open < HALF_OPEN) else {
            incoming.ignore();
            return None;
        };
        if half_open >= CAREFUL && !incoming.remote_address_validated() {
            let _ = incoming.retry();
            return None;
        }
        let mut config = ServerConfig::with_crypto(self.server.clone());
        config.transport_config(transport(rtt));
        incoming.accept_with(Arc::new(config)).ok()
    }

    /// Redeems the token that a client has presented; valid once, and from the address of the grant
    /// only.
    pub(super) fn redeem(&self, connection: &Connection) -> Option<u64> {
        let data = connection.handshake_data()?;
        let data = data.downcast::<HandshakeData>().ok()?;
        let token = named(data.server_name.as_deref()?)?;
        let mut table = self.grants.table();
        let from = connection.remote_address().ip().to_canonical();
        table.get(&token).filter(|grant| grant.client == from)?;
        table.remove(&token);
        Some(token)
    }

    /// Closes all connections at once.
    pub(super) fn close(&self) {
        self.endpoint.close(0_u32.into(), b"");
    }

    /// Completes when the peers have been told of the end.
    pub(super) async fn wait_idle(&self) {
        self.endpoint.wait_idle().await;
    }
}

/// Verifier that trusts the certificate with the fingerprint from the control connection only.
#[derive(Debug)]
struct Pinned {
    fingerprint: [u8; CRYPTO],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if <[u8; CRYPTO]>::from(Sha256::digest(end_entity)) == self.fingerprint {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(rustls::CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("QUIC has TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
