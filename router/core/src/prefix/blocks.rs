//! Cuts prompts into blocks: small ones first, so that short shared prompts are told apart, larger ones after, so that
//! long prompts stay cheap.
//!
//! Knows no JSON; whoever reads the request pushes the prompt's bytes as they go by. Next: [`tree`](super::tree).

use roundhouse_types::{BlockHash, ChainHasher};

use crate::request::PromptUse;

/// Blocks of the first 2 KiB: system prompts differ there.
const SMALL_BLOCK_BYTES: usize = 64;
/// Where medium blocks begin.
const SMALL_BLOCKS: usize = 32;
/// Blocks up to 16 KiB.
const MEDIUM_BLOCK_BYTES: usize = 256;
/// Where large blocks begin.
const MEDIUM_BLOCKS: usize = SMALL_BLOCKS + 56;
/// Blocks up to 256 KiB, which is some 64,000 tokens: at most 6 % of what came before them. All beyond a medium block are
/// chained in steps of one.
const LARGE_BLOCK_BYTES: usize = 1_024;
/// Where the largest blocks begin.
const LARGE_BLOCKS: usize = MEDIUM_BLOCKS + 240;
/// All later blocks.
const HUGE_BLOCK_BYTES: usize = 4_096;
/// A prompt has no more blocks than this, 15 MiB of it: the tree takes them in one step, under its lock.
pub const MAX_BLOCKS: usize = 4_096;
/// Keeps instructions apart from tools and text that are equal to them.
const SYSTEM_SALT: &[u8] = b"system";
/// What most short prompts have; room for them is taken at once.
const USUAL_BLOCKS: usize = 32;

/// Length of block number `index`.
#[must_use]
pub fn block_bytes(index: usize) -> usize {
    match index {
        0..SMALL_BLOCKS => SMALL_BLOCK_BYTES,
        SMALL_BLOCKS..MEDIUM_BLOCKS => MEDIUM_BLOCK_BYTES,
        MEDIUM_BLOCKS..LARGE_BLOCKS => LARGE_BLOCK_BYTES,
        _ => HUGE_BLOCK_BYTES,
    }
}

/// Where block number `count` of a segment begins: the bytes that `count` blocks cover.
#[must_use]
pub fn covered_bytes(count: usize) -> usize {
    let (small, medium, large) = (count.min(SMALL_BLOCKS), count.min(MEDIUM_BLOCKS), count.min(LARGE_BLOCKS));
    small * SMALL_BLOCK_BYTES
        + (medium - small) * MEDIUM_BLOCK_BYTES
        + (large - medium) * LARGE_BLOCK_BYTES
        + (count - large) * HUGE_BLOCK_BYTES
}

/// The blocks of a whole prompt: those of its tools, of its instructions, then of its text, each segment cut anew from small
/// blocks on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PromptBlocks {
    /// Chained hashes of the full blocks, first block first.
    pub hashes: Vec<BlockHash>,
    /// What comes before the text.
    pub opening: Opening,
    /// Length of the prompt, all segments together.
    pub prompt_bytes: usize,
}

/// Where in a list of blocks tools and instructions end. Chat templates put them before the messages, so requests with equal
/// ones share these blocks whatever their messages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Opening {
    /// Come first.
    pub tools: Stretch,
    /// The instructions, as far as they are no message.
    pub system: Stretch,
}

/// A segment of a list of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stretch {
    /// How many blocks are of it.
    pub blocks: usize,
    /// Its length, the end that fills no block included.
    pub bytes: usize,
}

impl Opening {
    /// The bytes of the prompt that its first `count` blocks cover. A block covers all of the segments before its own,
    /// because its hash does.
    #[must_use]
    pub fn covered_bytes(self, count: usize) -> usize {
        let (blocks, before_bytes) = self.last_segment(count);
        before_bytes + covered_bytes(blocks)
    }

    /// Of the first `count` blocks: how many are of the segment that the last one is of, and how long those before it are.
    fn last_segment(self, count: usize) -> (usize, usize) {
        let (mut blocks, mut before_bytes) = (count, 0);
        for segment in [self.tools, self.system] {
            let Some(beyond @ 1..) = blocks.checked_sub(segment.blocks) else { break };
            (blocks, before_bytes) = (beyond, before_bytes + segment.bytes);
        }
        (blocks, before_bytes)
    }
}

/// What a prompt was cut by, and so how large each of its blocks is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Its bytes; sizes are in bytes.
    Bytes(Opening),
    /// Its token ids, so many a block; sizes are in tokens.
    Tokens(usize),
}

