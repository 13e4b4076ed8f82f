//! Sizes and times as people write them.

use std::time::Duration;

/// `512`, `64KiB`, `64MiB`, `1GiB`; also `kB`, `MB`, `GB`.
pub(super) fn parse_bytes(text: &str) -> Result<usize, String> {
    const UNITS: &[(&str, usize)] = &[
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
    ];
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1));
    let parsed: Option<usize> = number.trim().parse().ok();
    parsed
        .and_then(|number| number.checked_mul(factor))
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{text:?} is no size; write 512, 64KiB, 64MiB or 1GiB"))
}

/// `500ms`, `5s`, `2m`, `1h`; a bare number is seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = parse_duration_or_zero(text).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| format!("{text:?} is no time; write 500ms, 5s, 2m or 1h"))
}

/// The same, and `0s` for no time at all.
pub(super) fn parse_duration_or_zero(text: &str) -> Result<Duration, String> {
    const UNITS: &[(&str, f64)] = &[("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3_600.0)];
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1.0));
    let seconds: Option<f64> = number.trim().parse().ok();
    seconds
        .map(|seconds| seconds * factor)
        .filter(|seconds| *seconds >= 0.0 && *seconds <= 86_400.0 * 365.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("{text:?} is no time; write 0s, 500ms, 5s, 2m or 1h"))
}

/// A time limit that can be switched off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeLimit {
    /// None.
    Off,
    /// After that time.
    After(Duration),
}

impl TimeLimit {
    /// The limit, if there is one.
    #[must_use]
    pub fn limit(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::After(limit) => Some(limit),
        }
    }
}

/// `off`, or a time as [`parse_duration`] reads it.
pub(super) fn parse_time_limit(text: &str) -> Result<TimeLimit, String> {
    if text == "off" {
        return Ok(TimeLimit::Off);
    }
    parse_duration(text)
        .map(TimeLimit::After)
        .map_err(|_| format!("{text:?} is no time; write 500ms, 5s, 2m, 1h or off"))
}

/// A share of requests that can be without end.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Share {
    /// Any number.
    Off,
    /// So many for each request.
    Of(f64),
}

impl Share {
    /// The share, if there is one.
    #[must_use]
    pub fn share(self) -> Option<f64> {
        match self {
            Self::Off => None,
            Self::Of(share) => Some(share),
        }
    }
}

/// `on` or `off`.
pub(super) fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("must be on or off".to_owned()),
    }
}

/// `20%`, or `off`.
pub(super) fn parse_share(text: &str) -> Result<Share, String> {
    if text == "off" {
        return Ok(Share::Off);
    }
    let percent: Option<f64> = text.strip_suffix('%').and_then(|number| number.trim().parse().ok());
    percent
        .filter(|percent| (0.0..=1_000.0).contains(percent))
        .map(|percent| Share::Of(percent / 100.0))
        .ok_or_else(|| format!("{text:?} is no share; write 20% or off"))
}

/// A ratio: a number that is not negative.
pub(super) fn parse_ratio(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("{text:?} is no ratio; write a number that is not negative, as in 2 or 0.5"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios() {
        assert_eq!((parse_ratio("0"), parse_ratio("2.5")), (Ok(0.0), Ok(2.5)));
        for wrong in ["", "-1", "inf", "NaN", "2x"] {
            assert!(parse_ratio(wrong).unwrap_err().contains("write a number"), "{wrong}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("5 kB"), Ok(5_000));
        assert_eq!(parse_bytes("17"), Ok(17));
        for bad in ["", "0", "-1", "x", "64 MiBs", "99999999999GiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_and_shares_can_be_off() {
        assert_eq!(parse_time_limit("off"), Ok(TimeLimit::Off));
        assert_eq!(parse_time_limit("2m"), Ok(TimeLimit::After(Duration::from_secs(120))));
        assert!(parse_time_limit("never").unwrap_err().contains("off"));
        assert_eq!(parse_share("off"), Ok(Share::Off));
        assert_eq!(parse_share("20%"), Ok(Share::Of(0.2)));
        assert_eq!(parse_share("0%"), Ok(Share::Of(0.0)));
        for bad in ["20", "0.2", "-1%", "NaN%", "%", "1001%"] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("3"), Ok(Duration::from_secs(3)));
        for bad in ["", "0s", "-1s", "NaN", "inf", "5 parsecs"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_duration_or_zero("0s"), Ok(Duration::ZERO));
        assert!(parse_duration_or_zero("-1s").is_err());
    }
}
