//! Where an engine publishes its cache events, as vLLM says it: `GET /kv_event_sources`, by data-parallel rank.

use std::collections::BTreeMap;

use http::Uri;
use router_core::WorkerSpec;
use serde::Deserialize;

/// The path to ask at.
pub const PATH: &str = "/kv_event_sources";
/// Hosts that stand for all addresses of the engine's machine.
const ANY_HOST: [&str; 4] = ["*", "0.0.0.0", "[::]", "::"];

/// Where one engine publishes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Host and port of its PUB socket.
    pub(super) publish: (String, u16),
    /// Of its ROUTER socket, if it replays.
    pub(super) replay: Option<(String, u16)>,
    /// What its messages begin with.
    pub(super) topic: String,
}

/// One rank's, in vLLM's words.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: String,
}

impl Source {
    /// Of what `worker` has answered; `None` if it publishes nothing that could be followed.
    #[must_use]
    pub fn read(body: &[u8], worker: &WorkerSpec) -> Option<Self> {
        let by_rank: BTreeMap<u32, Config> = serde_json::from_slice(body).ok()?;
        let config = match worker.dp_rank {
            // Who tells of one alone has no ranks behind this address but this one.
            _ if by_rank.len() == 1 => by_rank.into_values().next(),
            Some(rank) => by_rank.into_values().nth(rank.number.into()),
            // Whose cache a request meets nobody knows before it is there.
            None => None,
        };
        let config = config.filter(|config| config.enable_kv_cache_events)?;
        if config.publisher.as_deref() != Some("zmq") {
            return None;
        }
        let uri: Uri = worker.address.parse().ok()?;
        let host = uri.host()?;
        let place = |endpoint: &str| place(endpoint, host);
        Some(Self {
            publish: place(&config.endpoint?)?,
            replay: config.replay_endpoint.as_deref().and_then(place),
            topic: config.topic,
        })
    }
}

/// Host and port of an endpoint of ZeroMQ's; `host` is where the engine answers requests.
fn place(endpoint: &str, host: &str) -> Option<(String, u16)> {
    let (named, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let host = if ANY_HOST.contains(&named) { host } else { named };
    let port = port.parse().ok().filter(|port| *port != 0)?;
    Some((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
}

#[cfg(test)]
mod tests {
    use router_core::{DpRanks, ToldBy, WorkerId};
    use serde_json::{Value, json};

    use super::*;

    fn config(endpoint: &str, replay: Option<&str>) -> Value {
        json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay,
            "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "kv",
        })
    }

    fn spec(address: &str) -> WorkerSpec {
        WorkerSpec::new(WorkerId::new("w"), address.to_owned())
    }

    fn read(sources: &Value, worker: &WorkerSpec) -> Option<Source> {
        Source::read(sources.to_string().as_bytes(), worker)
    }

    #[test]
    fn an_engine_publishes_where_it_says() {
        let here = spec("http://engine:8000");
        let sources = json!({"0": config("tcp://*:5557", Some("tcp://*:5558"))});
        let place = |host: &str, port| (host.to_owned(), port);
        let expected = Source {
            publish: place("engine", 5557),
            replay: Some(place("engine", 5558)),
            topic: "kv".to_owned(),
        };
        assert_eq!(read(&sources, &here), Some(expected.clone()));
        let elsewhere = json!({"3": config("tcp://10.0.0.7:5557", None)});
        let expected = Source { publish: place("10.0.0.7", 5557), replay: None, ..expected };
        assert_eq!(read(&elsewhere, &here), Some(expected));
        let v6 = json!({"0": config("tcp://[::]:5557", Some("tcp://[::1]:5558"))});
        let source = read(&v6, &spec("https://[fd00::1]:8443")).unwrap();
        assert_eq!((source.publish, source.replay), (place("fd00::1", 5557), Some(place("::1", 5558))));
    }

    #[test]
    fn each_rank_publishes_for_itself() {
        let sources = json!({"9": config("tcp://*:6", None), "8": config("tcp://*:5", None)});
        let ranks = DpRanks { count: 2, told_by: ToldBy::Header };
        let ports: Vec<_> = ranks
            .of(&spec("http://engine:8000"))
            .map(|worker| read(&sources, &worker).map(|source| source.publish.1))
            .collect();
        assert_eq!(ports, [Some(5), Some(6)]);
        assert_eq!(read(&sources, &spec("http://engine:8000")), None, "whichever it is");
    }

    #[test]
    fn what_cannot_be_followed_is_not() {
        let here = spec("http://engine:8000");
        let with = |change: fn(&mut Value)| {
            let mut sources = json!({"0": config("tcp://*:5557", None)});
            change(&mut sources["0"]);
            read(&sources, &here)
        };
        assert!(with(|_| {}).is_some());
        assert_eq!(with(|config| config["enable_kv_cache_events"] = false.into()), None);
        assert_eq!(with(|config| config["publisher"] = "null".into()), None);
        assert_eq!(with(|config| config["endpoint"] = "ipc:///tmp/x".into()), None);
        assert_eq!(with(|config| config["endpoint"] = "tcp://*:0".into()), None);
        for none in [json!({}), json!([]), json!({"a": {}}), json!({"detail": "Not Found"})] {
            assert_eq!(read(&none, &here), None, "{none}");
        }
    }
}
