//! Requests to one registry: authentication, redirections, and limits of what it answers.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use ureq::Agent;
use ureq::http::{HeaderMap, Method, Request, StatusCode, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use super::challenge::{Challenge, complaint};
use super::login::Login;
use super::url::Url;

/// Redirections of one request that are followed.
const MAX_REDIRECTS: usize = 5;
/// How long a connection may take to open.
const CONNECT: Duration = Duration::from_secs(15);
/// How long a request may take, with its answer.
const PATIENCE: Duration = Duration::from_secs(120);
/// The longest answer that only says what is wrong, or gives a token, bytes.
const MAX_WORDS: usize = 64 << 10;
/// The longest token, bytes.
const MAX_TOKEN: usize = 16 << 10;

/// A registry that somebody talks to.
pub(super) struct Registry {
    agent: Agent,
    /// Its host; the only one that ever hears the authorization.
    origin: Url,
    /// What the user calls it.
    name: String,
    login: Option<Login>,
    authorization: RefCell<Option<String>>,
}

/// What to ask.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) url: Url,
    /// Besides those that every request has.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: &'a [u8],
    /// The longest answer that makes sense, bytes.
    pub(super) max: usize,
}

/// What came back.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    /// Where from.
    pub(super) url: Url,
}

impl Answer {
    pub(super) fn header(&self, name: impl header::AsHeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// What the answer redirects to, or gives as the place to go on.
    pub(super) fn location(&self) -> Option<Url> {
        self.url.join(self.header(header::LOCATION)?)
    }
}

impl Registry {
    /// Talks to the registry that the user calls `name`, without encryption if `plain`. The login
    /// is none or that for this registry.
    pub(super) fn new(name: &str, plain: bool, login: Option<Login>) -> anyhow::Result<Self> {
        // Docker's own has another address than name.
        let host = match name {
            "docker.io" => "registry-1.docker.io",
            other => other,
        };
        let scheme = if plain { "http" } else { "https" };
        let origin = Url::parse(&format!("{scheme}://{host}/"))
            .ok_or_else(|| anyhow!("\"{name}\" is no registry's host"))?;
        // Fails if there is one already, which will do as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // What this machine trusts ($SSL_CERT_FILE names others); an empty list refuses everybody.
        let found = rustls_native_certs::load_native_certs();
        if let (true, false, Some(why)) = (found.certs.is_empty(), plain, found.errors.first()) {
            bail!("no certificates of authorities to trust: {why}");
        }
        let roots = found
            .certs
            .iter()
            .map(|c| Certificate::from_der(c).to_owned());
        let tls = TlsConfig::builder().root_certs(RootCerts::from(roots));
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, since each needs a look.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(PATIENCE))
            .user_agent(concat!("vtl/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls.build())
            .build();
        Ok(Self {
            agent: config.into(),
            origin,
            name: name.to_owned(),
            login,
            authorization: RefCell::new(None),
        })
    }

    /// An address of the registry's interface.
    pub(super) fn url(&self, path: &str) -> Url {
        self.origin.at(format!("/v2/{path}"))
    }

    /// Sends a request, and once more with the user's authorization if the registry asks for it.
    pub(super) fn call(&self, ask: &Ask<'_>) -> anyhow::Result<Answer> {
        let answer = self.follow(ask)?;
        // Another host has nothing to ask.
        if answer.status != StatusCode::UNAUTHORIZED || !answer.url.same_origin(&self.origin) {
            return Ok(answer);
        }
        let authorization = self.authorize(&answer)?;
        *self.authorization.borrow_mut() = Some(authorization);
        self.follow(ask)
    }

    /// As [`Registry::call`], where only one status is success.
    pub(super) fn expect(&self, ask: &Ask<'_>, status: StatusCode) -> anyhow::Result<Answer> {
        let answer = self.call(ask)?;
        if answer.status == status {
            Ok(answer)
        } else {
            Err(self.refusal(&answer))
        }
    }

    /// What an answer that is no success says.
    pub(super) fn refusal(&self, answer: &Answer) -> anyhow::Error {
        let words = complaint(&answer.body).map_or(String::new(), |words| format!(": {words}"));
        let hint = match (answer.status, &self.login) {
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, None) => {
                format!(" (docker login {} lets vtl in, too)", self.name)
            }
            _ => String::new(),
        };
        anyhow!("{} refuses: {}{words}{hint}", self.name, answer.status)
    }

