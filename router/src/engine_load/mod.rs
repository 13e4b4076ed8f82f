//! Asks engines that nobody here wrote how many requests they have, every few seconds: what is not this router's there, or another's that tells
//! it, is others', who use the same engines for something else. And for how many adapters they have places.
//!
//! One task for all engines. Each address is asked once, whatever its ranks. Our own workers, which tell their load by themselves, are not asked.
//! Knows no policies. Next: [`Worker::hear_counts`].

mod counts;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use http::uri::PathAndQuery;
use router_core::{EngineLoad, LoadReading, Worker};

use self::counts::{SGLANGS_PATH, Told, Totals};
use crate::app::App;
use crate::fleet::{Roster, Upstream};
use crate::probes::ask;

/// In a round, the task wakes so often to see whose turn it is.
const PLACES: u32 = 10;
/// How long an engine may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// An engine rests for so many times what its answer took, so that one that has much to do is asked more rarely.
const REST: u32 = 20;
/// The longest rest, and until an engine that does not say is asked again: it may be another one by then.
const LONGEST_REST: Duration = Duration::from_secs(60);
/// What was heard counts for so many rounds after the longest rest.
const ROUNDS_VALID: u32 = 4;
/// Engines asked in a second, at most: with more of them, each more rarely. An answer is some 60 KB of text.
const MOST_ASKED_PER_S: u32 = 100;
/// Seconds, of the mean of what was computed of a prompt: prompts of so long ago count half.
const PROMPTS_S: f64 = 60.0;

/// What is known of one address.
struct Known {
    /// Who is there.
    ranks: Vec<Arc<Worker>>,
    /// When it is asked next; `None` while it is being asked.
    next: Option<Instant>,
    /// When it answered last.
    heard: Option<Instant>,
    /// What it had counted up by then.
    totals: Totals,
    /// Tokens computed of a prompt, on average, once it has computed some.
    uncached_tokens: Option<f64>,
}

/// An answer, or that there was none.
struct Answer {
    address: Arc<str>,
    asked: Instant,
    told: Option<Told>,
    /// What this router had at its workers when they were asked.
    before: Vec<(Arc<Worker>, LoadReading)>,
}

/// Asks for as long as the process lives, each engine every `every`.
pub async fn run(app: Arc<App>, every: Duration) {
    let mut known: HashMap<Arc<str>, Known> = HashMap::new();
    let mut asking: FuturesUnordered<BoxFuture<'static, Answer>> = FuturesUnordered::new();
    let mut tick = tokio::time::interval(every / PLACES);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let now = Instant::now();
                let engines = engines(&app.fleet.roster());
                let round = round(every, engines.len());
                known.retain(|address, entry| {
                    let stays = engines.contains_key(address);
                    if !stays {
                        entry.forget();
                    }
                    stays
                });
                for (place, (address, ranks)) in (0u32..).zip(&engines) {
                    // Not all at once, for ever after.
                    let first = now + round * (place % PLACES) / PLACES;
                    let entry = known.entry(Arc::clone(address)).or_insert_with(|| Known::asked_at(first));
                    let valid = round.max(LONGEST_REST) + ROUNDS_VALID * round;
                    if entry.heard.is_some_and(|heard| now.saturating_duration_since(heard) > valid) {
                        entry.forget();
                    }
                    if entry.next.is_some_and(|next| next <= now) {
                        entry.next = None;
                        asking.push(Box::pin(answer(Arc::clone(address), ranks.clone())));
                    }
                }
            }
            Some(Answer { address, asked, told, before }) = asking.next() => {
                let (now, round) = (Instant::now(), round(every, known.len()));
                let Some(entry) = known.get_mut(&address) else { continue };
                // One that did not answer this time, and has before, has more to do than it can.
                let tells = told.is_some() || entry.heard.is_some();
                let rest = if tells { (now - asked) * REST } else { LONGEST_REST };
                entry.next = Some(now + rest.clamp(round, round.max(LONGEST_REST)));
                if let Some(told) = told {
                    entry.hear(&told, before, (now, now.saturating_duration_since(app.started)));
                }
            }
        }
    }
}

