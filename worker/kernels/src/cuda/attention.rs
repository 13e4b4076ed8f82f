//! One layer's attention, and what all layers of a step share for it: the plan, its lists and the slots, uploaded once.
//!
//! A model calls layer by layer with the same spans, and is not asked to say when a step begins: the spans are compared with those
//! before, which costs a glance at the block tables where uploads would cost a dozen calls of the driver. Caller: [`super::kernels`].

use std::sync::Arc;

use super::buffer::{CudaBuffer, CudaKvPool};
use super::error::CudaError;
use super::gpu::Gpu;
use super::launch;
use super::memory::Memory;
use super::params::{
    CombineParams, DecodeParams, MixedParams, PrefillParams, PrefillWgmmaParams, Visibility,
};
use super::plan::{AttentionPlan, Cut};
use super::tensor_map::Matrix;
use crate::{KernelError, KvLayout, Span};

/// A step's attention on the device, for every layer.
pub(super) struct Step {
    layout: KvLayout,
    /// Whether prompts are computed by wgmma, of a layout that it takes.
    by_wgmma: bool,
    plan: AttentionPlan,
    /// Whether decodes read nothing that the step writes, but for their own rows.
    begins_early: bool,
    /// The position of each row.
    pub(super) positions: Memory,
    /// Where each row's keys and values go.
    pub(super) slots: Memory,
    sequences: Memory,
    block_tables: Memory,
    tiles: Memory,
    chunks: Memory,
    merges: Memory,
    /// What split rows leave, for so many heads; the next layer's attention writes over it when this one's has been summed.
    parts: Option<(usize, Parts)>,
}

struct Parts {
    sums: Memory,
    logs: Memory,
}

impl Step {
    /// What there is, when it is for these spans; else a new one in its place, with spans that fit `rows` and the pool.
    pub(super) fn of<'a>(
        kept: &'a mut Option<Self>,
        gpu: &Arc<Gpu>,
        spans: &[Span<'_>],
        (rows, layer): (usize, usize),
        (pool, by_wgmma): (&CudaKvPool, bool),
    ) -> Result<&'a mut Self, KernelError> {
        let layout = pool.layout();
        let again = kept.as_ref().is_some_and(|step| step.layout == layout && step.plan.is_of(spans, rows));
        if !again {
            pool.layout().check(spans, rows, layer)?;
            // The old lists go after the work that was started with them, and not at all when there are no new ones.
            *kept = Some(Self::new(gpu, spans, pool, by_wgmma)?);
        } else if layer >= layout.layers {
            // Of what has been checked before, only the layer is new.
            pool.layout().check(spans, rows, layer)?;
        }
        Ok(kept.as_mut().expect("there is one now"))
    }

    fn new(
        gpu: &Arc<Gpu>,
        spans: &[Span<'_>],
        pool: &CudaKvPool,
        by_wgmma: bool,
    ) -> Result<Self, KernelError> {
        let layout = pool.layout();
        let tile_rows =
            if by_wgmma { launch::WGMMA_TILE_ROWS } else { launch::prefill_tile_rows(layout.head_dim)? };
        let cut = Cut::of(tile_rows, gpu.multiprocessors(), layout.kv_heads);
        let plan = AttentionPlan::new(spans, cut, Visibility::default())?;
        let positions: Vec<u32> =
            spans.iter().flat_map(|span| span.context_tokens as u32..span.end() as u32).collect();
        Ok(Self {
            layout,
            by_wgmma,
            positions: Memory::passing(gpu, &positions)?,
            slots: Memory::passing(gpu, &pool.slots(spans))?,
            sequences: Memory::passing(gpu, &plan.sequences)?,
            block_tables: Memory::passing(gpu, &plan.block_tables)?,
            tiles: Memory::passing(gpu, &plan.tiles)?,
            chunks: Memory::passing(gpu, &plan.chunks)?,
            merges: Memory::passing(gpu, &plan.merges)?,
            parts: None,
            begins_early: AttentionPlan::begins_early(spans, layout),
            plan,
        })
    }

    /// Room for the parts of rows with so many heads.
    fn make_room(&mut self, gpu: &Arc<Gpu>, heads: usize) -> Result<(), CudaError> {
        if self.parts.as_ref().is_none_or(|(has, _)| *has < heads) {
            let parts = self.plan.slots as usize * heads;
            let sums = Memory::passing_bytes(gpu, parts * self.layout.head_dim * 4)?;
            self.parts = Some((heads, Parts { sums, logs: Memory::passing_bytes(gpu, parts * 4)? }));
        }
        Ok(())
    }
}

