//! Handshakes of two hosts, and what each keeps and refuses.

use super::*;
use crate::broker::random_token as random;

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn key() -> PublicKey {
    SecretKey::generate().expect("a key").public()
}

/// A directory, removed after the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = random();
        let path = std::env::temp_dir().join(format!("vtl-identity-{name:x}"));
        std::fs::create_dir(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Host {
    identity: Identity,
    folder: Folder,
}

fn host(listed: &str) -> Host {
    let folder = Folder::new();
    let peers = folder.0.join("peers.toml");
    std::fs::write(&peers, listed).expect("written");
    let identity = Identity::open(&folder.0, &peers).expect("an identity");
    Host { identity, folder }
}

#[test]
fn judge__first_use_is_kept_and_a_change_refused() {
    let host = host("");
    let (first, other) = (key(), key());
    let judge = |opener, peer, key| host.identity.judge(opener, at(peer), key, None).map(drop);
    let named = Ok(());
    assert_eq!(judge(Side::Local, "192.0.2.1", Some(first)), named);
    assert_eq!(judge(Side::Local, "::ffff:192.0.2.1", Some(first)), named);
    let changed = judge(Side::Local, "192.0.2.1", Some(other));
    assert!(
        matches!(changed, Err(Refused::Changed { known, shown, .. }) if known == first.to_string() && shown == other.to_string())
    );
    let silent = judge(Side::Local, "192.0.2.1", None);
    assert!(matches!(silent, Err(Refused::Silent { .. })));
    // A peer known without an address, or by a prefix only, is refused at an address pinned to another one.
    for addresses in [vec![], vec!["192.0.2.0/24".to_owned()]] {
        let known = PeerKey {
            name: "laptop".into(),
            key: other.to_string(),
            addresses,
            reach: None,
        };
        host.identity.trust(&known).expect("trusted");
        let changed = judge(Side::Local, "192.0.2.1", Some(other));
        assert!(matches!(changed, Err(Refused::Changed { .. })));
        assert_eq!(judge(Side::Local, "192.0.2.2", Some(other)), named);
    }
    // A prefix pins no address: a stranger there is learned on first use.
    let stranger = judge(Side::Local, "192.0.2.3", Some(key()));
    assert_eq!(stranger, named);
    host.identity.forget("laptop").expect("forgotten");
    // Trusted by name, at the address where it was learned.
    let renewed = PeerKey {
        name: "192.0.2.3".into(),
        key: other.to_string(),
        addresses: Vec::new(),
        reach: None,
    };
    host.identity.trust(&renewed).expect("trusted");
    assert!(judge(Side::Local, "192.0.2.3", Some(first)).is_err());
    host.identity.forget("192.0.2.3").expect("forgotten");
    // Another client behind the same NAT.
    assert_eq!(judge(Side::Peer, "192.0.2.1", Some(other)), named);
    assert_eq!(judge(Side::Peer, "192.0.2.1", Some(first)), named);
    // Also after a restart.
    let peers = host.folder.0.join("peers.toml");
    let again = Identity::open(&host.folder.0, &peers).expect("an identity");
    assert_eq!(again.public, host.identity.public);
    assert!(
        again
            .judge(Side::Local, at("192.0.2.1"), Some(other), None)
            .is_err()
    );
    again.forget("192.0.2.1").expect("forgotten");
    assert!(again.forget("192.0.2.1").is_err());
    assert_eq!(
        (again.judge(Side::Local, at("192.0.2.1"), Some(other), None)).map(drop),
        named
    );
}

#[test]
fn judge__known_only() {
    let (listed, other) = (key(), key());
    let host = host(&format!(
        "policy = \"known\"\n[[peer]]\nname = \"gate\"\nkey = \"{listed}\"\naddresses = [\"192.0.2.0/24\"]\n"
    ));
    let judge = |opener, peer, key| host.identity.judge(opener, at(peer), key, None).map(drop);
    for opener in [Side::Local, Side::Peer] {
        let name = judge(opener, "192.0.2.9", Some(listed));
        assert_eq!(name, Ok(()));
        let unknown = judge(opener, "198.51.100.1", Some(other));
        assert!(matches!(unknown, Err(Refused::Unknown { .. })));
        assert!(
            judge(opener, "198.51.100.1", Some(listed)).is_err(),
            "not its place"
        );
        assert!(judge(opener, "198.51.100.1", None).is_err());
    }
    assert!(host.identity.judges_first(Side::Local));
    let trusted = PeerKey {
        name: "other".into(),
        key: other.to_string(),
        addresses: Vec::new(),
        reach: None,
    };
    host.identity.trust(&trusted).expect("trusted");
    assert_eq!(judge(Side::Peer, "203.0.113.1", Some(other)), Ok(()));
    let names: Vec<_> = host
        .identity
        .list(0)
        .expect("a list")
        .peers
        .into_iter()
        .map(|p| (p.known.name, p.listed))
        .collect();
    assert_eq!(names, [("gate".into(), true), ("other".into(), false)]);
    assert!(host.identity.forget("gate").is_err(), "the operator's");
    assert!(
        host.identity
            .trust(&PeerKey {
                name: "gate".into(),
                ..trusted
            })
            .is_err()
    );
}

#[test]
fn judge__tells_what_a_peer_may_reach() {
    let [all, some, learned, trusted] = [key(), key(), key(), key()];
    let host = host(&format!(
        "reach = [22, \"8000-8100\"]\n\
         [[peer]]\nname = \"all\"\nkey = \"{all}\"\n\
         [[peer]]\nname = \"some\"\nkey = \"{some}\"\nreach = 80\naddresses = [\"192.0.2.0/24\"]\n"
    ));
    let reached = |peer, key| {
        let standing = host.identity.judge(Side::Peer, at(peer), key, None);
        let standing = standing.expect("not refused");
        [22, 80, 8050, 9000].map(|port| standing.out_of_reach(port).is_none())
    };
    let unlisted = [true, false, true, false];
    assert_eq!(reached("192.0.2.1", Some(all)), [true; 4], "listed without");
    assert_eq!(
        reached("192.0.2.1", Some(some)),
        [false, true, false, false]
    );
    assert_eq!(
        reached("198.51.100.1", Some(some)),
        unlisted,
        "not its place"
    );
    assert_eq!(reached("192.0.2.1", Some(key())), unlisted);
    assert_eq!(reached("192.0.2.1", None), unlisted, "shows no key");
    assert!(host.identity.judges_first(Side::Peer));
    assert!(!host.identity.judges_first(Side::Local));
    // Learned, and trusted by command.
    let met = host
        .identity
        .judge(Side::Local, at("192.0.2.9"), Some(learned), None);
    assert!(met.is_ok());
    assert_eq!(reached("192.0.2.9", Some(learned)), unlisted);
    let trust = |reach: Option<&str>| {
        host.identity.trust(&PeerKey {
            name: "trusted".into(),
            key: trusted.to_string(),
            addresses: Vec::new(),
            reach: reach.map(|reach| vec![reach.to_owned()]),
        })
    };
    trust(None).expect("trusted");
    assert_eq!(reached("192.0.2.2", Some(trusted)), unlisted);
    trust(Some("9000-9001")).expect("trusted");
    assert_eq!(
        reached("192.0.2.2", Some(trusted)),
        [false, false, false, true]
    );
    trust(None).expect("trusted");
    let kept = [false, false, false, true];
    assert_eq!(reached("192.0.2.2", Some(trusted)), kept, "kept");
    assert!(
        trust(Some("http")).is_err_and(|error| error.contains("trusted: \"http\" is no reach"))
    );
    let listed = host.identity.list(0).expect("a list");
    assert_eq!(listed.reach, Some(vec!["22".into(), "8000-8100".into()]));
    let reach = listed.peers.into_iter().map(|peer| peer.known.reach);
    let reach: Vec<_> = reach.map(|all| all.map(|all| all.join(","))).collect();
    assert_eq!(
        reach,
        [None, Some("80".into()), None, Some("9000-9001".into())]
    );
}

#[test]
fn open__refuses_what_makes_no_sense() {
    let folder = Folder::new();
    let peers = folder.0.join("peers.toml");
    for (text, why) in [
        ("policy = \"anybody\"", "anybody"),
        ("[[peer]]\nname = \"a b\"\nkey = \"\"", "is no name"),
        (
            "[[peer]]\nname = \"a\"\nkey = \"00\"",
            "64 hexadecimal digits",
        ),
        ("[[peer]]\nname = \"a\"\n", "key"),
        ("polcy = \"known\"", "polcy"),
        ("reach = \"ssh\"", "is no reach"),
        (
            &format!("[[peer]]\nname = \"a\"\nkey = \"{}\"\nreach = [0]", key()),
            "a: 0 is no reach",
        ),
        (
            &format!(
                "[[peer]]\nname = \"a\"\nkey = \"{}\"\npolicy = \"known\"",
                key()
            ),
            "policy",
        ),
        (
            &format!(
                "[[peer]]\nname = \"a\"\nkey = \"{}\"\naddress = \"::1\"",
                key()
            ),
            "address",
        ),
    ] {
        std::fs::write(&peers, text).expect("written");
        let error = Identity::open(&folder.0, &peers).err().expect("refused");
        assert!(
            error.contains(why) && error.contains("peers.toml"),
            "{error}"
        );
    }
}

/// Associations that meet a host at the same time learn it once.
#[test]
fn judge__at_the_same_time() {
    let host = host("");
    let (first, other) = (key(), key());
    let judge = |key| {
        host.identity
            .judge(Side::Local, at("192.0.2.1"), Some(key), None)
    };
    std::thread::scope(|scope| {
        let all = [first, first, first, other].map(|key| scope.spawn(move || judge(key)));
        let all = all.map(|one| one.join().expect("no panic").is_ok());
        assert!(all[0] == all[1] && all[1] == all[2] && all[2] != all[3]);
    });
    assert_eq!(host.identity.list(0).expect("a list").peers.len(), 1);
}

/// Both sides' handshake in memory, to its end.
fn shake(client: &mut rustls::Connection, server: &mut rustls::Connection) {
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).expect("room");
        }
        server.read_tls(&mut &bytes[..]).expect("room");
        server.process_new_packets().expect("no violation");
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).expect("room");
        }
        client.read_tls(&mut &bytes[..]).expect("room");
        client.process_new_packets().expect("no violation");
    }
}

