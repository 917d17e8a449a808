//! Packages through OCI registries: a real one (Debian's `docker-registry`), and some that lie.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use vtl_pool::key::SecretKey;
use vtl_pool::manifest::Project;
use vtl_pool::object::Description;
use vtl_pool::package::MAX_PACKAGE;
use vtl_pool::{Index, Package};

use crate::harness::{until, vtl};

const USER: &str = "ada";
/// The password "open sesame", by bcrypt.
const HASH: &str = "$2b$05$IicSp2TUmyWIVzxJZJ5E7et17U0Rh2C6bFthZ8HDklt9xp9r9VZ5a";
/// Both in Base64, as `docker login` leaves them.
const LOGIN: &str = "YWRhOm9wZW4gc2VzYW1l";

/// A directory that vanishes with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("registry-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("written");
        path
    }

    /// As `docker login` for this registry would.
    fn log_in(&self, registry: &str) {
        let config = json!({ "auths": { registry: { "auth": LOGIN } } });
        self.put("config.json", config.to_string());
    }

    fn vtl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(vtl());
        for proxy in ["http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(proxy).env_remove(proxy.to_uppercase());
        }
        let certificate = self.0.join("certificate.pem");
        if certificate.exists() {
            command.env("SSL_CERT_FILE", certificate);
        }
        command
            .args(args)
            .current_dir(&self.0)
            .env("DOCKER_CONFIG", &self.0)
            .stdin(Stdio::null())
            .output()
            .expect("vtl runs")
    }

    /// `vtl graft pull` of the package `mine`, from a registry without encryption.
    fn pull(&self, registry: &str) -> Output {
        let place = format!("oci://{registry}/grafts");
        self.vtl(&[
            "graft",
            "pull",
            "mine",
            &place,
            "--plain-http",
            "--output",
            "got",
        ])
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A package of a graft that comes with VTL, under another name.
fn package(version: &str) -> Vec<u8> {
    package_by(version, &SecretKey::generate().expect("randomness"))
}

fn package_by(version: &str, key: &SecretKey) -> Vec<u8> {
    let old = b"selective-repeat\0";
    let mut image = vtl_bpf::objects::graft("selective-repeat")
        .expect("it comes with VTL")
        .to_vec();
    let at = image.windows(old.len()).position(|w| w == old);
    let at = at.expect("its name");
    image[at..at + 32].fill(0);
    image[at..at + 4].copy_from_slice(b"mine");
    let at = at + std::mem::offset_of!(vtl_proto::intf::vtl_graft_info, gid);
    image[at..at + 4].copy_from_slice(&40_u32.to_le_bytes());
    let description = Description::read(&image).expect("a graft");
    let project = Project::built_in(&description, version.parse().expect("a version"));
    let manifest = project.manifest(&description).expect("honest");
    Package::sign(&manifest, &image, key).expect("signed")
}

#[track_caller]
fn success(output: &Output) -> String {
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    words
}

#[track_caller]
fn refused(output: &Output, about: &str) {
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert_eq!(words.lines().count(), 1, "one sentence: {words}");
    assert!(words.contains(about), "{about}: {words}");
}

/// A port that nobody listens on.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port()
}

/// A registry as it comes from its makers.
struct Real {
    process: Child,
    name: String,
}

