//! Parameters of the kernels, field for field those of the structs of the same names in `cu/`.
//!
//! The host machine of the tests refuses a kernel whose parameters have another size. Pointers are device addresses; 0 is null, which
//! the kernels take where the fields below say so. Next: [`super::launch`].

use super::tensor_map::TensorMap;

/// An address in device memory.
pub type Address = u64;

/// A value that means the same to the host and to a kernel.
///
/// # Safety
/// `#[repr(C)]`, without pointers of the host and without bytes of padding.
pub unsafe trait DeviceValue: cudarc::driver::DeviceRepr + Copy + 'static {}

macro_rules! device_values {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, PartialEq, Debug, Default)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        // SAFETY: repr(C), plain numbers only.
        unsafe impl cudarc::driver::DeviceRepr for $name {}
        // SAFETY: likewise, and the assertion below rules padding out.
        unsafe impl DeviceValue for $name {}
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "no padding");
    )*};
}
pub(super) use device_values;

// SAFETY: plain numbers.
unsafe impl DeviceValue for u8 {}
// SAFETY: as above.
unsafe impl DeviceValue for u16 {}
// SAFETY: as above.
unsafe impl DeviceValue for u32 {}
// SAFETY: as above.
unsafe impl DeviceValue for f32 {}

device_values! {
    /// Rows of one sequence in the batch.
    Sequence {
        /// Its first row.
        first_row: u32,
        /// How many rows; row i has position `context_tokens + i`.
        rows: u32,
        /// Positions before the first row.
        context_tokens: u32,
        /// Where its blocks begin in the block tables.
        table_start: u32,
    }
    /// Where keys and values lie.
    Paging {
        /// Blocks of all sequences, one behind another.
        block_tables: Address,
        /// KV heads.
        kv_heads: u32,
        /// Positions in a block: 1 << block_shift.
        block_shift: u32,
    }
    /// What a query sees of the positions before it.
    Visibility {
        /// The last so many positions, its own counted; 0 is all.
        window: u32,
        /// With a window, the first so many positions besides.
        sink_tokens: u32,
    }
    /// Rows of one sequence that a block of the prefill kernel computes.
    PrefillTile {
        /// Which sequence.
        sequence: u32,
        /// First row, counted within the sequence.
        first_row: u32,
    }
    /// `attention_prefill_{64,128,256}`.
    PrefillParams {
        /// Queries, bf16 `[rows, q_stride]`.
        q: Address,
        /// The layer's keys, bf16 `[blocks, kv_heads, block_tokens, head_dim]`.
        keys: Address,
        /// The layer's values, likewise.
        values: Address,
        /// bf16 `[rows, out_stride]`.
        out: Address,
        /// f32 `[heads]`, or null: a score without a value, for each head.
        sink_logits: Address,
        /// [`PrefillTile`]s, one for each block and head.
        tiles: Address,
        /// [`Sequence`]s.
        sequences: Address,
        /// Where keys and values lie.
        paging: Paging,
        /// What a query sees.
        visibility: Visibility,
        /// Query heads.
        heads: u32,
        /// Numbers from row to row of `q`.
        q_stride: u32,
        /// Numbers from row to row of `out`.
        out_stride: u32,
        /// Factor on the scores.
        score_scale: f32,
    }
    /// `attention_prefill_wgmma_{64,128,256}`.
    PrefillWgmmaParams {
        /// Queries `[rows, q_stride]`, in boxes of 128 rows.
        q: TensorMap,
        /// The layer's keys, `[blocks · kv_heads · block_tokens, head_dim]`, in boxes of `box_rows` whole rows.
        keys: TensorMap,
        /// The layer's values, likewise.
        values: TensorMap,
        /// As in [`PrefillParams`].
        out: Address,
        /// As in [`PrefillParams`].
        sink_logits: Address,
        /// [`PrefillTile`]s.
        tiles: Address,
        /// As in [`PrefillParams`].
        sequences: Address,
        /// As in [`PrefillParams`].
        paging: Paging,
        /// As in [`PrefillParams`].
        visibility: Visibility,
        /// As in [`PrefillParams`].
        heads: u32,
        /// As in [`PrefillParams`].
        out_stride: u32,
        /// Positions of a block, at most 128, or 64 of heads of 256.
        box_rows: u32,
        /// Tiles times heads.
        works: u32,
        /// Blocks of the launch.
        blocks: u32,
        /// As in [`PrefillParams`].
        score_scale: f32,
        /// Nothing; keeps the size a multiple of 64.
        reserved: [u32; 12],
    }
    /// Positions of one sequence that a block of the decode kernel goes over.
    DecodeChunk {
        /// Which sequence.
        sequence: u32,
        /// First position.
        begin: u32,
        /// Position after the last.
        end: u32,
        /// Slot of its part, or [`DecodeChunk::WHOLE`].
        slot: u32,
    }
    /// `attention_decode_{64,128,256}`.
    DecodeParams {
        /// As in [`PrefillParams`].
        q: Address,
        /// As in [`PrefillParams`].
        keys: Address,
        /// As in [`PrefillParams`].
        values: Address,
        /// As in [`PrefillParams`].
        out: Address,
        /// f32 `[slots, heads, head_dim]`.
        partial_sums: Address,
        /// f32 `[slots, heads]`.
        partial_logs: Address,
        /// As in [`PrefillParams`].
        sink_logits: Address,
        /// [`DecodeChunk`]s, each for all heads: a launch has as many blocks for it as [`super::launch::decode`] says.
        chunks: Address,
        /// [`Sequence`]s; their first row is computed.
        sequences: Address,
        /// As in [`PrefillParams`].
        paging: Paging,
        /// As in [`PrefillParams`].
        visibility: Visibility,
        /// As in [`PrefillParams`].
        heads: u32,
        /// As in [`PrefillParams`].
        q_stride: u32,
        /// As in [`PrefillParams`].
        out_stride: u32,
        /// As in [`PrefillParams`].
        score_scale: f32,
        /// 1 where the step writes no keys and values that are read here, but for each row's own ([`begins_early`](super::plan::AttentionPlan::begins_early)): then those are read while kernels before still run.
        begins_early: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
    /// `attention_mixed_{64,128,256}`.
    MixedParams {
        /// As for prefill alone.
        prefill: PrefillParams,
        /// As for decode alone.
        decode: DecodeParams,
        /// Blocks that prefill.
        prefill_blocks: u32,
        /// Blocks that decode, spread evenly among these.
        decode_blocks: u32,
    }
    /// Parts to add up to one row.
    Merge {
        /// The row.
        row: u32,
        /// Slot of its first part.
        first_slot: u32,
        /// How many parts.
        slots: u32,
    }
    /// `attention_combine`.
    CombineParams {
        /// As in [`DecodeParams`].
        partial_sums: Address,
        /// As in [`DecodeParams`].
        partial_logs: Address,
        /// As in [`PrefillParams`].
        sink_logits: Address,
        /// [`Merge`]s, one for each block and head.
        merges: Address,
        /// bf16 `[rows, out_stride]`.
        out: Address,
        /// Query heads.
        heads: u32,
        /// Numbers from row to row of `out`.
        out_stride: u32,
        /// Numbers of a head.
        head_dim: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
    /// `rms_norm`.
    RmsNormParams {
        /// The residual stream, f32 `[rows, width]`.
        x: Address,
        /// bf16 `[rows, width]`, or null: added to `x` first.
        addend: Address,
        /// f32 `[width]`.
        weight: Address,
        /// bf16 `[rows, width]`.
        out: Address,
        /// A multiple of 8.
        width: u32,
        /// Added to the mean of squares.
        eps: f32,
    }
    /// `rope_store_{64,128,256}`.
    RopeStoreParams {
        /// bf16 `[rows, qkv_stride]`: queries, keys, values.
        qkv: Address,
        /// The layer's keys.
        keys: Address,
        /// The layer's values.
        values: Address,
        /// f32 `[head_dim]`, or null: neither queries nor keys are normalised.
        query_norm: Address,
        /// The same for keys; null where that is.
        key_norm: Address,
        /// f32 `[.., head_dim]`, or null: nothing is turned.
        angles: Address,
        /// u32 `[rows]`, or null: which row of `angles` is each row's; null is its own.
        positions: Address,
        /// u32 `[rows]`, or null: where keys and values go, `block · block_tokens + place`; null leaves them in `qkv`.
        slots: Address,
        /// Where keys and values lie; the block tables are not read.
        paging: Paging,
        /// How many rows.
        rows: u32,
        /// Query heads.
        heads: u32,
        /// Numbers from row to row of `qkv`.
        qkv_stride: u32,
        /// Added to the mean of squares.
        eps: f32,
    }
    /// `silu_mul`.
    SiluMulParams {
        /// bf16 `[rows, 2 · width]`.
        gate_up: Address,
        /// bf16 `[rows, width]`.
        out: Address,
        /// How many rows.
        rows: u32,
        /// A multiple of 8.
        width: u32,
    }
    /// `linear_few_rows_{8,16}`.
    LinearFewRowsParams {
        /// bf16 `[rows, inputs]`.
        x: Address,
        /// bf16 `[outputs, inputs]`; of [`FewRowsResult::GatedBf16`] `[2 · outputs, inputs]`, the gate before the up projection.
        w: Address,
        /// f32, as long as `w` has rows, or null.
        bias: Address,
        /// `[rows, outputs]`, of what `result` says.
        out: Address,
        /// How many rows, at most those of the kernel's name.
        rows: u32,
        /// A multiple of 8.
        inputs: u32,
        /// A multiple of 8.
        outputs: u32,
        /// A [`FewRowsResult`].
        result: u32,
    }
    /// `embed` and `select_rows`.
    GatherParams {
        /// bf16 (`embed`) or f32 (`select_rows`) `[.., width]`.
        from: Address,
        /// u32 `[rows]`.
        indices: Address,
        /// f32 `[rows, width]`.
        out: Address,
        /// A multiple of 8.
        width: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
    /// All that happens to one token of one row before the draw.
    LogitChange {
        /// Which row.
        row: u32,
        /// Which token; at most once for each row.
        token: u32,
        /// Added first.
        bias: f32,
        /// How often it is in the answer: 0 is in the prompt only, [`LogitChange::UNSEEN`] in neither.
        seen: i32,
        /// 1 when it may not be drawn.
        withheld: u32,
    }
    /// A row's penalties, as in `worker_core::sampling`.
    Penalties {
        /// 1 is none.
        repetition: f32,
        /// 0 is none.
        frequency: f32,
        /// 0 is none.
        presence: f32,
    }
    /// `adjust_logits`.
    AdjustParams {
        /// f32 `[rows, vocab]`.
        logits: Address,
        /// [`LogitChange`]s.
        changes: Address,
        /// [`Penalties`] of each row.
        penalties: Address,
        /// How many changes.
        count: u32,
        /// Tokens of a row.
        vocab: u32,
    }
    /// How a row's token is drawn.
    Draw {
        /// Seeds the draw.
        seed: u64,
        /// Tokens generated before.
        position: u64,
        /// 0 is greedy.
        temperature: f32,
        /// 1 keeps all.
        top_p: f32,
        /// 0 keeps all.
        min_p: f32,
        /// 0 keeps all.
        top_k: u32,
    }
    /// `sample`.
    SampleParams {
        /// f32 `[rows, vocab]`.
        logits: Address,
        /// [`Draw`]s, one for each row.
        draws: Address,
        /// u32 `[rows]`: the tokens, or [`SampleParams::NO_TOKEN`].
        tokens: Address,
        /// Tokens of a row, below 2²⁴.
        vocab: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
}

impl DecodeChunk {
    /// The slot of a chunk that is its sequence's only one: it writes the row itself.
    pub const WHOLE: u32 = u32::MAX;
}

/// What becomes of a product of few rows, as in `cu/linear_few_rows.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum FewRowsResult {
    /// It replaces bf16.
    ReplaceBf16 = 0,
    /// It replaces f32.
    ReplaceF32 = 1,
    /// It is added to f32.
    AddToF32 = 2,
    /// silu(gate) · up replaces bf16.
    GatedBf16 = 3,
}

impl LogitChange {
    /// `seen` of a token that is in neither prompt nor answer.
    pub const UNSEEN: i32 = -1;
}

impl RopeStoreParams {
    /// A row whose keys and values are not stored.
    pub const NO_SLOT: u32 = u32::MAX;
}

impl SampleParams {
    /// Drawn from a row with a logit that is no number, or infinite.
    pub const NO_TOKEN: u32 = u32::MAX;
}
