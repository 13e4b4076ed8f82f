//! The operations on a GPU, one launch each; nothing waits but [`Device::read`].
//!
//! The residual stream, angles and logits are f32, all else bf16. Unlike on the CPU, a row's bits may depend on what is beside it: on how
//! many rows a dense product has where these are more than few, since cuBLASLt chooses by shape, and on whether attention decodes much or
//! little. All else keeps to one order. Caller: the model's forward pass. Next: [`super::products`].

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;

use super::attention::{Attention, Step};
use super::blas::{Blas, Output};
use super::buffer::{CudaBuffer, CudaKvPool, CudaLinear, Kind};
use super::error::CudaError;
use super::gpu::Gpu;
use super::launch;
use super::memory::Memory;
use super::params::{FewRowsResult, GatherParams, RmsNormParams, RopeStoreParams, SiluMulParams};
use crate::{AttentionShape, Device, KernelError, Kernels, KvLayout, RopeShape, Span, WeightView};

/// Blocks of KV that are read at a time go through so much pinned memory, which is kept.
const STAGED_BYTES: usize = 32 << 20;

/// Which kernel computes prompts, of those that the GPU has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrefillKernel {
    /// The faster one: by wgmma where the GPU has it, of layouts of which [`launch::wgmma_takes`] is true; else by mma.sync.
    #[default]
    Auto,
    /// By mma.sync, which every GPU has.
    MmaSync,
    /// As `Auto`, of a GPU that must have wgmma: compute capability 9.0.
    Wgmma,
}

/// The kernels on one GPU.
pub struct CudaKernels {
    pub(super) gpu: Arc<Gpu>,
    pub(super) blas: Blas,
    prefill: PrefillKernel,
    /// Of the step whose layers run.
    step: Mutex<Option<Step>>,
}

impl CudaKernels {
    /// Opens GPU `ordinal`, counted from 0.
    ///
    /// # Errors
    /// [`CudaError`], which says what this machine lacks.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        Self::on(Gpu::open(ordinal)?)
    }

    /// Computes on a GPU that is open.
    ///
    /// # Errors
    /// [`CudaError`], when there is no cuBLASLt.
    pub fn on(gpu: Arc<Gpu>) -> Result<Self, CudaError> {
        let blas = Blas::open(&gpu)?;
        Ok(Self { gpu, blas, prefill: PrefillKernel::default(), step: Mutex::default() })
    }

    /// With another kernel for prompts.
    ///
    /// # Errors
    /// [`CudaError::NoWgmma`], when the GPU has none.
    pub fn with_prefill(self, prefill: PrefillKernel) -> Result<Self, CudaError> {
        if prefill == PrefillKernel::Wgmma && !self.gpu.has_wgmma() {
            let (major, minor) = self.gpu.capability();
            return Err(CudaError::NoWgmma { name: self.gpu.name().to_owned(), major, minor });
        }
        // What is planned is in the tiles of one kernel.
        Ok(Self { prefill, step: Mutex::default(), ..self })
    }

    /// Whether prompts whose KV is laid out so are computed by wgmma.
    fn by_wgmma(&self, layout: KvLayout) -> bool {
        self.prefill != PrefillKernel::MmaSync && self.gpu.has_wgmma() && launch::wgmma_takes(layout)
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn step(&self) -> MutexGuard<'_, Option<Step>> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gather(
        &self,
        from: u64,
        rows: &[u32],
        width: usize,
        out: &mut CudaBuffer,
        launch: launch::Launch,
    ) -> Result<(), KernelError> {
        out.reset(&self.gpu, rows.len(), width, Kind::F32)?;
        let indices = Memory::passing(&self.gpu, rows)?;
        let params = GatherParams {
            from,
            indices: indices.address(),
            out: out.address(),
            width: width as u32,
            reserved: 0,
        };
        // SAFETY: the callers have checked the indices against what they index.
        Ok(unsafe { self.gpu.launch(launch, &params) }?)
    }
}

