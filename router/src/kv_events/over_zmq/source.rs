//! Where an engine publishes its cache events: as vLLM says it, `GET /kv_event_sources`, by data-parallel rank; and as SGLang does, in `GET /server_info`
//! (0.5.23, `runtime_context.py`), where each rank has the next port.

use std::collections::BTreeMap;

use http::Uri;
use router_core::WorkerSpec;
use serde::Deserialize;

/// The path to ask vLLM at.
pub const PATH: &str = "/kv_event_sources";
/// And SGLang.
pub const SGLANGS_PATH: &str = "/server_info";
/// Of smaller blocks an engine has as many as it has tokens, nearly, and each would be kept here as well.
const LEAST_BLOCK_TOKENS: usize = 8;
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
    /// How a request is named to the engine.
    pub named_in: NamedIn,
}

/// Where of a request an engine reads what its events call it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamedIn {
    /// The header `x-session-id`: vLLM.
    Header,
    /// The member `session_id` of its body: SGLang.
    Body,
}

/// What SGLang says of its events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerInfo {
    /// There are none, or none that can be followed.
    NoEvents,
    /// They are of blocks of so few tokens, that following them would take more memory than it is worth.
    SmallBlocks(usize),
    /// Each name of a request would have it keep what that leaves in its cache (`--enable-session-radix-cache`).
    KeepsSessions,
    /// They are published there.
    At(Source),
}

/// A publisher, in SGLang's words.
#[derive(Deserialize)]
struct Publisher {
    publisher: Option<String>,
    #[serde(default)]
    endpoint_host: String,
    endpoint_port_base: Option<u16>,
    replay_endpoint_port_base: Option<u16>,
    #[serde(default)]
    topic: String,
    #[serde(default)]
    block_size: usize,
    #[serde(default)]
    dp_size: u32,
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
            named_in: NamedIn::Header,
        })
    }
}

impl ServerInfo {
    /// What SGLang has answered for `worker`.
    #[must_use]
    pub fn read(body: &[u8], worker: &WorkerSpec) -> Self {
        #[derive(Deserialize)]
        struct Info {
            kv_events: Option<Publisher>,
            #[serde(default)]
            enable_session_radix_cache: Option<bool>,
        }
        let Ok(info) = serde_json::from_slice::<Info>(body) else { return Self::NoEvents };
        let Some(publisher) = info.kv_events.filter(|told| told.publisher.as_deref() == Some("zmq")) else {
            return Self::NoEvents;
        };
        if publisher.block_size < LEAST_BLOCK_TOKENS {
            return Self::SmallBlocks(publisher.block_size);
        }
        if info.enable_session_radix_cache == Some(true) {
            return Self::KeepsSessions;
        }
        publisher.source(worker).map_or(Self::NoEvents, Self::At)
    }
}

impl Publisher {
    fn source(&self, worker: &WorkerSpec) -> Option<Source> {
        let rank = match worker.dp_rank {
            _ if self.dp_size <= 1 => 0,
            Some(rank) => rank.number,
            // Whose cache a request meets nobody knows before it is there.
            None => return None,
        };
        let uri: Uri = worker.address.parse().ok()?;
        let here = uri.host()?;
        let place =
            |base: u16| place(&format!("tcp://{}:{}", self.endpoint_host, base.checked_add(rank)?), here);
        Some(Source {
            publish: place(self.endpoint_port_base?)?,
            replay: self.replay_endpoint_port_base.and_then(place),
            topic: self.topic.clone(),
            named_in: NamedIn::Body,
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
            named_in: NamedIn::Header,
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

    /// What SGLang 0.5.23 says with `--page-size 16`.
    fn sglangs(ranks: u32) -> Value {
        json!({"version": "0.5.23", "page_size": 16, "dp_size": ranks, "enable_session_radix_cache": false, "kv_events": {
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 15801, "topic": "", "block_size": 16, "dp_size": ranks,
            "replay_endpoint_port_base": 15803}})
    }

    #[test]
    fn sglang_tells_of_its_first_rank() {
        let at =
            |info: &Value, worker: &WorkerSpec| match ServerInfo::read(info.to_string().as_bytes(), worker) {
                ServerInfo::At(source) => {
                    Some((source.publish, source.replay.map(|(_, port)| port), source.named_in))
                }
                other => panic!("{other:?}"),
            };
        let here = spec("http://[::1]:8000");
        assert_eq!(at(&sglangs(1), &here), Some((("::1".to_owned(), 15801), Some(15803), NamedIn::Body)));
        let ranks = DpRanks { count: 2, told_by: ToldBy::Header };
        let engine = spec("http://engine:8000");
        let ports = ranks
            .of(&engine)
            .map(|worker| at(&sglangs(2), &worker).map(|(publish, replay, _)| (publish.1, replay)));
        assert!(ports.eq([Some((15801, Some(15803))), Some((15802, Some(15804)))]));
        let unranked = ServerInfo::read(sglangs(2).to_string().as_bytes(), &here);
        assert_eq!(unranked, ServerInfo::NoEvents, "whichever it is");
    }

    #[test]
    fn of_sglang_what_would_cost_too_much_is_not_followed() {
        let with = |change: fn(&mut Value)| {
            let mut info = sglangs(1);
            change(&mut info);
            ServerInfo::read(info.to_string().as_bytes(), &spec("http://engine:8000"))
        };
        assert!(matches!(with(|_| {}), ServerInfo::At(_)));
        assert_eq!(with(|info| info["kv_events"]["block_size"] = 1.into()), ServerInfo::SmallBlocks(1));
        assert_eq!(with(|info| info["enable_session_radix_cache"] = true.into()), ServerInfo::KeepsSessions);
        assert_eq!(with(|info| info["kv_events"] = Value::Null), ServerInfo::NoEvents);
        assert_eq!(with(|info| info["kv_events"]["publisher"] = "null".into()), ServerInfo::NoEvents);
        assert_eq!(with(|info| info["kv_events"]["endpoint_port_base"] = 0.into()), ServerInfo::NoEvents);
        assert_eq!(with(|info| *info = json!([])), ServerInfo::NoEvents);
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
