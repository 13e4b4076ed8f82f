//! Changes to logits before a token is drawn: bias, penalties, tokens withheld.
//!
//! Pure. Each token that changes is named once, with all that happens to it: [`adjust`] does it here, for
//! [`sample`](super::sample::sample), and a GPU does it for [`super::draws`].

use std::borrow::Cow;
use std::collections::HashMap;

use roundhouse_types::TokenId;
use worker_core::sampling::SamplingParams;
use worker_core::step::SampleRequest;

/// All that happens to the logit of one token.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Change {
    /// Added first.
    pub(super) bias: f32,
    /// How often it is in the answer: 0 is in the prompt only; `None` where it is in neither, or penalties do not ask.
    pub(super) seen: Option<u32>,
    /// It may not be drawn.
    pub(super) is_withheld: bool,
}

/// What the parameters change, by token; tokens may be beyond the vocabulary.
pub(super) fn changes(request: &SampleRequest) -> HashMap<TokenId, Change> {
    let params = &request.params;
    let mut changes: HashMap<TokenId, Change> = HashMap::new();
    for (token, bias) in &params.logit_bias {
        let change = changes.entry(*token).or_default();
        change.bias = finite(change.bias + bias);
    }
    if let Some(history) = request.history.as_ref().filter(|_| params.reads_history()) {
        let (prompt, answer) = history.tokens.split_at(history.prompt_tokens.min(history.tokens.len()));
        // A count of nothing still stands for a token that was seen.
        let prompt = if params.repetition_penalty == 1.0 { &[] } else { prompt };
        for (token, count) in
            prompt.iter().map(|token| (token, 0)).chain(answer.iter().map(|token| (token, 1)))
        {
            *changes.entry(*token).or_default().seen.get_or_insert(0) += count;
        }
    }
    if request.generated_tokens < params.min_tokens {
        for token in &params.withheld_tokens {
            changes.entry(*token).or_default().is_withheld = true;
        }
    }
    changes
}

/// The logits as the parameters change them; the same ones, not copied, where they change nothing.
pub(super) fn adjust<'a>(logits: &'a [f32], request: &SampleRequest) -> Cow<'a, [f32]> {
    let changes = changes(request);
    if changes.is_empty() {
        return Cow::Borrowed(logits);
    }
    let mut adjusted = logits.to_vec();
    for (token, change) in changes {
        if let Some(logit) = adjusted.get_mut(token as usize) {
            *logit = changed(*logit, change, &request.params);
        }
    }
    Cow::Owned(adjusted)
}

/// The bias, then the repetition penalty (Keskar et al. 2019, "CTRL") for what is in prompt or answer, then OpenAI's two for what is in
/// the answer. Withheld last, and not by a bias: neither a bias nor a penalty brings a token back.
fn changed(logit: f32, change: Change, params: &SamplingParams) -> f32 {
    let Change { bias, seen, is_withheld } = change;
    let mut logit = finite(logit + bias);
    if let Some(count) = seen {
        let penalty = params.repetition_penalty;
        let repeated = if logit > 0.0 { logit / penalty } else { logit * penalty };
        let present = if count > 0 { params.presence_penalty } else { 0.0 };
        logit = finite(repeated - params.frequency_penalty * count as f32 - present);
    }
    if is_withheld { f32::NEG_INFINITY } else { logit }
}

/// Keeps a logit a number: extreme parameters stop at what f32 holds.
fn finite(number: f32) -> f32 {
    if number == f32::NEG_INFINITY { number } else { number.clamp(f32::MIN, f32::MAX) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use worker_core::sampling::History;

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
