//! QUIC by quinn, with windows of twice the bandwidth-delay product and full-size datagrams.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    Chunk, Connection, Endpoint, EndpointConfig, MtuDiscoveryConfig, RecvStream, SendStream,
    TokenLog, TokenReuseError, TokioRuntime, TransportConfig, ValidationTokenConfig, VarInt,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

use super::conn::Conn;
use super::workload::{Progress, fetch, serve, wait_at_gate};
use super::{DATAGRAM, Order, SOCKET, Summary, Work, buffer_limit, tcp};

/// Bytes read at a time.
const READ: usize = 256 * 1024;
/// The name in the certificate, which nobody checks.
const NAME: &str = "vtl-bench";
/// The most flows at a time, and some.
const STREAMS: u32 = 4_096;

/// A bidirectional stream of a connection.
struct Quic {
    _connection: Connection,
    send: SendStream,
    receive: RecvStream,
    /// What has arrived behind a gap, by offset.
    ahead: BTreeMap<u64, Chunk>,
    /// The offset up to which everything has been handed over.
    next: u64,
}

impl Quic {
    fn new(connection: Connection, send: SendStream, receive: RecvStream) -> Self {
        Self {
            _connection: connection,
            send,
            receive,
            ahead: BTreeMap::new(),
            next: 0,
        }
    }
}

impl Conn for Quic {
    async fn send(&mut self, data: &[u8]) -> io::Result<()> {
        self.send.write_all(data).await?;
        // A large window takes everything at once; the other connections of this thread must get on.
        tokio::task::yield_now().await;
        Ok(())
    }

    /// Puts the stream in order itself: quinn gives a connection up ("too many gaps in stream
    /// buffer") when more than 1,024 pieces wait for a lost one, which a window of a few thousand
    /// packets brings about where a queue overflows.
    async fn receive(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        loop {
            if let Some(chunk) = self.ahead.remove(&self.next) {
                self.next += chunk.bytes.len() as u64;
                take(&chunk.bytes);
                return Ok(chunk.bytes.len());
            }
            match self.receive.read_chunk(READ, false).await? {
                // quinn hands no byte over twice.
                Some(chunk) => self.ahead.insert(chunk.offset, chunk),
                None => return Ok(0),
            };
        }
    }

    async fn pause(&mut self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn transport(order: &Order, control: &str) -> Arc<TransportConfig> {
    let window = buffer_limit(order);
    let credit = VarInt::from_u64(window).unwrap_or(VarInt::MAX);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(credit)
        .receive_window(credit)
        .send_window(window)
        .max_concurrent_bidi_streams(STREAMS.into())
        .initial_mtu(DATAGRAM)
        .mtu_discovery_config(Some({
            let mut discovery = MtuDiscoveryConfig::default();
            discovery.upper_bound(DATAGRAM);
            discovery
        }))
        .max_idle_timeout(Some(VarInt::from_u32(120_000).into()));
    if control == "bbr" {
        config.congestion_controller_factory(Arc::new(BbrConfig::default()));
    } else {
        config.congestion_controller_factory(Arc::new(CubicConfig::default()));
    }
    Arc::new(config)
}

fn socket(at: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(at)?;
    tcp::enlarge(&socket, SOCKET);
    Ok(socket)
}

fn endpoint_config() -> io::Result<EndpointConfig> {
    let mut config = EndpointConfig::default();
    config
        .max_udp_payload_size(DATAGRAM)
        .map_err(io::Error::other)?;
    Ok(config)
}

/// The asking end: one connection for each flow, from one socket.
pub(super) struct Client {
    runtime: Runtime,
    endpoint: Endpoint,
    server: SocketAddr,
    open: Mutex<Vec<Connection>>,
}

impl Client {
    pub(super) fn new(order: &Order, control: &str) -> io::Result<Self> {
        let runtime = runtime()?;
        let mut crypto = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyServer))
            .with_no_client_auth();
        crypto.enable_early_data = true;
        let crypto = QuicClientConfig::try_from(crypto).map_err(io::Error::other)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(transport(order, control));
        let any: SocketAddr = if order.address.is_ipv4() {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        };
        let mut endpoint = {
            let _inside = runtime.enter();
            Endpoint::new(
                endpoint_config()?,
                None,
                socket(any)?,
                Arc::new(TokioRuntime),
            )?
        };
        endpoint.set_default_client_config(config);
        Ok(Self {
            runtime,
            endpoint,
            server: order.address,
            open: Mutex::default(),
        })
    }

    /// Fetches on so many connections at the same time. They stay open.
    pub(super) fn fetch(
        &self,
        connections: u32,
        work: Work,
        progress: &Arc<Progress>,
    ) -> io::Result<()> {
        let local = LocalSet::new();
        local.block_on(&self.runtime, async {
            if connections == 1 {
                return self.one(work, progress).await;
            }
            let tasks: Vec<_> = (0..connections)
                .map(|_| {
                    let (endpoint, server) = (self.endpoint.clone(), self.server);
                    let progress = Arc::clone(progress);
                    tokio::task::spawn_local(async move {
                        let result = connect(&endpoint, server, false).await;
                        progress.opened(result.as_ref().err());
                        let mut conn = result?;
                        wait_at_gate(&mut conn, &progress).await;
                        let result = fetch(&mut conn, work, &progress).await;
                        result.map(|()| conn._connection.clone())
                    })
                })
                .collect();
            for task in tasks {
                let connection = task.await.map_err(io::Error::other)??;
                self.keep(connection);
            }
            Ok(())
        })
    }

