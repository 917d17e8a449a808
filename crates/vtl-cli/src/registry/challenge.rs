//! A registry's refusal: the authentication that it asks for, and its reason.

use serde_json::Value;

/// The token that a registry asks for (RFC 6750, section 3).
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Challenge {
    pub(super) realm: Option<String>,
    pub(super) service: Option<String>,
    pub(super) scope: Option<String>,
}

impl Challenge {
    /// Of `key="value",key=value`; what is not understood is left out.
    pub(super) fn parse(mut text: &str) -> Self {
        let mut challenge = Self::default();
        while let Some((key, rest)) = text.split_once('=') {
            let (value, rest) = match rest.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
                None => rest.split_at(rest.find(',').unwrap_or(rest.len())),
            };
            let place = match key.trim_matches([' ', ',']).to_ascii_lowercase().as_str() {
                "realm" => Some(&mut challenge.realm),
                "service" => Some(&mut challenge.service),
                "scope" => Some(&mut challenge.scope),
                _ => None,
            };
            if let Some(place) = place {
                *place = Some(value.to_owned());
            }
            text = rest;
        }
        challenge
    }
}

/// The registry's own words about a failure, fit for a terminal.
pub(super) fn complaint(body: &[u8]) -> Option<String> {
    const MAX_CHARACTERS: usize = 200;
    let answer: Value = serde_json::from_slice(body).ok()?;
    let error = &answer["errors"][0];
    let words = error["message"].as_str().or(error["code"].as_str())?;
    let words = words
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_CHARACTERS);
    Some(words.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenge__quoted_bare_and_broken() {
        let parsed = Challenge::parse(
            "realm=\"https://a/token\", service=b,error=\"x, y\",scope=\"repository:c:pull,push\"",
        );
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(parsed.realm, text("https://a/token"));
        assert_eq!(parsed.service, text("b"));
        assert_eq!(parsed.scope, text("repository:c:pull,push"));
        for broken in ["", "=", "realm", "realm=\"", ",,=,,", "a=\"b"] {
            Challenge::parse(broken);
        }
        assert_eq!(Challenge::parse("realm=\"x").realm, text("x"));
    }

    #[test]
    fn complaint__is_fit_for_a_terminal() {
        let body = br#"{"errors":[{"code":"DENIED","message":"no\u001b[2J way"}]}"#;
        assert_eq!(complaint(body).unwrap(), "no[2J way");
        assert_eq!(complaint(b"<html>"), None);
        let long = format!("{{\"errors\":[{{\"code\":\"{}\"}}]}}", "x".repeat(1000));
        assert_eq!(complaint(long.as_bytes()).unwrap().len(), 200);
    }
}
