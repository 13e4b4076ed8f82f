//! EndpointSlices of a Service, as the Kubernetes API writes them (`discovery.k8s.io/v1`), and which workers they say there are.
//!
//! Pure: bytes in, workers out. A Service has any number of slices, one family of addresses and one list of ports each. An endpoint may be in two of
//! them while it moves from one to the other, and is in one for each family where a Service has both.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::desired::{Found, NewRequests};
use crate::discovery::source::{Kind, PortChoice};

/// An EndpointSlice, as much of it as is read.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Slice {
    metadata: Metadata,
    #[serde(default)]
    address_type: String,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    name: String,
    #[serde(default)]
    resource_version: String,
}

impl Metadata {
    /// The version, which is written into paths as it is.
    fn version(self) -> serde_json::Result<String> {
        match self.resource_version.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            true => Ok(self.resource_version),
            false => Err(serde::de::Error::custom("its resourceVersion is none")),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Option<Vec<String>>,
    conditions: Option<Conditions>,
    target_ref: Option<TargetRef>,
}

/// What is not said is unknown, which is to be read as ready, and as not terminating.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Clone, Debug, Deserialize)]
struct TargetRef {
    name: Option<String>,
    uid: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
    protocol: Option<String>,
}

/// The answer to a list.
#[derive(Debug, Deserialize)]
struct List {
    metadata: Metadata,
    items: Option<Vec<Slice>>,
}

/// What a line of a watch says.
#[derive(Debug)]
pub(super) enum Event {
    /// Something has changed, up to this version.
    Changed(String),
    /// Nothing has, up to this version.
    Bookmark(String),
    /// The watch ends with this status.
    Failed {
        /// As of HTTP; 410 where the version is too old to go on from.
        code: u16,
        /// What the server says of it.
        message: String,
    },
    /// A kind of event that is not known.
    Unknown,
}

/// All slices of a Service, by name.
#[derive(Debug, Default)]
pub(super) struct Slices(BTreeMap<String, Slice>);

/// What the slices say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// The workers, sorted by address once their readiness is settled.
    pub(super) found: Vec<Found>,
    /// Endpoints that were left out because none of their ports is the one that was chosen.
    pub(super) without_port: usize,
}

/// One pod, or whatever else has endpoints.
#[derive(Clone, Debug)]
struct Instance<'a> {
    name: Option<&'a str>,
    address: SocketAddr,
    is_ready: bool,
    /// Whether it answers, terminating or not.
    is_serving: bool,
    is_terminating: bool,
}

impl Slices {
    /// Replaces all by what a list says. Returns the version from which a watch goes on.
    ///
    /// # Errors
    /// When it is no such list; then nothing has changed.
    pub(super) fn replace(&mut self, list: &[u8]) -> serde_json::Result<String> {
        let List { metadata, items } = serde_json::from_slice(list)?;
        let (version, items) = (metadata.version()?, items.unwrap_or_default());
        self.0 = items.into_iter().map(|slice| (slice.metadata.name.clone(), slice)).collect();
        Ok(version)
    }

