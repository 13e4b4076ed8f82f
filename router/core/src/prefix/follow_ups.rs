//! How many turns are expected to follow a request that begins a session.
//!
//! Where a session begins decides for all of its turns, since the later ones come to where the first is cached. A request does not say that
//! others will follow; but a prompt that goes on from where another ended is its next turn. So the ends of prompts are remembered. Of those
//! that began something, some were followed; of those that followed, some were followed again. Taken as the chances of each, these make a
//! geometric series, for each model by itself: agents may use one, and others another. Used by the decider, which tells the policy.

use roundhouse_types::BlockHash;
use xxhash_rust::xxh3::xxh3_64;

/// Ends of prompts that are remembered, by a part of their hash: the newest of those with the same. A session whose next turn comes after as many
/// other prompts is likely to be taken to be over: at 1,000 prompts a second four in five are kept for half a minute.
const PLACES: usize = 1 << 17;
/// What engines report goes beyond a prompt's end by its answer: so many blocks before the last that somebody holds are looked at.
const ANSWER_BLOCKS: usize = 64;
/// Prompts that nobody has followed and that there never were, since the first few tell little.
const DOUBT: f64 = 16.0;
/// More turns than that are not counted on: fleets change meanwhile.
const MOST_TURNS: f64 = 16.0;

/// Models that are told apart, by a part of their names' hash.
const MODELS: u32 = 256;

/// Of a place: the prompt was a later turn itself.
const IS_TURN: u32 = 1;
/// Of a place: another has followed.
const IS_FOLLOWED: u32 = 2;
/// Of a place: there is a prompt.
const IS_TAKEN: u32 = 4;
/// Of a place, from this bit on: the model.
const MODEL_SHIFT: u32 = 3;
/// What is left of a hash beside these. It begins with the model's, so that equal ends are of one model.
const PRINT: u32 = !(IS_TURN | IS_FOLLOWED | ((MODELS - 1) << MODEL_SHIFT));

/// Ends of prompts of late, and how many of them were followed.
#[derive(Debug, Default)]
pub struct FollowUps {
    /// A part of the hash, the model and two bits, or 0. Empty until the first is remembered.
    places: Vec<u32>,
    /// Of the prompts remembered; as empty.
    models: Vec<Sessions>,
}

/// One model's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sessions {
    /// Prompts that began something.
    begun: Counts,
    /// And those that followed another.
    turns: Counts,
}