impl Real {
    /// Starts it with these lines more in its configuration, `http:`'s indented by two blanks. `None`,
    /// where the test is skipped.
    fn start(scratch: &Scratch, http: &str, rest: &str) -> Option<Self> {
        let port = free_port();
        let storage = scratch.0.join("storage");
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: 127.0.0.1:{port}\n  secret: none\n{http}{rest}",
            storage.display()
        );
        let config = scratch.put("registry.yml", config);
        let log = fs::File::create(scratch.0.join("registry.log")).expect("a file");
        // Debian's name, and its makers'.
        let process = ["docker-registry", "registry"].iter().find_map(|program| {
            let mut command = Command::new(program);
            command.arg("serve").arg(&config).stdin(Stdio::null());
            let output = log.try_clone().expect("a descriptor");
            command
                .stdout(output)
                .stderr(log.try_clone().expect("a descriptor"));
            command.spawn().ok()
        });
        let Some(process) = process else {
            vtl_testing::skip("no docker-registry here");
            return None;
        };
        let mut real = Self {
            process,
            name: format!("localhost:{port}"),
        };
        until("the registry listens", || {
            let log = || fs::read_to_string(scratch.0.join("registry.log"));
            let ended = real.process.try_wait().expect("a child");
            assert!(ended.is_none(), "the registry has ended: {:?}", log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Some(real)
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pem(kind: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n")
}

#[test]
fn real__with_certificate_and_login() {
    let scratch = Scratch::new("tls");
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).expect("a certificate");
    let certificate = pem("CERTIFICATE", made.cert.der());
    let certificate = scratch.put("server.pem", certificate);
    let key = pem("PRIVATE KEY", &made.signing_key.serialize_der());
    let key = scratch.put("server.key", key);
    let users = scratch.put("users", format!("{USER}:{HASH}\n"));
    let tls = format!(
        "  tls:\n    certificate: {}\n    key: {}\n",
        certificate.display(),
        key.display()
    );
    let auth = format!(
        "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
        users.display()
    );
    let Some(real) = Real::start(&scratch, &tls, &auth) else {
        return;
    };
    let place = format!("oci://{}/some/grafts", real.name);
    let (old, new) = (package("0.9.0"), package("0.10.0"));
    scratch.put("old.vtlg", &old);
    scratch.put("new.vtlg", &new);
    scratch.put("other.vtlg", package("0.10.0"));
    let publish = |file: &str| scratch.vtl(&["graft", "publish", file, &place]);
    let pull = |wanted: &str| scratch.vtl(&["graft", "pull", wanted, &place, "--output", "got"]);

    refused(&publish("old.vtlg"), "cannot ask localhost");
    fs::copy(&certificate, scratch.0.join("certificate.pem")).expect("copied");
    refused(&publish("old.vtlg"), "docker login");
    scratch.log_in(&real.name);
    refused(
        &pull("mine"),
        "there is no package of mine in oci://localhost",
    );
    let words = success(&publish("new.vtlg"));
    assert!(words.contains("/some/grafts/mine:0.10.0"), "{words}");
    success(&publish("old.vtlg"));
    // Again is no error, another one is.
    success(&publish("old.vtlg"));
    refused(&publish("other.vtlg"), "raise the version");

    success(&pull("mine"));
    let got = |file: &str| fs::read(scratch.0.join("got").join(file)).expect(file);
    assert_eq!(got("mine-0.10.0.vtlg"), new);
    success(&pull("mine@0.9.0"));
    assert_eq!(got("mine-0.9.0.vtlg"), old);
    refused(&pull("mine@0.9.1"), "there is no package of mine@0.9.1");
    refused(&pull("Mine"), "lower case");
}

#[test]
fn real__without_encryption_or_login() {
    let scratch = Scratch::new("plain");
    let Some(real) = Real::start(&scratch, "", "") else {
        return;
    };
    let bytes = package("1.0.0");
    scratch.put("mine.vtlg", &bytes);
    let place = format!("oci://{}/grafts", real.name);
    let publish = ["graft", "publish", "mine.vtlg", &place];
    refused(&scratch.vtl(&publish), "cannot ask localhost");
    success(&scratch.vtl(&[&publish[..], &["--plain-http"]].concat()));
    success(&scratch.pull(&real.name));
    let got = fs::read(scratch.0.join("got/mine-1.0.0.vtlg")).expect("pulled");
    assert_eq!(got, bytes);
}

/// A publisher, what it publishes, and a host that trusts it.
struct Publisher {
    scratch: Scratch,
    key: SecretKey,
}

impl Publisher {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        success(&scratch.vtl(&["graft", "key", "new", "me"]));
        let key = SecretKey::read(&scratch.0.join("me.key")).expect("just made");
        for version in ["0.1.0", "0.2.0"] {
            scratch.put(&format!("mine-{version}.vtlg"), package_by(version, &key));
        }
        fs::create_dir(scratch.0.join("keys")).expect("a directory");
        fs::copy(scratch.0.join("me.pub"), scratch.0.join("keys/me.pub")).expect("copied");
        Self { scratch, key }
    }

    /// A publisher's command about a place.
    #[track_caller]
    fn run(&self, args: &[&str], more: &[&str]) -> String {
        success(&self.scratch.vtl(&[&["graft"], args, more].concat()))
    }

    fn pull(&self, wanted: &str, place: &str, more: &[&str]) -> Output {
        let args = [
            "graft", "pull", wanted, place, "--keys", "keys", "--output", "got",
        ];
        self.scratch.vtl(&[&args, more].concat())
    }

    /// The serial that the host keeps.
    fn kept(&self) -> Option<u64> {
        let kept = Index::kept(&self.scratch.0.join("keys"), &self.key.public());
        kept.expect("usable").map(|index| index.serial())
    }

    /// A directory with the old package, and nothing else.
    fn withholds(&self, name: &str) -> PathBuf {
        let folder = self.scratch.0.join(name);
        fs::create_dir_all(&folder).expect("a directory");
        let old = "mine-0.1.0.vtlg";
        fs::copy(self.scratch.0.join(old), folder.join(old)).expect("copied");
        folder
    }
}

#[test]
fn real__index() {
    let publisher = Publisher::new("index");
    let Some(real) = Real::start(&publisher.scratch, "", "") else {
        return;
    };
    let place = &format!("oci://{}/grafts", real.name);
    let plain = ["--plain-http"];
    let index = |more: &[&str]| {
        publisher.run(
            &[&["index", place, "--key", "me.key"], more].concat(),
            &plain,
        )
    };
    publisher.run(&["publish", "mine-0.1.0.vtlg", place], &plain);
    // Nobody has to have one.
    assert_eq!(
        success(&publisher.pull("mine", place, &plain))
            .lines()
            .count(),
        1
    );
    assert_eq!(publisher.kept(), None);
    let words = index(&["mine-0.1.0.vtlg"]);
    assert!(words.contains("serial 1, good until 2"), "{words}");
    success(&publisher.pull("mine", place, &plain));
    assert_eq!(publisher.kept(), Some(1));
    // The registry does not have the new one yet.
    index(&["mine-0.2.0.vtlg"]);
    refused(
        &publisher.pull("mine", place, &plain),
        "0.2.0 is, and is withheld",
    );
    publisher.run(&["publish", "mine-0.2.0.vtlg", place], &plain);
    let words = success(&publisher.pull("mine", place, &plain));
    assert!(words.contains("mine-0.2.0.vtlg"), "{words}");
    success(&publisher.pull("mine@0.1.0", place, &plain));
    index(&["--revoke", "mine@0.2.0"]);
    let old = publisher.pull("mine@0.1.0", place, &plain);
    refused(&old, "0.2.0 is the lowest version");
    assert_eq!(publisher.kept(), Some(3));
}

#[test]
fn index__of_a_place_that_withholds() {
    let publisher = Publisher::new("withholds");
    let honest = publisher.withholds("honest");
    let update = |more: &[&str]| {
        let args = ["index", "honest", "--key", "me.key"];
        publisher.run(&args, more)
    };
    update(&["mine-0.1.0.vtlg"]);
    let file = vtl_pool::index::file_name(&publisher.key.public());
    let rolled_back = publisher.withholds("old");
    fs::copy(honest.join(&file), rolled_back.join(&file)).expect("copied");
    fs::copy(
        publisher.scratch.0.join("mine-0.2.0.vtlg"),
        honest.join("mine-0.2.0.vtlg"),
    )
    .expect("copied");
    update(&["mine-0.2.0.vtlg"]);
    success(&publisher.pull("mine", "honest", &[]));
    assert_eq!(publisher.kept(), Some(2));

    let pull = |wanted: &str, place: &str| {
        let output = publisher.pull(wanted, place, &[]);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), words)
    };
    let rollback = publisher.pull("mine@0.1.0", "old", &[]);
    refused(&rollback, "serial 1: this host has seen serial 2");
    publisher.withholds("bare");
    let (is_taken, words) = pull("mine", "bare");
    assert!(!is_taken && words.contains("and is withheld"), "{words}");
    let (is_taken, words) = pull("mine@0.1.0", "bare");
    assert!(
        is_taken && words.contains("warning: there is no index"),
        "{words}"
    );
    // One that nobody renews.
    let frozen = publisher.withholds("frozen");
    let kept = Index::kept(&publisher.scratch.0.join("keys"), &publisher.key.public());
    let last = kept.expect("usable");
    let expired = Index::update(last.as_ref(), &[], Vec::new(), 1, &publisher.key);
    expired.expect("signed").store(&frozen).expect("stored");
    let expired = "has expired at 1970-01-01T00:00:01Z";
    let (is_taken, words) = pull("mine@0.1.0", "frozen");
    assert!(is_taken && words.contains(expired), "{words}");
    assert_eq!(publisher.kept(), Some(3));

