//! `Tell`: what routers say of their requests, checked before all who follow the cache get it.

use roundhouse_types::KvEvent;
use roundhouse_wire::{told_event, v1};
use tonic::Status;

/// In one call.
const MOST_EVENTS: usize = 1_024;
/// Of one prompt.
const MOST_HASHES: usize = 4_096;
/// Longer than any id that an HTTP header brings.
const MOST_ID_BYTES: usize = 1_024;

/// The events of a call.
///
/// # Errors
/// `INVALID_ARGUMENT` for what is not for a router to say, or too much of it.
pub(super) fn events(request: v1::TellRequest) -> Result<Vec<KvEvent>, Status> {
    let count = request.events.len();
    if count > MOST_EVENTS {
        return Err(Status::invalid_argument(format!("{count} events in one call; at most {MOST_EVENTS}")));
    }
    request.events.into_iter().map(event).collect()
}

fn event(event: v1::KvEvent) -> Result<KvEvent, Status> {
    let event = told_event(event);
    let event = event.ok_or_else(|| Status::invalid_argument("an event that is neither routed nor ended"))?;
    let (id, hashes) = match &event {
        KvEvent::Routed(prompt) => (&prompt.request_id, prompt.hashes.len()),
        KvEvent::Ended(request) => (&request.request_id, 0),
        KvEvent::Stored(_) | KvEvent::Removed { .. } | KvEvent::Cleared => return Ok(event),
    };
    if id.is_empty() || id.len() > MOST_ID_BYTES || hashes > MOST_HASHES {
        let wrong = format!(
            "an event with an id of {} bytes and {hashes} hashes; 1 to {MOST_ID_BYTES} and at most {MOST_HASHES} are taken",
            id.len()
        );
        return Err(Status::invalid_argument(wrong));
    }
    Ok(event)
}

#[cfg(test)]
mod tests {
    use roundhouse_types::{BlockHash, RoutedPrompt};

    use super::*;

    fn routed(id: &str, hashes: usize) -> v1::KvEvent {
        v1::KvEvent::from(&KvEvent::Routed(RoutedPrompt {
            request_id: id.into(),
            router: 1,
            seed_digest: 2,
            hashes: vec![BlockHash(3); hashes],
            tools_blocks: 0,
            tools_bytes: 0,
            system_blocks: 0,
            system_bytes: 0,
            prompt_bytes: 100,
            prompt_tokens: 25,
        }))
    }

    #[test]
    fn what_routers_may_say_is_taken_and_nothing_else() {
        let tell = |events: Vec<v1::KvEvent>| events_of(events).map(|events| events.len());
        assert_eq!(tell(vec![routed("r", MOST_HASHES), routed("s", 0)]).unwrap(), 2);
        let refused = [
            vec![v1::KvEvent::from(&KvEvent::Cleared)],
            vec![routed("", 1)],
            vec![routed(&"r".repeat(MOST_ID_BYTES + 1), 1)],
            vec![routed("r", MOST_HASHES + 1)],
            vec![routed("r", 1); MOST_EVENTS + 1],
            vec![v1::KvEvent { event: None }],
        ];
        for events in refused {
            assert_eq!(tell(events).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
    }

    fn events_of(events: Vec<v1::KvEvent>) -> Result<Vec<KvEvent>, Status> {
        super::events(v1::TellRequest { events })
    }
}