impl Cut {
    /// Size of block number `index`.
    #[must_use]
    pub fn size(self, index: usize) -> u32 {
        let size = match self {
            Self::Bytes(opening) => block_bytes(opening.last_segment(index + 1).0 - 1),
            Self::Tokens(tokens) => tokens,
        };
        u32::try_from(size).unwrap_or(u32::MAX)
    }

    /// What of the prompt its first `count` blocks cover.
    #[must_use]
    pub fn covered(self, count: usize) -> usize {
        match self {
            Self::Bytes(opening) => opening.covered_bytes(count),
            Self::Tokens(tokens) => count * tokens,
        }
    }
}

/// A prompt as the tree knows it: the chained hashes of its full blocks, and how they were cut.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// First block first.
    pub hashes: &'a [BlockHash],
    sizes: Sizes<'a>,
}

/// How large each block of a path is.
#[derive(Clone, Copy, Debug)]
enum Sizes<'a> {
    Cut(Cut),
    /// As it was kept.
    Each(&'a [u32]),
}

impl<'a> Path<'a> {
    /// One whose blocks are cut so.
    #[must_use]
    pub fn new(hashes: &'a [BlockHash], cut: Cut) -> Self {
        Self { hashes, sizes: Sizes::Cut(cut) }
    }

    /// One that was kept, with the size of each block.
    pub(super) fn kept(hashes: &'a [BlockHash], sizes: &'a [u32]) -> Self {
        Self { hashes, sizes: Sizes::Each(sizes) }
    }

    /// Its first `most` blocks, or all if they are fewer.
    pub(super) fn first(self, most: usize) -> Self {
        Self { hashes: &self.hashes[..self.hashes.len().min(most)], ..self }
    }

    /// Size of block number `index`.
    pub(super) fn size(&self, index: usize) -> u32 {
        match self.sizes {
            Sizes::Cut(cut) => cut.size(index),
            Sizes::Each(sizes) => sizes[index],
        }
    }
}

/// Hashes a prompt whose segments come in pieces, in any order, into the chained hashes of its full blocks.
///
/// How the prompt is cut into pieces makes no difference to the hashes. What it is salted with (model, cache salt) is
/// known only at the end, since in a JSON object it may come last.
#[derive(Debug)]
pub struct PromptHasher {
    seed: ChainHasher,
    max_blocks: usize,
    /// Most prompts have none.
    tools: Option<Box<Segment>>,
    /// The same.
    system: Option<Box<Segment>>,
    text: Segment,
}

impl PromptHasher {
    /// Begins a prompt under `seed`, which is the process's secret. Blocks beyond those that are read are not hashed,
    /// only counted.
    #[must_use]
    #[inline]
    pub fn new(seed: ChainHasher, prompt_use: PromptUse) -> Self {
        let max_blocks = prompt_use.max_blocks();
        Self { seed, max_blocks, tools: None, system: None, text: Segment::new(seed, max_blocks) }
    }

    /// Whether anything is hashed at all.
    #[must_use]
    pub fn hashes(&self) -> bool {
        self.max_blocks > 0
    }

    /// Adds the next piece of text.
    pub fn push(&mut self, piece: &[u8]) {
        self.text.push(piece);
    }

    /// The tools begin. If there were others, these are instead of them.
    pub fn begin_tools(&mut self) {
        self.tools = Some(Box::new(Segment::new(self.seed, self.max_blocks)));
    }

    /// Adds the next piece of the tools.
    pub fn push_tools(&mut self, piece: &[u8]) {
        let (seed, max_blocks) = (self.seed, self.max_blocks);
        self.tools.get_or_insert_with(|| Box::new(Segment::new(seed, max_blocks))).push(piece);
    }

    /// The instructions begin. If there were others, these are instead of them; empty ones are none.
    pub fn begin_system(&mut self) {
        self.system = Some(Box::new(Segment::new(self.seed, self.max_blocks)));
    }

    /// Adds the next piece of the instructions.
    pub fn push_system(&mut self, piece: &[u8]) {
        let (seed, max_blocks) = (self.seed, self.max_blocks);
        self.system.get_or_insert_with(|| Box::new(Segment::new(seed, max_blocks))).push(piece);
    }