    async fn one(&self, work: Work, progress: &Progress) -> io::Result<()> {
        let mut conn = connect(&self.endpoint, self.server, true).await?;
        let result = fetch(&mut conn, work, progress).await;
        self.keep(conn._connection.clone());
        result
    }

    fn keep(&self, connection: Connection) {
        if let Ok(mut open) = self.open.lock() {
            open.push(connection);
        }
    }
}

/// Opens a connection and a stream; without a round trip if `early` and the server is known.
async fn connect(endpoint: &Endpoint, server: SocketAddr, early: bool) -> io::Result<Quic> {
    let connecting = endpoint.connect(server, NAME).map_err(io::Error::other)?;
    let connection = if early {
        match connecting.into_0rtt() {
            Ok((connection, _accepted)) => connection,
            Err(connecting) => connecting.await?,
        }
    } else {
        connecting.await?
    };
    let (send, receive) = connection.open_bi().await?;
    Ok(Quic::new(connection, send, receive))
}

/// The answering end, on a thread of its own.
pub(super) struct Server {
    connections: Arc<Mutex<Vec<Connection>>>,
    settings: String,
}

impl Server {
    pub(super) fn start(order: &Order, control: &str) -> io::Result<Self> {
        let certified =
            rcgen::generate_simple_self_signed([NAME.to_owned()]).map_err(io::Error::other)?;
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der())
            .map_err(io::Error::other)?;
        let mut crypto = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .map_err(io::Error::other)?;
        crypto.max_early_data_size = u32::MAX;
        let crypto = QuicServerConfig::try_from(crypto).map_err(io::Error::other)?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(transport(order, control));
        // A known client proves its address with a token: else the answer to early data would be
        // three times as long as the question at most, until a round trip has passed.
        let mut tokens = ValidationTokenConfig::default();
        tokens.sent(2).log(Arc::new(NoLog));
        config.validation_token_config(tokens);
        let connections = Arc::<Mutex<Vec<Connection>>>::default();
        let (seen, at) = (Arc::clone(&connections), order.address);
        let (tell, started) = mpsc::channel();
        thread::spawn(move || {
            let run = || -> io::Result<()> {
                let runtime = runtime()?;
                let endpoint = {
                    let _inside = runtime.enter();
                    Endpoint::new(
                        endpoint_config()?,
                        Some(config),
                        socket(at)?,
                        Arc::new(TokioRuntime),
                    )?
                };
                let _ = tell.send(Ok(()));
                LocalSet::new().block_on(&runtime, accept(&endpoint, &seen));
                Ok(())
            };
            if let Err(error) = run() {
                let _ = tell.send(Err(error));
            }
        });
        started.recv().map_err(io::Error::other)??;
        Ok(Self {
            connections,
            settings: format!(
                "quinn, {control}, flow-control windows {} bytes, datagrams of {DATAGRAM} bytes, socket buffers of {SOCKET} bytes, GSO and GRO",
                buffer_limit(order)
            ),
        })
    }

    pub(super) fn summary(&self) -> Summary {
        let mut summary = Summary {
            settings: self.settings.clone(),
            ..Summary::default()
        };
        if let Ok(connections) = self.connections.lock() {
            for connection in connections.iter() {
                let path = connection.stats().path;
                summary.sent += path.sent_packets;
                summary.again += path.lost_packets;
            }
            if let Some(connection) = connections.last() {
                let initial = connection.congestion_state().initial_window();
                let _ = write!(summary.settings, ", initial window {initial} bytes");
            }
        }
        summary
    }
}

async fn accept(endpoint: &Endpoint, seen: &Mutex<Vec<Connection>>) {
    while let Some(incoming) = endpoint.accept().await {
        let Ok(connecting) = incoming.accept() else {
            continue;
        };
        // Data of a known client is answered before the handshake is over.
        let connection = match connecting.into_0rtt() {
            Ok((connection, _accepted)) => connection,
            Err(connecting) => match connecting.await {
                Ok(connection) => connection,
                Err(_) => continue,
            },
        };
        if let Ok(mut seen) = seen.lock() {
            seen.push(connection.clone());
        }
        tokio::task::spawn_local(async move {
            while let Ok((send, receive)) = connection.accept_bi().await {
                let mut conn = Quic::new(connection.clone(), send, receive);
                // The client says what went wrong.
                tokio::task::spawn_local(async move { serve(&mut conn).await });
            }
        });
    }
}

/// Takes tokens as often as they come: no client here steals one.
struct NoLog;

impl TokenLog for NoLog {
    fn check_and_insert(
        &self,
        _nonce: u128,
        _issued: SystemTime,
        _lifetime: Duration,
    ) -> Result<(), TokenReuseError> {
        Ok(())
    }
}

/// Trusts any server: the certificate is made for one run inside a testbed.
#[derive(Debug)]
struct AnyServer;

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
