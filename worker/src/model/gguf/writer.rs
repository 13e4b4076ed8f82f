//! Writes GGUF files, for tests: what llama.cpp's converter does to a model directory.

use serde_json::Value as Json;

use crate::model::ModelFiles;

/// A file that is being put together.
#[derive(Clone, Default)]
pub(super) struct Writer {
    metadata: Vec<u8>,
    entries: u64,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Writer {
    pub(super) fn entry(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.metadata.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        self.entries += 1;
    }

    pub(super) fn text(&mut self, key: &str, value: &str) {
        self.entry(key, 8, &text(value));
    }

    pub(super) fn whole(&mut self, key: &str, value: u64) {
        self.entry(key, 4, &(value as u32).to_le_bytes());
    }

    pub(super) fn float(&mut self, key: &str, value: f64) {
        self.entry(key, 6, &(value as f32).to_le_bytes());
    }

    pub(super) fn list(&mut self, key: &str, kind: u32, values: &[Vec<u8>]) {
        let length = (values.len() as u64).to_le_bytes();
        self.entry(key, 9, &[&kind.to_le_bytes()[..], &length, &values.concat()].concat());
    }

    pub(super) fn texts(&mut self, key: &str, texts: &[&str]) {
        self.list(key, 8, &texts.iter().map(|value| text(value)).collect::<Vec<_>>());
    }

    pub(super) fn tensor(&mut self, name: &str, dimensions: &[usize], kind: u32, bytes: Vec<u8>) {
        let dimensions = dimensions.iter().map(|length| *length as u64).collect();
        self.tensors.push((name.to_owned(), dimensions, kind, bytes));
    }

    pub(super) fn finish(&self) -> Vec<u8> {
        let counts = [self.tensors.len() as u64, self.entries].map(u64::to_le_bytes).concat();
        let mut file = [&b"GGUF\x03\0\0\0"[..], &counts, &self.metadata].concat();
        let mut data = Vec::new();
        for (name, dimensions, kind, bytes) in &self.tensors {
            file.extend(text(name));
            file.extend((dimensions.len() as u32).to_le_bytes());
            file.extend(dimensions.iter().flat_map(|length| length.to_le_bytes()));
            file.extend([&kind.to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat());
            data.extend_from_slice(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }

    /// Shape and weights of a model; not its tokenizer, and not how it stretches positions.
    pub(super) fn of_model(files: &ModelFiles) -> Self {
        let config: Json = serde_json::from_str(&files.config).unwrap();
        let architecture = config["model_type"].as_str().unwrap();
        let mut writer = Self::default();
        writer.text("general.architecture", architecture);
        for (key, theirs) in [
            ("block_count", "num_hidden_layers"),
            ("context_length", "max_position_embeddings"),
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
        ] {
            if let Some(value) = config[theirs].as_u64() {
                writer.whole(&format!("{architecture}.{key}"), value);
            }
        }
        let epsilon = config["rms_norm_eps"].as_f64().unwrap();
        writer.float(&format!("{architecture}.attention.layer_norm_rms_epsilon"), epsilon);
        let theta = config["rope_theta"].as_f64().unwrap_or(10_000.0);
        writer.float(&format!("{architecture}.rope.freq_base"), theta);
        let tensors = safetensors::SafeTensors::deserialize(files.weights[0].bytes()).unwrap();
        for (name, tensor) in tensors.tensors() {
            let mut bytes = tensor.data().to_vec();
            let heads = match () {
                () if architecture != "llama" => None,
                () if name.contains("q_proj") => config["num_attention_heads"].as_u64(),
                () if name.contains("k_proj") => config["num_key_value_heads"].as_u64(),
                () => None,
            };
            if let Some(heads) = heads {
                bytes = interleaved(&bytes, tensor.shape()[0], heads as usize);
            }
            let kind = match tensor.dtype() {
                safetensors::Dtype::BF16 => 30,
                safetensors::Dtype::F32 => 0,
                other => panic!("{other:?} in a fixture"),
            };
            let dimensions: Vec<usize> = tensor.shape().iter().rev().copied().collect();
            writer.tensor(&super::weights::gguf_name(&name).unwrap(), &dimensions, kind, bytes);
        }
        writer
    }
}

/// Rows of each head with its first and second half alternating.
fn interleaved(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let (row_bytes, head_rows) = (bytes.len() / rows, rows / heads);
    let row = |row: usize| &bytes[row * row_bytes..][..row_bytes];
    let mut out = Vec::new();
    for head in 0..heads {
        for pair in 0..head_rows / 2 {
            out.extend_from_slice(row(head * head_rows + pair));
            out.extend_from_slice(row(head * head_rows + head_rows / 2 + pair));
        }
    }
    out
}
