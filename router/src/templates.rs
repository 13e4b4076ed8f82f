//! Of which models it is known whether an engine goes on with a message that has begun.
//!
//! Nearly all do: their templates are cut off behind the message's text. Some models have renderers of their own in vLLM (`DeepSeek` V3.2 and V4), which write the turn's end behind it
//! whatever they are told. Of responses that is another question (vLLM writes their chats, with thoughts and without), and kept under a name of its own. Knows nothing of how that is found out, and forgets: another engine may serve the model tomorrow.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;

/// A fleet serves a few models; adapters may be many.
const MOST_MODELS: usize = 1_024;

/// What is known of a model's template.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Messages {
    /// A message that has begun is gone on with.
    GoOn,
    /// It is ended.
    End,
    /// Nobody says.
    Untold,
}

impl Messages {
    /// How long that is believed.
    fn holds_for(self) -> Duration {
        Duration::from_secs(match self {
            Self::GoOn => 3_600,
            Self::End => 600,
            // An engine may be busy for a moment.
            Self::Untold => 60,
        })
    }
}

/// Those models.
#[derive(Debug, Default)]
pub struct Templates {
    known: Mutex<HashMap<Box<str>, (Messages, Duration)>>,
    /// One asks at a time: all streams of a worker that has died want to know the same.
    pub asking: AsyncMutex<()>,
    /// The same of responses, which takes longer.
    pub asking_of_responses: AsyncMutex<()>,
}

impl Templates {
    /// What is known of `model`, `now`.
    #[must_use]
    pub fn of(&self, model: &str, now: Duration) -> Option<Messages> {
        let known = self.lock().get(model).copied();
        known.filter(|(messages, since)| now < *since + messages.holds_for()).map(|(messages, _)| messages)
    }

    /// It is from `now` on.
    pub fn note(&self, model: &str, messages: Messages, now: Duration) {
        let mut known = self.lock();
        if known.len() >= MOST_MODELS {
            known.clear();
        }
        known.insert(model.into(), (messages, now));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, (Messages, Duration)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_known_for_a_while() {
        let templates = Templates::default();
        let at = Duration::from_secs;
        assert_eq!(templates.of("m", at(0)), None);
        for (messages, seconds) in [(Messages::GoOn, 3_600), (Messages::End, 600), (Messages::Untold, 60)] {
            templates.note("m", messages, at(5));
            assert_eq!(templates.of("m", at(4 + seconds)), Some(messages));
            assert_eq!(templates.of("m", at(5 + seconds)), None);
        }
        (0..2 * MOST_MODELS).for_each(|model| templates.note(&model.to_string(), Messages::GoOn, at(0)));
        assert!(templates.lock().len() <= MOST_MODELS);
    }
}
