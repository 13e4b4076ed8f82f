//! Cuts the rows of a step into what the blocks of the attention kernels do, once for all layers.
//!
//! Sequences with one new row decode, those with more prefill. Where a decode's context is cut depends on its position, and on whether
//! much or little is decoded in the step; so does the order of a row's sums. Next: [`super::launch`] and the kernels.

use super::params::{DecodeChunk, Merge, PrefillTile, Sequence, Visibility};
use crate::{KernelError, KvLayout, Span};

/// Positions that one block of the decode kernel goes over where little is decoded: so few that one sequence of 8k and eight KV heads
/// keeps 128 multiprocessors busy with two blocks each.
pub const SHORT_CHUNK_TOKENS: u32 = 256;

/// The same where much is: so many that most sequences are not cut, or make up for their blocks' beginnings and ends.
pub const LONG_CHUNK_TOKENS: u32 = 1024;

/// How a step is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Rows of a prefill tile ([`super::launch::prefill_tile_rows`], or [`super::launch::WGMMA_TILE_ROWS`]).
    pub tile_rows: usize,
    /// Fewer long chunks than this are little to decode.
    pub few_chunks: usize,
}

impl Cut {
    /// For a GPU with so many multiprocessors: long chunks, each of which has a block for every KV head, must keep two thirds of them busy.
    /// (Measured on an H200 with 132 and 8 KV heads, bench/results/2026-11-26-h200-decode.md: 8 chunks are better short, 16 long.)
    #[must_use]
    pub fn of(tile_rows: usize, multiprocessors: u32, kv_heads: usize) -> Self {
        Self { tile_rows, few_chunks: (multiprocessors as usize * 2 / 3).div_ceil(kv_heads.max(1)) }
    }

    fn chunk_tokens(self, spans: &[Span<'_>]) -> u32 {
        let decodes = spans.iter().filter(|span| span.rows == 1);
        let chunks: usize = decodes.map(|span| span.end().div_ceil(LONG_CHUNK_TOKENS as usize)).sum();
        if chunks < self.few_chunks { SHORT_CHUNK_TOKENS } else { LONG_CHUNK_TOKENS }
    }
}

/// The attention of one step.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AttentionPlan {
    /// The sequences of the batch.
    pub sequences: Vec<Sequence>,
    /// Their blocks, one sequence behind another.
    pub block_tables: Vec<u32>,
    /// Row tiles of those that prefill, those with most keys first.
    pub tiles: Vec<PrefillTile>,
    /// Chunks of context of those that decode.
    pub chunks: Vec<DecodeChunk>,
    /// Rows whose chunks are more than one.
    pub merges: Vec<Merge>,
    /// Parts that these leave.
    pub slots: u32,
}