impl Device for CudaKernels {
    type Buffer = CudaBuffer;
    type Linear = CudaLinear;
    type Vector = Memory;
    type KvPool = CudaKvPool;

    fn buffer(&self) -> CudaBuffer {
        CudaBuffer::default()
    }

    fn write(&self, rows: &[f32], width: usize, buffer: &mut CudaBuffer) -> Result<(), KernelError> {
        if width == 0 || !rows.len().is_multiple_of(width) {
            return Err(mismatch(
                "write",
                format!("whole rows of {width}"),
                format!("{} numbers", rows.len()),
            ));
        }
        buffer.reset(&self.gpu, rows.len() / width, width, Kind::F32)?;
        Ok(buffer.memory()?.write(rows)?)
    }

    fn read<'a>(&self, buffer: &'a CudaBuffer) -> Result<Cow<'a, [f32]>, KernelError> {
        let (memory, count) = (buffer.memory()?, buffer.rows() * buffer.width());
        Ok(Cow::Owned(match buffer.kind() {
            Kind::F32 => memory.read::<f32>(count)?,
            Kind::Bf16 => {
                memory.read::<u16>(count)?.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
            }
        }))
    }

    fn linear(&self, parts: &[WeightView<'_>], bias: &[WeightView<'_>]) -> Result<CudaLinear, KernelError> {
        CudaLinear::upload(&self.gpu, parts, bias)
    }

    fn vector(&self, weight: WeightView<'_>) -> Result<Memory, KernelError> {
        let mut numbers = vec![0.0; weight.rows() * weight.columns()];
        for (row, to) in numbers.chunks_exact_mut(weight.columns().max(1)).enumerate() {
            weight.read_row(row, to);
        }
        let memory = Memory::kept(&self.gpu, 4 * numbers.len())
            .map_err(|error| error.of_allocation(4 * numbers.len()))?;
        memory.write(&numbers)?;
        Ok(memory)
    }

    fn kv_pool(&self, layout: KvLayout) -> Result<CudaKvPool, KernelError> {
        CudaKvPool::allocate(&self.gpu, layout)
    }

    fn kv_format(&self) -> &'static str {
        "cuda-bf16"
    }

    fn read_blocks(&self, pool: &CudaKvPool, blocks: &[u32], bytes: &mut [u8]) -> Result<(), KernelError> {
        let block_bytes = CudaKvPool::block_bytes(pool.layout());
        pool.layout().check_blocks(blocks, bytes.len(), block_bytes)?;
        // As many at a time as pinned memory is worth keeping for.
        let at_once = (STAGED_BYTES / block_bytes.max(1)).max(1);
        for (blocks, bytes) in blocks.chunks(at_once).zip(bytes.chunks_mut(at_once * block_bytes)) {
            // SAFETY: the pool has these blocks, and each of their parts is as large as all others.
            unsafe { self.gpu.download(&pool.parts(blocks), bytes) }?;
        }
        Ok(())
    }

    fn write_blocks(&self, pool: &mut CudaKvPool, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        let block_bytes = CudaKvPool::block_bytes(pool.layout());
        pool.layout().check_blocks(blocks, bytes.len(), block_bytes)?;
        let parts = pool.parts(blocks);
        let part_bytes = bytes.len() / parts.len().max(1);
        for (part, bytes) in parts.iter().zip(bytes.chunks_exact(part_bytes.max(1))) {
            // SAFETY: as above.
            unsafe { self.gpu.upload(*part, bytes) }?;
        }
        Ok(())
    }
}