    /// The blocks, kept apart from those of other prompts by `salt`.
    #[must_use]
    pub fn finish(self, salt: ChainHasher) -> PromptBlocks {
        let Self { max_blocks, tools, system, mut text, .. } = self;
        let system = system.filter(|system| system.bytes > 0);
        if tools.is_none() && system.is_none() {
            text.salt(salt);
            let opening = Opening::default();
            return PromptBlocks { prompt_bytes: text.bytes, hashes: text.blocks, opening };
        }
        let mut prompt = PromptBlocks::default();
        let mut salt = salt;
        if let Some(tools) = tools {
            (prompt.opening.tools, salt) = prompt.append(*tools, salt, max_blocks);
        }
        if let Some(system) = system {
            let salted = salt.salted(SYSTEM_SALT);
            (prompt.opening.system, salt) = prompt.append(*system, salted, max_blocks);
        }
        prompt.append(text, salt, max_blocks);
        prompt
    }
}

impl PromptBlocks {
    /// Adds the next segment, under `salt`. Returns where it is, and the salt of what comes behind it.
    fn append(
        &mut self,
        mut segment: Segment,
        salt: ChainHasher,
        max_blocks: usize,
    ) -> (Stretch, ChainHasher) {
        let behind = salt.salted(&segment.digest().0.to_le_bytes());
        segment.salt(salt);
        // If a segment was cut off at the limit its digest says too little to build upon, and there is no room left.
        let room = max_blocks - self.hashes.len();
        let stretch = Stretch { blocks: segment.blocks.len().min(room), bytes: segment.bytes };
        self.hashes.extend(segment.blocks.into_iter().take(room));
        self.prompt_bytes += segment.bytes;
        (stretch, behind)
    }
}

/// A stretch of a prompt, cut from small blocks on.
#[derive(Debug)]
struct Segment {
    chain: ChainHasher,
    partial: [u8; MEDIUM_BLOCK_BYTES],
    partial_bytes: usize,
    /// What of a larger block is in the chain already.
    chained_bytes: usize,
    blocks: Vec<BlockHash>,
    max_blocks: usize,
    bytes: usize,
}

impl Segment {
    #[inline]
    fn new(seed: ChainHasher, max_blocks: usize) -> Self {
        Self {
            chain: seed,
            partial: [0; MEDIUM_BLOCK_BYTES],
            partial_bytes: 0,
            chained_bytes: 0,
            blocks: Vec::new(),
            max_blocks,
            bytes: 0,
        }
    }

    fn push(&mut self, mut piece: &[u8]) {
        self.bytes += piece.len();
        while !piece.is_empty() && self.blocks.len() < self.max_blocks {
            let step_bytes = block_bytes(self.blocks.len()).min(MEDIUM_BLOCK_BYTES);
            if self.partial_bytes == 0 && piece.len() >= step_bytes {
                let (step, rest) = piece.split_at(step_bytes);
                self.chain.push_bytes(step);
                self.step(step_bytes);
                piece = rest;
                continue;
            }
            let (head, rest) = piece.split_at(piece.len().min(step_bytes - self.partial_bytes));
            self.partial[self.partial_bytes..self.partial_bytes + head.len()].copy_from_slice(head);
            self.partial_bytes += head.len();
            piece = rest;
            if self.partial_bytes == step_bytes {
                self.chain.push_bytes(&self.partial[..step_bytes]);
                self.partial_bytes = 0;
                self.step(step_bytes);
            }
        }
    }

    /// The chain has gone on by `step_bytes`; takes note if that fills a block.
    fn step(&mut self, step_bytes: usize) {
        self.chained_bytes += step_bytes;
        if self.chained_bytes == block_bytes(self.blocks.len()) {
            self.chained_bytes = 0;
            if self.blocks.capacity() == 0 {
                self.blocks.reserve(USUAL_BLOCKS.min(self.max_blocks));
            }
            self.blocks.push(self.chain.current());
        }
    }

    /// Keeps the blocks apart from equal ones under another salt. Equal results still mean equal salts and paths, as far
    /// as hashes go: hash and salt both come from the secret seed, and each step can be undone.
    fn salt(&mut self, salt: ChainHasher) {
        /// The golden ratio, as in Fibonacci hashing.
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        for BlockHash(hash) in &mut self.blocks {
            let mixed = (*hash ^ salt.current().0).wrapping_mul(ODD);
            *hash = mixed ^ (mixed >> 32);
        }
    }

