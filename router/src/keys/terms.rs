//! What stands behind a key in its file: how important its requests are, and how many there may be.

use router_core::Priority;

use crate::precedence::parse_priority;

/// What goes with a key.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Terms {
    /// The priority of its requests, and the most they may ask for; `None` for any.
    pub priority: Option<Priority>,
    /// How much it may ask for.
    pub limits: KeyLimits,
}

/// How much a key may ask for; of what is not named, any number.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct KeyLimits {
    /// Requests in a minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens in a minute, of prompts and answers.
    pub tokens_per_minute: Option<u32>,
    /// Requests at once.
    pub in_flight: Option<u32>,
}

/// What may stand there.
pub(super) const FORM: &str = "priority=N, with N from -10 to 10, requests-per-minute=N, tokens-per-minute=N and max-in-flight=N, each once, with N from 1";

impl Terms {
    /// Reads `name=value`, one after the other; `None` if one is none of those, or comes twice.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut terms = Self::default();
        for term in text.split_whitespace() {
            let (name, value) = term.split_once('=')?;
            let limits = &mut terms.limits;
            let limit = match name {
                "priority" => {
                    let before = terms.priority.replace(parse_priority(value)?);
                    before.is_none().then_some(())?;
                    continue;
                }
                "requests-per-minute" => &mut limits.requests_per_minute,
                "tokens-per-minute" => &mut limits.tokens_per_minute,
                "max-in-flight" => &mut limits.in_flight,
                _ => return None,
            };
            let number = value.parse().ok().filter(|number| *number > 0)?;
            limit.replace(number).is_none().then_some(())?;
        }
        Some(terms)
    }
}
