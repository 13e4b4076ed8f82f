//! The built-in model with heads twice as long, which have kernels: the same function of a text, but for roundings of its queries. And
//! models of other architectures made of it, for what Llama does not have.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

const SHORT: usize = 32;
const LONG: usize = 64;

/// What is computed of the built-in model's weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Architecture {
    Llama,
    /// With biases of queries, keys and values.
    Qwen2,
    /// With norms of queries and keys.
    Qwen3,
}

type Tensor = (String, Vec<usize>, Vec<bf16>);

/// A new directory with the model.
pub(crate) fn with_heads_of_64(architecture: Architecture) -> PathBuf {
    // On another machine the crate is elsewhere: bench/gpu/run.sh says where.
    let crate_directory =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let from = Path::new(&crate_directory).join("models/builtin");
    static MADE: AtomicU32 = AtomicU32::new(0);
    let unique = [std::process::id(), MADE.fetch_add(1, Ordering::Relaxed)];
    let to = std::env::temp_dir().join(format!("roundhouse-{architecture:?}-of-64-{unique:?}"));
    std::fs::create_dir_all(&to).unwrap();
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["head_dim"], SHORT);
    config["head_dim"] = json!(LONG);
    config["model_type"] = json!(format!("{architecture:?}").to_lowercase());
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let mut tensors: Vec<Tensor> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, tensor)| {
            let (shape, data) = lengthened(name, tensor.shape(), &numbers(tensor.data()));
            (name.to_owned(), shape, data)
        })
        .collect();
    let added: Vec<Tensor> =
        tensors.iter().filter_map(|(name, shape, _)| added(architecture, name, shape[0])).collect();
    assert_eq!(added.is_empty(), architecture == Architecture::Llama);
    tensors.extend(added);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, shape, data)| {
            (name, shape, data.iter().flat_map(|number| number.to_le_bytes()).collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), data).expect("as long as its shape says"))
    });
    std::fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    to
}

/// What an architecture has beside a projection that Llama has alone: numbers that differ from place to place, large enough to show.
fn added(architecture: Architecture, projection: &str, outputs: usize) -> Option<Tensor> {
    let (layer, kind) = projection.strip_suffix("_proj.weight")?.rsplit_once('.')?;
    let varied = |count: usize, middle: f32, spread: f32| {
        let step = if kind == "k" { 3 } else { 7 };
        let number = |i: usize| bf16::from_f32(middle + spread * ((i * step % 11) as f32 / 5.0 - 1.0));
        (0..count).map(number).collect::<Vec<_>>()
    };
    match (architecture, kind) {
        (Architecture::Qwen2, "q" | "k" | "v") => {
            Some((format!("{layer}.{kind}_proj.bias"), vec![outputs], varied(outputs, 0.0, 0.2)))
        }
        (Architecture::Qwen3, "q" | "k") => {
            Some((format!("{layer}.{kind}_norm.weight"), vec![LONG], varied(LONG, 3.0, 0.5)))
        }
        _ => None,
    }
}

fn numbers(bytes: &[u8]) -> Vec<bf16> {
    bytes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair)).collect()
}

/// Where number `i` of a short head lies in a long one. A rotation turns `i` and `i + half` of a head by an angle that falls with
/// `i / head_dim`: pair `i` of 16 turns as pair `2 i` of 32 does.
fn place(i: usize) -> usize {
    let half = SHORT / 2;
    if i < half { 2 * i } else { LONG / 2 + 2 * (i - half) }
}

/// Heads lie along the rows of the projections of queries, keys and values, and along the columns of the output's.
fn lengthened(name: &str, shape: &[usize], from: &[bf16]) -> (Vec<usize>, Vec<bf16>) {
    let is = |part: &str| name.ends_with(&format!("self_attn.{part}_proj.weight"));
    // Scores are divided by the root of a head's length.
    let factor = if is("q") { (LONG as f32 / SHORT as f32).sqrt() } else { 1.0 };
    let longer = |index: usize| index / SHORT * LONG + place(index % SHORT);
    let (rows, columns) = match (is("q") || is("k") || is("v"), is("o")) {
        (true, _) => (shape[0] * LONG / SHORT, shape[1]),
        (_, true) => (shape[0], shape[1] * LONG / SHORT),
        _ => return (shape.to_vec(), from.to_vec()),
    };
    let mut to = vec![bf16::ZERO; rows * columns];
    for (index, number) in from.iter().enumerate() {
        let (row, column) = (index / shape[1], index % shape[1]);
        let at = if is("o") { row * columns + longer(column) } else { longer(row) * columns + column };
        to[at] = bf16::from_f32(number.to_f32() * factor);
    }
    (vec![rows, columns], to)
}
