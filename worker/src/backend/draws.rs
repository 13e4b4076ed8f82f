//! What a GPU is told of the requests whose tokens it draws.
//!
//! Pure: the same parameters as [`super::sample`] reads, in the kernels' terms. Next: [`worker_kernels::cuda::CudaKernels::draw`].

use worker_core::step::SampleRequest;
use worker_kernels::cuda::Draws;
use worker_kernels::cuda::params::{Draw, LogitChange, Penalties};

use super::adjust::changes;

/// One row of logits for each request, in this order, of `vocab` tokens.
pub(super) fn draws(requests: &[&SampleRequest], vocab: usize) -> Draws {
    let mut draws = Draws::default();
    for (row, request) in (0..).zip(requests) {
        let params = &request.params;
        draws.draws.push(Draw {
            seed: params.seed,
            position: request.generated_tokens,
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k.unwrap_or(0),
        });
        draws.penalties.push(Penalties {
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
        });
        let changes = changes(request).into_iter().filter(|(token, _)| (*token as usize) < vocab);
        draws.changes.extend(changes.map(|(token, change)| LogitChange {
            row,
            token,
            bias: change.bias,
            seen: change.seen.map_or(LogitChange::UNSEEN, |count| count.min(i32::MAX as u32) as i32),
            withheld: change.is_withheld.into(),
        }));
    }
    draws
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use worker_core::sampling::{History, SamplingParams};

    use super::*;

    #[test]
    fn every_parameter_has_its_place() {
        let plain =
            SampleRequest { params: Arc::new(SamplingParams::greedy()), generated_tokens: 0, history: None };
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(7),
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.5,
            frequency_penalty: 0.25,
            presence_penalty: -0.5,
            logit_bias: vec![(3, 2.0), (99, 1.0)],
            min_tokens: 3,
            withheld_tokens: vec![3, 8],
            logprobs: None,
            seed: 11,
        };
        let history = Some(History { tokens: vec![1, 2, 2, 3, 2], prompt_tokens: 2 });
        let rich = SampleRequest { params: Arc::new(params), generated_tokens: 2, history };
        let mut draws = draws(&[&plain, &rich], 50);
        let greedy = Draw { seed: 0, position: 0, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };
        let drawn = Draw { seed: 11, position: 2, temperature: 0.5, top_p: 0.9, min_p: 0.1, top_k: 7 };
        assert_eq!(draws.draws, [greedy, drawn]);
        let none = Penalties { repetition: 1.0, frequency: 0.0, presence: 0.0 };
        assert_eq!(draws.penalties, [none, Penalties { repetition: 1.5, frequency: 0.25, presence: -0.5 }]);
        draws.changes.sort_by_key(|change| change.token);
        let change = |token, bias, seen, withheld| LogitChange { row: 1, token, bias, seen, withheld };
        let unseen = LogitChange::UNSEEN;
        assert_eq!(
            draws.changes,
            [change(1, 0.0, 0, 0), change(2, 0.0, 2, 0), change(3, 2.0, 1, 1), change(8, 0.0, unseen, 1)],
            "token 99 is nobody's",
        );
    }
}