#[test]
fn tls__shows_each_the_others_key() {
    let hosts = [host(""), host("")];
    let mut client = hosts[0].identity.tls(Side::Local).expect("an end");
    let mut server = hosts[1].identity.tls(Side::Peer).expect("an end");
    shake(&mut client, &mut server);
    assert_eq!(tls::shown(&client), Some(hosts[1].identity.public));
    assert_eq!(tls::shown(&server), Some(hosts[0].identity.public));
    assert!(tls::certifies(&client) && tls::certifies(&server));
}

/// Hosts of the version before, which know no certificates.
#[test]
fn tls__with_hosts_that_show_no_certificates() {
    let host = host("");
    let (older_client, older_server) =
        tls::configs(&SecretKey::generate().expect("a key")).expect("configurations");
    let pairs = [
        (
            tls::client(&older_client).expect("an end"),
            host.identity.tls(Side::Peer).expect("an end"),
        ),
        (
            host.identity.tls(Side::Local).expect("an end"),
            tls::server(&older_server).expect("an end"),
        ),
    ];
    for (mut client, mut server) in pairs {
        shake(&mut client, &mut server);
        assert!(!tls::certifies(&client) && !tls::certifies(&server));
        assert!(tls::shown(&client).is_some() && tls::shown(&server).is_some());
    }
}