    /// Stands for all of it, the end that fills no block included.
    fn digest(&self) -> BlockHash {
        self.chain.salted(&self.partial[..self.partial_bytes]).current()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEED: u64 = 1;

    fn hash_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> PromptBlocks {
        let mut hasher = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
        pieces.into_iter().for_each(|piece| hasher.push(piece));
        hasher.finish(ChainHasher::new(2))
    }

    fn hash_with_tools(tools: &str, text: &str, prompt_use: PromptUse) -> PromptBlocks {
        let mut hasher = PromptHasher::new(ChainHasher::new(SEED), prompt_use);
        hasher.push_tools(tools.as_bytes());
        hasher.push(text.as_bytes());
        hasher.finish(ChainHasher::new(2))
    }

    fn hash_all(tools: &str, system: &str, text: &str) -> PromptBlocks {
        let mut hasher = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
        hasher.push_tools(tools.as_bytes());
        hasher.push_system(system.as_bytes());
        hasher.push(text.as_bytes());
        hasher.finish(ChainHasher::new(2))
    }

    fn shared(one: &PromptBlocks, two: &PromptBlocks) -> usize {
        one.hashes.iter().zip(&two.hashes).take_while(|(one, two)| one == two).count()
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(prompt in prop::collection::vec(any::<u8>(), 0..6_000), cut in 1usize..700) {
            prop_assert_eq!(hash_pieces([&prompt[..]]), hash_pieces(prompt.chunks(cut)));
        }

        #[test]
        fn covers_all_full_blocks(len in prop_oneof![0usize..9_000, 250_000usize..300_000]) {
            let prompt = vec![b'x'; len];
            let blocks = hash_pieces([&prompt[..]]);
            prop_assert_eq!(blocks.prompt_bytes, len);
            prop_assert!(covered_bytes(blocks.hashes.len()) <= len);
            prop_assert!(covered_bytes(blocks.hashes.len() + 1) > len);
        }

        #[test]
        fn segments_may_come_in_any_order(
            tools in ".{0,400}",
            system in ".{0,400}",
            text in ".{0,400}",
            cut in 1usize..100,
        ) {
            let mut turned = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
            text.as_bytes().chunks(cut).for_each(|piece| turned.push(piece));
            system.as_bytes().chunks(cut).for_each(|piece| turned.push_system(piece));
            tools.as_bytes().chunks(cut).for_each(|piece| turned.push_tools(piece));
            if tools.is_empty() {
                turned.begin_tools();
            }
            let turned = turned.finish(ChainHasher::new(2));
            prop_assert_eq!(hash_all(&tools, &system, &text), turned);
        }

        #[test]
        fn sizes_add_up_to_what_is_covered(tools in 0usize..3_000, system in 0usize..3_000, text in 0usize..3_000) {
            let blocks = hash_all(&"t".repeat(tools), &"s".repeat(system), &"m".repeat(text));
            let cut = Cut::Bytes(blocks.opening);
            let Opening { tools: of_tools, system: of_system } = blocks.opening;
            prop_assert_eq!((of_tools.bytes, of_system.bytes), (tools, system));
            let (mut own_bytes, mut before_bytes) = (0, 0);
            for index in 0..blocks.hashes.len() {
                if index == of_tools.blocks {
                    (own_bytes, before_bytes) = (0, tools);
                }
                if index == of_tools.blocks + of_system.blocks {
                    (own_bytes, before_bytes) = (0, tools + system);
                }
                own_bytes += cut.size(index) as usize;
                prop_assert_eq!(cut.covered(index + 1), before_bytes + own_bytes, "block {}", index);
            }
        }
    }

    #[test]
    fn prompts_share_blocks_up_to_where_they_part() {
        let mut other = vec![b'a'; 4_096];
        let first = hash_pieces([&other[..]]);
        other[2_500] = b'b';
        let second = hash_pieces([&other[..]]);
        let shared = shared(&first, &second);
        assert_eq!(shared, 33, "2,048 bytes in small blocks and one of 256 bytes");
        assert!(covered_bytes(shared) <= 2_500);
    }

    #[test]
    fn every_byte_of_a_large_block_counts() {
        let mut prompt = vec![b'a'; 300 << 10];
        let first = hash_pieces([&prompt[..]]);
        let last_block = covered_bytes(first.hashes.len() - 1);
        for at in [last_block, last_block + 300, last_block + 4_095] {
            prompt[at] = b'b';
            let second = hash_pieces([&prompt[..]]);
            assert_eq!(shared(&first, &second), first.hashes.len() - 1, "byte {at}");
            prompt[at] = b'a';
        }
    }

    #[test]
    fn equal_tools_are_shared_by_different_conversations() {
        let tools = "t".repeat(330);
        let one = hash_with_tools(&tools, &"a".repeat(200), PromptUse::Whole);
        let two = hash_with_tools(&tools, &"b".repeat(200), PromptUse::Whole);
        assert_eq!(one.opening.tools, Stretch { blocks: 5, bytes: 330 });
        assert_eq!((shared(&one, &two), one.hashes.len()), (5, 8));
        let covered: Vec<_> = [0, 5, 6, 8].map(|count| one.opening.covered_bytes(count)).into();
        assert_eq!(covered, [0, 320, 330 + 64, 330 + 192]);
    }

    #[test]
    fn tools_that_differ_past_their_last_block_share_no_text() {
        let text = "a".repeat(200);
        let one = hash_with_tools(&("t".repeat(320) + "x"), &text, PromptUse::Whole);
        let two = hash_with_tools(&("t".repeat(320) + "y"), &text, PromptUse::Whole);
        assert_eq!(shared(&one, &two), 5);
        assert_ne!(hash_with_tools("", &text, PromptUse::Whole), hash_pieces([text.as_bytes()]));
    }

    #[test]
    fn equal_instructions_are_shared_behind_equal_tools_only() {
        let (tools, system) = ("t".repeat(330), "s".repeat(200));
        let one = hash_all(&tools, &system, &"a".repeat(200));
        assert_eq!(one.opening.system, Stretch { blocks: 3, bytes: 200 });
        assert_eq!((one.hashes.len(), one.prompt_bytes), (5 + 3 + 3, 730));
        let covered: Vec<_> = [5, 6, 8, 9].map(|count| one.opening.covered_bytes(count)).into();
        assert_eq!(covered, [320, 330 + 64, 330 + 192, 530 + 64]);
        assert_eq!(shared(&one, &hash_all(&tools, &system, &"b".repeat(200))), 8);
        assert_eq!(shared(&one, &hash_all(&tools, &(system.clone() + "s"), &"a".repeat(200))), 8, "no text");
        assert_eq!(shared(&one, &hash_all(&tools, &"x".repeat(200), &"a".repeat(200))), 5, "tools alone");
        let others = hash_all(&"u".repeat(330), &system, &"a".repeat(200));
        assert!(!others.hashes.iter().any(|hash| one.hashes.contains(hash)));
        assert_eq!(hash_all(&tools, "", "a"), hash_with_tools(&tools, "a", PromptUse::Whole));
    }

    #[test]
    fn equal_bytes_in_other_segments_share_nothing() {
        let of = |push: fn(&mut PromptHasher, &[u8])| {
            let mut hasher = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
            push(&mut hasher, &[b'p'; 500]);
            hasher.finish(ChainHasher::new(2)).hashes[0]
        };
        let system = of(PromptHasher::push_system);
        assert!(system != of(PromptHasher::push_tools) && system != of(PromptHasher::push));
    }

    #[test]
    fn salts_share_nothing() {
        let of_salt = |salt| {
            let mut hasher = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
            hasher.push(&[b'p'; 500]);
            hasher.finish(ChainHasher::new(salt))
        };
        assert_eq!(shared(&of_salt(3), &of_salt(4)), 0);
        assert_eq!(shared(&of_salt(3), &of_salt(3)), 7);
    }

    #[test]
    fn no_more_is_hashed_than_is_read() {
        let text = "a".repeat(5_000);
        let (none, first) =
            (hash_with_tools("", &text, PromptUse::None), hash_with_tools("", &text, PromptUse::FirstKib));
        assert_eq!((none.hashes.len(), none.prompt_bytes), (0, 5_000));
        assert_eq!((first.hashes.len(), first.prompt_bytes), (16, 5_000));
        let whole = hash_with_tools("", &text, PromptUse::Whole);
        assert_eq!(first.hashes, whole.hashes[..16]);
        let endless = hash_with_tools(&"t".repeat(16 << 20), &text, PromptUse::Whole);
        assert_eq!(endless.hashes.len(), MAX_BLOCKS);
        assert_eq!(endless.opening.tools.blocks, MAX_BLOCKS);
        let endless = hash_all(&"t".repeat(8 << 20), &"s".repeat(8 << 20), &text);
        assert_eq!(endless.hashes.len(), MAX_BLOCKS);
        assert_eq!(endless.opening.tools.blocks + endless.opening.system.blocks, MAX_BLOCKS);
    }
}
