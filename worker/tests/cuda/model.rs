//! The built-in model with heads twice as long, which have kernels: the same function of a text, but for roundings of its queries.

use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

const SHORT: usize = 32;
const LONG: usize = 64;

/// A directory with the model.
pub(crate) fn with_heads_of_64() -> PathBuf {
    // On another machine the crate is elsewhere: bench/gpu/run.sh says where.
    let crate_directory =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let from = Path::new(&crate_directory).join("models/builtin");
    let to = std::env::temp_dir().join(format!("roundhouse-heads-of-64-{}", std::process::id()));
    std::fs::create_dir_all(&to).unwrap();
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["head_dim"], SHORT);
    config["head_dim"] = json!(LONG);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, tensor)| {
            let (shape, data) = lengthened(name, tensor.shape(), &numbers(tensor.data()));
            (name.to_owned(), shape, data.iter().flat_map(|number| number.to_le_bytes()).collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), data).expect("as long as its shape says"))
    });
    std::fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    to
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
