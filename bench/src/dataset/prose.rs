//! Words in random order, cut to a number of tokens.
//!
//! With a tokenizer the length is exact: words that are one token each are put side by side and the whole is counted
//! again. Without one a word counts as a token.

use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use roundhouse_text::TokenizerError;

use super::Passage;
use crate::tokens::TokenCounter;

/// Frequent English words: nearly every vocabulary has most of them as one token.
const WORDS: &str = "the of and to in that was his he it with is for as had you not be her on at by which have or \
    from this him but all she they were my are me one their so an said them we who would been will no when there if \
    more out up into do any your what has man could other than our some very time upon about may its only now like \
    little then can made should did us such great before must two these see know over much down after first good men \
    own never most old shall day where those came come himself way work life without go make well through being long \
    say might how am too even again many back here think every people went same last thought away under take found \
    hand eyes still place while just also young yet though against things get ever give god years off face nothing \
    right once another left part saw house world head three took new love always mrs put night each king between \
    tell mind heart few because thing whom far seemed looked called whole de set both got find done heard look name \
    days told let lord country asked going seen better having home knew side something moment father among course \
    hands woman enough words mother soon full end gave almost small thou cannot water want however light quite \
    brought nor word whose given door best turned taken does use morning myself felt until since power themselves";

/// Rounds of counting and mending before a length is left as it is.
const MENDING_ROUNDS: usize = 16;

/// Makes passages.
pub struct Prose<'a> {
    counter: &'a TokenCounter,
    /// Words that can begin a passage, one token each where the vocabulary allows.
    first: Vec<&'static str>,
    /// Words that add one token after a space, where the vocabulary allows.
    next: Vec<&'static str>,
}

impl<'a> Prose<'a> {
    /// Looks the words up in the vocabulary.
    ///
    /// # Errors
    /// A vocabulary that cannot spell English words.
    pub fn new(counter: &'a TokenCounter) -> Result<Self, TokenizerError> {
        let all: Vec<&str> = WORDS.split_whitespace().collect();
        if matches!(counter, TokenCounter::Approximate) {
            return Ok(Self { counter, first: all.clone(), next: all });
        }
        let first = those_of_cost(1, &all, |word| counter.count(word))?;
        let before = first[0];
        let cost_before = counter.count(before)?;
        let next = those_of_cost(cost_before + 1, &all, |word| counter.count(&format!("{before} {word}")))?;
        Ok(Self { counter, first, next })
    }

    /// Words that are one token each, at the beginning of a text as well as after a space; none where the vocabulary has
    /// no such words.
    pub fn words_of_one_token(&self) -> Vec<&'static str> {
        let one = |word: &str, before: &str, cost_before: u64| {
            self.counter.count(&format!("{before}{word}")).is_ok_and(|tokens| tokens == cost_before + 1)
        };
        match self.counter {
            TokenCounter::Approximate => self.next.clone(),
            TokenCounter::Exact(_) => {
                let before = format!("{} ", self.first[0]);
                let cost_before = self.counter.count(self.first[0]).unwrap_or(0);
                self.next
                    .iter()
                    .copied()
                    .filter(|word| one(word, "", 0) && one(word, &before, cost_before))
                    .collect()
            }
        }
    }

    /// A passage of `tokens` tokens. Its own count says what was reached, should a vocabulary not allow the length.
    ///
    /// # Errors
    /// A vocabulary that cannot spell the words.
    pub fn passage(&self, tokens: u64, rng: &mut Xoshiro256PlusPlus) -> Result<Passage, TokenizerError> {
        if tokens == 0 {
            return Ok(Passage::default());
        }
        let mut words = vec![pick(&self.first, rng)];
        words.extend((1..tokens).map(|_| pick(&self.next, rng)));
        let mut text = words.join(" ");
        if matches!(self.counter, TokenCounter::Approximate) {
            return Ok(Passage { text, tokens });
        }
        let mut counted = self.counter.count(&text)?;
        for _ in 0..MENDING_ROUNDS {
            if counted == tokens {
                break;
            }
            // Words of more than one token: take out or add as many words as tokens differ, but keep one.
            let wanted = (words.len() as u64 + tokens).saturating_sub(counted).max(1) as usize;
            words.truncate(wanted);
            while words.len() < wanted {
                words.push(pick(&self.next, rng));
            }
            text = words.join(" ");
            counted = self.counter.count(&text)?;
        }
        Ok(Passage { text, tokens: counted })
    }

    /// Two passages with an empty line between them. `seam_tokens` is what the join adds, as [`Self::seam`] finds it.
    pub fn join(&self, before: &Passage, after: &Passage, seam_tokens: i64) -> Passage {
        let tokens = (before.tokens + after.tokens).saturating_add_signed(seam_tokens);
        Passage { text: format!("{}\n\n{}", before.text, after.text), tokens }
    }

    /// How many tokens an empty line between these two adds (fewer than none where words merge across it).
    ///
    /// # Errors
    /// A vocabulary that cannot spell the words.
    pub fn seam(&self, before: &Passage, after: &Passage) -> Result<i64, TokenizerError> {
        if matches!(self.counter, TokenCounter::Approximate) {
            return Ok(0);
        }
        let joined = self.counter.count(&self.join(before, after, 0).text)?;
        Ok(joined as i64 - (before.tokens + after.tokens) as i64)
    }
}

/// The words that cost `tokens`; all words where the vocabulary has none such.
fn those_of_cost(
    tokens: u64,
    words: &[&'static str],
    cost: impl Fn(&str) -> Result<u64, TokenizerError>,
) -> Result<Vec<&'static str>, TokenizerError> {
    let mut found = Vec::new();
    for word in words {
        if cost(word)? == tokens {
            found.push(*word);
        }
    }
    Ok(if found.is_empty() { words.to_vec() } else { found })
}

fn pick(words: &[&'static str], rng: &mut Xoshiro256PlusPlus) -> &'static str {
    words[rng.random_range(0..words.len())]
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn without_a_tokenizer_a_word_is_a_token() {
        let counter = TokenCounter::Approximate;
        let prose = Prose::new(&counter).unwrap();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for tokens in [0, 1, 2, 100] {
            let passage = prose.passage(tokens, &mut rng).unwrap();
            assert_eq!(passage.text.split_whitespace().count() as u64, tokens);
            assert_eq!(passage.tokens, tokens);
        }
    }

    #[test]
    fn words_are_distinct() {
        let mut words: Vec<_> = WORDS.split_whitespace().collect();
        words.sort_unstable();
        let count = words.len();
        words.dedup();
        assert_eq!(words.len(), count);
        assert!(count > 200);
    }
}