    /// Sends a request, and follows redirections of those that only read.
    fn follow(&self, ask: &Ask<'_>) -> anyhow::Result<Answer> {
        let mut url = ask.url.clone();
        let reads = matches!(ask.method, Method::GET | Method::HEAD);
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.send(ask, &url)?;
            if !(reads && answer.status.is_redirection()) {
                return Ok(answer);
            }
            url = self.next(&answer)?;
        }
        bail!("{} redirects again and again", self.name)
    }

    /// Where an answer leads; never out of encryption.
    pub(super) fn next(&self, answer: &Answer) -> anyhow::Result<Url> {
        let location = answer.location();
        let location =
            location.with_context(|| format!("{} leads on to what is no address", self.name))?;
        if answer.url.secure && !location.secure {
            bail!("{} leads on to where there is no encryption", self.name);
        }
        Ok(location)
    }

    fn send(&self, ask: &Ask<'_>, url: &Url) -> anyhow::Result<Answer> {
        let mut request = Request::builder().method(&ask.method).uri(url.to_string());
        for (name, value) in ask.headers {
            request = request.header(*name, *value);
        }
        let authorization = self.authorization.borrow();
        if let Some(authorization) = authorization.as_deref()
            && url.same_origin(&self.origin)
        {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        self.transmit(request, ask, url)
    }

    fn transmit(
        &self,
        request: ureq::http::request::Builder,
        ask: &Ask<'_>,
        url: &Url,
    ) -> anyhow::Result<Answer> {
        let failed = |error: ureq::Error| anyhow!("cannot ask {}: {error}", url.authority);
        let response = match ask.method {
            Method::GET | Method::HEAD => self.agent.run(request.body(())?),
            _ => self.agent.run(request.body(ask.body)?),
        };
        let (parts, mut body) = response.map_err(failed)?.into_parts();
        let max = match parts.status.is_success() {
            true => ask.max,
            false => MAX_WORDS,
        };
        // It takes an answer of exactly the limit for one beyond it.
        let body = match body.with_config().limit(max as u64 + 1).read_to_vec() {
            Ok(body) => body,
            Err(ureq::Error::BodyExceedsLimit(_)) => {
                bail!("{} answers with more than {max} bytes", url.authority)
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body,
            url: url.clone(),
        })
    }
}

/// Authentication.
impl Registry {
    /// The header that the registry asks for with this answer.
    fn authorize(&self, answer: &Answer) -> anyhow::Result<String> {
        let challenges = answer.headers.get_all(header::WWW_AUTHENTICATE);
        let challenges = challenges.iter().filter_map(|value| value.to_str().ok());
        let mut basic = false;
        for challenge in challenges {
            let (scheme, rest) = challenge.split_once(' ').unwrap_or((challenge, ""));
            if scheme.eq_ignore_ascii_case("bearer") {
                return self.token(&Challenge::parse(rest));
            }
            basic |= scheme.eq_ignore_ascii_case("basic");
        }
        match &self.login {
            Some(login) if basic => {
                self.require_private(&self.origin)?;
                Ok(login.basic())
            }
            _ => Err(self.refusal(answer)),
        }
    }

    /// Refuses to send a password or token where others on the path could read it.
    fn require_private(&self, url: &Url) -> anyhow::Result<()> {
        if !url.is_private() {
            bail!(
                "{} asks for a login, which would go to {} without encryption",
                self.name,
                url.authority
            );
        }
        Ok(())
    }

    /// Fetches a token from where the registry says (Docker's token authentication).
    fn token(&self, challenge: &Challenge) -> anyhow::Result<String> {
        let realm = challenge.realm.as_deref().and_then(Url::parse);
        let mut url = realm.with_context(|| format!("{} names no token server", self.name))?;
        for (key, value) in [("service", &challenge.service), ("scope", &challenge.scope)] {
            if let Some(value) = value {
                url = url.with(key, value);
            }
        }
        if self.login.is_some() {
            self.require_private(&url)?;
            self.require_private(&self.origin)?;
        }
        let ask = Ask {
            method: Method::GET,
            url,
            headers: &[],
            body: &[],
            max: MAX_WORDS,
        };
        let mut request = Request::builder().uri(ask.url.to_string());
        if let Some(login) = &self.login {
            request = request.header(header::AUTHORIZATION, login.basic());
        }
        // Redirections are not followed: the login is for nobody else.
        let answer = self.transmit(request, &ask, &ask.url)?;
        if answer.status != StatusCode::OK {
            return Err(self.refusal(&answer));
        }
        let words: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let token = words["token"].as_str().or(words["access_token"].as_str());
        let good = |token: &&str| {
            (1..=MAX_TOKEN).contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic())
        };
        let token = token.filter(good);
        let token = token.with_context(|| format!("{} gives no token", ask.url.authority))?;
        Ok(format!("Bearer {token}"))
    }
}
