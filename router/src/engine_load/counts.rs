//! What an engine says of its load: vLLM in its metrics, our own worker by the same names, and SGLang in `GET /v1/loads` (0.5.23). SGLang's gauges of
//! requests are written with prefills, every so many decode steps and, where it has nothing to do, twice a minute: they count requests that are over,
//! and would make them somebody else's. Of its metrics, what is counted up is read, and places for adapters.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::metrics_text::{Sample, samples};

/// Where SGLang tells its load.
pub(super) const SGLANGS_PATH: &str = "/v1/loads";

/// Of one data-parallel rank of an engine, or of an engine without ranks.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Counts {
    /// Requests that take part in its steps.
    pub(super) running: f64,
    /// Requests that wait in it.
    pub(super) waiting: f64,
    /// The share of its KV cache that requests hold, from 0 to 1.
    pub(super) kv_usage: f64,
}

/// What is counted up, over all ranks of an engine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Totals {
    /// Prompts that have their first token.
    pub(super) prompts: f64,
    /// Their tokens.
    pub(super) prompt_tokens: f64,
    /// Those of them that were cached.
    pub(super) cached_tokens: f64,
}

impl Totals {
    /// What SGLang counts of requests at their end. Returns whether it is that.
    fn add_sglangs(&mut self, what: &str, value: f64) -> bool {
        let total = match what {
            "num_requests_total" => &mut self.prompts,
            "prompt_tokens_total" => &mut self.prompt_tokens,
            // One for each tier that they were found in.
            "cached_tokens_total" => &mut self.cached_tokens,
            _ => return false,
        };
        *total += value;
        true
    }

    /// Tokens that were computed of a prompt on average, since it said `before`; `None` where there were no prompts.
    #[must_use]
    pub(super) fn mean_uncached(&self, before: &Self) -> Option<f64> {
        let prompts = self.prompts - before.prompts;
        let tokens = self.prompt_tokens - before.prompt_tokens;
        let cached = self.cached_tokens - before.cached_tokens;
        // An engine that was started anew has less than before.
        (prompts >= 1.0).then(|| (tokens - cached).max(0.0) / prompts)
    }
}

/// What SGLang says of one rank.
#[derive(Deserialize)]
struct RankLoad {
    #[serde(default)]
    dp_rank: u32,
    num_running_reqs: f64,
    #[serde(default)]
    num_waiting_reqs: f64,
    /// The share of its KV cache that requests hold.
    #[serde(default)]
    token_usage: f64,
    #[serde(default)]
    disaggregation: HandingOver,
}

/// And of those that wait for the other engine, beyond the ones that are among those that wait.
#[derive(Deserialize, Default)]
struct HandingOver {
    /// Computed, and on their way.
    #[serde(default)]
    prefill_inflight_queue_reqs: f64,
}

fn sglangs_adapter_places(sample: &Sample<'_>) -> Option<usize> {
    let places =
        sample.number().filter(|places| sample.name == "sglang:lora_pool_slots_total" && *places >= 1.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to 10^15")]
    places.map(|places| places as usize)
}

/// All that an engine says of its load.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Told {
    ranks: Vec<Counts>,
    /// Counted up.
    pub(super) totals: Totals,
    /// How many adapters each rank computes side by side; vLLM tells once it has had a request, SGLang if its metrics are on.
    pub(super) adapter_places: Option<usize>,
}

