//! To one data-parallel rank of an engine that has several behind its address: HTTP, with the rank told in each request.
//!
//! vLLM reads the header on its paths that generate. SGLang reads it too, where its own path (`/generate`) and releases before March 2026
//! read a member of the body instead, which used to be named otherwise. A body is added to on that path, or where an operator wants it, only if it is an
//! object, and not if it is compressed; the header goes out in any case.

use http::{HeaderName, HeaderValue, header};
use router_core::{DpRank, ToldBy};

use super::http::HttpTransport;
use super::{Answer, Connections, HandingOver, Transport, WorkerRequest};
use crate::hop_by_hop;
use crate::openai::members::Members;
use crate::payload::Payload;

/// What tells the rank: vLLM's name, which SGLang has taken over. A client's own goes no further.
const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// What of a body says which rank it is for, in SGLang's newer and older releases. The newer name counts where both are.
pub const RANK_FIELDS: [&str; 2] = ["routed_dp_rank", "data_parallel_rank"];

/// SGLang's own path, on which it reads no header.
const SGLANGS_OWN: &str = "/generate";

/// HTTP to one rank.
pub struct RankedTransport {
    http: HttpTransport,
    rank: DpRank,
    number: HeaderValue,
}

impl RankedTransport {
    pub(super) fn new(http: HttpTransport, rank: DpRank) -> Self {
        Self { http, rank, number: HeaderValue::from(rank.number) }
    }

    /// The request as the rank is to get it.
    async fn told(&self, request: &WorkerRequest) -> WorkerRequest {
        // What `Connection` names is left out before the header is added, so that no client takes it away again.
        let mut headers = hop_by_hop::end_to_end_map(&request.headers);
        headers.insert(DP_RANK, self.number.clone());
        WorkerRequest {
            method: request.method.clone(),
            path: request.path.clone(),
            headers,
            body: self.body(request).await.unwrap_or_else(|| request.body.clone()),
            underway: request.underway.clone(),
            leaves: None,
            gateway: None,
        }
    }

    /// The body with the rank in it; `None` if it stays as it is.
    async fn body(&self, request: &WorkerRequest) -> Option<Payload> {
        let name = match self.rank.told_by {
            ToldBy::Field(name) => name,
            ToldBy::Header if request.path.path() == SGLANGS_OWN => RANK_FIELDS[0],
            ToldBy::Header => return None,
        };
        if request.headers.contains_key(header::CONTENT_ENCODING) {
            return None;
        }
        let members = Members::of(&request.body).await?;
        Some(members.with(&format!(r#""{name}":{}"#, self.rank.number), &RANK_FIELDS))
    }
}

impl Transport for RankedTransport {
    fn send<'a>(&'a self, request: &'a WorkerRequest) -> Answer<'a> {
        Box::pin(async move { self.http.attempt(&self.told(request).await).await })
    }

    fn hand_over<'a>(&'a self, request: &'a WorkerRequest) -> HandingOver<'a> {
        Box::pin(async move { self.http.handover(&self.told(request).await).await })
    }

    fn connections(&self) -> Connections {
        self.http.connections()
    }
}
