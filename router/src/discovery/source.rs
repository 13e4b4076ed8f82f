//! A source of workers as an operator has written it, and what it makes of the addresses that are found there.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use router_core::{DpRanks, Role, WorkerId, WorkerSpec};

use crate::desired::{Found, NewRequests};

/// Where workers are found, and what those are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceSpec {
    /// As it was written, without what stands in front of `=` and behind `?`. No two sources have the same.
    pub name: Arc<str>,
    /// Where to look.
    pub place: Place,
    /// What its workers are.
    pub workers: Kind,
}

/// Where to look for workers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// The endpoints of a Kubernetes Service.
    Kubernetes {
        /// Its namespace; the router's own if none is given.
        namespace: Option<String>,
        /// Its name.
        service: String,
        /// Which port of the pods.
        port: PortChoice,
    },
    /// The addresses of a name.
    Dns {
        /// The name.
        host: String,
        /// The port of all of them.
        port: u16,
    },
}

/// Which port of a pod its worker listens on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortChoice {
    /// The only one that the Service has, or of several the one that is named like what is spoken: `http`, `grpc` and so on.
    Only,
    /// The one of that name.
    Named(String),
    /// This one, whether the Service has it or not.
    Number(u16),
}

/// What all workers of a source have in common.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kind {
    /// What is spoken: `http`, `https`, `h2c` or `grpc`.
    pub scheme: &'static str,
    /// What stands in front of their ids, so that those of two sources differ.
    pub prefix: Option<String>,
    /// What they do.
    pub role: Role,
    /// Where they are asked for prompts that they have computed, if that is not where it is by default.
    pub bootstrap_port: Option<u16>,
    /// The data-parallel ranks behind each address, if each of them is to be a worker.
    pub dp_ranks: Option<DpRanks>,
}

impl Kind {
    /// The worker at an address, or one for each of its ranks. Its id is the name of what runs it, such as a pod's, which outlives a restart
    /// where names do; without one the address.
    #[must_use]
    pub fn workers(&self, name: Option<&str>, address: SocketAddr, new_requests: NewRequests) -> Vec<Found> {
        let name = name.map_or_else(|| plain(address), str::to_owned);
        let id = self.prefix.as_ref().map_or_else(|| name.clone(), |prefix| format!("{prefix}-{name}"));
        let spec = WorkerSpec {
            id: WorkerId::new(&id),
            // IPv6 addresses come in brackets.
            address: format!("{}://{address}", self.scheme),
            role: self.role,
            bootstrap_port: self.bootstrap_port,
            dp_rank: None,
        };
        let found = |spec| Found { spec, new_requests };
        match self.dp_ranks {
            Some(ranks) => ranks.of(&spec).map(found).collect(),
            None => vec![found(spec)],
        }
    }
}

/// An address as an id, which has no colons and brackets: operators write ids into paths and files.
fn plain(address: SocketAddr) -> String {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => ip.to_string().replace(':', "-"),
    };
    format!("{ip}-{}", address.port())
}

#[cfg(test)]
mod tests {
    use router_core::ToldBy;

    use super::*;

    #[test]
    fn workers_are_named_by_what_runs_them_or_by_their_address() {
        let kind =
            Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None, dp_ranks: None };
        let prefixed = Kind { prefix: Some("a".into()), ..kind.clone() };
        let grpc = Kind { scheme: "grpc", ..kind.clone() };
        for (kind, name, address, id, url) in [
            (&kind, Some("vllm-0"), "10.0.0.1:8000", "vllm-0", "http://10.0.0.1:8000"),
            (&prefixed, Some("vllm-0"), "10.0.0.1:8000", "a-vllm-0", "http://10.0.0.1:8000"),
            (&kind, None, "10.0.0.1:8000", "10.0.0.1-8000", "http://10.0.0.1:8000"),
            (&grpc, None, "[fd00::1]:9000", "fd00--1-9000", "grpc://[fd00::1]:9000"),
        ] {
            let found = kind.workers(name, address.parse().unwrap(), NewRequests::Taken);
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].spec.id.as_str(), found[0].spec.address.as_str()), (id, url));
        }
    }

    #[test]
    fn each_rank_of_what_is_found_is_a_worker() {
        let dp_ranks = Some(DpRanks { count: 2, told_by: ToldBy::Header });
        let kind = Kind {
            scheme: "http",
            prefix: Some("a".into()),
            role: Role::Prefill,
            bootstrap_port: Some(7),
            dp_ranks,
        };
        let found = kind.workers(Some("vllm-0"), "10.0.0.1:8000".parse().unwrap(), NewRequests::Withheld);
        let told: Vec<_> = found
            .iter()
            .map(|Found { spec, .. }| (spec.id.as_str(), spec.address.as_str(), spec.bootstrap_port))
            .collect();
        let url = "http://10.0.0.1:8000";
        assert_eq!(told, [("a-vllm-0-dp0", url, Some(7)), ("a-vllm-0-dp1", url, Some(7))]);
        assert!(found.iter().all(|found| found.new_requests == NewRequests::Withheld));
    }
}