impl Told {
    /// Of an engine's metrics; `None` if they say nothing of requests, nor of adapters.
    #[must_use]
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut ranks: BTreeMap<Option<u32>, Counts> = BTreeMap::new();
        let (mut totals, mut is_told) = (Totals::default(), false);
        let mut adapter_places = None;
        for sample in samples(text) {
            let Some((engine, what)) = sample.name.split_once(':') else { continue };
            let Some(value) = sample.number() else { continue };
            match engine {
                "vllm" | "worker" => {}
                "sglang" => {
                    is_told |= totals.add_sglangs(what, value);
                    adapter_places = adapter_places.max(sglangs_adapter_places(&sample));
                    continue;
                }
                _ => continue,
            }
            // Ranks of one engine that hold parts of the same sequences all count these.
            let most = |known: &mut f64| *known = value.max(*known);
            match what {
                "num_requests_running" => {
                    is_told = true;
                    most(&mut rank(&mut ranks, sample.label("engine")).running);
                }
                "num_requests_waiting" => {
                    most(&mut rank(&mut ranks, sample.label("engine")).waiting);
                }
                "kv_cache_usage_perc" | "gpu_cache_usage_perc" => {
                    most(&mut rank(&mut ranks, sample.label("engine")).kv_usage);
                }
                "lora_requests_info" => {
                    let told = sample.label("max_lora").and_then(|places| places.parse().ok());
                    adapter_places = adapter_places.max(told);
                }
                "time_to_first_token_seconds_count" => totals.prompts += value,
                "prompt_tokens_total" => totals.prompt_tokens += value,
                "prefix_cache_hits_total" => {
                    totals.cached_tokens += value;
                }
                _ => {}
            }
        }
        let tells = is_told || adapter_places.is_some();
        tells.then(|| Self { ranks: ranks.into_values().collect(), totals, adapter_places })
    }

    /// The same, with what SGLang tells at [its path](SGLANGS_PATH), if that says anything.
    #[must_use]
    pub(super) fn with_loads(told: Option<Self>, loads: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Loads {
            loads: Vec<RankLoad>,
        }
        let Ok(Loads { loads }) = serde_json::from_slice(loads) else { return told };
        let counts = |load: RankLoad| {
            let RankLoad { dp_rank, num_running_reqs, num_waiting_reqs, token_usage, disaggregation } = load;
            let running = num_running_reqs + disaggregation.prefill_inflight_queue_reqs;
            (dp_rank, Counts { running, waiting: num_waiting_reqs, kv_usage: token_usage })
        };
        let ranks: BTreeMap<u32, Counts> = loads.into_iter().map(counts).collect();
        Some(Self { ranks: ranks.into_values().collect(), ..told.unwrap_or_default() })
    }

    /// Of all ranks together, or of the one with that place in their order: engines that have only some of all ranks count those from 0 in requests,
    /// and from somewhere else in metrics. An engine that tells of one alone says what each has, if it is asked for one.
    #[must_use]
    pub(super) fn part(&self, rank: Option<u16>) -> Option<Counts> {
        let count = self.ranks.len();
        if let Some(number) = rank {
            return self
                .ranks
                .get(usize::from(number))
                .or_else(|| self.ranks.first().filter(|_| count == 1))
                .copied();
        }
        let sum = |of: fn(&Counts) -> f64| self.ranks.iter().map(of).sum::<f64>();
        (count > 0).then(|| Counts {
            running: sum(|rank| rank.running),
            waiting: sum(|rank| rank.waiting),
            kv_usage: sum(|rank| rank.kv_usage) / count as f64,
        })
    }
}

