//! Generated workloads: what traces do not show, each from a seed.
//!
//! Lengths and shares are round figures of what such applications do, not fits; whoever has better ones gives a trace. The pace, about
//! [`RATE`] requests a second, is scaled by `--load`, think times with it. Next: [`super::super::run`].

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{BLOCK_TOKENS, Draft, Workload};

/// Requests a second, before scaling.
const RATE: f64 = 8.0;

/// Which workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// 256 system prompts of 8,192 tokens, equally popular, with short questions.
    Groups,
    /// 2,000 documents of 2 to 16 thousand tokens, popular by Zipf's law, with short questions.
    Zipf,
    /// Conversations of six turns on average, half a minute of thought between them.
    MultiTurn,
    /// Agents: 8 to 16 thousand tokens of tools, fifteen turns on average, seconds apart.
    Agentic,
    /// Bursts of 4 to 32 equal prompts in one instant, among single requests.
    Bursts,
}

impl Kind {
    /// As in `--workload`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Groups => "groups",
            Self::Zipf => "zipf",
            Self::MultiTurn => "multi-turn",
            Self::Agentic => "agentic",
            Self::Bursts => "bursts",
        }
    }

    /// About `requests` requests, drawn from `seed`.
    #[must_use]
    pub fn generate(self, requests: usize, seed: u64) -> Workload {
        let mut generator = Generator::new(self.name(), seed);
        match self {
            Self::Groups => generator.groups(requests),
            Self::Zipf => generator.zipf(requests),
            Self::MultiTurn => generator.conversations(requests, &CHAT),
            Self::Agentic => generator.conversations(requests, &AGENT),
            Self::Bursts => generator.bursts(requests),
        }
        generator.workload.sort();
        generator.workload.truncate(requests);
        generator.workload
    }
}

/// What conversations are like. Ranges are of tokens, drawn evenly.
struct Talk {
    /// System prompts there are, and their lengths in blocks.
    systems: usize,
    system_blocks: (u32, u32),
    mean_turns: f64,
    asked: (u32, u32),
    answered: (u32, u32),
    /// Mean seconds from one turn's arrival to the next.
    pause_s: f64,
}

const CHAT: Talk = Talk {
    systems: 8,
    system_blocks: (1, 4),
    mean_turns: 6.0,
    asked: (50, 800),
    answered: (100, 600),
    pause_s: 30.0,
};

const AGENT: Talk = Talk {
    systems: 4,
    system_blocks: (16, 32),
    mean_turns: 15.0,
    asked: (200, 3_000),
    answered: (30, 300),
    pause_s: 6.0,
};

/// Draws requests.
pub(super) struct Generator {
    pub(super) workload: Workload,
    pub(super) rng: SmallRng,
    next_id: u32,
    clock_s: f64,
}

impl Generator {
    pub(super) fn new(name: &str, seed: u64) -> Self {
        let rng = SmallRng::seed_from_u64(seed ^ 0x776f_726b_6c6f_6164);
        Self { workload: Workload::named(name), rng, next_id: 0, clock_s: 0.0 }
    }

    /// New block ids.
    pub(super) fn fresh(&mut self, count: usize) -> Vec<u32> {
        let first = self.next_id;
        self.next_id += u32::try_from(count).unwrap_or(0);
        (first..self.next_id).collect()
    }

    /// An even draw from `range`, both ends included.
    fn even(&mut self, range: (u32, u32)) -> u32 {
        self.rng.random_range(range.0..=range.1)
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        let uniform: f64 = self.rng.random();
        -(1.0 - uniform).ln() * mean
    }

    /// The next moment of a Poisson process of `rate` a second.
    fn next_s(&mut self, rate: f64) -> f64 {
        self.clock_s += self.exponential(1.0 / rate);
        self.clock_s
    }

    /// A question of its own after `prefix`.
    fn question(&mut self, at_s: f64, prefix: &[u32], asked: (u32, u32), answered: (u32, u32)) {
        let own_tokens = self.even(asked);
        let own = self.fresh((own_tokens as usize).div_ceil(BLOCK_TOKENS));
        let input_tokens = blocks_tokens(prefix.len()) + own_tokens;
        let draft = Draft { at_s, input_tokens, output_tokens: self.even(answered), ..Draft::default() };
        self.workload.push(draft, prefix.iter().copied().chain(own));
    }

    fn groups(&mut self, requests: usize) {
        let prefixes: Vec<Vec<u32>> = (0..256).map(|_| self.fresh(16)).collect();
        for _ in 0..requests {
            let at_s = self.next_s(RATE);
            let group = self.rng.random_range(0..prefixes.len());
            self.question(at_s, &prefixes[group], (50, 700), (50, 400));
        }
    }

    fn zipf(&mut self, requests: usize) {
        let documents: Vec<Vec<u32>> = (0..2_000)
            .map(|_| {
                let blocks = self.even((4, 32)) as usize;
                self.fresh(blocks)
            })
            .collect();
        let popularity = Zipf::new(documents.len(), 1.0);
        for _ in 0..requests {
            let at_s = self.next_s(RATE);
            let rank = popularity.draw(&mut self.rng);
            self.question(at_s, &documents[rank], (50, 700), (50, 400));
        }
    }

