//! What arrives: requests with lengths, times, and the names of their blocks.
//!
//! A prompt is known by the ids of its blocks of [`BLOCK_TOKENS`] tokens; equal ids at equal places mean equal text. All tokens of a
//! block are given its id, so that the worker's scheduler hashes real token blocks and finds what it should find. Knows no
//! policy and no engine. Next: [`run`](super::run) follows it.

pub mod azure;
pub mod generated;
pub mod trace;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use roundhouse_types::{BlockHash, ChainHasher, TokenId};
use router_core::{Precedence, Priority};

/// Tokens in a block: what published traces are cut into, and the block size of the simulated engines.
pub const BLOCK_TOKENS: usize = 512;
/// Ids below this are the workload's; above, tokens that no later prompt contains.
const FIRST_UNIQUE: u32 = 1 << 31;
const NANOSECONDS: f64 = 1e9;

/// One request of a workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// When it is due, in seconds from the start, at the workload's own pace.
    pub at_s: f64,
    /// Length of the prompt.
    pub input_tokens: u32,
    /// Tokens that will be generated.
    pub output_tokens: u32,
    /// Where its ids begin.
    first_id: u32,
    /// How many ids it has; they cover the prompt, and in conversations what is generated as well.
    ids: u32,
    /// Whose it is, where clients say so.
    pub session: Option<u64>,
    /// The request that must have ended before this one comes.
    pub after: Option<u32>,
    /// Which of [`Workload::adapters`] it is for.
    pub adapter: Option<u32>,
    /// How important it is, and whose.
    pub precedence: Precedence,
}

/// A workload: requests in order of time.
#[derive(Debug, Clone, Default)]
pub struct Workload {
    /// What it goes by in tables.
    pub name: String,
    /// Requests; those that wait for another come after it.
    pub requests: Vec<Request>,
    /// Names of adapters that requests are for; none where all are for the model itself.
    pub adapters: Vec<String>,
    /// Routers are told nothing of priorities and tenants.
    pub is_all_alike: bool,
    ids: Vec<u32>,
    /// So many requests at the end are in the background: there from the beginning, and in no figures of the others.
    background: usize,
}

/// What a request is made of, on the way into a [`Workload`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Draft {
    /// See [`Request`].
    pub at_s: f64,
    /// See [`Request`].
    pub input_tokens: u32,
    /// See [`Request`].
    pub output_tokens: u32,
    /// See [`Request`].
    pub session: Option<u64>,
    /// See [`Request`].
    pub after: Option<u32>,
    /// See [`Request`].
    pub precedence: Precedence,
}

impl Workload {
    /// An empty one.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Adds a request whose blocks are `ids`.
    pub fn push(&mut self, draft: Draft, ids: impl IntoIterator<Item = u32>) {
        let first = self.ids.len();
        self.ids.extend(ids);
        let count = self.ids.len() - first;
        let Draft { at_s, input_tokens, output_tokens, session, after, precedence } = draft;
        let as_u32 = |number: usize| u32::try_from(number).expect("a workload has fewer than 2^32 blocks");
        let (first_id, ids) = (as_u32(first), as_u32(count));
        self.requests.push(Request {
            at_s,
            input_tokens: input_tokens.max(1),
            output_tokens: output_tokens.max(1),
            first_id,
            ids,
            session,
            after,
            adapter: None,
            precedence,
        });
    }

    /// Puts the requests of `other` into the background, in its order; their times do not count, and they share nothing with those that are here.
    ///
    /// # Errors
    /// When there are more blocks than can be told apart.
    pub fn put_behind(&mut self, other: &Self) -> anyhow::Result<()> {
        let first = self.ids.iter().max().map_or(0, |most| most + 1);
        let most = other.ids.iter().max().copied().unwrap_or(0);
        anyhow::ensure!(first.saturating_add(most) < FIRST_UNIQUE, "{}: too many blocks", other.name);
        for request in &other.requests {
            let Request { input_tokens, output_tokens, session, .. } = *request;
            let precedence = Precedence { priority: Priority(-1), ..request.precedence };
            let draft = Draft { input_tokens, output_tokens, session, precedence, ..Draft::default() };
            self.push(draft, other.ids(request).iter().map(|id| first + id));
        }
        self.background += other.requests.len();
        Ok(())
    }

    /// Those that are not in the background.
    #[must_use]
    pub fn foreground(&self) -> &[Request] {
        &self.requests[..self.requests.len() - self.background]
    }

    /// Where those begin that are.
    #[must_use]
    pub fn first_in_background(&self) -> u32 {
        u32::try_from(self.foreground().len()).unwrap_or(u32::MAX)
    }

