//! What comes between the projection of queries, keys and values and attention: norms of heads, rotary embedding, the store.
//!
//! Next: [`super::norm`] and [`super::kv_pool`].

use std::ops::Range;

use super::CpuKernels;
use super::activations::Activations;
use super::kv_pool::CpuKvPool;
use super::norm::head_norm;
use crate::{KernelError, KvLayout, RopeShape, Span};

/// Numbers that are worth a task of their own.
const TASK_NUMBERS: usize = 1 << 13;

/// Prepares the queries of each row, and stores its keys and values.
pub(crate) fn rope_store(
    kernels: &CpuKernels,
    qkv: &mut Activations,
    shape: RopeShape<'_, CpuKernels>,
    pool: &mut CpuKvPool,
) -> Result<(), KernelError> {
    let KvLayout { kv_heads, head_dim, .. } = pool.layout();
    let RopeShape { layer, heads, angles, norm, spans } = shape;
    qkv.expect_width("rope_store", (heads + 2 * kv_heads) * head_dim)?;
    angles.expect_width("rope_store", head_dim)?;
    pool.layout().check(spans, qkv.rows(), layer)?;
    let norms = norm.iter().flat_map(|norm| [norm.query.len(), norm.key.len()]);
    let end = Span::last_end(spans);
    if angles.rows() < end || !head_dim.is_multiple_of(2) || norms.clone().any(|len| len != head_dim) {
        return Err(KernelError::Shape {
            operation: "rope_store",
            expected: format!("angles of {end} positions, even heads, norms of {head_dim}"),
            found: format!(
                "{} positions, heads of {head_dim}, norms of {:?}",
                angles.rows(),
                norms.collect::<Vec<_>>()
            ),
        });
    }
    let queries = 0..heads * head_dim;
    let keys = queries.end..queries.end + kv_heads * head_dim;
    if let Some(norm) = norm {
        head_norm(kernels, qkv, queries, norm.query, norm.eps);
        head_norm(kernels, qkv, keys.clone(), norm.key, norm.eps);
    }
    let positions: Vec<usize> = spans.iter().flat_map(|span| span.context_tokens..span.end()).collect();
    rope(kernels, qkv, 0..keys.end, (angles, &positions));
    pool.store(kernels, qkv, spans, layer);
    Ok(())
}

/// Rotates pairs `(i, i + head_dim / 2)` of each head in these columns by the angles of the row's position.
fn rope(
    kernels: &CpuKernels,
    x: &mut Activations,
    columns: Range<usize>,
    (angles, positions): (&Activations, &[usize]),
) {
    let (width, head_dim) = (x.width(), angles.width());
    kernels.for_rows(x.numbers_mut(), width, TASK_NUMBERS, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(width.max(1)).enumerate() {
            let (cosines, sines) = angles.row(positions[first + i]).split_at(head_dim / 2);
            for head in row[columns.clone()].chunks_exact_mut(head_dim) {
                rotate(head, cosines, sines);
            }
        }
    });
}

fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (low, high) = head.split_at_mut(cosines.len());
    for ((a, b), (cosine, sine)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
        let (x, y) = (*a, *b);
        *a = x * cosine - y * sine;
        *b = y * cosine + x * sine;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::simd::LANES;
    use crate::{Device, QkNorm};

    const LAYOUT: KvLayout = KvLayout { layers: 2, kv_heads: 2, head_dim: 12, block_tokens: 4, blocks: 3 };
    const HEADS: usize = 3;
    const WIDTH: usize = (HEADS + 4) * 12;
    const EPS: f32 = 1e-3;

    /// Numbers that repeat nowhere near.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 40.0 - 1.2).collect()
    }

    fn head(row: &[f32], index: usize) -> Vec<f64> {
        row[index * 12..][..12].iter().map(|x| f64::from(*x)).collect()
    }

    fn normed(head: &[f64], weight: &[f32]) -> Vec<f64> {
        let mean = head.iter().map(|x| x * x).sum::<f64>() / 12.0;
        head.iter().zip(weight).map(|(x, w)| x / (mean + f64::from(EPS)).sqrt() * f64::from(*w)).collect()
    }

    fn turned(head: &[f64], angles: &[f32]) -> Vec<f64> {
        let angle = |i: usize| (f64::from(angles[i]), f64::from(angles[6 + i]));
        let low = (0..6).map(|i| head[i] * angle(i).0 - head[6 + i] * angle(i).1);
        let high = (0..6).map(|i| head[6 + i] * angle(i).0 + head[i] * angle(i).1);
        low.chain(high).collect()
    }

    fn assert_near(got: impl Iterator<Item = f32>, want: &[f64], what: &str) {
        let got: Vec<f32> = got.collect();
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{what}: {got} for {want}");
        }
    }

    #[test]
    fn heads_are_normed_and_turned_and_keys_and_values_stored() {
        let (rows, angles) = (numbers(3 * WIDTH, 1), numbers(5 * 12, 2));
        let (query, key) = (numbers(12, 3), numbers(12, 4));
        // Two positions of one sequence, of which the first ends a block, and one of another.
        let spans = [
            Span { first_row: 0, rows: 2, context_tokens: 3, blocks: &[2, 0] },
            Span { first_row: 2, rows: 1, context_tokens: 1, blocks: &[1] },
        ];
        let places = [(3, 2, 3), (4, 0, 0), (1, 1, 1)];
        for (isa, has_norm) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
            let kernels = CpuKernels::with_isa("test", 2, isa).unwrap();
            let mut pool = kernels.kv_pool(LAYOUT).unwrap();
            let (mut qkv, mut turns) = (Activations::default(), Activations::default());
            kernels.write(&rows, WIDTH, &mut qkv).unwrap();
            kernels.write(&angles, 12, &mut turns).unwrap();
            let norm = has_norm.then_some(QkNorm { query: &query, key: &key, eps: EPS });
            let shape = RopeShape { layer: 1, heads: HEADS, angles: &turns, norm, spans: &spans };
            rope_store(&kernels, &mut qkv, shape, &mut pool).unwrap();
            for (row, (position, block, slot)) in places.into_iter().enumerate() {
                let (from, angles) = (&rows[row * WIDTH..][..WIDTH], &angles[position * 12..][..12]);
                let prepared = |index: usize, weight: &[f32]| {
                    let head = head(from, index);
                    turned(&if has_norm { normed(&head, weight) } else { head }, angles)
                };
                for index in 0..HEADS {
                    let got = qkv.row(row)[index * 12..][..12].iter().copied();
                    assert_near(got, &prepared(index, &query), "query");
                }
                for kv_head in 0..2 {
                    let keys = &pool.keys(1, block, kv_head)[slot / LANES * LANES * 12..];
                    let got = keys[slot % LANES..].iter().step_by(LANES).take(12).copied();
                    assert_near(got, &prepared(HEADS + kv_head, &key), "key");
                    let values = &pool.values(1, block, kv_head)[slot * pool.value_width()..][..12];
                    assert_near(values.iter().copied(), &head(from, HEADS + 2 + kv_head), "value");
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let kernels = CpuKernels::new("test", 1).unwrap();
        let mut pool = kernels.kv_pool(LAYOUT).unwrap();
        let (mut qkv, mut one, mut two) =
            (Activations::default(), Activations::default(), Activations::default());
        kernels.write(&numbers(WIDTH, 1), WIDTH, &mut qkv).unwrap();
        kernels.write(&numbers(12, 2), 12, &mut one).unwrap();
        kernels.write(&numbers(24, 2), 12, &mut two).unwrap();
        let (weight, short) = (numbers(12, 3), numbers(11, 3));
        let spans = [Span { first_row: 0, rows: 1, context_tokens: 1, blocks: &[0] }];
        let mut refusal = |layer, heads, angles, key| {
            let norm = Some(QkNorm { query: &weight, key, eps: EPS });
            let shape = RopeShape { layer, heads, angles, norm, spans: &spans };
            rope_store(&kernels, &mut qkv, shape, &mut pool).err().map(|error| error.to_string())
        };
        assert_eq!(refusal(1, HEADS, &two, &weight), None);
        for (error, wanted) in [
            (refusal(2, HEADS, &two, &weight), "a layer below 2"),
            (refusal(1, HEADS + 1, &two, &weight), "96"),
            (refusal(1, HEADS, &one, &weight), "angles of 2 positions"),
            (refusal(1, HEADS, &two, &short), "norms of [12, 11]"),
        ] {
            let error = error.unwrap();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