/// An operator's key, a host that trusts it and has `more` in its list.
struct Fleet {
    ca: SecretKey,
    host: Host,
}

/// Good until then.
const EXPIRES: u64 = 2_000_000_000;

impl Fleet {
    fn new(more: &str) -> Self {
        let ca = SecretKey::generate().expect("a key");
        let text = format!(
            "policy = \"ca\"\nreach = \"1-1023\"\n{more}\n[[ca]]\nname = \"fleet\"\nkey = \"{}\"\nreach = 443\n",
            ca.public()
        );
        let host = host(&text);
        Self { ca, host }
    }

    fn sign(&self, name: &str, key: PublicKey, addresses: &[&str]) -> Vec<u8> {
        let addresses: Vec<_> = addresses
            .iter()
            .map(|text| {
                let prefix: crate::hooker::rules::Prefix = text.parse().expect("a prefix");
                (prefix.address, prefix.bits)
            })
            .collect();
        Certificate::sign(name, key, &addresses, EXPIRES, &self.ca).expect("signed")
    }

    /// At a time before the end.
    fn judge(
        &self,
        opener: Side,
        peer: &str,
        key: PublicKey,
        certificate: &[u8],
    ) -> Result<Standing, Refused> {
        self.judge_at(EXPIRES - 1, opener, peer, key, certificate)
    }

