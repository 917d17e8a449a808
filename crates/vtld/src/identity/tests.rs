use super::*;
use crate::broker::random_token as random;

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn key() -> PublicKey {
    SecretKey::generate().expect("a key").public()
}

/// A folder that goes with the test.
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
    let judge = |opener, peer, key| host.identity.judge(opener, at(peer), key).map(drop);
    let named = Ok(());
    assert_eq!(judge(Side::Local, "192.0.2.1", Some(first)), named);
    assert_eq!(judge(Side::Local, "::ffff:192.0.2.1", Some(first)), named);
    let changed = judge(Side::Local, "192.0.2.1", Some(other));
    assert!(
        matches!(changed, Err(Refused::Changed { known, shown, .. }) if known == first.to_string() && shown == other.to_string())
    );
    let silent = judge(Side::Local, "192.0.2.1", None);
    assert!(matches!(silent, Err(Refused::Silent { .. })));
    // Whom this host knows, but at no address or in a network, is not the host at this one.
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
    // Nor are others in its network.
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
    // Somebody else behind the same NAT, who has connected.
    assert_eq!(judge(Side::Peer, "192.0.2.1", Some(other)), named);
    assert_eq!(judge(Side::Peer, "192.0.2.1", Some(first)), named);
    // Also after a restart.
    let peers = host.folder.0.join("peers.toml");
    let again = Identity::open(&host.folder.0, &peers).expect("an identity");
    assert_eq!(again.public, host.identity.public);
    assert!(
        again
            .judge(Side::Local, at("192.0.2.1"), Some(other))
            .is_err()
    );
    again.forget("192.0.2.1").expect("forgotten");
    assert!(again.forget("192.0.2.1").is_err());
    assert_eq!(
        (again.judge(Side::Local, at("192.0.2.1"), Some(other))).map(drop),
        named
    );
}

#[test]
fn judge__known_only() {
    let (listed, other) = (key(), key());
    let host = host(&format!(
        "policy = \"known\"\n[[peer]]\nname = \"gate\"\nkey = \"{listed}\"\naddresses = [\"192.0.2.0/24\"]\n"
    ));
    let judge = |opener, peer, key| host.identity.judge(opener, at(peer), key).map(drop);
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
        let standing = host.identity.judge(Side::Peer, at(peer), key);
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
        .judge(Side::Local, at("192.0.2.9"), Some(learned));
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
    let judge = |key| host.identity.judge(Side::Local, at("192.0.2.1"), Some(key));
    std::thread::scope(|scope| {
        let all = [first, first, first, other].map(|key| scope.spawn(move || judge(key)));
        let all = all.map(|one| one.join().expect("no panic").is_ok());
        assert!(all[0] == all[1] && all[1] == all[2] && all[2] != all[3]);
    });
    assert_eq!(host.identity.list(0).expect("a list").peers.len(), 1);
}

/// Both sides' handshake in memory.
#[test]
fn tls__shows_each_the_others_key() {
    let hosts = [host(""), host("")];
    let mut client = hosts[0].identity.tls(Side::Local).expect("an end");
    let mut server = hosts[1].identity.tls(Side::Peer).expect("an end");
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
    assert_eq!(tls::shown(&client), Some(hosts[1].identity.public));
    assert_eq!(tls::shown(&server), Some(hosts[0].identity.public));
}
