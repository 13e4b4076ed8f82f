//! The header with which a worker says when to come back.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, header};

/// How long a worker asks to be left alone: `Retry-After` in seconds or as a date (RFC 9110, section 10.2.3). `None` if it
/// does not say, or not in a way that can be read.
#[must_use]
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_dates_and_neither() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers, now)
        };
        assert_eq!(read("7"), Some(Duration::from_secs(7)));
        assert_eq!(read("Sun, 06 Nov 1994 08:50:07 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(read("Sun, 06 Nov 1994 08:00:00 GMT"), Some(Duration::ZERO), "a date in the past");
        for text in ["", "-1", "1.5", "soon"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
