//! How important a request is, and whose: by its key, its headers and its `service_tier`.

use http::{HeaderMap, HeaderName, HeaderValue};
use router_core::{Precedence, Priority};
use xxhash_rust::xxh3::xxh3_64;

use crate::keys::Grant;
use crate::openai::members::Members;
use crate::payload::Payload;

/// The highest priority; the lowest is as far below 0.
const MOST: i8 = 10;

/// A header that says no priority.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{header}: {value:?} is no priority; write a whole number from -{MOST} to {MOST}, of which 0 is usual and more goes first"
)]
pub struct BadPriority {
    header: HeaderName,
    value: HeaderValue,
}

/// A priority in digits.
#[must_use]
pub fn parse_priority(text: &str) -> Option<Priority> {
    text.trim().parse().ok().filter(|number| (-MOST..=MOST).contains(number)).map(Priority)
}

/// Which way engines count that are told of priorities, in `priority` of a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum EnginePriority {
    /// They are not told.
    Off,
    /// Who has less goes first (vLLM, and SGLang with `--schedule-low-priority-values-first`).
    LowerFirst,
    /// Who has more goes first (SGLang).
    HigherFirst,
}

/// What engines read.
const PRIORITY: &str = "priority";

impl EnginePriority {
    /// The body that tells engines of `priority`, in place of what the client says there; `None` if they are not told, or it is no object. All of its time
    /// is a walk along it.
    pub async fn body(self, body: &Payload, Priority(priority): Priority) -> Option<Payload> {
        let told = match self {
            Self::Off => return None,
            Self::LowerFirst => -priority,
            Self::HigherFirst => priority,
        };
        let members = Members::of(body).await?;
        Some(members.with(&format!("\"{PRIORITY}\":{told}"), &[PRIORITY]))
    }
}

/// Where it is said.
#[derive(Clone, Debug)]
pub struct PrecedenceHeaders {
    /// The priority.
    pub priority: HeaderName,
    /// The tenant, where clients have no keys.
    pub tenant: HeaderName,
}

impl PrecedenceHeaders {
    /// What a request waits by that has this key and these headers, and whose body says that of its priority. A key gives its requests their priority
    /// where they say nothing, and none may have more.
    ///
    /// # Errors
    /// When the header says no priority.
    pub fn precedence(
        &self,
        headers: &HeaderMap,
        grant: Option<&Grant>,
        of_body: Option<Priority>,
    ) -> Result<Precedence, BadPriority> {
        let asked = match headers.get(&self.priority) {
            Some(value) => Some(
                value
                    .to_str()
                    .ok()
                    .and_then(parse_priority)
                    .ok_or_else(|| BadPriority { header: self.priority.clone(), value: value.clone() })?,
            ),
            None => of_body,
        };
        let priority = match grant.and_then(|grant| grant.terms.priority) {
            Some(most) => asked.map_or(most, |asked| asked.min(most)),
            None => asked.unwrap_or_default(),
        };
        let named = || {
            let name = headers.get(&self.tenant).map(HeaderValue::as_bytes);
            name.filter(|name| !name.is_empty()).map(xxh3_64)
        };
        let tenant = grant.map(|grant| grant.tenant).or_else(named);
        Ok(Precedence { priority, tenant })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::keys::Terms;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    fn precedence(
        pairs: &[(&'static str, &'static str)],
        grant: Option<Grant>,
        of_body: Option<i8>,
    ) -> Result<Precedence, BadPriority> {
        let names = PrecedenceHeaders {
            priority: HeaderName::from_static("x-request-priority"),
            tenant: HeaderName::from_static("x-tenant-id"),
        };
        names.precedence(&headers(pairs), grant.as_ref(), of_body.map(Priority))
    }

    fn priority(header: Option<&'static str>, most: Option<i8>, of_body: Option<i8>) -> i8 {
        let pairs: Vec<_> = header.map(|value| ("x-request-priority", value)).into_iter().collect();
        let grant = most.map(|most| Grant {
            tenant: 7,
            terms: Terms { priority: Some(Priority(most)), ..Terms::default() },
        });
        precedence(&pairs, grant, of_body).unwrap().priority.0
    }

    #[test]
    fn a_header_wins_over_the_body_and_a_key_over_both() {
        assert_eq!(priority(None, None, None), 0);
        assert_eq!(priority(None, None, Some(-1)), -1);
        assert_eq!(priority(Some(" 5"), None, Some(-1)), 5);
        assert_eq!(priority(None, Some(3), None), 3);
        assert_eq!(priority(Some("2"), Some(3), None), 2);
        assert_eq!(priority(Some("9"), Some(3), None), 3);
        assert_eq!(priority(None, Some(-1), Some(1)), -1);
    }

    #[test]
    fn a_header_that_says_no_priority_is_told() {
        for wrong in ["", "high", "11", "-11", "1.5", "1 2"] {
            let error = precedence(&[("x-request-priority", wrong)], None, None).unwrap_err().to_string();
            assert!(error.starts_with("x-request-priority: ") && error.contains("from -10 to 10"), "{error}");
        }
    }

    #[test]
    fn a_tenant_is_whose_key_it_is_or_else_what_the_header_says() {
        let tenant = |name, grant| precedence(&[("x-tenant-id", name)], grant, None).unwrap().tenant;
        assert_eq!((tenant("", None), tenant("a", None) == tenant("b", None)), (None, false));
        assert_eq!(tenant("a", None), tenant("a", None));
        assert_eq!(tenant("a", Some(Grant { tenant: 7, terms: Terms::default() })), Some(7));
    }

    #[tokio::test]
    async fn engines_are_told_in_the_way_they_count() {
        let body = Payload::from(Bytes::from_static(br#"{"model": "m", "priority": 9, "n":1}"#));
        let told = async |how: EnginePriority| {
            how.body(&body, Priority(-3)).await.map(|body| String::from_utf8(body.joined().to_vec()).unwrap())
        };
        assert_eq!(told(EnginePriority::Off).await, None);
        let lower = told(EnginePriority::LowerFirst).await.unwrap();
        assert_eq!(lower, r#"{"priority":3,"model": "m","n":1}"#);
        assert!(told(EnginePriority::HigherFirst).await.unwrap().starts_with(r#"{"priority":-3,"#));
        let list = Payload::from(Bytes::from_static(b"[1]"));
        assert!(EnginePriority::LowerFirst.body(&list, Priority(1)).await.is_none());
    }
}