    publisher
        .scratch
        .put("keys/revoked.toml", "index = \"require\"\n");
    for (place, why) in [("bare", "there is no index"), ("frozen", expired)] {
        let refusal = publisher.pull("mine@0.1.0", place, &[]);
        refused(&refusal, why);
        refused(&refusal, "an index is required here");
    }
    // The publisher goes on from what it has signed, whatever the place shows.
    let own = publisher.scratch.0.join("me.vtli");
    fs::copy(frozen.join(&file), own).expect("copied");
    update(&[]);
    success(&publisher.pull("mine", "honest", &[]));
    assert_eq!(publisher.kept(), Some(4));
    // Somebody has changed it.
    let path = honest.join(&file);
    let text = fs::read_to_string(&path).expect("an index");
    fs::write(&path, text.replace("0.2.0", "0.1.0")).expect("written");
    refused(
        &publisher.pull("mine", "honest", &[]),
        "it was altered after it was signed",
    );
}

/// What a server sends back.
#[derive(Clone)]
struct Reply {
    status: &'static str,
    headers: Vec<String>,
    body: Vec<u8>,
}

impl Reply {
    fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: "200 OK",
            headers: Vec::new(),
            body: body.into(),
        }
    }

    fn with(status: &'static str, header: String) -> Self {
        Self {
            status,
            headers: vec![header],
            body: Vec::new(),
        }
    }
}