    /// Gives each session, or where there are none each beginning of prompts, one of `count` adapters, the nth of them with a weight of 1/n. What
    /// is computed with one is not found with another.
    ///
    /// # Errors
    /// When there are more blocks than can be told apart for so many.
    pub fn give_adapters(&mut self, count: u32, seed: u64) -> anyhow::Result<()> {
        let most = self.ids.iter().max().copied().unwrap_or(0);
        let names_all =
            most.checked_add(1).and_then(|ids| ids.checked_mul(count)).is_some_and(|ids| ids < FIRST_UNIQUE);
        anyhow::ensure!(
            names_all,
            "{}: --adapters must be at most {}",
            self.name,
            FIRST_UNIQUE / most.saturating_add(1)
        );
        let total: f64 = (1..=count).map(|nth| 1.0 / f64::from(nth)).sum();
        for (number, request) in self.requests.iter_mut().enumerate() {
            let ids = &mut self.ids[request.first_id as usize..][..request.ids as usize];
            let known_by = request.session.or(ids.first().map(|id| u64::from(*id))).unwrap_or(number as u64);
            let hash = ChainHasher::new(2).push_bytes(&known_by.to_le_bytes()).0;
            let mut left = total * SmallRng::seed_from_u64(seed ^ hash).random::<f64>();
            let adapter = (0..count - 1).find(|nth| {
                left -= 1.0 / f64::from(nth + 1);
                left < 0.0
            });
            let adapter = adapter.unwrap_or(count - 1);
            request.adapter = Some(adapter);
            ids.iter_mut().for_each(|id| *id = *id * count + adapter);
        }
        self.adapters = (0..count).map(|adapter| format!("adapter-{adapter}")).collect();
        Ok(())
    }

    /// Ids of the blocks of `request`.
    #[must_use]
    pub fn ids(&self, request: &Request) -> &[u32] {
        &self.ids[request.first_id as usize..][..request.ids as usize]
    }

    /// When `request` is due if the workload's pace is scaled by `scale`; in nanoseconds.
    #[must_use]
    pub fn due_ns(request: &Request, scale: f64) -> u64 {
        nanoseconds(request.at_s * scale)
    }

    /// From the first arrival to the last, in seconds, at its own pace.
    #[must_use]
    pub fn duration_s(&self) -> f64 {
        let times = || self.foreground().iter().map(|request| request.at_s);
        times().fold(0.0, f64::max) - times().fold(f64::INFINITY, f64::min).min(f64::MAX)
    }

    /// If all arrive in one instant, that is the first one: no pace can be told, and the time before it would be scaled instead.
    pub fn begin_at_once(&mut self) {
        if self.duration_s() == 0.0 {
            self.requests.iter_mut().for_each(|request| request.at_s = 0.0);
        }
    }

    /// Arrivals a second, at its own pace.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.foreground().len() as f64 / self.duration_s().max(1e-9)
    }

    /// All prompts together.
    #[must_use]
    pub fn input_tokens(&self) -> u64 {
        self.foreground().iter().map(|request| u64::from(request.input_tokens)).sum()
    }

    /// Chained hashes of the prompt's blocks, into `path`: those that an engine could find, or all.
    pub fn path(&self, request: &Request, partial: Partial, path: &mut Vec<BlockHash>) {
        let tokens = request.input_tokens as usize;
        let count = match partial {
            Partial::LeftOut => (tokens - 1) / BLOCK_TOKENS,
            Partial::Counted => tokens.div_ceil(BLOCK_TOKENS),
        };
        let mut chain = ChainHasher::new(0);
        path.clear();
        path.extend(self.ids(request).iter().take(count).map(|id| chain.push_bytes(&id.to_le_bytes())));
    }

    /// The prompt's tokens. Beyond its ids they are of no other prompt.
    #[must_use]
    pub fn tokens(&self, number: u32) -> Vec<TokenId> {
        let request = &self.requests[number as usize];
        let length = request.input_tokens as usize;
        let mut tokens = Vec::with_capacity(length + request.output_tokens as usize);
        for id in self.ids(request) {
            let left = length - tokens.len();
            tokens.extend(std::iter::repeat_n(*id, left.min(BLOCK_TOKENS)));
        }
        tokens.resize(length, FIRST_UNIQUE + number);
        tokens
    }

    /// The token at `position` of request `number`, prompt or output.
    #[must_use]
    pub fn token(&self, number: u32, position: usize) -> TokenId {
        let ids = self.ids(&self.requests[number as usize]);
        ids.get(position / BLOCK_TOKENS).copied().unwrap_or(FIRST_UNIQUE + number)
    }

    /// The longest request, prompt and output.
    #[must_use]
    pub fn longest_tokens(&self) -> usize {
        let lengths =
            self.requests.iter().map(|request| (request.input_tokens + request.output_tokens) as usize);
        lengths.max().unwrap_or(0)
    }

    /// Only the first `count` requests, in order of time; nobody among them waits for one that is left out.
    pub fn truncate(&mut self, count: usize) {
        self.requests.truncate(count);
    }

    /// Puts requests in order of time; those that wait for another stay behind it.
    pub(crate) fn sort(&mut self) {
        let mut order: Vec<u32> = (0u32..).take(self.requests.len()).collect();
        order.sort_by(|one, two| {
            let at = |number: &u32| self.requests[*number as usize].at_s;
            at(one).total_cmp(&at(two)).then(one.cmp(two))
        });
        let mut place = vec![0u32; order.len()];
        for (new, old) in (0u32..).zip(&order) {
            place[*old as usize] = new;
        }
        let mut sorted: Vec<Request> = order.iter().map(|old| self.requests[*old as usize].clone()).collect();
        for request in &mut sorted {
            request.after = request.after.map(|old| place[old as usize]);
        }
        self.requests = sorted;
    }
}