    /// Applies one line of a watch.
    ///
    /// # Errors
    /// When it is no event; then nothing has changed.
    pub(super) fn apply(&mut self, line: &[u8]) -> serde_json::Result<Event> {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(rename = "type")]
            kind: String,
            #[serde(borrow)]
            object: &'a RawValue,
        }
        #[derive(Deserialize)]
        struct Bookmark {
            metadata: Metadata,
        }
        let Line { kind, object } = serde_json::from_slice(line)?;
        Ok(match kind.as_str() {
            "ADDED" | "MODIFIED" | "DELETED" => {
                let slice: Slice = serde_json::from_str(object.get())?;
                let version = slice.metadata.clone().version()?;
                if kind == "DELETED" {
                    self.0.remove(&slice.metadata.name);
                } else {
                    self.0.insert(slice.metadata.name.clone(), slice);
                }
                Event::Changed(version)
            }
            "BOOKMARK" => {
                let Bookmark { metadata } = serde_json::from_str(object.get())?;
                Event::Bookmark(metadata.version()?)
            }
            "ERROR" => {
                let Status { code, message } = Status::read(object.get().as_bytes());
                Event::Failed { code, message }
            }
            _ => Event::Unknown,
        })
    }

    /// Whether there are none: nothing is known to be of that Service.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The workers. While one is ready and stays, those that are not ready or terminate get no new requests. Where none is, it is more
    /// likely that whoever says so is wrong, or that all have just begun, and the router's own probes say who is well; and those that
    /// terminate and still serve are better than nobody.
    pub(super) fn told(&self, kind: &Kind, choice: &PortChoice) -> Told {
        let (instances, without_port) = self.instances(kind, choice);
        let any_ready = instances.iter().any(|one| one.is_ready && !one.is_terminating);
        let mut found: Vec<_> = instances
            .into_iter()
            .flat_map(|one| {
                let is_worse = one.is_terminating || !one.is_ready;
                let is_out = any_ready && is_worse || one.is_terminating && !one.is_serving;
                let new_requests = if is_out { NewRequests::Withheld } else { NewRequests::Taken };
                kind.workers(one.name, one.address, new_requests)
            })
            .collect();
        let order = |Found { spec, .. }: &Found| (spec.endpoint_name().to_owned(), spec.dp_rank);
        found.sort_by_cached_key(order);
        Told { found, without_port }
    }

    /// Each pod once, by its first family of addresses; and of two pods with one name, or one address, that which stays.
    fn instances(&self, kind: &Kind, choice: &PortChoice) -> (Vec<Instance<'_>>, usize) {
        let mut without_port = 0;
        // By name and by what tells two of that name apart, in this order.
        let mut pods = BTreeMap::<(String, &str), Instance<'_>>::new();
        for slice in self.0.values().filter(|slice| slice.has_ip_addresses()) {
            let port = slice.port(kind, choice);
            for endpoint in slice.endpoints.iter().flatten() {
                let Some(ip) = endpoint.ip() else { continue };
                let Some(port) = port else {
                    without_port += 1;
                    continue;
                };
                let instance = endpoint.at(SocketAddr::new(ip, port));
                let name = instance.name.map_or_else(|| instance.address.to_string(), str::to_owned);
                let uid = endpoint.target_ref.as_ref().and_then(|target| target.uid.as_deref());
                pods.entry((name, uid.unwrap_or_default()))
                    .and_modify(|known| known.meet(&instance))
                    .or_insert(instance);
            }
        }
        // Those that stay come first, so that they are the ones that are kept.
        let mut pods: Vec<_> = pods.into_iter().collect();
        pods.sort_by_key(|(_, pod)| pod.is_terminating);
        let (mut names, mut addresses) = (HashSet::new(), HashSet::new());
        pods.retain(|((name, _), pod)| names.insert(name.clone()) && addresses.insert(pod.address));
        (pods.into_iter().map(|(_, pod)| pod).collect(), without_port)
    }
}

impl Slice {
    /// Names that are to be looked up are an old kind of slice that nobody makes any more.
    fn has_ip_addresses(&self) -> bool {
        ["IPv4", "IPv6"].contains(&self.address_type.as_str())
    }

    fn port(&self, kind: &Kind, choice: &PortChoice) -> Option<u16> {
        let is_tcp = |port: &&Port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
        let ports = || self.ports.iter().flatten().filter(is_tcp);
        let named = |name: &str| ports().find(|port| port.name.as_deref() == Some(name))?.port;
        match choice {
            PortChoice::Number(number) => Some(*number),
            PortChoice::Named(name) => named(name),
            PortChoice::Only if ports().count() == 1 => ports().next()?.port,
            PortChoice::Only => named(kind.scheme),
        }
    }
}

impl Endpoint {
    /// All of its addresses lead to the same place, so the first is as good as any.
    fn ip(&self) -> Option<IpAddr> {
        self.addresses.as_ref()?.first()?.parse().ok()
    }

    fn at(&self, address: SocketAddr) -> Instance<'_> {
        let Conditions { ready, serving, terminating } = self.conditions.unwrap_or_default();
        let name = self.target_ref.as_ref().and_then(|target| target.name.as_deref());
        Instance {
            name: name.filter(|name| !name.is_empty()),
            address,
            is_ready: ready.unwrap_or(true),
            is_serving: serving.unwrap_or(true),
            is_terminating: terminating.unwrap_or(false),
        }
    }
}

impl Instance<'_> {
    /// The same pod in another slice, of another family, or older or newer: nothing that terminates goes back to work, and its address stays
    /// the same whatever comes first.
    fn meet(&mut self, other: &Self) {
        self.address = self.address.min(other.address);
        self.is_ready |= other.is_ready;
        self.is_serving |= other.is_serving;
        self.is_terminating |= other.is_terminating;
    }
}

/// Why the API has not done what it was asked, in its own words.
pub(super) struct Status {
    pub(super) code: u16,
    pub(super) message: String,
}

impl Status {
    /// Most of a message that is told: it goes into the log.
    const MOST_CHARACTERS: usize = 300;

    /// Reads it; what is none says nothing.
    pub(super) fn read(body: &[u8]) -> Self {
        #[derive(Default, Deserialize)]
        struct Body {
            #[serde(default)]
            code: u16,
            #[serde(default)]
            message: String,
        }
        let Body { code, message } = serde_json::from_slice(body).unwrap_or_default();
        Self { code, message: message.chars().take(Self::MOST_CHARACTERS).collect() }
    }
}

#[cfg(test)]
mod tests;
