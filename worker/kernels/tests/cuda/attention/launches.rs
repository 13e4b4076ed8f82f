//! A case of attention in a device's memory, and the launches of a step over it.

use worker_kernels::KvLayout;
use worker_kernels::cuda::params::{
    Address, CombineParams, DecodeParams, MixedParams, Paging, PrefillParams, PrefillWgmmaParams,
};
use worker_kernels::cuda::plan::AttentionPlan;
use worker_kernels::cuda::{PrefillKernel, launch};

use super::{Case, Data, Launches, Sinks};
use crate::machine::{Buffer, Run, copied_bytes, gpu, launch as run_launch, map};

/// A case in device memory.
pub(super) struct Device {
    q: Buffer,
    keys: Buffer,
    values: Buffer,
    pub(super) out: Buffer,
    sink_logits: Option<Buffer>,
    sequences: Buffer,
    block_tables: Buffer,
    /// Of the pool.
    blocks: usize,
    q_stride: u32,
    out_stride: u32,
}

impl Device {
    pub(super) fn new(case: &Case, data: &Data, plan: &AttentionPlan) -> Self {
        Self {
            q: Buffer::of_bf16(&data.q),
            keys: Buffer::of_bf16(&data.keys),
            values: Buffer::of_bf16(&data.values),
            out: Buffer::poisoned::<u16>(case.rows() * data.out_stride),
            sink_logits: (case.sinks == Sinks::Learned).then(|| Buffer::of(&data.sink_logits)),
            sequences: Buffer::of(&plan.sequences),
            block_tables: Buffer::of(&plan.block_tables),
            blocks: data.keys.len() / (case.kv_heads * case.block_tokens * case.head_dim),
            q_stride: data.q_stride as u32,
            out_stride: data.out_stride as u32,
        }
    }

    fn paging(&self, case: &Case) -> Paging {
        Paging {
            block_tables: self.block_tables.address(),
            kv_heads: case.kv_heads as u32,
            block_shift: case.block_tokens.ilog2(),
        }
    }

    fn sinks(&self) -> u64 {
        self.sink_logits.as_ref().map_or(0, Buffer::address)
    }

    /// All rows, in one launch when there are both kinds.
    pub(super) fn run(&self, case: &Case, plan: &AttentionPlan, run: Run) {
        let (tiles, chunks, merges) =
            (Buffer::of(&plan.tiles), Buffer::of(&plan.chunks), Buffer::of(&plan.merges));
        let parts = plan.slots as usize * case.heads;
        let partial_sums = Buffer::poisoned::<f32>(parts * case.head_dim);
        let partial_logs = Buffer::poisoned::<f32>(parts);
        let (sums, logs) = (partial_sums.address(), partial_logs.address());
        let (prefill, decode) =
            (self.prefill(case, tiles.address()), self.decode(case, chunks.address(), sums, logs));
        let tiles = launch::prefill(case.head_dim, plan.tiles.len(), case.heads).unwrap();
        let chunks = launch::decode(case.head_dim, plan.chunks.len(), case.heads, case.kv_heads).unwrap();
        if case.prefill == PrefillKernel::Wgmma {
            self.prefill_by_wgmma(case, plan, &prefill, run);
            run_launch(chunks, &decode, run).unwrap();
        } else if tiles.grid == 0 || chunks.grid == 0 || case.launches == Launches::Separate {
            run_launch(tiles, &prefill, run).unwrap();
            run_launch(chunks, &decode, run).unwrap();
        } else {
            let params =
                MixedParams { prefill, decode, prefill_blocks: tiles.grid, decode_blocks: chunks.grid };
            run_launch(launch::mixed(case.head_dim, tiles, chunks).unwrap(), &params, run).unwrap();
        }
        let params = CombineParams {
            partial_sums: sums,
            partial_logs: logs,
            sink_logits: self.sinks(),
            merges: merges.address(),
            out: self.out.address(),
            heads: case.heads as u32,
            out_stride: self.out_stride,
            head_dim: case.head_dim as u32,
            ..Default::default()
        };
        let combine = launch::combine(case.head_dim, plan.merges.len(), case.heads).unwrap();
        run_launch(combine, &params, run).unwrap();
    }

    /// How many bytes of keys and values the rows that decode read, each alone in its sequence; on the host's machine.
    pub(super) fn bytes_read(&self, case: &Case, plan: &AttentionPlan, run: Run) -> u64 {
        let chunks = Buffer::of(&plan.chunks);
        let parts = plan.slots as usize * case.heads;
        let (sums, logs) = (Buffer::poisoned::<f32>(parts * case.head_dim), Buffer::poisoned::<f32>(parts));
        let params = self.decode(case, chunks.address(), sums.address(), logs.address());
        let launch = launch::decode(case.head_dim, plan.chunks.len(), case.heads, case.kv_heads).unwrap();
        copied_bytes(launch, &params, run).unwrap()
    }

    fn prefill_by_wgmma(&self, case: &Case, plan: &AttentionPlan, prefill: &PrefillParams, run: Run) {
        // Fewer than there is work, so that each goes over several.
        let multiprocessors = gpu().map_or(2, |gpu| gpu.multiprocessors());
        let tiles = plan.tiles.len();
        let launch = launch::prefill_wgmma(case.head_dim, tiles, case.heads, multiprocessors).unwrap();
        let Case { kv_heads, head_dim, block_tokens, .. } = *case;
        let layout = KvLayout { layers: 1, kv_heads, head_dim, blocks: self.blocks, block_tokens };
        assert!(launch::wgmma_takes(layout));
        let params =
            PrefillWgmmaParams::new(prefill, case.rows(), layout, (tiles, launch.grid), map).unwrap();
        run_launch(launch, &params, run).unwrap();
    }

    fn prefill(&self, case: &Case, tiles: Address) -> PrefillParams {
        PrefillParams {
            q: self.q.address(),
            keys: self.keys.address(),
            values: self.values.address(),
            out: self.out.address(),
            sink_logits: self.sinks(),
            tiles,
            sequences: self.sequences.address(),
            paging: self.paging(case),
            visibility: case.visibility,
            heads: case.heads as u32,
            q_stride: self.q_stride,
            out_stride: self.out_stride,
            score_scale: case.scale(),
        }
    }

    fn decode(
        &self,
        case: &Case,
        chunks: Address,
        partial_sums: Address,
        partial_logs: Address,
    ) -> DecodeParams {
        DecodeParams {
            q: self.q.address(),
            keys: self.keys.address(),
            values: self.values.address(),
            out: self.out.address(),
            partial_sums,
            partial_logs,
            sink_logits: self.sinks(),
            chunks,
            sequences: self.sequences.address(),
            paging: self.paging(case),
            visibility: case.visibility,
            heads: case.heads as u32,
            q_stride: self.q_stride,
            out_stride: self.out_stride,
            score_scale: case.scale(),
            // Here kernels run one behind another, and no test would notice a wait too few; on a GPU both ways are right.
            begins_early: 1,
            reserved: 0,
        }
    }
}