/// A request's first line, and its authorization.
type Seen = (String, Option<String>);

/// A web server of a few lines.
struct Server {
    name: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Answers each request as `reply` says, from its path and its authorization.
    fn start(reply: impl Fn(&str, Option<&str>) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let name = listener.local_addr().expect("bound").to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        // Ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = serve(&stream, &reply, &notes);
            }
        });
        Self { name, seen }
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("unpoisoned").clone()
    }
}

fn serve(
    mut stream: &TcpStream,
    reply: &impl Fn(&str, Option<&str>) -> Reply,
    notes: &Mutex<Vec<Seen>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.take(64 << 10)).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut authorization = None;
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("authorization")
        {
            authorization = Some(value.to_owned());
        }
    }
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let answer = reply(&path, authorization.as_deref());
    notes
        .lock()
        .expect("unpoisoned")
        .push((first, authorization));
    let mut head = format!("HTTP/1.1 {}\r\nConnection: close\r\n", answer.status);
    for header in &answer.headers {
        head += &format!("{header}\r\n");
    }
    head += &format!("Content-Length: {}\r\n\r\n", answer.body.len());
    stream.write_all(head.as_bytes())?;
    stream.write_all(&answer.body)
}

fn digest(bytes: &[u8]) -> String {
    let hex = Sha256::digest(bytes);
    hex.iter()
        .fold("sha256:".to_owned(), |text, b| format!("{text}{b:02x}"))
}

/// The image manifest of a package, as an honest registry gives it.
fn document(package: &[u8]) -> Value {
    json!({
        "schemaVersion": 2,
        "artifactType": "application/vnd.vtl.graft.v1",
        "layers": [{
            "mediaType": "application/vnd.vtl.graft.package.v1+tar",
            "digest": digest(package),
            "size": package.len(),
        }],
    })
}

