//! What an engine's metrics say of its load: vLLM's names, and our own worker's, which are vLLM's. SGLang's gauges of requests are written with prefills,
//! every so many decode steps and, where it has nothing to do, twice a minute: they count requests that are over, and would make them somebody else's. Of
//! its metrics, places for adapters are read.

use std::collections::BTreeMap;

use crate::metrics_text::samples;

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

/// All that an engine's metrics say of its load.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Told {
    ranks: Vec<Counts>,
    /// Counted up.
    pub(super) totals: Totals,
    /// How many adapters each rank computes side by side; vLLM tells once it has had a request, SGLang if its metrics are on.
    pub(super) adapter_places: Option<usize>,
}

impl Told {
    /// `None` if `text` says nothing of requests that run, nor of adapters.
    #[must_use]
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut ranks: BTreeMap<Option<u32>, Counts> = BTreeMap::new();
        let (mut totals, mut is_told) = (Totals::default(), false);
        let mut adapter_places = None;
        for sample in samples(text) {
            let Some((engine, what)) = sample.name.split_once(':') else { continue };
            let Some(value) = sample.number() else { continue };
            if engine == "sglang" && what == "lora_pool_slots_total" && value >= 1.0 {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "from 1 to 10^15"
                )]
                let told = value as usize;
                adapter_places = adapter_places.max(Some(told));
            }
            if !["vllm", "worker"].contains(&engine) {
                continue;
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

    #[test]
    fn what_sglang_counts_is_too_old_to_go_by() {
        let counts =
            "sglang:num_running_reqs{tp_rank=\"0\"} 20.0\nsglang:num_queue_reqs{tp_rank=\"0\"} 3.0\n";
        assert_eq!(Told::read(counts), None);
        let told =
            Told::read(&format!("{counts}sglang:lora_pool_slots_total{{tp_rank=\"0\"}} 8.0\n")).unwrap();
        assert_eq!((told.adapter_places, told.part(None), told.part(Some(0))), (Some(8), None, None));
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
