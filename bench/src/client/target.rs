//! The server's URL.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use http::Uri;

/// Where requests go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name or address, without brackets.
    pub host: String,
    /// Port; 80 when the URL has none.
    pub port: u16,
    /// Host and port as in the `host` header.
    pub authority: String,
    /// Path before `/v1/…`, without a slash at its end.
    prefix: String,
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(url: &str) -> anyhow::Result<Self> {
        let expected = || format!("--base-url {url}: expected something like http://127.0.0.1:30000");
        let uri: Uri = url.parse().with_context(expected)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => bail!("--base-url {url}: TLS is not spoken; measure behind it, over plain http"),
            _ => bail!(expected()),
        }
        let authority = uri.authority().with_context(expected)?;
        ensure!(uri.query().is_none(), "--base-url {url}: no query is allowed");
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Self {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            prefix,
        })
    }
}

impl Target {
    /// The request target of a path under the server's prefix.
    pub fn uri(&self, path: &str) -> Uri {
        let full = format!("{}{path}", self.prefix);
        full.parse().expect("a path of a parsed URL and a fixed path are a path")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn understands_what_people_type() {
        let target = |url: &str| url.parse::<Target>().unwrap();
        let plain = target("http://localhost:30000");
        assert_eq!((plain.host.as_str(), plain.port), ("localhost", 30000));
        for url in ["http://localhost:30000/", "http://localhost:30000/v1", "http://localhost:30000/v1/"] {
            assert_eq!(target(url), plain);
        }
        assert_eq!(plain.uri("/v1/models"), "/v1/models");
        assert_eq!(target("http://h/proxy/v1").uri("/v1/models"), "/proxy/v1/models");
        let v6 = target("http://[::1]:8001");
        assert_eq!((v6.host.as_str(), v6.port, v6.authority.as_str()), ("::1", 8001, "[::1]:8001"));
    }

    #[test]
    fn refuses_what_it_cannot_speak() {
        let error = |url: &str| url.parse::<Target>().unwrap_err().to_string();
        assert!(error("https://h").contains("TLS"));
        assert!(error("localhost:30000").contains("http://127.0.0.1:30000"));
        assert!(error("http://h?x=1").contains("query"));
    }
}