impl Known {
    fn asked_at(first: Instant) -> Self {
        Self {
            ranks: Vec::new(),
            next: Some(first),
            heard: None,
            totals: Totals::default(),
            uncached_tokens: None,
        }
    }

    /// What it said is no longer what it would say.
    fn forget(&mut self) {
        self.heard = None;
        self.ranks.drain(..).for_each(|worker| worker.reports.forget_load());
    }

    /// It has told `now`; what this router had at its ranks when it was asked was `before`.
    fn hear(
        &mut self,
        told: &Told,
        before: Vec<(Arc<Worker>, LoadReading)>,
        (now, clock): (Instant, Duration),
    ) {
        if let Some(mean) = told.totals.mean_uncached(&self.totals) {
            let passed_s = self.heard.map(|heard| now.saturating_duration_since(heard).as_secs_f64());
            let share = passed_s.map_or(1.0, |passed_s| passed_s / (passed_s + PROMPTS_S));
            self.uncached_tokens =
                Some(self.uncached_tokens.map_or(mean, |before| before + share * (mean - before)));
        }
        (self.totals, self.heard) = (told.totals, Some(now));
        for (worker, before) in &before {
            if let Some(places) = told.adapter_places {
                worker.load.set_adapter_places(places);
            }
            let Some(counts) = told.part(worker.spec.dp_rank.map(|rank| rank.number)) else {
                worker.reports.forget_load();
                continue;
            };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 10^15")]
            let count = |value: f64| value as usize;
            let capacity = worker.reports.kv_capacity_tokens().unwrap_or(0);
            let kv_used_tokens = count(counts.kv_usage.min(1.0) * capacity as f64);
            let load = EngineLoad {
                running: count(counts.running),
                waiting: count(counts.waiting),
                kv_used_tokens,
                kv_free_tokens: capacity - kv_used_tokens,
                uncached_tokens: self.uncached_tokens.unwrap_or(0.0),
            };
            worker.hear_counts(&load, before, clock);
        }
        let heard: Vec<_> = before.into_iter().map(|(worker, _)| worker).collect();
        for gone in self.ranks.drain(..).filter(|rank| !heard.iter().any(|worker| Arc::ptr_eq(worker, rank)))
        {
            gone.reports.forget_load();
        }
        self.ranks = heard;
    }
}

/// How often so many engines are asked.
fn round(every: Duration, engines: usize) -> Duration {
    every.max(Duration::from_secs(1) / MOST_ASKED_PER_S * u32::try_from(engines).unwrap_or(u32::MAX))
}

/// Those that may be asked, with all ranks at an address together.
fn engines(roster: &Roster) -> HashMap<Arc<str>, Vec<Arc<Upstream>>> {
    let mut engines: HashMap<Arc<str>, Vec<Arc<Upstream>>> = HashMap::new();
    for worker in roster.snapshot.workers().iter().filter(|worker| worker.is_up()) {
        let Some(upstream) = roster.upstream(worker) else { continue };
        let tells_itself = upstream.follower.as_ref().is_some_and(|follower| !follower.is_of_engine());
        if !tells_itself && !worker.spec.address.starts_with("embedded:") {
            engines.entry(worker.spec.address.as_str().into()).or_default().push(upstream);
        }
    }
    engines
}

async fn answer(address: Arc<str>, ranks: Vec<Arc<Upstream>>) -> Answer {
    let asked = Instant::now();
    let before =
        ranks.iter().map(|upstream| (Arc::clone(&upstream.worker), upstream.worker.sent_there())).collect();
    let told = match ranks.first() {
        Some(upstream) => tokio::time::timeout(ANSWER_LIMIT, told(upstream)).await.ok().flatten(),
        None => None,
    };
    Answer { address, asked, told, before }
}

/// What an engine says.
async fn told(upstream: &Upstream) -> Option<Told> {
    let ask = |path| ask(&*upstream.transport, PathAndQuery::from_static(path));
    let told = ask("/metrics").await.and_then(|metrics| Told::read(&String::from_utf8_lossy(&metrics)));
    if !upstream.is_of(&["sglang"]) {
        return told;
    }
    match ask(SGLANGS_PATH).await {
        Some(loads) => Told::with_loads(told, &loads),
        None => told,
    }
}