/// One layer: all rows in one launch, then the sum of what was split.
pub(super) struct Attention<'a> {
    pub(super) gpu: &'a Arc<Gpu>,
    /// Queries begin its rows.
    pub(super) qkv: &'a CudaBuffer,
    pub(super) pool: &'a CudaKvPool,
    pub(super) out: &'a CudaBuffer,
    pub(super) layer: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Factor on the scores.
    pub(super) scale: f32,
}

impl Attention<'_> {
    /// Starts it. `step` is of spans that lie in the buffers and the pool.
    pub(super) fn run(&self, step: &mut Step) -> Result<(), KernelError> {
        step.make_room(self.gpu, self.heads)?;
        let (heads, KvLayout { kv_heads, head_dim, .. }) = (self.heads, self.pool.layout());
        let (prefill, decode) = (self.prefill(step), self.decode(step));
        let tiles = launch::prefill(head_dim, step.plan.tiles.len(), heads)?;
        let chunks = launch::decode(head_dim, step.plan.chunks.len(), heads, kv_heads)?;
        // SAFETY: the spans, from which the plan is, lie in the buffers and the pool; the parts have a slot for each chunk that leaves one.
        unsafe {
            if step.by_wgmma && tiles.grid > 0 {
                self.prefill_by_wgmma(step, &prefill)?;
                self.gpu.launch(chunks, &decode)?;
            } else if tiles.grid == 0 || chunks.grid == 0 {
                self.gpu.launch(tiles, &prefill)?;
                self.gpu.launch(chunks, &decode)?;
            } else {
                let mixed =
                    MixedParams { prefill, decode, prefill_blocks: tiles.grid, decode_blocks: chunks.grid };
                self.gpu.launch(launch::mixed(head_dim, tiles, chunks)?, &mixed)?;
            }
        }
        let launch = launch::combine(head_dim, step.plan.merges.len(), heads)?;
        // SAFETY: merges name slots and rows of this plan.
        Ok(unsafe { self.gpu.launch(launch, &self.combine(step)) }?)
    }

    /// Starts what `prefill` says.
    ///
    /// # Safety
    /// As for a launch of `prefill`.
    unsafe fn prefill_by_wgmma(&self, step: &Step, prefill: &PrefillParams) -> Result<(), KernelError> {
        let tiles = step.plan.tiles.len();
        let launch =
            launch::prefill_wgmma(step.layout.head_dim, tiles, self.heads, self.gpu.multiprocessors())?;
        let params = PrefillWgmmaParams::new(
            prefill,
            self.qkv.rows(),
            step.layout,
            (tiles, launch.grid),
            Matrix::map,
        )?;
        // SAFETY: the same memory as for mma.sync, of which the maps have no row more.
        Ok(unsafe { self.gpu.launch(launch, &params) }?)
    }

    fn prefill(&self, step: &Step) -> PrefillParams {
        let (keys, values) = self.pool.layer(self.layer);
        PrefillParams {
            q: self.qkv.address(),
            keys,
            values,
            out: self.out.address(),
            sink_logits: 0,
            tiles: step.tiles.address(),
            sequences: step.sequences.address(),
            paging: self.pool.paging(step.block_tables.address()),
            visibility: Visibility::default(),
            heads: self.heads as u32,
            q_stride: self.qkv.width() as u32,
            out_stride: self.out.width() as u32,
            score_scale: self.scale,
        }
    }

    fn decode(&self, step: &Step) -> DecodeParams {
        let prefill = self.prefill(step);
        let (partial_sums, partial_logs) = parts(step);
        DecodeParams {
            q: prefill.q,
            keys: prefill.keys,
            values: prefill.values,
            out: prefill.out,
            partial_sums,
            partial_logs,
            sink_logits: prefill.sink_logits,
            chunks: step.chunks.address(),
            sequences: prefill.sequences,
            paging: prefill.paging,
            visibility: prefill.visibility,
            heads: prefill.heads,
            q_stride: prefill.q_stride,
            out_stride: prefill.out_stride,
            score_scale: prefill.score_scale,
            begins_early: u32::from(step.begins_early),
            reserved: 0,
        }
    }

    fn combine(&self, step: &Step) -> CombineParams {
        let (partial_sums, partial_logs) = parts(step);
        CombineParams {
            partial_sums,
            partial_logs,
            sink_logits: 0,
            merges: step.merges.address(),
            out: self.out.address(),
            heads: self.heads as u32,
            out_stride: self.out.width() as u32,
            head_dim: step.layout.head_dim as u32,
            reserved: 0,
        }
    }
}

/// Where sums and logarithms of parts lie; null before there is room for them.
fn parts(step: &Step) -> (u64, u64) {
    step.parts.as_ref().map_or((0, 0), |(_, parts)| (parts.sums.address(), parts.logs.address()))
}