impl AttentionPlan {
    /// Plans attention over `spans`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more rows, positions or blocks than 31 bits count.
    pub fn new(spans: &[Span<'_>], cut: Cut, visibility: Visibility) -> Result<Self, KernelError> {
        let (mut plan, chunk_tokens) = (Self::default(), cut.chunk_tokens(spans));
        for (index, span) in spans.iter().enumerate() {
            let sequence = Sequence {
                first_row: narrow(span.first_row)?,
                rows: narrow(span.rows)?,
                context_tokens: narrow(span.context_tokens)?,
                table_start: narrow(plan.block_tables.len())?,
            };
            narrow(span.end())?;
            plan.sequences.push(sequence);
            plan.block_tables.extend_from_slice(span.blocks);
            match sequence.rows {
                0 => {}
                1 => plan.add_decode(index as u32, sequence, visibility, chunk_tokens),
                rows => plan.tiles.extend(
                    (0..rows)
                        .step_by(cut.tile_rows)
                        .map(|first_row| PrefillTile { sequence: index as u32, first_row }),
                ),
            }
        }
        // The longest first: what begins last should be short.
        let sequences = &plan.sequences;
        plan.tiles.sort_by_key(|tile| {
            std::cmp::Reverse(sequences[tile.sequence as usize].context_tokens + tile.first_row)
        });
        Ok(plan)
    }

    /// Whether what the decodes of `spans` read, in blocks of so many positions, was there before the step, but for their own rows. A prompt
    /// whose beginning another computes in the same step may be down to its last token, and be a decode here.
    #[must_use]
    pub(super) fn begins_early(spans: &[Span<'_>], layout: KvLayout) -> bool {
        let block_tokens = layout.block_tokens;
        let mut written = vec![0u64; layout.blocks.div_ceil(64)];
        let place = |block: u32| (block as usize / 64, 1u64 << (block % 64));
        for span in spans {
            for &block in &span.blocks[span.context_tokens / block_tokens..span.end().div_ceil(block_tokens)]
            {
                let (word, bit) = place(block);
                written[word] |= bit;
            }
        }
        let mut read = spans.iter().filter(|span| span.rows == 1).flat_map(|span| {
            // The block that the row itself writes to is its own: only full ones are shared, of which each has one writer.
            &span.blocks[..span.context_tokens / block_tokens]
        });
        !read.any(|&block| {
            let (word, bit) = place(block);
            written[word] & bit != 0
        })
    }

    /// Whether it was made of these spans, which have `rows` rows in all.
    #[must_use]
    pub(super) fn is_of(&self, spans: &[Span<'_>], rows: usize) -> bool {
        let mut table_start = 0;
        let same = spans.len() == self.sequences.len()
            && spans.iter().zip(&self.sequences).all(|(span, sequence)| {
                let Sequence { first_row, rows, context_tokens, .. } = *sequence;
                let place = [first_row, rows, context_tokens, sequence.table_start].map(|n| n as usize);
                let same = place == [span.first_row, span.rows, span.context_tokens, table_start];
                let table = table_start..table_start + span.blocks.len();
                table_start = table.end;
                same && self.block_tables.get(table) == Some(span.blocks)
            });
        let planned_rows: usize = self.sequences.iter().map(|sequence| sequence.rows as usize).sum();
        same && table_start == self.block_tables.len() && rows == planned_rows
    }

    fn add_decode(&mut self, index: u32, sequence: Sequence, visibility: Visibility, chunk_tokens: u32) {
        let end = sequence.context_tokens + 1;
        let from = if visibility.window == 0 { 0 } else { end.saturating_sub(visibility.window) };
        let seen = |chunk: u32| chunk + chunk_tokens > from || chunk < visibility.sink_tokens;
        let first = self.chunks.len();
        for begin in (0..end).step_by(chunk_tokens as usize).filter(|&begin| seen(begin)) {
            let slot = self.slots + (self.chunks.len() - first) as u32;
            let end = end.min(begin + chunk_tokens);
            self.chunks.push(DecodeChunk { sequence: index, begin, end, slot });
        }
        let slots = (self.chunks.len() - first) as u32;
        if slots == 1 {
            self.chunks[first].slot = DecodeChunk::WHOLE;
        } else {
            self.merges.push(Merge { row: sequence.first_row, first_slot: self.slots, slots });
            self.slots += slots;
        }
    }
}

fn narrow(number: usize) -> Result<u32, KernelError> {
    // One below: the highest number stands for "none" in the kernels.
    u32::try_from(number).ok().filter(|&number| number < u32::MAX / 2).ok_or_else(|| KernelError::Shape {
        operation: "attention",
        expected: format!("fewer than {} rows, positions and blocks", u32::MAX / 2),
        found: number.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: Visibility = Visibility { window: 0, sink_tokens: 0 };
    const CUT: Cut = Cut { tile_rows: 128, few_chunks: 11 };

    fn span(first_row: usize, rows: usize, context_tokens: usize, blocks: &[u32]) -> Span<'_> {
        Span { first_row, rows, context_tokens, blocks }
    }

    #[test]
    fn one_row_decodes_and_more_prefill() {
        let spans = [span(0, 1, 9, &[4]), span(1, 0, 5, &[5]), span(1, 130, 0, &[6, 7])];
        let plan = AttentionPlan::new(&spans, CUT, ALL).unwrap();
        assert_eq!(plan.block_tables, [4, 5, 6, 7]);
        assert_eq!(plan.chunks, [DecodeChunk { sequence: 0, begin: 0, end: 10, slot: DecodeChunk::WHOLE }]);
        let tile = |first_row| PrefillTile { sequence: 2, first_row };
        assert_eq!(plan.tiles, [tile(128), tile(0)], "the longest first");
        assert!(plan.merges.is_empty() && plan.slots == 0);
    }

    #[test]
    fn chunks_that_no_window_reaches_are_left_out() {
        let visibility = Visibility { window: 256, sink_tokens: 4 };
        let plan = AttentionPlan::new(&[span(0, 1, 5 * 256, &[])], CUT, visibility).unwrap();
        let begins: Vec<u32> = plan.chunks.iter().map(|chunk| chunk.begin).collect();
        assert_eq!(begins, [0, 4 * 256, 5 * 256]);
        assert_eq!(plan.merges, [Merge { row: 0, first_slot: 0, slots: 3 }]);
    }

    #[test]
    fn chunks_are_short_where_little_is_decoded() {
        assert_eq!(Cut::of(128, 132, 8), CUT);
        assert_eq!([Cut::of(128, 132, 2).few_chunks, Cut::of(128, 3, 8).few_chunks], [44, 1]);
        let chunk_of = |sequences: usize, context: usize| {
            let spans: Vec<_> = (0..sequences).map(|row| span(row, 1, context, &[])).collect();
            AttentionPlan::new(&spans, CUT, ALL).unwrap().chunks[0].end
        };
        let (short, long) = (SHORT_CHUNK_TOKENS, LONG_CHUNK_TOKENS);
        assert_eq!([chunk_of(10, 1023), chunk_of(11, 1023), chunk_of(10, 1024)], [short, long, long]);
        assert_eq!([chunk_of(1, 10 * 1024 - 1), chunk_of(1, 10 * 1024)], [short, long]);
        let prompts = [span(0, 1, 400, &[]), span(1, 40_000, 0, &[]), span(40_001, 0, 70_000, &[])];
        assert_eq!(
            AttentionPlan::new(&prompts, CUT, ALL).unwrap().chunks[0].end,
            short,
            "prompts do not count"
        );
    }

    #[test]
    fn decode_begins_early_unless_another_writes_what_it_reads() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 64, block_tokens: 4, blocks: 70 };
        let early = |spans: &[Span<'_>]| AttentionPlan::begins_early(spans, layout);
        let decodes = [span(0, 1, 6, &[3, 65]), span(1, 1, 8, &[3, 66, 67])];
        assert!(early(&decodes), "what both have was there before");
        // A prompt whose first two blocks the other computes in this step, and has one token left.
        let computes = span(0, 8, 0, &[5, 69]);
        assert!(!early(&[computes, span(8, 1, 8, &[5, 69, 6])]));
        assert!(early(&[computes, span(8, 8, 8, &[5, 69, 6, 7])]), "it is no decode");
        assert!(early(&[span(0, 6, 2, &[5, 69]), span(6, 1, 3, &[8])]));
        // One row completes a block that another has taken over.
        assert!(!early(&[span(0, 1, 3, &[5]), span(1, 1, 4, &[5, 6])]));
    }

    proptest! {
        /// Every visible position lies in exactly one chunk, every chunk has one, and parts have slots of their own.
        #[test]
        fn chunks_cover_what_a_row_sees(
            contexts in prop::collection::vec(0usize..3000, 1..14),
            window in prop_oneof![Just(0u32), 1u32..2000],
            sink_tokens in 0u32..700,
        ) {
            let spans: Vec<_> = contexts.iter().enumerate().map(|(row, &context)| span(row, 1, context, &[])).collect();
            let plan = AttentionPlan::new(&spans, CUT, Visibility { window, sink_tokens }).unwrap();
            for (index, &context) in contexts.iter().enumerate() {
                let chunks: Vec<_> = plan.chunks.iter().filter(|chunk| chunk.sequence == index as u32).collect();
                let seen = |key: u32| window == 0 || key + window > context as u32 || key < sink_tokens;
                for key in (0..=context as u32).filter(|&key| seen(key)) {
                    prop_assert_eq!(chunks.iter().filter(|c| (c.begin..c.end).contains(&key)).count(), 1);
                }
                for chunk in &chunks {
                    prop_assert!((chunk.begin..chunk.end).any(seen), "{:?} sees nothing", chunk);
                    prop_assert_eq!(chunk.slot == DecodeChunk::WHOLE, chunks.len() == 1);
                }
            }
            let mut slots: Vec<u32> =
                plan.chunks.iter().map(|chunk| chunk.slot).filter(|&slot| slot != DecodeChunk::WHOLE).collect();
            slots.sort_unstable();
            prop_assert_eq!(slots, (0..plan.slots).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_plan_knows_its_spans_from_all_others() {
        let spans = [span(0, 1, 20, &[4, 5]), span(1, 3, 0, &[6])];
        let plan = AttentionPlan::new(&spans, CUT, ALL).unwrap();
        assert!(plan.is_of(&spans, 4));
        let others: [&[Span<'_>]; 8] = [
            &spans[..1],
            &[spans[0], spans[1], span(4, 0, 0, &[])],
            &[span(0, 1, 21, &[4, 5]), spans[1]],
            &[span(0, 2, 20, &[4, 5]), span(2, 2, 0, &[6])],
            &[span(0, 1, 20, &[4, 7]), spans[1]],
            // The same blocks one behind another, cut at another place.
            &[span(0, 1, 20, &[4]), span(1, 3, 0, &[5, 6])],
            &[span(0, 1, 20, &[4, 5]), span(1, 3, 0, &[6, 7])],
            &[span(0, 1, 20, &[4, 5]), span(1, 3, 0, &[])],
        ];
        for other in others {
            assert!(!plan.is_of(other, other.iter().map(|span| span.rows).sum()), "{other:?}");
        }
        assert!(!plan.is_of(&spans, 5));
    }

    #[test]
    fn what_32_bits_do_not_count_is_refused() {
        let error = AttentionPlan::new(&[span(0, 1, 1 << 31, &[])], CUT, ALL).unwrap_err().to_string();
        assert!(error.contains("fewer than 2147483647"), "{error}");
    }
}
