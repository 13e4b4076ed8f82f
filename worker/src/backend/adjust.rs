//! Changes to logits before a token is drawn: bias, tokens withheld, penalties.
//!
//! Pure, like [`sample`](super::sample::sample), its only caller.

use std::borrow::Cow;
use std::collections::HashMap;

use roundhouse_types::TokenId;
use worker_core::sampling::{History, SamplingParams};
use worker_core::step::SampleRequest;

/// The logits as the parameters change them; the same ones, not copied, where they change nothing.
pub(super) fn adjust<'a>(logits: &'a [f32], request: &SampleRequest) -> Cow<'a, [f32]> {
    let params = &request.params;
    let withheld: &[TokenId] =
        if request.generated_tokens < params.min_tokens { &params.withheld_tokens } else { &[] };
    let history = request.history.as_ref().filter(|_| params.reads_history());
    if params.logit_bias.is_empty() && withheld.is_empty() && history.is_none() {
        return Cow::Borrowed(logits);
    }
    let mut adjusted = logits.to_vec();
    for (token, bias) in &params.logit_bias {
        change(&mut adjusted, *token, |logit| logit + bias);
    }
    if let Some(history) = history {
        penalize(&mut adjusted, params, history);
    }
    // Last, and not by a bias: neither a bias nor a penalty brings them back.
    for token in withheld {
        change(&mut adjusted, *token, |_| f32::NEG_INFINITY);
    }
    Cow::Owned(adjusted)
}

/// Each token once, whatever its count: the repetition penalty (Keskar et al. 2019, "CTRL") for what is in prompt or answer,
/// then OpenAI's two for what is in the answer.
fn penalize(logits: &mut [f32], params: &SamplingParams, history: &History) {
    let (prompt, answer) = history.tokens.split_at(history.prompt_tokens.min(history.tokens.len()));
    let mut in_answer: HashMap<TokenId, u32> = HashMap::new();
    if params.repetition_penalty != 1.0 {
        // A count of nothing still stands for a token that was seen.
        in_answer.extend(prompt.iter().map(|token| (*token, 0)));
    }
    for token in answer {
        *in_answer.entry(*token).or_insert(0) += 1;
    }
    for (token, count) in in_answer {
        change(logits, token, |logit| {
            let penalty = params.repetition_penalty;
            let repeated = if logit > 0.0 { logit / penalty } else { logit * penalty };
            let present = if count > 0 { params.presence_penalty } else { 0.0 };
            repeated - params.frequency_penalty * count as f32 - present
        });
    }
}

/// Changes one logit, and keeps it a number: extreme parameters stop at what f32 holds.
fn change(logits: &mut [f32], token: TokenId, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        let changed = to(*logit);
        *logit = if changed == f32::NEG_INFINITY { changed } else { changed.clamp(f32::MIN, f32::MAX) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn request(params: SamplingParams, prompt: &[u32], answer: &[u32]) -> SampleRequest {
        SampleRequest {
            history: params
                .reads_history()
                .then(|| History { tokens: [prompt, answer].concat(), prompt_tokens: prompt.len() }),
            generated_tokens: answer.len() as u64,
            params: Arc::new(params),
        }
    }

    #[test]
    fn logits_are_not_copied_where_nothing_changes_them() {
        let logits = [1.0, 2.0];
        let withheld_no_longer =
            SamplingParams { min_tokens: 2, withheld_tokens: vec![0], ..SamplingParams::default() };
        for params in [SamplingParams::default(), SamplingParams::greedy(), withheld_no_longer] {
            assert!(matches!(adjust(&logits, &request(params, &[0], &[0, 1])), Cow::Borrowed(_)));
        }
    }

    #[test]
    fn a_bias_is_added_and_unknown_tokens_are_nobodys() {
        let params = SamplingParams { logit_bias: vec![(1, -2.5), (9, 5.0)], ..SamplingParams::default() };
        assert_eq!(*adjust(&[1.0, 2.0], &request(params, &[], &[])), [1.0, -0.5]);
    }

    #[test]
    fn withheld_tokens_stay_away_until_there_are_enough() {
        let params = SamplingParams {
            min_tokens: 2,
            withheld_tokens: vec![1],
            // Not even a bias brings them back.
            logit_bias: vec![(1, 100.0)],
            ..SamplingParams::default()
        };
        for (answer, expected) in [(&[][..], f32::NEG_INFINITY), (&[0], f32::NEG_INFINITY), (&[0, 0], 102.0)]
        {
            assert_eq!(adjust(&[1.0, 2.0], &request(params.clone(), &[], answer))[1], expected);
        }
    }

    #[test]
    fn extreme_penalties_leave_numbers() {
        let params = SamplingParams {
            repetition_penalty: SamplingParams::LEAST_REPETITION_PENALTY,
            frequency_penalty: -2.0,
            ..SamplingParams::default()
        };
        let adjusted =
            adjust(&[f32::MAX, f32::MIN, 0.0], &request(params, &[0, 1, 2], &[0, 1, 2])).into_owned();
        assert!(adjusted.iter().all(|logit| logit.is_finite()), "{adjusted:?}");
    }

    proptest! {
        /// The reference goes over the vocabulary and counts each token's occurrences anew.
        #[test]
        fn penalties_agree_with_their_definition(
            logits in prop::collection::vec(-8.0f32..8.0, 12),
            prompt in prop::collection::vec(0u32..12, 0..10),
            answer in prop::collection::vec(0u32..12, 0..10),
            repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
            frequency_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
            presence_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
        ) {
            let params = SamplingParams {
                repetition_penalty, frequency_penalty, presence_penalty, ..SamplingParams::default()
            };
            let adjusted = adjust(&logits, &request(params, &prompt, &answer)).into_owned();
            for (token, &logit) in (0..).zip(&logits) {
                let count = answer.iter().filter(|&&seen| seen == token).count() as f32;
                let mut expected = logit;
                if count > 0.0 || prompt.contains(&token) {
                    expected = if expected > 0.0 { expected / repetition_penalty } else { expected * repetition_penalty };
                }
                expected -= frequency_penalty * count;
                if count > 0.0 {
                    expected -= presence_penalty;
                }
                let found = adjusted[token as usize];
                prop_assert!((found - expected).abs() < 1e-5, "token {}: {} is not {}", token, found, expected);
            }
        }
    }
}