    fn judge_at(
        &self,
        seconds: u64,
        opener: Side,
        peer: &str,
        key: PublicKey,
        certificate: &[u8],
    ) -> Result<Standing, Refused> {
        let now = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let identity = &self.host.identity;
        identity.judge_at(now, opener, at(peer), Some(key), Some(certificate))
    }
}

#[test]
fn judge__certified_hosts() {
    let fleet = Fleet::new("");
    let (server, laptop) = (key(), key());
    let certificate = fleet.sign("server", server, &["192.0.2.7", "2001:db8::/32"]);
    let identity = &fleet.host.identity;
    assert!(identity.judges_first(Side::Local) && identity.needs_certificates());
    // Before it has shown it.
    let unknown = fleet.judge(Side::Local, "192.0.2.7", server, b"");
    assert!(matches!(unknown, Err(Refused::Uncertified { .. })));
    for opener in [Side::Local, Side::Peer] {
        for peer in ["192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"] {
            let standing = fleet.judge(opener, peer, server, &certificate);
            let standing = standing.expect("certified");
            assert_eq!(standing.name.as_deref(), Some("server"));
            assert_eq!(standing.out_of_reach(443), None);
            assert!(standing.out_of_reach(80).is_some(), "the authority's reach");
        }
    }
    // A session that has no place for a certificate, by the key that has shown it.
    let session = identity.judge(Side::Local, at("192.0.2.7"), Some(server), None);
    assert_eq!(session.expect("known").name.as_deref(), Some("server"));
    let elsewhere = identity.judge(Side::Local, at("192.0.2.8"), Some(server), None);
    assert!(matches!(elsewhere, Err(Refused::Certificate { .. })));
    // Nobody connects to a host without an address; it may be anywhere.
    let certificate = fleet.sign("laptop", laptop, &[]);
    assert!(
        fleet
            .judge(Side::Peer, "203.0.113.9", laptop, &certificate)
            .is_ok()
    );
    let refused = fleet.judge(Side::Local, "203.0.113.9", laptop, &certificate);
    assert!(
        refused
            .expect_err("no address")
            .to_string()
            .contains("only for hosts that connect")
    );
    // A new key and a new certificate, with nothing to forget.
    let renewed = key();
    let certificate = fleet.sign("server", renewed, &["192.0.2.7"]);
    assert!(
        fleet
            .judge(Side::Local, "192.0.2.7", renewed, &certificate)
            .is_ok()
    );
    let rows = identity.list(0).expect("a list");
    let names: Vec<_> = rows
        .peers
        .iter()
        .map(|peer| peer.known.name.as_str())
        .collect();
    assert_eq!(names, ["server", "laptop", "server"]);
    assert_eq!(rows.authorities[0].name, "fleet");
}

/// The operator's own entry for a host takes precedence over its certificate.
#[test]
fn judge__a_listed_host_with_a_certificate() {
    let web = key();
    let listed = format!(
        "[[peer]]\nname = \"web\"\nkey = \"{web}\"\naddresses = [\"192.0.2.0/24\"]\nreach = 22"
    );
    let fleet = Fleet::new(&listed);
    let certificate = fleet.sign("web", web, &[]);
    for shown in [&certificate[..], b""] {
        let standing = fleet.judge(Side::Peer, "192.0.2.7", web, shown);
        let standing = standing.expect("listed");
        assert_eq!(standing.out_of_reach(22), None);
        assert!(standing.out_of_reach(443).is_some());
        let elsewhere = fleet.judge(Side::Peer, "203.0.113.9", web, shown);
        assert!(elsewhere.is_err(), "{elsewhere:?}");
    }
}

