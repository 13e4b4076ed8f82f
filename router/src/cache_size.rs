//! How many tokens an engine's KV cache has room for, as it says of itself: vLLM, SGLang and our own worker in `/metrics`, SGLang without
//! `--enable-metrics` in `/server_info`, which was `/get_server_info`. Asked once a worker is up, since it does not change while it runs. Used by [`probes`](crate::probes).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::metrics_text::{Sample, samples};

/// Whose cache is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// All that is behind an address.
    Whole,
    /// One of its data-parallel ranks, by its place in their order: engines that have only some of all ranks count those from 0 in requests, and
    /// from somewhere else in metrics.
    Rank(u16),
}

/// Of metrics in Prometheus' text format; `None` if they do not say.
#[must_use]
pub fn of_metrics(text: &str, part: Part) -> Option<usize> {
    let by_blocks = ["vllm:cache_config_info", "worker:cache_config_info"];
    let mut parts: BTreeMap<Option<u32>, usize> = BTreeMap::new();
    // Ranks that tell blocks alone.
    let mut by_blocks_alone = BTreeSet::new();
    for sample in samples(text) {
        let (rank, tokens) = if by_blocks.contains(&sample.name) {
            let tokens = sample.label("kv_cache_size_tokens").and_then(|tokens| tokens.parse().ok());
            let engine = sample.label("engine");
            if tokens.is_none() {
                by_blocks_alone.insert(engine.and_then(|rank| rank.parse().ok()));
            }
            (engine, tokens.or_else(|| of_blocks(&sample)))
        } else if sample.name == "sglang:max_total_num_tokens" {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 10^15")]
            (sample.label("dp_rank"), sample.number().map(|tokens| tokens as usize))
        } else {
            continue;
        };
        // Ranks of one engine that hold parts of the same tokens all say how many these are.
        let known = parts.entry(rank.and_then(|rank| rank.parse().ok())).or_default();
        *known = tokens.unwrap_or(0).max(*known);
    }
    // vLLM's blocks are those of all its ranks together, and each rank says so.
    for rank in &by_blocks_alone {
        if let Some(tokens) = parts.get_mut(rank) {
            *tokens /= by_blocks_alone.len();
        }
    }
    let tokens = match part {
        Part::Whole => Some(parts.values().sum()),
        // Who tells of one alone says what each has.
        Part::Rank(_) if parts.len() == 1 => parts.values().next().copied(),
        Part::Rank(number) => parts.values().nth(number.into()).copied(),
    };
    tokens.filter(|tokens| *tokens > 0)
}

/// Of SGLang's `/server_info`, which tells what each rank has.
#[must_use]
pub fn of_server_info(body: &[u8], part: Part) -> Option<usize> {
    let info: Value = serde_json::from_slice(body).ok()?;
    let number = |name: &str| usize::try_from(info.get(name)?.as_u64()?).ok();
    let ranks = if part == Part::Whole { number("dp_size").unwrap_or(1) } else { 1 };
    number("max_total_num_tokens")?.checked_mul(ranks).filter(|tokens| *tokens > 0)
}

fn of_blocks(sample: &Sample<'_>) -> Option<usize> {
    let number = |name| sample.label(name)?.parse::<usize>().ok();
    number("num_gpu_blocks")?.checked_mul(number("block_size")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_says_blocks_and_their_size_for_each_engine() {
        let line = |engine: &str, blocks: &str| {
            format!(
                "vllm:cache_config_info{{block_size=\"16\",cache_dtype=\"auto\",engine=\"{engine}\",num_cpu_blocks=\"7\",num_gpu_blocks=\"{blocks}\",\
                 num_gpu_blocks_override=\"None\"}} 1.0\n"
            )
        };
        let head = "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n";
        let one = head.to_owned() + &line("0", "573");
        assert_eq!(of_metrics(&one, Part::Whole), Some(573 * 16));
        assert_eq!(of_metrics(&one, Part::Rank(1)), Some(573 * 16), "what each has");
        let two = line("0", "1146") + &line("1", "1146") + "vllm:num_requests_running{engine=\"0\"} 3\n";
        assert_eq!(of_metrics(&two, Part::Whole), Some(1_146 * 16), "each says what all have together");
        let ranks = [0, 1, 2].map(|number| of_metrics(&two, Part::Rank(number)));
        assert_eq!(ranks, [Some(573 * 16), Some(573 * 16), None]);
        // Newer releases tell the tokens of each; of models with several kinds of attention these are fewer than blocks have places.
        let told = |engine: &str, tokens: &str| {
            let more = format!(",kv_cache_size_tokens=\"{tokens}\",num_gpu_blocks_override");
            line(engine, "512").replace(",num_gpu_blocks_override", &more)
        };
        let elsewhere = told("10", "48") + &told("9", "32") + &told("8", "16");
        let ranks = [0, 1, 2].map(|number| of_metrics(&elsewhere, Part::Rank(number)));
        assert_eq!(ranks, [Some(16), Some(32), Some(48)], "8 of 16 ranks begin at the eighth");
        assert_eq!(of_metrics(&elsewhere, Part::Whole), Some(96));
        assert_eq!(of_metrics(&told("0", "None"), Part::Whole), Some(512 * 16));
        assert_eq!(of_metrics(&line("0", "None"), Part::Whole), None);
        let ours = "worker:cache_config_info{block_size=\"32\",num_gpu_blocks=\"10\"} 1\n";
        assert_eq!(of_metrics(ours, Part::Whole), Some(320));
    }

    #[test]
    fn sglang_says_tokens_once_for_each_rank() {
        let line = |dp: u32, tp: u32, tokens: f64| {
            format!(
                "sglang:max_total_num_tokens{{model_name=\"a, {{b\",tp_rank=\"{tp}\",dp_rank=\"{dp}\",priority=\"\"}} {tokens:?}\n"
            )
        };
        let text = line(0, 0, 60_000.0) + &line(0, 1, 60_000.0) + &line(1, 0, 50_000.0);
        assert_eq!(of_metrics(&text, Part::Whole), Some(110_000));
        assert_eq!(of_metrics(&text, Part::Rank(1)), Some(50_000));
        assert_eq!(
            of_metrics("sglang:max_total_num_tokens{tp_rank=\"0\"} 2.62144e+05 1732271\n", Part::Whole),
            Some(262_144)
        );
        let info = br#"{"dp_size": 2, "max_total_num_tokens": 1000, "internal_states": []}"#;
        assert_eq!(of_server_info(info, Part::Whole), Some(2_000));
        assert_eq!(of_server_info(info, Part::Rank(1)), Some(1_000));
        assert_eq!(of_server_info(br#"{"max_total_num_tokens": 1000}"#, Part::Whole), Some(1_000));
    }

    #[test]
    fn whatever_else_is_said_says_nothing() {
        let lines = [
            "",
            "{",
            "}{",
            "vllm:cache_config_info{",
            "vllm:cache_config_info{a=\"} 1",
            "vllm:cache_config_info{block_size=\"16\"} 1",
        ];
        let numbers = [
            "sglang:max_total_num_tokens{} NaN",
            "sglang:max_total_num_tokens{} -4",
            "sglang:max_total_num_tokens{} 1e99",
        ];
        for text in lines.iter().chain(&numbers) {
            assert_eq!(of_metrics(text, Part::Whole), None, "{text}");
        }
        for body in
            [&b"[]"[..], b"", b"{\"max_total_num_tokens\": \"many\"}", b"{\"max_total_num_tokens\": 0}"]
        {
            assert_eq!(of_server_info(body, Part::Whole), None);
        }
    }
}
