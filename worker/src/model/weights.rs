//! A model's weights on a device, under the names that Hugging Face gives them.
//!
//! Queries, keys and values are one linear layer, gate and up projection another: fewer, larger products.

use worker_kernels::{Device, WeightView};

use super::tensors::{Stored, Tensors};
use super::{ModelConfig, ModelError, ModelFiles};

/// All weights of a decoder.
pub struct Weights<D: Device> {
    /// `[vocab, hidden]`; the output layer too when embeddings are tied.
    pub(super) embedding: D::Linear,
    pub(super) layers: Vec<LayerWeights<D>>,
    pub(super) norm: D::Vector,
    /// The output layer, unless embeddings are tied.
    head: Option<D::Linear>,
}

/// The weights of one layer.
pub(super) struct LayerWeights<D: Device> {
    pub(super) input_norm: D::Vector,
    /// `[(heads + 2 · kv_heads) · head_dim, hidden]`
    pub(super) qkv: D::Linear,
    pub(super) qk_norm: Option<QkWeights<D>>,
    pub(super) output: D::Linear,
    pub(super) mlp_norm: D::Vector,
    /// `[2 · intermediate, hidden]`
    pub(super) gate_up: D::Linear,
    pub(super) down: D::Linear,
}

/// Of the norms of queries and keys, `[head_dim]` each.
pub(super) struct QkWeights<D: Device> {
    pub(super) query: D::Vector,
    pub(super) key: D::Vector,
}

impl<D: Device> Weights<D> {
    /// Finds, checks and packs all tensors.
    ///
    /// # Errors
    /// [`ModelError`] that names the first tensor that is missing or of another shape than `config` asks for.
    pub fn load(device: &D, config: &ModelConfig, files: &ModelFiles) -> Result<Self, ModelError> {
        let tensors = Tensors::open(files)?;
        let loader = Loader { device, config, tensors: &tensors };
        let (vocab, hidden) = (config.vocab, config.hidden);
        let head = match config.tied_embeddings {
            true => None,
            false => Some(loader.linear(&[("lm_head", vocab)], hidden, Bias::Without)?),
        };
        Ok(Self {
            embedding: loader.linear(&[("model.embed_tokens", vocab)], hidden, Bias::Without)?,
            layers: (0..config.layers).map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
            norm: loader.vector("model.norm.weight", hidden)?,
            head,
        })
    }

    /// The output layer `[vocab, hidden]`.
    pub(super) fn head(&self) -> &D::Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

#[derive(Clone, Copy)]
enum Bias {
    With,
    Without,
}

impl From<bool> for Bias {
    fn from(with: bool) -> Self {
        if with { Self::With } else { Self::Without }
    }
}

struct Loader<'a, D> {
    device: &'a D,
    config: &'a ModelConfig,
    tensors: &'a Tensors<'a>,
}

impl<D: Device> Loader<'_, D> {
    fn layer(&self, layer: usize) -> Result<LayerWeights<D>, ModelError> {
        let config = self.config;
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let (query, kv) = (config.query_width(), config.kv_width());
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| at(&format!("self_attn.{name}")));
        let [gate, up] = ["gate_proj", "up_proj"].map(|name| at(&format!("mlp.{name}")));
        let norm = |name: &str, len: usize| self.vector(&at(name), len);
        let qk_norm = match config.qk_norm() {
            false => None,
            true => Some(QkWeights {
                query: norm("self_attn.q_norm.weight", config.head_dim)?,
                key: norm("self_attn.k_norm.weight", config.head_dim)?,
            }),
        };
        Ok(LayerWeights {
            input_norm: norm("input_layernorm.weight", hidden)?,
            qkv: self.linear(&[(&q, query), (&k, kv), (&v, kv)], hidden, config.qkv_bias.into())?,
            qk_norm,
            output: self.linear(&[(&at("self_attn.o_proj"), hidden)], query, config.output_bias.into())?,
            mlp_norm: norm("post_attention_layernorm.weight", hidden)?,
            gate_up: self.linear(
                &[(&gate, intermediate), (&up, intermediate)],
                hidden,
                config.mlp_bias.into(),
            )?,
            down: self.linear(&[(&at("mlp.down_proj"), hidden)], intermediate, config.mlp_bias.into())?,
        })
    }

    /// One linear layer from tensors stacked along their outputs, each with its name and outputs.
    fn linear(&self, parts: &[(&str, usize)], inputs: usize, bias: Bias) -> Result<D::Linear, ModelError> {
        let weight = |(name, outputs): &(&str, usize)| {
            self.tensors.matrix(&format!("{name}.weight"), *outputs, inputs)
        };
        let weights: Vec<Stored<'_>> = parts.iter().map(weight).collect::<Result<_, _>>()?;
        let biases: Vec<Stored<'_>> = match bias {
            Bias::Without => Vec::new(),
            Bias::With => parts
                .iter()
                .map(|(name, outputs)| self.tensors.vector(&format!("{name}.bias"), *outputs))
                .collect::<Result<_, _>>()?,
        };
        Ok(self.device.linear(&views(&weights)?, &views(&biases)?)?)
    }

    fn vector(&self, name: &str, len: usize) -> Result<D::Vector, ModelError> {
        Ok(self.device.vector(self.tensors.vector(name, len)?.view()?)?)
    }
}