    fn bursts(&mut self, requests: usize) {
        while self.workload.requests.len() < requests {
            // Mean size of a burst is 18; a third of all requests are single.
            let at_s = self.next_s(RATE / 18.0 * 0.67);
            let blocks = self.even((4, 32)) as usize;
            let prompt = self.fresh(blocks);
            let input_tokens = blocks_tokens(blocks);
            for _ in 0..self.even((4, 32)) {
                let draft =
                    Draft { at_s, input_tokens, output_tokens: self.even((50, 400)), ..Draft::default() };
                self.workload.push(draft, prompt.iter().copied());
            }
            for _ in 0..9 {
                let after_s = self.exponential(18.0 / RATE);
                self.question(at_s + after_s, &[], (500, 8_000), (50, 400));
            }
        }
    }

    fn conversations(&mut self, requests: usize, talk: &Talk) {
        let systems: Vec<Vec<u32>> = (0..talk.systems)
            .map(|_| {
                let blocks = self.even(talk.system_blocks) as usize;
                self.fresh(blocks)
            })
            .collect();
        let mut session = 0;
        while self.workload.requests.len() < requests {
            session += 1;
            let at_s = self.next_s(RATE / talk.mean_turns);
            let system = self.rng.random_range(0..systems.len());
            self.conversation(at_s, session, &systems[system], talk);
        }
    }

    /// Each turn's prompt is all that was said before, so that its blocks are the same ones.
    fn conversation(&mut self, mut at_s: f64, session: u64, system: &[u32], talk: &Talk) {
        let mut ids = system.to_vec();
        let mut tokens = blocks_tokens(system.len());
        let mut after = None;
        loop {
            let input_tokens = tokens + self.even(talk.asked);
            let output_tokens = self.even(talk.answered);
            tokens = input_tokens + output_tokens;
            let missing = (tokens as usize).div_ceil(BLOCK_TOKENS) - ids.len();
            ids.extend(self.fresh(missing));
            let number = u32::try_from(self.workload.requests.len()).ok();
            let draft = Draft {
                at_s,
                input_tokens,
                output_tokens,
                session: Some(session),
                after,
                ..Draft::default()
            };
            self.workload.push(draft, ids.iter().copied());
            if self.rng.random_bool(1.0 / talk.mean_turns) || tokens > MAX_CONTEXT_TOKENS {
                return;
            }
            after = number;
            at_s += self.exponential(talk.pause_s);
        }
    }
}

/// Conversations end here.
const MAX_CONTEXT_TOKENS: u32 = 100_000;

fn blocks_tokens(blocks: usize) -> u32 {
    u32::try_from(blocks * BLOCK_TOKENS).unwrap_or(u32::MAX)
}

/// Ranks drawn by Zipf's law: the n-th is drawn in proportion to n to the power of −`exponent`.
pub(super) struct Zipf {
    cumulated: Vec<f64>,
}

impl Zipf {
    pub(super) fn new(count: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let cumulated = (1..=count)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        Self { cumulated }
    }

    pub(super) fn draw(&self, rng: &mut SmallRng) -> usize {
        let total = self.cumulated.last().copied().unwrap_or(0.0);
        let drawn = rng.random::<f64>() * total;
        self.cumulated.partition_point(|sum| *sum <= drawn).min(self.cumulated.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 5] = [Kind::Groups, Kind::Zipf, Kind::MultiTurn, Kind::Agentic, Kind::Bursts];

    #[test]
    fn seeds_repeat_themselves_and_differ_from_each_other() {
        for kind in KINDS {
            let of = |seed| kind.generate(300, seed).requests;
            assert_eq!(of(1), of(1), "{}", kind.name());
            assert_ne!(of(1), of(2), "{}", kind.name());
            assert_eq!(of(1).len(), 300);
        }
    }

    #[test]
    fn requests_come_in_order_of_time_and_after_those_they_wait_for() {
        for kind in KINDS {
            let workload = kind.generate(500, 3);
            assert!(workload.requests.is_sorted_by(|one, two| one.at_s <= two.at_s), "{}", kind.name());
            for (number, request) in (0..).zip(&workload.requests) {
                assert!(request.after.is_none_or(|leader| leader < number), "{}", kind.name());
                let blocks = (request.input_tokens as usize).div_ceil(BLOCK_TOKENS);
                assert!(workload.ids(request).len() >= blocks);
            }
        }
    }

    #[test]
    fn a_turn_begins_with_all_of_the_one_before() {
        let workload = Kind::MultiTurn.generate(500, 1);
        let followers = workload.requests.iter().filter_map(|request| Some((request, request.after?)));
        let mut seen = 0;
        for (request, leader) in followers {
            let before = &workload.requests[leader as usize];
            assert!(workload.ids(request).starts_with(workload.ids(before)));
            assert!(request.input_tokens > before.input_tokens + before.output_tokens);
            seen += 1;
        }
        assert!(seen > 300, "{seen} of 500 follow another");
    }

    #[test]
    fn zipf_draws_the_first_rank_most_often() {
        let (zipf, mut rng) = (Zipf::new(100, 1.0), SmallRng::seed_from_u64(1));
        let mut counts = [0; 100];
        (0..50_000).for_each(|_| counts[zipf.draw(&mut rng)] += 1);
        // Harmonic number of 100 is 5.187: shares of 19.3 % and 1.9 %.
        assert!((9_000..10_300).contains(&counts[0]), "{}", counts[0]);
        assert!((750..1_200).contains(&counts[9]), "{}", counts[9]);
    }
}
