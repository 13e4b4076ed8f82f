//! A source of workers as an operator has written it, and what it makes of the addresses that are found there.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use router_core::{Role, WorkerId, WorkerSpec};

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
}

impl Kind {
    /// The worker at an address. Its id is the name of what runs it, such as a pod's, which outlives a restart where names do; without one
    /// the address.
    #[must_use]
    pub fn worker(&self, name: Option<&str>, address: SocketAddr, new_requests: NewRequests) -> Found {
        let name = name.map_or_else(|| plain(address), str::to_owned);
        let id = self.prefix.as_ref().map_or_else(|| name.clone(), |prefix| format!("{prefix}-{name}"));
        let spec = WorkerSpec {
            id: WorkerId::new(&id),
            // IPv6 addresses come in brackets.
            address: format!("{}://{address}", self.scheme),
            role: self.role,
            bootstrap_port: self.bootstrap_port,
        };
        Found { spec, new_requests }
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
    use super::*;

    #[test]
    fn workers_are_named_by_what_runs_them_or_by_their_address() {
        let kind = Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None };
        let prefixed = Kind { prefix: Some("a".into()), ..kind.clone() };
        let grpc = Kind { scheme: "grpc", ..kind.clone() };
        for (kind, name, address, id, url) in [
            (&kind, Some("vllm-0"), "10.0.0.1:8000", "vllm-0", "http://10.0.0.1:8000"),
            (&prefixed, Some("vllm-0"), "10.0.0.1:8000", "a-vllm-0", "http://10.0.0.1:8000"),
            (&kind, None, "10.0.0.1:8000", "10.0.0.1-8000", "http://10.0.0.1:8000"),
            (&grpc, None, "[fd00::1]:9000", "fd00--1-9000", "grpc://[fd00::1]:9000"),
        ] {
            let found = kind.worker(name, address.parse().unwrap(), NewRequests::Taken);
            assert_eq!((found.spec.id.as_str(), found.spec.address.as_str()), (id, url));
        }
    }
}