impl Kernels for CudaKernels {
    fn embed(&self, table: &CudaLinear, tokens: &[u32], out: &mut CudaBuffer) -> Result<(), KernelError> {
        expect_eights("embed", table.inputs)?;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= table.outputs) {
            return Err(mismatch("embed", format!("tokens below {}", table.outputs), token.to_string()));
        }
        self.gather(table.weights.address(), tokens, table.inputs, out, launch::embed(tokens.len())?)
    }

    fn rms_norm(
        &self,
        x: &CudaBuffer,
        weight: &Memory,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        x.expect("rms_norm", Kind::F32)?;
        expect_eights("rms_norm", x.width())?;
        expect_width("rms_norm", x, weight.bytes() / 4)?;
        out.reset(&self.gpu, x.rows(), x.width(), Kind::Bf16)?;
        let params = RmsNormParams {
            x: x.address(),
            addend: 0,
            weight: weight.address(),
            out: out.address(),
            width: x.width() as u32,
            eps,
        };
        // SAFETY: x, weight and out are of one width; without an addend x is only read.
        Ok(unsafe { self.gpu.launch(launch::rms_norm(x.rows(), x.width())?, &params) }?)
    }

    fn linear_into(&self, x: &CudaBuffer, w: &CudaLinear, out: &mut CudaBuffer) -> Result<(), KernelError> {
        x.expect("linear", Kind::Bf16)?;
        expect_width("linear", x, w.inputs)?;
        out.reset(&self.gpu, x.rows(), w.outputs, Kind::Bf16)?;
        self.multiply(x, w, out, Output::Bf16)
    }

    fn logits(&self, x: &CudaBuffer, w: &CudaLinear, out: &mut CudaBuffer) -> Result<(), KernelError> {
        x.expect("logits", Kind::Bf16)?;
        expect_width("logits", x, w.inputs)?;
        out.reset(&self.gpu, x.rows(), w.outputs, Kind::F32)?;
        self.multiply(x, w, out, Output::F32)
    }

    fn linear_add(&self, x: &CudaBuffer, w: &CudaLinear, out: &mut CudaBuffer) -> Result<(), KernelError> {
        x.expect("linear", Kind::Bf16)?;
        out.expect("linear", Kind::F32)?;
        expect_width("linear", x, w.inputs)?;
        expect_width("linear", out, w.outputs)?;
        if out.rows() != x.rows() {
            return Err(mismatch("linear", format!("{} rows to add to", x.rows()), out.rows().to_string()));
        }
        self.multiply(x, w, out, Output::AddToF32)
    }

    fn rope_store(
        &self,
        qkv: &mut CudaBuffer,
        shape: RopeShape<'_, Self>,
        pool: &mut CudaKvPool,
    ) -> Result<(), KernelError> {
        let KvLayout { kv_heads, head_dim, .. } = pool.layout();
        let RopeShape { layer, heads, angles, norm, spans } = shape;
        qkv.expect("rope_store", Kind::Bf16)?;
        expect_width("rope_store", qkv, (heads + 2 * kv_heads) * head_dim)?;
        angles.expect("rope_store", Kind::F32)?;
        expect_width("rope_store", angles, head_dim)?;
        let end = Span::last_end(spans);
        if angles.rows() < end {
            let expected = format!("angles of {end} positions");
            return Err(mismatch("rope_store", expected, angles.rows().to_string()));
        }
        for weight in norm.iter().flat_map(|norm| [norm.query, norm.key]) {
            if weight.bytes() != 4 * head_dim {
                let found = format!("{} numbers", weight.bytes() / 4);
                return Err(mismatch("rope_store", format!("norms of {head_dim}"), found));
            }
        }
        let mut step = self.step();
        let pool_and_kernel = (&*pool, self.by_wgmma(pool.layout()));
        let step = Step::of(&mut step, &self.gpu, spans, (qkv.rows(), layer), pool_and_kernel)?;
        let (keys, values) = pool.layer(layer);
        let (query_norm, key_norm, eps) =
            norm.map_or((0, 0, 0.0), |norm| (norm.query.address(), norm.key.address(), norm.eps));
        let params = RopeStoreParams {
            qkv: qkv.address(),
            keys,
            values,
            query_norm,
            key_norm,
            angles: angles.address(),
            positions: step.positions.address(),
            slots: step.slots.address(),
            paging: pool.paging(0),
            rows: qkv.rows() as u32,
            heads: heads as u32,
            qkv_stride: qkv.width() as u32,
            eps,
        };
        let launch = launch::rope_store(head_dim, qkv.rows(), heads, kv_heads)?;
        // SAFETY: a row is as wide as its heads, norms are as long as a head, angles are there for every position; `slots` are within the pool.
        Ok(unsafe { self.gpu.launch(launch, &params) }?)
    }

    fn attention(
        &self,
        qkv: &CudaBuffer,
        pool: &CudaKvPool,
        shape: AttentionShape<'_>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        qkv.expect("attention", Kind::Bf16)?;
        expect_eights("attention", qkv.width())?;
        let layout = pool.layout();
        let width = shape.heads * layout.head_dim;
        if !shape.heads.is_multiple_of(layout.kv_heads) || width > qkv.width() {
            let expected = format!("a multiple of {} heads within {} columns", layout.kv_heads, qkv.width());
            return Err(mismatch("attention", expected, shape.heads.to_string()));
        }
        let AttentionShape { layer, heads, scale, spans } = shape;
        let mut step = self.step();
        let pool_and_kernel = (pool, self.by_wgmma(layout));
        let step = Step::of(&mut step, &self.gpu, spans, (qkv.rows(), layer), pool_and_kernel)?;
        out.reset(&self.gpu, qkv.rows(), width, Kind::Bf16)?;
        Attention { gpu: &self.gpu, qkv, pool, out, layer, heads, scale }.run(step)
    }

    fn silu_mul(&self, gate_up: &CudaBuffer, out: &mut CudaBuffer) -> Result<(), KernelError> {
        gate_up.expect("silu_mul", Kind::Bf16)?;
        let width = gate_up.width() / 2;
        expect_eights("silu_mul", width)?;
        expect_width("silu_mul", gate_up, 2 * width)?;
        out.reset(&self.gpu, gate_up.rows(), width, Kind::Bf16)?;
        let params = SiluMulParams {
            gate_up: gate_up.address(),
            out: out.address(),
            rows: gate_up.rows() as u32,
            width: width as u32,
        };
        // SAFETY: both buffers have these rows.
        Ok(unsafe { self.gpu.launch(launch::silu_mul(gate_up.rows(), width)?, &params) }?)
    }

    fn linear_silu_mul(
        &self,
        x: &CudaBuffer,
        w: &CudaLinear,
        gate_up: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let width = w.outputs / 2;
        if !Self::multiplies_few(x.rows(), w) || !width.is_multiple_of(8) {
            self.linear_into(x, w, gate_up)?;
            return self.silu_mul(gate_up, out);
        }
        x.expect("linear", Kind::Bf16)?;
        expect_width("linear", x, w.inputs)?;
        out.reset(&self.gpu, x.rows(), width, Kind::Bf16)?;
        self.multiply_few(x, w, out, FewRowsResult::GatedBf16)
    }

    fn select_rows(&self, x: &CudaBuffer, rows: &[usize], out: &mut CudaBuffer) -> Result<(), KernelError> {
        x.expect("select_rows", Kind::F32)?;
        expect_eights("select_rows", x.width())?;
        if let Some(row) = rows.iter().find(|&&row| row >= x.rows()) {
            return Err(mismatch("select_rows", format!("rows below {}", x.rows()), row.to_string()));
        }
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        self.gather(x.address(), &rows, x.width(), out, launch::select_rows(rows.len())?)
    }
}

fn expect_width(operation: &'static str, x: &CudaBuffer, width: usize) -> Result<(), KernelError> {
    if x.width() == width {
        return Ok(());
    }
    Err(mismatch(operation, format!("rows of {width}"), x.width().to_string()))
}

/// What the kernels that move 16 bytes at once need.
fn expect_eights(operation: &'static str, width: usize) -> Result<(), KernelError> {
    if width.is_multiple_of(8) {
        return Ok(());
    }
    Err(mismatch(operation, "rows of a multiple of 8".into(), width.to_string()))
}

pub(super) fn mismatch(operation: &'static str, expected: String, found: String) -> KernelError {
    KernelError::Shape { operation, expected, found }
}