#[test]
fn judge__certificates_that_are_worth_nothing() {
    let (listed, revoked) = (key(), key());
    let fleet = Fleet::new(&format!(
        "revoked = [\"{revoked}\"]\n[[peer]]\nname = \"gate\"\nkey = \"{listed}\"\naddresses = [\"192.0.2.1\"]\n"
    ));
    let refused = |peer, key, certificate: &[u8]| {
        let judged = fleet.judge(Side::Local, peer, key, certificate);
        judged.expect_err("refused").to_string()
    };
    let one = key();
    let good = fleet.sign("one", one, &["192.0.2.7"]);
    assert!(fleet.judge(Side::Local, "192.0.2.7", one, &good).is_ok());
    let expired = fleet.judge_at(EXPIRES, Side::Local, "192.0.2.7", one, &good);
    let expired = expired.expect_err("refused").to_string();
    assert!(
        expired.contains("one has expired at 2033-05-18T03:33:20Z"),
        "{expired}"
    );
    let address = refused("192.0.2.8", one, &good);
    assert!(address.contains("one is for 192.0.2.7/32"), "{address}");
    let other = refused("192.0.2.7", key(), &good);
    assert!(other.contains("is for another key"), "{other}");
    let stranger = SecretKey::generate().expect("a key");
    let addresses = [(at("192.0.2.7"), 32)];
    let forged = Certificate::sign("one", one, &addresses, EXPIRES, &stranger).expect("signed");
    let forged = refused("192.0.2.7", one, &forged);
    assert!(forged.contains("is no [[ca]]"), "{forged}");
    let mut changed = good.clone();
    changed[11] ^= 1;
    let changed = refused("192.0.2.7", one, &changed);
    assert!(changed.contains("its signature is invalid"), "{changed}");
    assert!(refused("192.0.2.7", one, &[1]).contains("cut short"));
    // Names and addresses that the operator has listed as others'.
    let named = refused("192.0.2.7", one, &fleet.sign("gate", one, &["192.0.2.7"]));
    assert!(named.contains("is listed as the key of gate"), "{named}");
    let pinned = refused("192.0.2.1", one, &fleet.sign("one", one, &["192.0.2.1"]));
    assert!(
        pinned.contains("the key of 192.0.2.1 has changed"),
        "{pinned}"
    );
    let certificate = fleet.sign("two", revoked, &["192.0.2.7"]);
    let gone = refused("192.0.2.7", revoked, &certificate);
    assert!(gone.contains("is revoked"), "{gone}");
    // The host that is listed needs none, and a bad one does not harm it.
    assert!(fleet.judge(Side::Local, "192.0.2.1", listed, b"").is_ok());
    assert!(fleet.judge(Side::Local, "192.0.2.1", listed, &[1]).is_ok());
    // Peers without a key are refused, too.
    let silent = fleet
        .host
        .identity
        .judge(Side::Peer, at("192.0.2.9"), None, None);
    assert!(matches!(silent, Err(Refused::Nameless { .. })));
}

/// Keys are revoked under every policy, and certificates count under one only.
#[test]
fn judge__revoked_and_other_policies() {
    let (bad, certified) = (key(), key());
    let first_use = host(&format!("revoked = [\"{bad}\"]\n"));
    let judge = |key, certificate| {
        let identity = &first_use.identity;
        identity.judge(Side::Local, at("192.0.2.7"), Some(key), certificate)
    };
    assert!(matches!(judge(bad, None), Err(Refused::Revoked { .. })));
    let fleet = Fleet::new("");
    let certificate = fleet.sign("x", certified, &["192.0.2.7"]);
    let met = judge(certified, Some(&certificate)).expect("on first use");
    assert_eq!(met, Standing::default());
    assert!(!first_use.identity.needs_certificates());
    for (text, why) in [
        ("policy = \"ca\"", "wants a [[ca]]"),
        (
            "[[ca]]\nname = \"a\"\nkey = \"K\"",
            "counts for nothing with policy = \"first-use\"",
        ),
        (
            "policy = \"ca\"\n[[ca]]\nname = \"a\"\nkey = \"K\"\naddresses = [\"::1\"]",
            "stand in its certificates",
        ),
        ("revoked = [\"00\"]", "is no key"),
    ] {
        let folder = Folder::new();
        let peers = folder.0.join("peers.toml");
        std::fs::write(&peers, text.replace('K', &certified.to_string())).expect("written");
        let error = Identity::open(&folder.0, &peers).err().expect("refused");
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn certificate__this_hosts_own() {
    let fleet = Fleet::new("");
    let identity = &fleet.host.identity;
    assert!(identity.certificate().is_empty());
    let file = fleet.host.folder.0.join("host.crt");
    let good = fleet.sign("here", identity.public, &["192.0.2.7"]);
    std::fs::write(&file, Certificate::to_text(&good)).expect("written");
    assert_eq!(identity.certificate(), good);
    let told = identity.list(0).expect("a list").certificate;
    assert_eq!(told.expect("told").expires, "2033-05-18T03:33:20Z");
    // Somebody else's, or none, is not shown.
    for bytes in [
        Certificate::to_text(&fleet.sign("here", key(), &[])),
        "x".into(),
    ] {
        std::fs::write(&file, bytes).expect("written");
        assert!(identity.certificate().is_empty());
    }
}
