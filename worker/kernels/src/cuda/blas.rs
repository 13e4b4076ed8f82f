//! Dense products by cuBLASLt, opened when there is a GPU.
//!
//! `out = x · wᵀ (+ bias)`, row-major, is to a library that counts by columns `outᵀ = w · xᵀ`: w is read as a transposed matrix [inputs,
//! outputs], x as [inputs, rows]. Next: [`super::kernels`] multiplies.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as DescriptionAttribute;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
use cudarc::cublaslt::sys::cudaDataType;

use super::error::CudaError;
use super::gpu::Gpu;
use super::memory::Memory;
use super::params::Address;

/// All that is called of cuBLASLt. The fake one of the tests has these and no others.
pub const FUNCTIONS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// `CUBLAS_OP_T`, an enumeration that cudarc has with cuBLAS only.
const TRANSPOSED: i32 = 1;

/// What NVIDIA recommends for Hopper; less on older ones, where it does no harm.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Numbers that a product writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Output {
    /// Replaces bf16.
    Bf16,
    /// Replaces f32.
    F32,
    /// Is added to f32.
    AddToF32,
}

/// One product; pointers are device addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// bf16 `[rows, inputs]`.
    pub(super) x: Address,
    /// bf16 `[outputs, inputs]`.
    pub(super) w: Address,
    /// `[outputs]` in the format of `out`, or null.
    pub(super) bias: Address,
    /// `[rows, outputs]`.
    pub(super) out: Address,
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) output: Output,
}

/// What an algorithm is chosen by.
type Shape = (usize, usize, usize, Output, bool);

/// cuBLASLt on one GPU.
pub(super) struct Blas {
    gpu: Arc<Gpu>,
    handle: sys::cublasLtHandle_t,
    workspace: Memory,
    algorithms: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: cuBLASLt may be called from any thread; the workspace is used in the order of the one stream.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Drop for Blas {
    fn drop(&mut self) {
        // The thread may be another than that which opened it.
        let _ = self.gpu.enter();
        // SAFETY: created by `open`, and used no more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Opens the library.
fn find() -> Result<(), CudaError> {
    // SAFETY: opens the library; its constructors do nothing that Rust relies on.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoBlas);
    }
    // SAFETY: as above, and it is there.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: the address is taken as that of nothing in particular, and not used.
        if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(CudaError::MissingBlasFunction(name));
        }
    }
    Ok(())
}

impl Blas {
    /// Opens the library, and a workspace for its products.
    pub(super) fn open(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        find()?;
        let workspace = Memory::kept(gpu, WORKSPACE_BYTES)?;
        gpu.enter()?;
        let handle = result::create_handle().map_err(during("cublasLtCreate"))?;
        Ok(Self { gpu: Arc::clone(gpu), handle, workspace, algorithms: Mutex::default() })
    }

    /// Starts a product.
    ///
    /// # Safety
    /// The addresses are of memory as large as the product takes it to be.
    pub(super) unsafe fn multiply(&self, product: Product) -> Result<(), CudaError> {
        if product.rows == 0 {
            return Ok(());
        }
        self.gpu.enter()?;
        let operands = Operands::new(&product)?;
        let algorithm = self.algorithm(&product, &operands)?;
        let (alpha, beta) = (1.0f32, if product.output == Output::AddToF32 { 1.0f32 } else { 0.0 });
        // SAFETY: the layouts say what the product says; the caller vouches for the addresses, of which out is read when beta is 1.
        unsafe {
            result::matmul(
                self.handle,
                operands.description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                product.w as *const c_void,
                operands.w.0,
                product.x as *const c_void,
                operands.x.0,
                product.out as *const c_void,
                operands.out.0,
                product.out as *mut c_void,
                operands.out.0,
                &raw const algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES,
                self.gpu.stream().cu_stream().cast(),
            )
        }
        .map_err(during("cublasLtMatmul"))?;
        self.gpu.count_launch();
        Ok(())
    }

    /// What cuBLASLt thinks is fastest, asked once for each shape.
    fn algorithm(
        &self,
        product: &Product,
        operands: &Operands,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CudaError> {
        let shape = (product.rows, product.inputs, product.outputs, product.output, product.bias != 0);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(algorithm) = algorithms.get(&shape) {
            return Ok(*algorithm);
        }
        let preference = Preference::new()?;
        let Operands { description, w, x, out } = operands;
        // SAFETY: all of them exist.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                description.0,
                w.0,
                x.0,
                out.0,
                out.0,
                preference.0,
            )
        }
        .map_err(during("cublasLtMatmulAlgoGetHeuristic"))?;
        algorithms.insert(shape, found.algo);
        Ok(found.algo)
    }
}

/// What a product is, in cuBLASLt's words.
struct Operands {
    description: Description,
    w: Layout,
    x: Layout,
    out: Layout,
}

impl Operands {
    fn new(product: &Product) -> Result<Self, CudaError> {
        let Product { rows, inputs, outputs, output, .. } = *product;
        let out_type = match output {
            Output::Bf16 => cudaDataType::CUDA_R_16BF,
            Output::F32 | Output::AddToF32 => cudaDataType::CUDA_R_32F,
        };
        Ok(Self {
            description: Description::new(product)?,
            w: Layout::new(cudaDataType::CUDA_R_16BF, inputs, outputs)?,
            x: Layout::new(cudaDataType::CUDA_R_16BF, inputs, rows)?,
            out: Layout::new(out_type, outputs, rows)?,
        })
    }
}

/// Sums in f32, w transposed, and what is added at the end.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(product: &Product) -> Result<Self, CudaError> {
        let description = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            cudaDataType::CUDA_R_32F,
        )
        .map(Self)
        .map_err(during("cublasLtMatmulDescCreate"))?;
        description.set(DescriptionAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if product.bias != 0 {
            let with_bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(DescriptionAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &with_bias)?;
            description.set(DescriptionAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
        }
        Ok(description)
    }

    fn set<T>(&self, attribute: DescriptionAttribute, value: &T) -> Result<(), CudaError> {
        let from = std::ptr::from_ref(value).cast();
        // SAFETY: the value is copied, and is of the attribute's type: a 32-bit number, or an address.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, from, size_of::<T>()) }
            .map_err(during("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and used no more.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// A matrix whose columns lie one behind another.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: cudaDataType, rows: usize, columns: usize) -> Result<Self, CudaError> {
        result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
            .map(Self)
            .map_err(during("cublasLtMatrixLayoutCreate"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and used no more.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What an algorithm may use.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, CudaError> {
        let preference =
            result::create_matmul_pref().map(Self).map_err(during("cublasLtMatmulPreferenceCreate"))?;
        let (most, bytes) = (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES);
        // SAFETY: the value is copied, and is a number of 64 bits.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                most,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )
        }
        .map_err(during("cublasLtMatmulPreferenceSetAttribute"))?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and used no more.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn during(call: &'static str) -> impl FnOnce(CublasError) -> CudaError {
    move |CublasError(status)| CudaError::Call {
        call,
        of: None,
        code: status as u32,
        message: Some(format!("{status:?}")),
    }
}
