//! `config.json`, read into what the forward pass needs; whatever it cannot compute is an error here.
//!
//! Next: [`super::weights`] takes the shapes from here, [`super::rope`] the positions.

use serde::Deserialize;
use serde_json::Value;

use super::rope::{Rope, RopeScaling};
use super::{ModelError, ModelFiles};

/// Decoder families that the one forward pass covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2 and others of that shape.
    Llama,
    /// Qwen2 and Qwen2.5: a bias on queries, keys and values.
    Qwen2,
    /// Qwen3, dense: queries and keys normalised by head.
    Qwen3,
}

const ARCHITECTURES: &str = "llama, qwen2, qwen3 (dense)";

/// The shape and options of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding table, and logits.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width between the projections of the MLP.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Added to the mean square in each norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Longest sequence, prompt and answer together, in tokens.
    pub context_tokens: usize,
    /// Whether the embedding table is the output layer too.
    pub tied_embeddings: bool,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Whether attention's output has a bias.
    pub output_bias: bool,
    /// Whether the MLP's projections have a bias.
    pub mlp_bias: bool,
    /// Tokens that end an answer.
    pub eos_tokens: Vec<u32>,
}

impl ModelConfig {
    /// Reads the configuration of a model.
    ///
    /// # Errors
    /// [`ModelError::Json`] for what does not parse, [`ModelError::Unsupported`] for what is not implemented.
    pub fn from_files(files: &ModelFiles) -> Result<Self, ModelError> {
        let generation = files.generation_config.as_deref().map(|text| parse("generation_config.json", text));
        let generation: Generation = generation.transpose()?.unwrap_or_default();
        let raw: Raw = parse("config.json", &files.config)?;
        let mut config = raw.into_config()?;
        if let Some(eos) = generation.eos_token_id {
            config.eos_tokens = eos.into_tokens();
        }
        Ok(config)
    }

    /// Whether queries and keys are normalised by head.
    #[must_use]
    pub fn qk_norm(&self) -> bool {
        self.architecture == Architecture::Qwen3
    }

    /// Width of all queries of a row.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all keys of a row, and of all values.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

fn parse<'a, T: Deserialize<'a>>(file: &'static str, text: &'a str) -> Result<T, ModelError> {
    serde_json::from_str(text).map_err(|source| ModelError::Json { file, source })
}

#[derive(Deserialize, Default)]
struct Generation {
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn into_tokens(self) -> Vec<u32> {
        match self {
            Self::One(token) => vec![token],
            Self::Many(tokens) => tokens,
        }
    }
}

/// `config.json` as it stands; keys that change nothing here are not read.
#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default = "default_act")]
    hidden_act: String,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    /// Where transformers 5 puts both of the above.
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    rope_interleaved: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize, Default, Clone)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
}

fn default_eps() -> f32 {
    1e-6
}

fn default_act() -> String {
    "silu".to_owned()
}

impl Raw {
    fn into_config(self) -> Result<ModelConfig, ModelError> {
        let architecture = self.architecture()?;
        self.refuse_unsupported()?;
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1));
        self.refuse_bad_shape(kv_heads, head_dim)?;
        let qwen2 = architecture == Architecture::Qwen2;
        Ok(ModelConfig {
            architecture,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads,
            head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope: self.rope()?,
            context_tokens: self.max_position_embeddings,
            tied_embeddings: self.tie_word_embeddings,
            qkv_bias: qwen2 || self.attention_bias,
            output_bias: !qwen2 && self.attention_bias,
            mlp_bias: architecture == Architecture::Llama && self.mlp_bias,
            eos_tokens: self.eos_token_id.map(TokenIds::into_tokens).unwrap_or_default(),
        })
    }

    fn architecture(&self) -> Result<Architecture, ModelError> {
        match self.model_type.as_str() {
            "llama" => Ok(Architecture::Llama),
            "qwen2" => Ok(Architecture::Qwen2),
            "qwen3" => Ok(Architecture::Qwen3),
            other => Err(unsupported("model_type", other, ARCHITECTURES)),
        }
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        if let Some(quantization) = &self.quantization_config {
            let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("present");
            return Err(unsupported("quantization_config", method, "weights in BF16, F16 or F32"));
        }
        if self.hidden_act != "silu" {
            return Err(unsupported("hidden_act", &self.hidden_act, "silu"));
        }
        if self.rope_interleaved {
            return Err(unsupported("rope_interleaved", "true", "false"));
        }
        // Layers below `max_window_layers` see everything; without the key, none does.
        if self.use_sliding_window && self.max_window_layers.unwrap_or(0) < self.num_hidden_layers {
            return Err(unsupported("use_sliding_window", "true", "false: full attention in every layer"));
        }
        let mut layers = self.layer_types.iter().flatten();
        if let Some(layer) = layers.find(|layer| *layer != "full_attention") {
            return Err(unsupported("layer_types", layer, "full_attention in every layer"));
        }
        Ok(())
    }

    fn refuse_bad_shape(&self, kv_heads: usize, head_dim: usize) -> Result<(), ModelError> {
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((key, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(unsupported(key, "0", "at least 1"));
        }
        if kv_heads == 0 || !self.num_attention_heads.is_multiple_of(kv_heads) {
            let supported = "a divisor of num_attention_heads";
            return Err(unsupported("num_key_value_heads", &kv_heads.to_string(), supported));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(unsupported("head_dim", &head_dim.to_string(), "an even number"));
        }
        Ok(())
    }

    fn rope(&self) -> Result<Rope, ModelError> {
        let parameters = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let raw = parameters.cloned().unwrap_or_default();
        let partial = raw.partial_rotary_factor.or(self.partial_rotary_factor).unwrap_or(1.0);
        if partial != 1.0 {
            return Err(unsupported("partial_rotary_factor", &partial.to_string(), "1"));
        }
        let theta = raw.rope_theta.or(self.rope_theta).unwrap_or(10_000.0);
        let scaling = match raw.rope_type.as_deref() {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: required(raw.factor, "factor")? },
            Some("llama3") => {
                let original = raw.original_max_position_embeddings.map(|tokens| tokens as f64);
                RopeScaling::Llama3 {
                    factor: required(raw.factor, "factor")?,
                    low_freq_factor: required(raw.low_freq_factor, "low_freq_factor")?,
                    high_freq_factor: required(raw.high_freq_factor, "high_freq_factor")?,
                    original_context: required(original, "original_max_position_embeddings")?,
                }
            }
            Some(other) => {
                return Err(unsupported("rope_scaling.rope_type", other, "default, linear, llama3"));
            }
        };
        Ok(Rope { theta, scaling })
    }
}

fn required(value: Option<f64>, key: &'static str) -> Result<f64, ModelError> {
    match value {
        Some(value) if value > 0.0 => Ok(value),
        Some(value) => Err(unsupported(key, &value.to_string(), "a number above 0")),
        None => Err(unsupported(key, "missing from rope_scaling", "a number above 0")),
    }
}

fn unsupported(key: &'static str, found: &str, supported: &'static str) -> ModelError {
    ModelError::Unsupported { key, found: found.to_owned(), supported }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