fn rank<'a>(ranks: &'a mut BTreeMap<Option<u32>, Counts>, label: Option<&str>) -> &'a mut Counts {
    ranks.entry(label.and_then(|number| number.parse().ok())).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = "# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 5.0\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 2.0\n\
        vllm:num_requests_waiting{engine=\"1\",model_name=\"tiny\"} 0.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"tiny\",reason=\"capacity\"} 2.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25\n\
        vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"tiny\"} 0.75\n\
        vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 900.0\n\
        vllm:prompt_tokens_total{engine=\"1\",model_name=\"tiny\"} 100.0\n\
        vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"tiny\"} 600.0\n\
        vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"tiny\"} 4.0\n";

    #[test]
    fn places_for_adapters_are_told_by_names_of_their_own() {
        let places = |text: &str| Told::read(&format!("{VLLM}{text}")).unwrap().adapter_places;
        assert_eq!(places(""), None);
        // One line for each set of adapters that there has been.
        let line = "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"a,b\",waiting_lora_adapters=\"\"} 1.79e+09\n";
        assert_eq!(places(&format!("{line}{}", line.replace("a,b", "c"))), Some(4));
        assert_eq!(places("vllm:lora_requests_info{max_lora=\"many\"} 1.0\n"), None);
        assert_eq!(places("sglang:lora_pool_slots_total{tp_rank=\"0\"} 8.0\n"), Some(8));
        assert_eq!(places("sglang:lora_pool_slots_total{tp_rank=\"0\"} 0.0\n"), None);
    }

    #[test]
    fn vllm_counts_for_each_rank() {
        let told = Told::read(VLLM).unwrap();
        let ranks = [
            Counts { running: 3.0, waiting: 2.0, kv_usage: 0.25 },
            Counts { running: 5.0, waiting: 0.0, kv_usage: 0.75 },
        ];
        assert_eq!(told.part(None), Some(Counts { running: 8.0, waiting: 2.0, kv_usage: 0.5 }));
        assert_eq!(
            [told.part(Some(0)), told.part(Some(1)), told.part(Some(2))],
            [Some(ranks[0]), Some(ranks[1]), None]
        );
        assert_eq!(told.totals.mean_uncached(&Totals::default()), Some(100.0));
        assert_eq!(told.totals.mean_uncached(&told.totals), None, "no prompts since");
        let more = Totals { prompts: 9.0, ..told.totals };
        assert_eq!(told.totals.mean_uncached(&more), None, "started anew");
    }

    /// What SGLang 0.5.23 says with two ranks, cut short.
    const LOADS: &str = r#"{"version":"0.5.23","loads":[
        {"dp_rank":1,"num_running_reqs":4,"disaggregation":{"mode":"prefill","prefill_inflight_queue_reqs":1},"num_waiting_reqs":0,"token_usage":0.75,"queues":{"waiting":0}},
        {"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,"num_waiting_uncached_tokens":90,"token_usage":0.25}]}"#;

    #[test]
    fn what_sglangs_metrics_say_of_requests_is_too_old_to_go_by() {
        let counts =
            "sglang:num_running_reqs{tp_rank=\"0\"} 20.0\nsglang:num_queue_reqs{tp_rank=\"0\"} 3.0\n";
        assert_eq!(Told::read(counts), None);
        let told =
            Told::read(&format!("{counts}sglang:lora_pool_slots_total{{tp_rank=\"0\"}} 8.0\n")).unwrap();
        assert_eq!((told.adapter_places, told.part(None), told.part(Some(0))), (Some(8), None, None));
    }

    #[test]
    fn sglang_tells_its_load_at_a_path_of_its_own() {
        let metrics = "sglang:num_requests_total{is_streaming=\"false\"} 3.0\n\
            sglang:num_requests_total{is_streaming=\"true\"} 1.0\n\
            sglang:prompt_tokens_total{is_streaming=\"true\"} 1000.0\n\
            sglang:cached_tokens_total{cache_source=\"device\"} 500.0\n\
            sglang:cached_tokens_total{cache_source=\"host\"} 100.0\n\
            sglang:num_running_reqs{dp_rank=\"0\"} 9.0\n";
        let told = Told::with_loads(Told::read(metrics), LOADS.as_bytes()).unwrap();
        assert_eq!(told.part(None), Some(Counts { running: 8.0, waiting: 2.0, kv_usage: 0.5 }));
        assert_eq!(told.part(Some(0)), Some(Counts { running: 3.0, waiting: 2.0, kv_usage: 0.25 }));
        assert_eq!(told.totals.mean_uncached(&Totals::default()), Some(100.0));
        let alone = Told::with_loads(None, LOADS.as_bytes()).unwrap();
        assert_eq!(
            (alone.part(None), alone.totals),
            (told.part(None), Totals::default()),
            "without --enable-metrics"
        );
        for nothing in ["", "{}", r#"{"detail":"Not Found"}"#, r#"{"loads":[{"dp_rank":0}]}"#] {
            assert_eq!(Told::with_loads(None, nothing.as_bytes()), None, "{nothing}");
        }
    }

    #[test]
    fn what_says_nothing_of_requests_is_no_load() {
        for text in [
            "",
            "a 1\n",
            "vllm:kv_cache_usage_perc 1\n",
            "tgi:num_requests_running 1\n",
            "vllm:num_requests_running NaN\n",
        ] {
            assert_eq!(Told::read(text), None, "{text}");
        }
        let bare = Told::read("worker:num_requests_running 1\n").unwrap();
        assert_eq!(bare.part(None), Some(Counts { running: 1.0, ..Counts::default() }));
    }
}
