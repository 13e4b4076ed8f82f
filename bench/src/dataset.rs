//! What to send: conversations, made from a seed or read from a file, before the run starts.
//!
//! Must not know HTTP, time or the server. One file a kind; [`crate::run`] sends what they return.

pub mod azure;
pub mod blocks;
pub mod multi_turn;
pub mod openai;
pub mod prose;
pub mod random;
pub mod shared_prefix;
pub mod sharegpt;
pub mod trace;

use std::borrow::Cow;
use std::time::Duration;

use anyhow::Context;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;

use crate::args::{DatasetName, JsonObject, ServeArgs};
use crate::statistics::DatasetCount;
use crate::tokens::TokenCounter;
use blocks::{BlockWriter, Recipe};

/// Azure's prompts have no blocks of their own; any length will do.
const AZURE_BLOCK_TOKENS: u64 = 512;
/// How many conversations when `--num-prompts` is not given, as in SGLang.
const DEFAULT_NUM_PROMPTS: usize = 1000;

/// A whole workload.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dataset {
    /// In the order in which they start.
    pub conversations: Vec<Conversation>,
    /// What a reader should know of how it was made.
    pub notes: Vec<String>,
    /// When each conversation started where it was recorded, from the first on; empty where that is not known.
    pub arrivals: Vec<Duration>,
    /// Writes the prompts that are kept as recipes.
    pub writer: Option<BlockWriter>,
}

/// One or more turns of one user.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// A system message before the first turn.
    pub system: Option<Passage>,
    /// In order; each is a request that carries what came before it.
    pub turns: Vec<Turn>,
}

/// What the user says in one turn, and how much is wanted back.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// The words.
    pub content: Content,
    /// Output tokens to ask for; `None` leaves it to the server.
    pub output_tokens: Option<u64>,
}

/// The words of a turn.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Text to be put into a request.
    Text(Passage),
    /// Text that is written when it is sent.
    Made(Recipe),
    /// A whole request body, and the tokens of its texts.
    Body(JsonObject, u64),
}

/// A text whose length is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passage {
    /// The text.
    pub text: String,
    /// Its length, exact with a tokenizer.
    pub tokens: u64,
}

impl Conversation {
    /// One turn of plain text.
    pub fn single(passage: Passage, output_tokens: u64) -> Self {
        let turn = Turn { content: Content::Text(passage), output_tokens: Some(output_tokens) };
        Self { system: None, turns: vec![turn] }
    }

    /// Tokens of what the user and the system say in all turns.
    pub fn input_tokens(&self) -> u64 {
        let said = self.turns.iter().map(|turn| turn.content.tokens()).sum::<u64>();
        said + self.system.as_ref().map_or(0, |system| system.tokens)
    }
}

impl Dataset {
    /// Conversations without recorded times.
    pub fn of(conversations: Vec<Conversation>) -> Self {
        Self { conversations, ..Self::default() }
    }

    /// The words of a turn; none where it is a whole body.
    ///
    /// # Panics
    /// When the dataset has recipes and nobody to write them: a bug of the dataset.
    pub fn text<'a>(&'a self, content: &'a Content) -> Option<Cow<'a, str>> {
        match content {
            Content::Text(passage) => Some(Cow::Borrowed(&passage.text)),
            Content::Made(recipe) => {
                let writer = self.writer.as_ref().expect("a dataset of recipes has its writer");
                Some(Cow::Owned(writer.text(recipe)))
            }
            Content::Body(..) => None,
        }
    }
}

impl Content {
    /// The length of the words.
    pub fn tokens(&self) -> u64 {
        match self {
            Self::Text(passage) => passage.tokens,
            Self::Made(recipe) => recipe.tokens,
            Self::Body(_, tokens) => *tokens,
        }
    }
}

/// Makes or reads the dataset that the flags describe.
///
/// # Errors
/// A file that cannot be read or is not what it should be, and `--num-prompts` beyond what the flags describe.
pub fn load(args: &ServeArgs, counter: &TokenCounter) -> anyhow::Result<Dataset> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(args.traffic.seed);
    let wanted = args.traffic.num_prompts;
    let count = wanted.unwrap_or(DEFAULT_NUM_PROMPTS);
    let prose = || prose::Prose::new(counter);
    let blocks = |tokens| BlockWriter::new(&prose()?, tokens, args.traffic.seed);
    let mut dataset = match args.dataset.dataset_name {
        DatasetName::Random => random::make(&args.dataset, count, &prose()?, &mut rng)?,
        DatasetName::SharedPrefix => shared_prefix::make(&args.dataset, wanted, &prose()?, &mut rng)?,
        DatasetName::MultiTurn => multi_turn::make(&args.dataset, count, &prose()?, &mut rng)?,
        DatasetName::Sharegpt => sharegpt::read(&args.dataset, count, counter, &mut rng)?,
        DatasetName::Openai => openai::read(&args.dataset, wanted, counter)?,
        DatasetName::Trace => trace::read(&args.dataset, wanted, blocks(args.dataset.trace_block_len)?)?,
        DatasetName::Azure => azure::read(&args.dataset, wanted, blocks(AZURE_BLOCK_TOKENS)?)?,
    };
    if dataset.conversations.is_empty() {
        anyhow::bail!("the dataset {} has nothing to send", args.dataset.dataset_name.name());
    }
    if counter.dataset_count() == DatasetCount::Approximate {
        let how = "no --tokenizer: generated lengths are words, lengths of texts from files are bytes / 4";
        dataset.notes.push(how.to_owned());
    }
    Ok(dataset)
}

/// The file of a dataset.
fn read_file(path: Option<&std::path::Path>) -> anyhow::Result<String> {
    let path = path.context("this dataset needs --dataset-path FILE")?;
    std::fs::read_to_string(path).with_context(|| format!("cannot read the dataset {}", path.display()))
}
