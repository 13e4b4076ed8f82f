//! What a GGUF file's metadata say, as the texts of a Hugging Face directory: `config.json`, `generation_config.json`,
//! `tokenizer_config.json`.

use serde_json::{Value as Json, json};

use super::{Gguf, GgufError, wrong_key};
use crate::model::rope::{Rope, RopeScaling};

/// Names that end a turn in one family of models or another, beside the tokens that the metadata name.
const END_TOKENS: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"];
/// GGUF's type of special tokens.
const CONTROL: f64 = 3.0;

/// Largest shape that is taken seriously; products of three fit into 64 bits.
const MOST: u64 = 1 << 21;

/// How attention is cut into heads.
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    head_dim: u64,
}

impl Gguf<'_> {
    pub(super) fn architecture(&self) -> Result<&str, GgufError> {
        match self.text("general.architecture")? {
            Some(name @ ("llama" | "qwen2" | "qwen3")) => Ok(name),
            _ => {
                let found = self.metadata.get("general.architecture");
                Err(wrong_key("general.architecture", found, "llama, qwen2 or qwen3"))
            }
        }
    }

    /// The key of the architecture's own `name`.
    fn own(&self, name: &str) -> Result<String, GgufError> {
        Ok(format!("{}.{name}", self.architecture()?))
    }

    fn own_whole(&self, name: &str) -> Result<Option<u64>, GgufError> {
        self.whole(&self.own(name)?)
    }

    fn required(&self, name: &str) -> Result<u64, GgufError> {
        let key = self.own(name)?;
        let found = self.whole(&key)?.filter(|number| (1..=MOST).contains(number));
        found.ok_or_else(|| {
            wrong_key(&key, self.metadata.get(key.as_str()), format!("a whole number from 1 to {MOST}"))
        })
    }

    pub(super) fn heads(&self) -> Result<Heads, GgufError> {
        let heads = self.required("attention.head_count")?;
        let given = |name: &str| match self.own_whole(name)? {
            None => Ok(None),
            Some(_) => self.required(name).map(Some),
        };
        let kv_heads = given("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = given("attention.key_length")?.unwrap_or(self.required("embedding_length")? / heads);
        Ok(Heads { heads: heads as usize, kv_heads: kv_heads as usize, head_dim })
    }

    pub(in crate::model) fn config(&self) -> Result<String, GgufError> {
        if let Some(parts) = self.whole("split.count")?.filter(|parts| *parts > 1) {
            let wanted = format!("1: join the {parts} files first (llama.cpp's `llama-gguf-split --merge`)");
            return Err(wrong_key("split.count", self.metadata.get("split.count"), wanted));
        }
        let heads = self.heads()?;
        self.refuse_unsupported(heads.head_dim)?;
        let has = |name: &str| self.tensors.contains_key(name);
        let config = json!({
            "model_type": self.architecture()?,
            "vocab_size": self.vocabulary_rows()?,
            "hidden_size": self.required("embedding_length")?,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": self.required("block_count")?,
            "num_attention_heads": heads.heads,
            "num_key_value_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "max_position_embeddings": self.required("context_length")?,
            "rms_norm_eps": self.epsilon()?,
            "rope_theta": self.theta()?,
            "rope_scaling": self.rope_scaling(heads.head_dim as usize)?,
            "tie_word_embeddings": !has("output.weight"),
            "attention_bias": has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
        });
        Ok(config.to_string())
    }

    /// What would change the result and is not computed.
    fn refuse_unsupported(&self, head_dim: u64) -> Result<(), GgufError> {
        let whole_heads = format!("{head_dim}, the width of a head");
        let must_be = [
            ("attention.value_length", head_dim, whole_heads.as_str()),
            ("rope.dimension_count", head_dim, whole_heads.as_str()),
            ("expert_count", 0, "0: mixtures of experts are not supported"),
            ("attention.sliding_window", 0, "0: attention is full in every layer"),
        ];
        for (name, right, wanted) in must_be {
            if self.own_whole(name)?.is_some_and(|found| found != right) {
                let key = self.own(name)?;
                return Err(wrong_key(&key, self.metadata.get(key.as_str()), wanted));
            }
        }
        Ok(())
    }

    fn vocabulary_rows(&self) -> Result<usize, GgufError> {
        let problem =
            |problem: &str| GgufError::Tensor { name: "token_embd.weight".into(), problem: problem.into() };
        let tensor = self.tensors.get("token_embd.weight").ok_or_else(|| problem("is missing"))?;
        tensor.dimensions.get(1).copied().ok_or_else(|| problem("has no rows"))
    }

    fn epsilon(&self) -> Result<f64, GgufError> {
        let key = self.own("attention.layer_norm_rms_epsilon")?;
        let epsilon = self.number(&key)?.filter(|epsilon| (0.0..1.0).contains(epsilon));
        epsilon.ok_or_else(|| wrong_key(&key, self.metadata.get(key.as_str()), "a number from 0 to 1"))
    }

    fn theta(&self) -> Result<f64, GgufError> {
        let key = self.own("rope.freq_base")?;
        let theta = self.number(&key)?.unwrap_or(10_000.0);
        if theta > 0.0 && theta.is_finite() {
            return Ok(theta);
        }
        Err(wrong_key(&key, self.metadata.get(key.as_str()), "a number above 0"))
    }

    fn rope_scaling(&self, head_dim: usize) -> Result<Json, GgufError> {
        let key = self.own("rope.scaling.type")?;
        match self.text(&key)? {
            None | Some("none") => self.llama3_scaling(head_dim),
            Some("linear") => {
                let key = self.own("rope.scaling.factor")?;
                let factor = self.number(&key)?.filter(|factor| *factor > 0.0 && factor.is_finite());
                let wrong = || wrong_key(&key, self.metadata.get(key.as_str()), "a number above 0");
                Ok(json!({ "rope_type": "linear", "factor": factor.ok_or_else(wrong)? }))
            }
            Some(_) => Err(wrong_key(&key, self.metadata.get(key.as_str()), "none or linear")),
        }
    }

    /// Llama 3.1 and its successors: llama.cpp keeps no parameters, but what each frequency is divided by. Found again are those
    /// that all of these models have, with their factor.
    fn llama3_scaling(&self, head_dim: usize) -> Result<Json, GgufError> {
        let Some(tensor) = self.tensors.get("rope_freqs.weight") else { return Ok(Json::Null) };
        let problem =
            |problem: &str| GgufError::Tensor { name: "rope_freqs.weight".into(), problem: problem.into() };
        if tensor.kind != 0 || tensor.dimensions != [head_dim / 2] {
            return Err(problem("must be F32, one number for each pair of a head"));
        }
        let divisors: Vec<f32> =
            tensor.bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
        let theta = self.theta()?;
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let plain = Rope { theta, scaling: RopeScaling::None }.frequencies(head_dim);
        let stretched = Rope { theta, scaling }.frequencies(head_dim);
        let mut pairs = plain.iter().zip(&stretched).zip(&divisors);
        if !pairs.all(|((plain, stretched), divisor)| (plain / stretched - divisor).abs() < 1e-3 * divisor) {
            return Err(problem("stretches positions in another way than Llama 3.1, which is not supported"));
        }
        Ok(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }))
    }

    /// Tokens that end an answer.
    pub(in crate::model) fn generation_config(&self) -> Result<String, GgufError> {
        let (tokens, kinds) =
            (self.texts("tokenizer.ggml.tokens")?, self.numbers("tokenizer.ggml.token_type")?);
        let mut ends = Vec::new();
        for name in ["eos", "eot", "eom"] {
            ends.extend(self.special(name)?);
        }
        let is_special = |id: usize| kinds.is_some_and(|kinds| kinds.get(id) == Some(CONTROL));
        let by_name =
            tokens.iter().enumerate().filter(|(id, token)| END_TOKENS.contains(token) && is_special(*id));
        ends.extend(by_name.map(|(id, _)| id as u64));
        ends.sort_unstable();
        ends.dedup();
        Ok(json!({ "eos_token_id": ends }).to_string())
    }

    /// The id of a token that the metadata name: `bos`, `eos` and so on.
    pub(super) fn special(&self, name: &str) -> Result<Option<u64>, GgufError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let tokens = self.texts("tokenizer.ggml.tokens")?.len() as u64;
        match self.whole(&key)? {
            Some(id) if id >= tokens => {
                let wanted = format!("below {tokens}, the number of tokens");
                Err(wrong_key(&key, self.metadata.get(key.as_str()), wanted))
            }
            id => Ok(id),
        }
    }

    /// Special tokens and chat template.
    pub(in crate::model) fn tokenizer_config(&self) -> Result<String, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let spelled = |name| Ok(self.special(name)?.map(|id| tokens[id as usize]));
        let (bos, eos) = (spelled("bos")?, spelled("eos")?);
        let template = self.text("tokenizer.chat_template")?;
        Ok(json!({ "bos_token": bos, "eos_token": eos, "chat_template": template }).to_string())
    }
}
