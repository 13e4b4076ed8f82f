//! How long a request may take, by model.
//!
//! Knows nothing of requests but the model's name. Next: [`dispatch`](crate::stages::dispatch) looks up a request's limits
//! once; it and [`relay`](crate::stages::relay) hold them.

use std::collections::HashMap;
use std::time::Duration;

use crate::config::Config;

/// The limits of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimeLimits {
    /// Of one attempt: from its beginning to the first byte of the reply's body.
    pub first_byte: Option<Duration>,
    /// Between two pieces of the reply.
    pub idle: Duration,
    /// From the moment that the request's body is in to the end of its reply, over all attempts.
    pub total: Duration,
}

/// Everybody's limits.
#[derive(Debug)]
pub struct TimeLimitTable {
    ordinary: TimeLimits,
    /// Empty unless configured, and then not looked into.
    by_model: HashMap<String, TimeLimits>,
}

impl TimeLimitTable {
    /// The limits of a configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let settings = &config.settings;
        let ordinary = TimeLimits {
            first_byte: settings.first_byte_timeout.limit(),
            idle: settings.idle_timeout,
            total: settings.request_timeout,
        };
        let of_model = |model: &crate::config::ModelTimeouts| TimeLimits {
            first_byte: model.first_byte.map_or(ordinary.first_byte, crate::config::TimeLimit::limit),
            idle: model.idle.unwrap_or(ordinary.idle),
            total: model.total.unwrap_or(ordinary.total),
        };
        let by_model =
            config.model_timeouts.iter().map(|model| (model.model.clone(), of_model(model))).collect();
        Self { ordinary, by_model }
    }

    /// The limits of a request for `model`.
    #[must_use]
    pub fn of(&self, model: Option<&str>) -> TimeLimits {
        if self.by_model.is_empty() {
            return self.ordinary;
        }
        model.and_then(|model| self.by_model.get(model)).copied().unwrap_or(self.ordinary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cli;

    #[test]
    fn a_models_limits_stand_in_for_the_ordinary_ones() {
        let arguments =
            ["--workers=a", "--first-byte-timeout=9s", "--model-timeouts=m idle=5s,n first-byte=off"];
        let config = Cli::configure(&arguments.map(str::to_owned), None).unwrap();
        let table = TimeLimitTable::new(&config);
        let ordinary = table.of(None);
        assert_eq!(ordinary.first_byte, Some(Duration::from_secs(9)));
        assert_eq!(table.of(Some("other")), ordinary);
        assert_eq!(table.of(Some("m")), TimeLimits { idle: Duration::from_secs(5), ..ordinary });
        assert_eq!(table.of(Some("n")), TimeLimits { first_byte: None, ..ordinary });
    }
}