impl Sessions {
    fn later_turns(self) -> f64 {
        (self.begun.share() / (1.0 - self.turns.share())).min(MOST_TURNS)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Counts {
    all: u32,
    followed: u32,
}

impl Counts {
    fn share(self) -> f64 {
        f64::from(self.followed) / (f64::from(self.all) + DOUBT)
    }
}

impl FollowUps {
    /// Turns that are expected to follow the prompt of these full blocks, of which somebody holds the first `known`; 0 if it is a later turn
    /// itself, whose session has its worker.
    #[must_use]
    pub fn later_turns(&self, model: Option<&str>, path: &[BlockHash], known: usize) -> f64 {
        match self.followed(path, known) {
            Some(_) => 0.0,
            None => self.of_begun(number_of(model)),
        }
    }

    /// Whether the prompt goes on from where another ended.
    #[must_use]
    pub fn is_turn(&self, path: &[BlockHash], known: usize) -> bool {
        self.followed(path, known).is_some()
    }

    /// The same of a prompt that comes, which is remembered; once, however often it is decided.
    pub fn see(&mut self, model: Option<&str>, path: &[BlockHash], known: usize) -> f64 {
        let (number, followed) = (number_of(model), self.followed(path, known));
        let later_turns = if followed.is_some() { 0.0 } else { self.of_begun(number) };
        if let Some(at) = followed.filter(|at| self.places[*at] & IS_FOLLOWED == 0) {
            self.places[at] |= IS_FOLLOWED;
            self.counts(self.places[at]).followed += 1;
        }
        // Where somebody has been before, a prefix may end that many have.
        if let Some(end) = path.last().filter(|_| known < path.len()) {
            let is_turn = if followed.is_some() { IS_TURN } else { 0 };
            self.remember(*end, number << MODEL_SHIFT | is_turn);
        }
        later_turns
    }

    fn of_begun(&self, model: u32) -> f64 {
        self.models.get(model as usize).map_or(0.0, |sessions| sessions.later_turns())
    }

    /// Where the prompt is remembered that ended where this one goes on.
    fn followed(&self, path: &[BlockHash], known: usize) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let last = known.min(path.len().saturating_sub(1));
        let ends = path[last.saturating_sub(ANSWER_BLOCKS)..last].iter().rev();
        let mut places = ends.map(|end| (place_of(*end), print_of(*end)));
        places.find(|(at, print)| self.places[*at] & PRINT == *print).map(|(at, _)| at)
    }

    fn remember(&mut self, end: BlockHash, what: u32) {
        if self.places.is_empty() {
            self.places = vec![0; PLACES];
            self.models = vec![Sessions::default(); MODELS as usize];
        }
        let (at, print) = (place_of(end), print_of(end));
        let before = std::mem::replace(&mut self.places[at], print | what);
        if before & PRINT == print {
            self.places[at] = before;
            return;
        }
        self.counts(what).all += 1;
        if before != 0 {
            let counts = self.counts(before);
            counts.all -= 1;
            counts.followed -= u32::from(before & IS_FOLLOWED != 0);
        }
    }

    fn counts(&mut self, place: u32) -> &mut Counts {
        let sessions = &mut self.models[(place >> MODEL_SHIFT & (MODELS - 1)) as usize];
        if place & IS_TURN == 0 { &mut sessions.begun } else { &mut sessions.turns }
    }
}

fn number_of(model: Option<&str>) -> u32 {
    u32::try_from(xxh3_64(model.unwrap_or_default().as_bytes()) % u64::from(MODELS)).unwrap_or(0)
}

fn place_of(end: BlockHash) -> usize {
    usize::try_from(end.0 & (PLACES as u64 - 1)).unwrap_or(0)
}

fn print_of(end: BlockHash) -> u32 {
    u32::try_from(end.0 >> 32).unwrap_or(0) & PRINT | IS_TAKEN
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODEL: Option<&str> = Some("agents");

    /// The block at that place of one session's prompts.
    fn block(session: u64, at: u64) -> BlockHash {
        BlockHash(xxh3_64(&[session.to_le_bytes(), at.to_le_bytes()].concat()))
    }

    /// Turn n of a session has n times so many blocks.
    const TURN_BLOCKS: u64 = 5;

    fn prompt(session: u64, turn: u64) -> Vec<BlockHash> {
        (0..turn * TURN_BLOCKS).map(|at| block(session, at)).collect()
    }

    /// Sessions of so many turns, some tens at a time; of each turn somebody knows the one before and `answered` blocks more.
    fn sessions(turns: u64, answered: usize) -> FollowUps {
        let mut seen = FollowUps::default();
        for ten in 0..30 {
            for turn in 1..=turns {
                for session in ten * 10..ten * 10 + 10 {
                    let known = if turn == 1 { 0 } else { prompt(session, turn - 1).len() + answered };
                    seen.see(MODEL, &prompt(session, turn), known);
                }
            }
        }
        seen
    }

    #[test]
    fn who_begins_a_session_is_followed_as_often_as_others_were() {
        for (turns, least, most) in [(1, 0.0, 0.0), (2, 0.9, 1.1), (4, 2.5, 3.2), (10, 7.0, 9.5)] {
            for answered in [0, 3] {
                let seen = sessions(turns, answered);
                let expected = seen.later_turns(MODEL, &prompt(1_000, 1), 0);
                assert!((least..=most).contains(&expected), "{turns} turns: {expected}");
            }
        }
    }

    #[test]
    fn a_later_turn_has_its_place() {
        let mut seen = sessions(4, 0);
        seen.see(MODEL, &prompt(500, 1), 0);
        let known = prompt(500, 1).len();
        assert_eq!(seen.later_turns(MODEL, &prompt(500, 2), known), 0.0);
        assert_eq!(seen.see(MODEL, &prompt(500, 2), known), 0.0);
        assert!(seen.later_turns(MODEL, &prompt(501, 2), 0) > 2.0);
        assert!(seen.later_turns(MODEL, &[], 0) > 2.0);
    }

    fn of_model(seen: &FollowUps) -> Sessions {
        seen.models[number_of(MODEL) as usize]
    }

    #[test]
    fn sessions_of_one_model_say_nothing_of_another() {
        let mut seen = sessions(4, 0);
        for session in 1_000..2_000 {
            seen.see(Some("embedder"), &prompt(session, 1), 0);
        }
        let expected = |model| seen.later_turns(Some(model), &prompt(3_000, 1), 0);
        assert!(expected("agents") > 2.5 && expected("embedder") == 0.0 && expected("new") == 0.0);
        assert_eq!(seen.later_turns(None, &prompt(3_000, 1), 0), 0.0);
    }

    #[test]
    fn there_is_an_end_to_what_is_counted_on() {
        assert_eq!(sessions(60, 0).later_turns(MODEL, &prompt(1_000, 1), 0), MOST_TURNS);
    }

    #[test]
    fn a_prefix_that_many_have_begins_nothing() {
        let mut seen = FollowUps::default();
        let prefix = prompt(1, 3);
        seen.see(MODEL, &prefix, 0);
        for one in 2..500 {
            let other = [&prefix[..], &prompt(one, 1)].concat();
            seen.see(MODEL, &other, prefix.len());
            // Short questions leave no more than the prefix of full blocks.
            seen.see(MODEL, &prefix, prefix.len());
        }
        assert!(seen.later_turns(MODEL, &prompt(1_000, 1), 0) < 0.1);
        assert_eq!(of_model(&seen).begun, Counts { all: 1, followed: 1 });
    }

    #[test]
    fn a_prompt_that_is_sent_again_counts_once() {
        let mut seen = FollowUps::default();
        for known in [0, 0, 2, 5] {
            seen.see(MODEL, &prompt(1, 1), known);
        }
        assert_eq!(of_model(&seen).begun, Counts { all: 1, followed: 0 });
        for _ in 0..3 {
            seen.see(MODEL, &prompt(1, 2), 5);
        }
        assert_eq!(of_model(&seen).begun, Counts { all: 1, followed: 1 });
        assert_eq!(of_model(&seen).turns, Counts { all: 1, followed: 0 });
    }

    impl FollowUps {
        fn check_invariants(&self) {
            let mut counted =
                Self { models: vec![Sessions::default(); self.models.len()], ..Self::default() };
            for place in self.places.iter().filter(|place| **place != 0) {
                let counts = counted.counts(*place);
                counts.all += 1;
                counts.followed += u32::from(place & IS_FOLLOWED != 0);
            }
            assert_eq!(self.models, counted.models);
        }
    }

    proptest! {
        /// Few places are used, so that most prompts take another's.
        #[test]
        fn counts_are_those_of_what_is_remembered(
            prompts in prop::collection::vec((prop::collection::vec(0_u64..4, 0..6), 0_usize..7), 0..200)
        ) {
            let mut seen = FollowUps::default();
            for (blocks, known) in prompts {
                let mut chain = 0;
                let path: Vec<_> = blocks.iter().map(|block| {
                    chain = xxh3_64(&[chain, *block].map(u64::to_le_bytes).concat());
                    BlockHash(chain & !(PLACES as u64 - 4))
                }).collect();
                let expected = seen.later_turns(MODEL, &path, known.min(path.len()));
                prop_assert_eq!(seen.see(MODEL, &path, known.min(path.len())), expected);
                prop_assert!((0.0..=MOST_TURNS).contains(&expected));
                seen.check_invariants();
            }
        }
    }
}
