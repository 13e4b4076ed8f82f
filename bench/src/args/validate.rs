//! What clap cannot check: combinations of flags. All problems are named at once.
//!
//! Next on the path: [`crate::run`].

use super::values::time;
use super::{DatasetName, RequestRate, ServeArgs, Style};
use crate::arrivals::Burstiness;

impl ServeArgs {
    /// Checks what clap cannot: values and combinations.
    ///
    /// # Errors
    /// All problems at once, one a line, each naming the flag and what would be right.
    pub fn validate(&self) -> anyhow::Result<()> {
        let mut problems = Vec::new();
        self.check_dataset(&mut problems);
        self.check_traffic(&mut problems);
        self.check_report(&mut problems);
        if !(self.target.timeout > 0.0 && time(self.target.timeout).is_some()) {
            problems.push("--timeout must be a number of seconds above 0 and up to 1e9".to_owned());
        }
        if time(self.dataset.turn_delay_ms as f64 / 1e3).is_none() {
            problems.push("--turn-delay-ms must be at most 1000000000000".to_owned());
        }
        for key in ["model", "messages", "prompt", "stream", "stream_options"] {
            if self.request.extra_request_body.as_ref().is_some_and(|body| body.contains_key(key)) {
                problems
                    .push(format!("--extra-request-body must not set {key}: the benchmark sets it itself"));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(problems.join("\n       "))) }
    }

    fn check_dataset(&self, problems: &mut Vec<String>) {
        let dataset = &self.dataset;
        let mut at_least_one = |flag: &str, value: u64| {
            if value == 0 {
                problems.push(format!("{flag} must be at least 1"));
            }
        };
        at_least_one("--num-prompts", self.traffic.num_prompts.map_or(1, |n| n as u64));
        match dataset.dataset_name {
            DatasetName::Random => {
                at_least_one("--random-input-len", dataset.random_input_len);
                at_least_one("--random-output-len", dataset.random_output_len);
            }
            DatasetName::SharedPrefix => {
                at_least_one("--gsp-num-groups", dataset.gsp_num_groups as u64);
                at_least_one("--gsp-prompts-per-group", dataset.gsp_prompts_per_group as u64);
                at_least_one("--gsp-system-prompt-len", dataset.gsp_system_prompt_len);
                at_least_one("--gsp-question-len", dataset.gsp_question_len);
                at_least_one("--gsp-output-len", dataset.gsp_output_len);
                at_least_one("--gsp-num-turns", dataset.gsp_num_turns as u64);
            }
            DatasetName::MultiTurn => {
                at_least_one("--multi-turn-num-turns", dataset.multi_turn_num_turns as u64);
                at_least_one("--multi-turn-question-len", dataset.multi_turn_question_len);
                at_least_one("--multi-turn-output-len", dataset.multi_turn_output_len);
            }
            DatasetName::Trace => at_least_one("--trace-block-len", dataset.trace_block_len),
            DatasetName::Sharegpt | DatasetName::Openai | DatasetName::Azure => {}
        }
        if !(0.0..=1.0).contains(&dataset.random_range_ratio) {
            problems.push("--random-range-ratio must be between 0 and 1".to_owned());
        }
        if dataset.dataset_name.has_file() && dataset.dataset_path.is_none() {
            problems
                .push(format!("--dataset-name {} needs --dataset-path FILE", dataset.dataset_name.name()));
        }
    }

    fn check_traffic(&self, problems: &mut Vec<String>) {
        let traffic = &self.traffic;
        let has_rate = traffic.request_rate != RequestRate::Infinite;
        let has_ramp = traffic.ramp_up_strategy.is_some();
        if traffic.use_trace_timestamps && !self.dataset.dataset_name.has_timestamps() {
            problems.push("--use-trace-timestamps needs --dataset-name trace or azure".to_owned());
        }
        for (flag, given) in
            [("--ramp-up-strategy", has_ramp), ("--use-trace-timestamps", traffic.use_trace_timestamps)]
        {
            if given && has_rate {
                problems.push(format!("{flag} and --request-rate both say when requests start; give one"));
            }
        }
        if has_ramp && traffic.use_trace_timestamps {
            problems.push("--ramp-up-strategy and --use-trace-timestamps exclude each other".to_owned());
        }
        if traffic.burstiness != Burstiness::Shape(1.0) && !has_rate && !has_ramp {
            problems.push(
                "--burstiness needs a --request-rate or a ramp: without it there are no gaps".to_owned(),
            );
        }
    }

    fn check_report(&self, problems: &mut Vec<String>) {
        let report = &self.report;
        if report.style == Style::Sglang {
            for (flag, given) in [
                ("--percentile-metrics", report.percentile_metrics.is_some()),
                ("--metric-percentiles", report.metric_percentiles.is_some()),
            ] {
                if given {
                    problems.push(format!("{flag} needs --style vllm: the sglang table has fixed lines"));
                }
            }
        }
        if report.metric_percentiles.iter().flatten().any(|p| !(0.0..=100.0).contains(p)) {
            problems.push("--metric-percentiles must be between 0 and 100".to_owned());
        }
    }
}
