//! Who the user is to a registry: what `docker login` left behind.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{env, fmt};

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use vtl_pool::read_bounded;

/// Maximum size of the configuration file, and of a helper's answer, bytes.
const MAX_BYTES: usize = 1 << 20;

/// Name and password.
pub(super) struct Login {
    user: String,
    password: String,
}

/// Never the password.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Login of {}", self.user)
    }
}

impl Login {
    /// The login for a registry; none if there is none.
    ///
    /// # Errors
    /// The configuration cannot be read.
    pub(super) fn find(registry: &str) -> anyhow::Result<Option<Self>> {
        let Some(path) = configuration().filter(|path| path.exists()) else {
            return Ok(None);
        };
        let bytes = read_bounded(&path, MAX_BYTES)?;
        let config: Value =
            serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?;
        Self::of(&config, registry).with_context(|| path.display().to_string())
    }

    fn of(config: &Value, registry: &str) -> anyhow::Result<Option<Self>> {
        let names = names(registry);
        let own = names
            .iter()
            .find_map(|name| Some((name, config["credHelpers"][name].as_str()?)));
        if let Some((name, helper)) = own {
            return ask(helper, name);
        }
        for name in &names {
            let entry = &config["auths"][name];
            if entry["identitytoken"]
                .as_str()
                .is_some_and(|t| !t.is_empty())
            {
                bail!(
                    "the login for {registry} is an identity token, which vtl does not use: log in \
                       with a name and a password, or an access token as password"
                );
            }
            if let Some(encoded) = entry["auth"].as_str().filter(|text| !text.is_empty()) {
                return Self::decode(encoded).map(Some);
            }
        }
        match config["credsStore"].as_str() {
            Some(helper) => ask(helper, &names[0]),
            None => Ok(None),
        }
    }

    /// Of `name:password` in Base64.
    fn decode(encoded: &str) -> anyhow::Result<Self> {
        let text = STANDARD.decode(encoded).ok();
        let text = text.and_then(|bytes| String::from_utf8(bytes).ok());
        let pair = text.as_deref().and_then(|text| text.split_once(':'));
        let (user, password) = pair.context("a login in it cannot be understood")?;
        Ok(Self {
            user: user.to_owned(),
            password: password.trim_end_matches('\0').to_owned(),
        })
    }

    /// As a header says it (RFC 7617).
    pub(super) fn basic(&self) -> String {
        let pair = format!("{}:{}", self.user, self.password);
        format!("Basic {}", STANDARD.encode(pair))
    }
}

fn configuration() -> Option<PathBuf> {
    let folder = env::var_os("DOCKER_CONFIG")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".docker")))?;
    Some(folder.join("config.json"))
}

/// What a registry is called in that file, the usual name first.
fn names(registry: &str) -> Vec<String> {
    if registry == "docker.io" {
        return vec!["https://index.docker.io/v1/".to_owned()];
    }
    vec![
        registry.to_owned(),
        format!("https://{registry}"),
        format!("https://{registry}/"),
    ]
}

/// Asks a program that keeps passwords (`docker-credential-NAME`).
fn ask(helper: &str, registry: &str) -> anyhow::Result<Option<Login>> {
    if !helper
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    {
        bail!("\"{helper}\" is no name of a credential helper");
    }
    let program = format!("docker-credential-{helper}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {program}, which keeps the logins"))?;
    let mut said = || -> std::io::Result<Vec<u8>> {
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(registry.as_bytes())?;
        drop(stdin);
        let mut said = Vec::new();
        let stdout = child.stdout.take().expect("piped");
        stdout.take(MAX_BYTES as u64).read_to_end(&mut said)?;
        Ok(said)
    };
    let (said, status) = (said(), child.wait()?);
    // It also fails if it has no such login.
    if !status.success() {
        return Ok(None);
    }
    let answer: Value = serde_json::from_slice(&said?)
        .with_context(|| format!("{program} says something else than expected"))?;
    match (answer["Username"].as_str(), answer["Secret"].as_str()) {
        (Some("<token>"), _) => bail!("{program} has an identity token, which vtl does not use"),
        (Some(user), Some(password)) => Ok(Some(Login {
            user: user.to_owned(),
            password: password.to_owned(),
        })),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of__takes_the_registrys_own_login_only() {
        let config = json!({ "auths": {
            "a.example": { "auth": STANDARD.encode("ada:se:cret") },
            "https://b.example": { "auth": STANDARD.encode("bob:x") },
            "https://index.docker.io/v1/": { "auth": STANDARD.encode("cy:y") },
            "token.example": { "auth": "", "identitytoken": "z" },
            "broken.example": { "auth": "!" },
        }});
        let of = |registry| Login::of(&config, registry);
        let basic = |registry| of(registry).unwrap().map(|login| login.basic());
        let expected = |pair: &str| Some(format!("Basic {}", STANDARD.encode(pair)));
        assert_eq!(basic("a.example"), expected("ada:se:cret"));
        assert_eq!(basic("b.example"), expected("bob:x"));
        assert_eq!(basic("docker.io"), expected("cy:y"));
        assert_eq!(basic("a.example:5000"), None);
        assert!(of("token.example").is_err() && of("broken.example").is_err());
        let login = of("a.example").unwrap().unwrap();
        assert_eq!(format!("{login:?}"), "Login of ada");
    }

    #[test]
    fn of__helpers_that_cannot_be() {
        let config = json!({ "credHelpers": { "a.example": "../sh" } });
        assert!(Login::of(&config, "a.example").is_err());
        let config = json!({ "credsStore": "not-installed-anywhere" });
        let error = Login::of(&config, "a.example").unwrap_err();
        let why = format!("{error:#}");
        assert!(why.contains("docker-credential-not-installed"), "{why}");
    }
}