/// Whether the last block of a prompt counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partial {
    /// It does not: engines keep full blocks, and compute at least the last token, from which they draw.
    LeftOut,
    /// It does, as in the plain engine.
    Counted,
}

/// Seconds in nanoseconds.
#[must_use]
pub fn nanoseconds(seconds: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times are not negative, and short of 500 years"
    )]
    let rounded = (seconds * NANOSECONDS).round() as u64;
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(at_s: f64, input_tokens: u32) -> Draft {
        Draft { at_s, input_tokens, output_tokens: 3, ..Draft::default() }
    }

    #[test]
    fn prompts_with_equal_ids_have_equal_tokens_and_their_ends_are_their_own() {
        let mut workload = Workload::named("w");
        workload.push(draft(0.0, 1_100), [7, 8, 9]);
        workload.push(draft(1.0, 1_100), [7, 8]);
        let (one, two) = (workload.tokens(0), workload.tokens(1));
        assert_eq!((one.len(), one[..1_024] == two[..1_024]), (1_100, true));
        assert_ne!(one[1_024], two[1_024]);
        assert_eq!(workload.token(0, 1_030), one[1_030]);
        assert_eq!(workload.token(1, 1_030), two[1_030]);
    }

    #[test]
    fn paths_leave_out_what_is_not_full() {
        let mut workload = Workload::named("w");
        workload.push(draft(0.0, 1_100), [7, 8, 9]);
        let mut path = Vec::new();
        workload.path(&workload.requests[0], Partial::LeftOut, &mut path);
        assert_eq!(path.len(), 2);
        workload.path(&workload.requests[0], Partial::Counted, &mut path);
        assert_eq!(path.len(), 3);
    }

    #[test]
    fn a_session_has_one_adapter_and_shares_nothing_with_another_one() {
        let mut workload = Workload::named("w");
        for session in 0..400 {
            let draft = Draft { session: Some(session % 200), ..draft(0.0, 1_100) };
            workload.push(draft, [7, 1_000 + u32::try_from(session).unwrap()]);
        }
        workload.give_adapters(3, 5).unwrap();
        let mut shares = [0; 3];
        for (one, two) in workload.requests.iter().zip(&workload.requests[200..]) {
            assert_eq!(one.adapter, two.adapter);
            shares[one.adapter.unwrap() as usize] += 1;
        }
        assert!(shares.is_sorted_by(|one, next| one > next), "{shares:?}");
        for (one, two) in workload.requests.iter().zip(&workload.requests[1..]) {
            let first = |request| workload.ids(request)[0];
            assert_eq!(first(one) == first(two), one.adapter == two.adapter);
        }
        assert_eq!(workload.adapters, ["adapter-0", "adapter-1", "adapter-2"]);
        let mut many = Workload::named("w");
        many.push(draft(0.0, 1), [1 << 30]);
        assert!(many.give_adapters(3, 5).unwrap_err().to_string().contains("--adapters must be at most 1"));
    }

    #[test]
    fn sorting_keeps_who_waits_for_whom() {
        let mut workload = Workload::named("w");
        workload.push(draft(5.0, 1), []);
        workload.push(Draft { after: Some(0), ..draft(6.0, 2) }, []);
        workload.push(draft(1.0, 3), []);
        workload.sort();
        let lengths: Vec<_> = workload.requests.iter().map(|request| request.input_tokens).collect();
        assert_eq!(lengths, [3, 1, 2]);
        assert_eq!(workload.requests[2].after, Some(1));
        assert!((workload.duration_s() - 5.0).abs() < 1e-12);
    }
}
