//! Tensors of a GGUF file under Hugging Face's names, as Hugging Face has them: quantised ones widened to bf16, the rows of
//! Llama's queries and keys back in their order.

use std::borrow::Cow;

use half::bf16;
use rayon::prelude::*;
use worker_kernels::Dtype;

use super::blocks::{Format, SUPPORTED, kind_name};
use super::{Gguf, GgufError, Tensor};

/// A tensor's numbers.
pub(in crate::model) struct Widened<'a> {
    /// Rows first.
    pub(in crate::model) shape: Vec<usize>,
    pub(in crate::model) dtype: Dtype,
    pub(in crate::model) bytes: Cow<'a, [u8]>,
}

/// Hugging Face's names of a layer's parts, and GGUF's.
const PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// GGUF's name for a tensor.
pub(super) fn gguf_name(name: &str) -> Option<String> {
    let (name, suffix) = name.rsplit_once('.')?;
    let stem = match name {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" => "output_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        layered => {
            let (layer, part) = layered.strip_prefix("model.layers.")?.split_once('.')?;
            let (_, part) = PARTS.iter().find(|(theirs, _)| *theirs == part)?;
            format!("blk.{layer}.{part}")
        }
    };
    Some(format!("{stem}.{suffix}"))
}

impl<'a> Gguf<'a> {
    /// The tensor that Hugging Face calls `name`; `None` if the file has none.
    ///
    /// # Errors
    /// When its format cannot be read.
    pub(in crate::model) fn widened(&self, name: &str) -> Result<Option<Widened<'a>>, GgufError> {
        let Some(name) = gguf_name(name) else { return Ok(None) };
        let Some(tensor) = self.tensors.get(name.as_str()) else { return Ok(None) };
        let problem = |problem: String| GgufError::Tensor { name: name.clone(), problem };
        let format = Format::from_kind(tensor.kind).ok_or_else(|| {
            problem(format!("is stored as {}; supported: {SUPPORTED}", kind_name(tensor.kind)))
        })?;
        let rows = Rows::new(tensor, format, self.interleaved_heads(&name)?).map_err(problem)?;
        let shape = tensor.dimensions.iter().rev().copied().collect();
        Ok(Some(match format {
            Format::Plain(dtype) => Widened { shape, dtype, bytes: rows.in_order() },
            Format::Quantised(quantisation) => {
                let widen = |blocks: &[u8], row: &mut [f32]| quantisation.widen(blocks, row);
                Widened { shape, dtype: Dtype::Bf16, bytes: Cow::Owned(rows.widened(widen)) }
            }
        }))
    }

    /// Heads of a tensor whose rows have the two halves of each rotary pair beside each other: llama.cpp writes the queries and
    /// keys of Llama files so.
    fn interleaved_heads(&self, name: &str) -> Result<Option<usize>, GgufError> {
        if self.architecture()? != "llama" {
            return Ok(None);
        }
        let shape = self.heads()?;
        let part = name.strip_prefix("blk.").and_then(|rest| rest.split('.').nth(1));
        Ok(match part {
            Some("attn_q") => Some(shape.heads),
            Some("attn_k") => Some(shape.kv_heads),
            _ => None,
        })
    }
}

/// The rows of a tensor, and their order.
struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    columns: usize,
    heads: Option<usize>,
}

impl<'a> Rows<'a> {
    fn new(tensor: &Tensor<'a>, format: Format, heads: Option<usize>) -> Result<Self, String> {
        // The numbers of an interleaved vector, a bias, are its rows.
        let columns = if tensor.dimensions.len() == 1 && heads.is_some() { 1 } else { tensor.dimensions[0] };
        let rows = Self { bytes: tensor.bytes, row_bytes: format.row_bytes(columns)?, columns, heads };
        match heads {
            Some(heads) if heads == 0 || !rows.count().is_multiple_of(2 * heads) => {
                Err(format!("has {} rows, which are no pairs for {heads} heads", rows.count()))
            }
            _ => Ok(rows),
        }
    }

    fn count(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Row `row` as Hugging Face counts: pair `j` of a head of `d` is rows `j` and `j + d / 2` there, and `2j` and `2j + 1` here.
    fn row(&self, row: usize) -> &'a [u8] {
        let stored = match self.heads {
            None => row,
            Some(heads) => {
                let head_dim = self.count() / heads;
                let (head, at) = (row / head_dim, row % head_dim);
                let (side, pair) = (at / (head_dim / 2), at % (head_dim / 2));
                head * head_dim + 2 * pair + side
            }
        };
        &self.bytes[stored * self.row_bytes..][..self.row_bytes]
    }

    fn in_order(&self) -> Cow<'a, [u8]> {
        match self.heads {
            None => Cow::Borrowed(self.bytes),
            Some(_) => Cow::Owned((0..self.count()).flat_map(|row| self.row(row)).copied().collect()),
        }
    }

    /// All rows as bf16, rounded to nearest even.
    fn widened(&self, widen: impl Fn(&[u8], &mut [f32]) + Sync) -> Vec<u8> {
        let mut bytes = vec![0; self.count() * self.columns * Dtype::Bf16.bytes()];
        let rows = bytes.par_chunks_exact_mut(self.columns * Dtype::Bf16.bytes()).enumerate();
        rows.for_each_init(
            || vec![0.0; self.columns],
            |numbers, (row, out)| {
                widen(self.row(row), numbers);
                for (out, number) in out.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                    *out = bf16::from_f32(*number).to_le_bytes();
                }
            },
        );
        bytes
    }
}