fn views<'a>(stored: &'a [Stored<'_>]) -> Result<Vec<WeightView<'a>>, ModelError> {
    stored.iter().map(Stored::view).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Model, ModelSource};

    fn builtin(change: impl FnOnce(&mut serde_json::Value)) -> Result<Model, ModelError> {
        let mut files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let mut config = serde_json::from_str(&files.config).unwrap();
        change(&mut config);
        files.config = config.to_string();
        Model::load(&files)
    }

    #[test]
    fn a_tensor_of_another_shape_is_named_with_both_shapes() {
        let error = builtin(|config| config["intermediate_size"] = 96.into()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ModelError::TensorShape { .. }), "{text}");
        assert!(text.contains("mlp") && text.contains("[96, 192]") && text.contains("[512, 192]"), "{text}");
    }

    #[test]
    fn a_missing_tensor_is_named() {
        let text = builtin(|config| config["tie_word_embeddings"] = false.into()).unwrap_err().to_string();
        assert!(text.contains("lm_head.weight"), "{text}");
        let text = builtin(|config| config["num_hidden_layers"] = 50.into()).unwrap_err().to_string();
        assert!(text.contains("model.layers.4."), "{text}");
    }

    /// A directory of the built-in model that is gone at the end of the test.
    struct Directory(std::path::PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("roundhouse-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            let directory = Self(path);
            directory
                .write("config.json", ModelFiles::open(&ModelSource::Builtin).unwrap().config.as_bytes());
            directory
        }

        fn write(&self, file: &str, contents: &[u8]) {
            std::fs::write(self.0.join(file), contents).unwrap();
        }

        fn open(&self) -> Result<Model, ModelError> {
            Model::open(&ModelSource::Directory(self.0.clone()))
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn weights_in_several_files_are_found_through_their_index() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(files.weights[0].bytes()).unwrap();
        let directory = Directory::new("sharded");
        let mut places = serde_json::Map::new();
        for (shard, file) in ["model-1.safetensors", "model-2.safetensors"].into_iter().enumerate() {
            let of_shard = |name: &str| name.contains("mlp") == (shard == 1);
            let part: Vec<_> = tensors.tensors().into_iter().filter(|(name, _)| of_shard(name)).collect();
            places.extend(part.iter().map(|(name, _)| (name.clone(), file.into())));
            directory.write(file, &safetensors::serialize(part, None).unwrap());
        }
        directory.write(
            "model.safetensors.index.json",
            serde_json::json!({ "weight_map": places }).to_string().as_bytes(),
        );
        assert_eq!(directory.open().unwrap().config().layers, 4);
        places.retain(|_, file| file == "model-1.safetensors");
        directory.write(
            "model.safetensors.index.json",
            serde_json::json!({ "weight_map": places }).to_string().as_bytes(),
        );
        assert!(
            directory.open().unwrap_err().to_string().contains("mlp"),
            "a shard that the index leaves out"
        );
        std::fs::remove_file(directory.0.join("model-1.safetensors")).unwrap();
        assert!(directory.open().unwrap_err().to_string().contains("model-1.safetensors"));
    }

    #[test]
    fn damaged_weights_are_said_to_be_that() {
        let directory = Directory::new("damaged");
        directory.write("model.safetensors", b"no such thing");
        let error = directory.open().unwrap_err();
        assert!(error.to_string().contains("model.safetensors is not a safetensors file"), "{error}");
    }
}