/// A registry with the tag 1.0.0 of `grafts/mine`.
fn holding(document: Vec<u8>, blob: Reply) -> Server {
    Server::start(move |path, _| match path {
        "/v2/grafts/mine/tags/list?n=1000" => Reply::ok(r#"{"tags":["latest","1.0.0"]}"#),
        "/v2/grafts/mine/manifests/1.0.0" => Reply::ok(document.clone()),
        path if path.starts_with("/v2/grafts/mine/blobs/") => blob.clone(),
        _ => Reply::with("404 Not Found", String::new()),
    })
}

#[test]
fn hostile__what_is_not_what_it_says() {
    let scratch = Scratch::new("hostile");
    let honest = package("1.0.0");
    let words = |value: Value| value.to_string().into_bytes();
    let pull = |document: Vec<u8>, blob: Reply| scratch.pull(&holding(document, blob).name);
    let right = || words(document(&honest));

    // The fake is good enough.
    success(&pull(right(), Reply::ok(honest.clone())));
    assert!(scratch.0.join("got/mine-1.0.0.vtlg").exists());
    fs::remove_dir_all(scratch.0.join("got")).expect("removed");

    let mut changed = honest.clone();
    changed[2000] ^= 1;
    let cases = [
        (
            "another blob",
            right(),
            Reply::ok(changed.clone()),
            "not what its digest says",
        ),
        (
            "a short blob",
            right(),
            Reply::ok(&honest[1..]),
            "not what its digest says",
        ),
        (
            "a long blob",
            right(),
            Reply::ok([&honest[..], b"x"].concat()),
            "more than",
        ),
        (
            "a tampered package",
            words(document(&changed)),
            Reply::ok(changed.clone()),
            "altered after it was signed",
        ),
        (
            "no package",
            words(document(b"nothing")),
            Reply::ok("nothing"),
            "not a graft package",
        ),
        (
            "another version",
            words(document(&package("2.0.0"))),
            Reply::ok(""),
            "not what its digest says",
        ),
        (
            "a long manifest",
            vec![b' '; 1 << 20],
            Reply::ok(""),
            "more than",
        ),
        (
            "no manifest",
            b"<html>".to_vec(),
            Reply::ok(""),
            "is no graft package",
        ),
        (
            "a huge package",
            words({
                let mut huge = document(&honest);
                huge["layers"][0]["size"] = (MAX_PACKAGE + 1).into();
                huge
            }),
            Reply::ok(""),
            "a size that it cannot have",
        ),
    ];
    for (case, document, blob, about) in cases {
        println!("{case}");
        refused(&pull(document, blob), about);
    }
    // A package that is right, in the place of another.
    let newer = package("2.0.0");
    let output = pull(words(document(&newer)), Reply::ok(newer));
    refused(
        &output,
        "what is there as mine 1.0.0 is another package: mine 2.0.0",
    );
    assert!(!scratch.0.join("got").exists(), "nothing was written");
}

#[test]
fn hostile__redirections_end_and_keep_secrets() {
    let scratch = Scratch::new("redirect");
    let honest = package("1.0.0");
    let elsewhere = {
        let honest = honest.clone();
        Server::start(move |_, _| Reply::ok(honest.clone()))
    };
    let tokens = Server::start(|path, login| {
        let right = login == Some(&format!("Basic {LOGIN}"))
            && path == "/token?service=us&scope=repository%3Agrafts%2Fmine%3Apull";
        match right {
            true => Reply::ok(r#"{"token":"the-token"}"#),
            false => Reply::with("403 Forbidden", String::new()),
        }
    });
    let (realm, away) = (tokens.name.clone(), elsewhere.name.clone());
    let document = document(&honest).to_string();
    let registry = Server::start(move |path, token| {
        if token != Some("Bearer the-token") {
            let challenge = format!(
                "WWW-Authenticate: Bearer realm=\"http://{realm}/token\",service=\"us\",\
                 scope=\"repository:grafts/mine:pull\""
            );
            return Reply::with("401 Unauthorized", challenge);
        }
        match path {
            "/v2/grafts/mine/tags/list?n=1000" => Reply::ok(r#"{"tags":["1.0.0"]}"#),
            "/v2/grafts/mine/manifests/1.0.0" => Reply::ok(document.clone()),
            index if index.starts_with("/v2/grafts/vtl-index/") => {
                Reply::with("404 Not Found", String::new())
            }
            _ => Reply::with(
                "307 Temporary Redirect",
                format!("Location: http://{away}/blob"),
            ),
        }
    });
    // Without a login there is no token.
    refused(&scratch.pull(&registry.name), "403 Forbidden");
    scratch.log_in(&registry.name);
    success(&scratch.pull(&registry.name));
    let there = elsewhere.seen();
    assert_eq!(there.len(), 1, "{there:?}");
    assert_eq!(there[0].1, None, "no token for another host");
    for (line, authorization) in registry.seen() {
        let leaked = authorization.is_some_and(|a| a.contains(LOGIN));
        assert!(!leaked, "the password is the token server's: {line}");
    }

    // Round in circles.
    let circle = Server::start(|_, _| Reply::with("302 Found", "Location: /v2/round".into()));
    refused(&scratch.pull(&circle.name), "redirects again and again");
    assert!(circle.seen().len() <= 6);
    // A list without end.
    let endless = Server::start(|_, _| Reply {
        headers: vec!["Link: </v2/more>; rel=\"next\"".into()],
        ..Reply::ok("{\"tags\":[\"1.0.0\"]}")
    });
    refused(
        &scratch.pull(&endless.name),
        "more tags than anything honest",
    );
    // Words for the terminal.
    let rude = Server::start(|_, _| Reply {
        status: "500 Internal Server Error",
        ..Reply::ok(r#"{"errors":[{"message":"\u001b]0;mine\u0007\n\nsorry"}]}"#)
    });
    let output = scratch.pull(&rude.name);
    refused(&output, "sorry");
    assert!(!output.stderr.contains(&0x1b));
}
