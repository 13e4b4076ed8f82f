//! Dense products by cuBLASLt, opened when there is a GPU.
//!
//! `out = x · wᵀ (+ bias)`, row-major, is to a library that counts by columns `outᵀ = w · xᵀ`: w is read as a transposed matrix [inputs,
//! outputs], x as [inputs, rows]. Next: [`super::kernels`] calls [`Blas::multiply`].

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::driver::Handle;
use super::error::CudaError;
use super::gpu::{Gpu, Memory};
use super::library::{Library, functions};
use super::params::Address;

/// `cublasLtMatmulAlgo_t`.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Found {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: i32,
    waves: f32,
    reserved: [i32; 4],
}

functions! {
    /// What is used of libcublasLt.
    Functions {
        create = "cublasLtCreate"(*mut Handle),
        create_product = "cublasLtMatmulDescCreate"(*mut Handle, i32, i32),
        set_product = "cublasLtMatmulDescSetAttribute"(Handle, i32, *const c_void, usize),
        destroy_product = "cublasLtMatmulDescDestroy"(Handle),
        create_layout = "cublasLtMatrixLayoutCreate"(*mut Handle, i32, u64, u64, i64),
        destroy_layout = "cublasLtMatrixLayoutDestroy"(Handle),
        create_preference = "cublasLtMatmulPreferenceCreate"(*mut Handle),
        set_preference = "cublasLtMatmulPreferenceSetAttribute"(Handle, i32, *const c_void, usize),
        destroy_preference = "cublasLtMatmulPreferenceDestroy"(Handle),
        heuristic = "cublasLtMatmulAlgoGetHeuristic"(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Found, *mut i32,
        ),
        multiply = "cublasLtMatmul"(
            Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
            Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, Handle,
        ),
    }
}

const COMPUTE_F32: i32 = 68;
const R_F32: i32 = 0;
const R_BF16: i32 = 14;
const PRODUCT_TRANSA: i32 = 3;
const PRODUCT_EPILOGUE: i32 = 7;
const PRODUCT_BIAS: i32 = 8;
const TRANSPOSED: i32 = 1;
const EPILOGUE_BIAS: u32 = 4;
const PREFERENCE_WORKSPACE_BYTES: i32 = 1;

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
    functions: Functions,
    handle: Handle,
    workspace: Memory,
    algorithms: Mutex<HashMap<Shape, Algorithm>>,
}

// SAFETY: cuBLASLt may be called from any thread; the workspace is used in the order of the one stream.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Something to destroy when it is no longer needed.
struct Owned(Handle, unsafe extern "C" fn(Handle) -> i32);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created by the function that belongs to this one, and used no more.
        let _ = unsafe { (self.1)(self.0) };
    }
}

impl Blas {
    /// Opens the library.
    pub(super) fn open(gpu: &Arc<Gpu>, path: &Path) -> Result<Self, CudaError> {
        let none = || CudaError::NoBlas(path.to_owned());
        let library = Library::open(path).ok_or_else(none)?;
        // SAFETY: the types are those of cuBLASLt's documentation.
        let functions = unsafe { Functions::find(library) }.map_err(|_| none())?;
        let mut handle = std::ptr::null_mut();
        gpu.enter()?;
        // SAFETY: writes the handle; a context is current.
        check("cublasLtCreate", unsafe { (functions.create)(&raw mut handle) })?;
        let workspace = Memory::kept(gpu, WORKSPACE_BYTES)?;
        Ok(Self { gpu: Arc::clone(gpu), functions, handle, workspace, algorithms: Mutex::default() })
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
        let Product { rows, inputs, outputs, output, .. } = product;
        let description = self.describe(&product)?;
        let out_type = if output == Output::Bf16 { R_BF16 } else { R_F32 };
        let w = self.layout(R_BF16, inputs, outputs)?;
        let x = self.layout(R_BF16, inputs, rows)?;
        let out = self.layout(out_type, outputs, rows)?;
        let algorithm = self.algorithm(&product, [&description, &w, &x, &out])?;
        let (alpha, beta) = (1.0f32, if output == Output::AddToF32 { 1.0f32 } else { 0.0 });
        // SAFETY: the layouts say what the product says; the caller vouches for the addresses, of which out is read when beta is 1.
        let status = unsafe {
            (self.functions.multiply)(
                self.handle,
                description.0,
                (&raw const alpha).cast(),
                product.w as *const c_void,
                w.0,
                product.x as *const c_void,
                x.0,
                (&raw const beta).cast(),
                product.out as *const c_void,
                out.0,
                product.out as *mut c_void,
                out.0,
                &raw const algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES,
                self.gpu.stream(),
            )
        };
        check("cublasLtMatmul", status)
    }

    fn describe(&self, product: &Product) -> Result<Owned, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        let status = unsafe { (self.functions.create_product)(&raw mut handle, COMPUTE_F32, R_F32) };
        check("cublasLtMatmulDescCreate", status)?;
        let description = Owned(handle, self.functions.destroy_product);
        self.set(&description, PRODUCT_TRANSA, &TRANSPOSED)?;
        if product.bias != 0 {
            self.set(&description, PRODUCT_EPILOGUE, &EPILOGUE_BIAS)?;
            self.set(&description, PRODUCT_BIAS, &product.bias)?;
        }
        Ok(description)
    }

    fn set<T>(&self, description: &Owned, attribute: i32, value: &T) -> Result<(), CudaError> {
        // SAFETY: the value is copied, and is of the attribute's type: a 32-bit number, or an address.
        let status = unsafe {
            (self.functions.set_product)(
                description.0,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        check("cublasLtMatmulDescSetAttribute", status)
    }

    /// A matrix whose columns lie one behind another.
    fn layout(&self, kind: i32, rows: usize, columns: usize) -> Result<Owned, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        let status = unsafe {
            (self.functions.create_layout)(&raw mut handle, kind, rows as u64, columns as u64, rows as i64)
        };
        check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Owned(handle, self.functions.destroy_layout))
    }

    /// What cuBLASLt thinks is fastest, asked once for each shape.
    fn algorithm(
        &self,
        product: &Product,
        [description, w, x, out]: [&Owned; 4],
    ) -> Result<Algorithm, CudaError> {
        let shape = (product.rows, product.inputs, product.outputs, product.output, product.bias != 0);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(algorithm) = algorithms.get(&shape) {
            return Ok(*algorithm);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            (self.functions.create_preference)(&raw mut handle)
        })?;
        let preference = Owned(handle, self.functions.destroy_preference);
        let bytes = WORKSPACE_BYTES;
        // SAFETY: the value is copied, and is a number of 64 bits.
        let status = unsafe {
            (self.functions.set_preference)(
                preference.0,
                PREFERENCE_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )
        };
        check("cublasLtMatmulPreferenceSetAttribute", status)?;
        let (mut found, mut count) = (Found::default(), 0);
        // SAFETY: writes one result and how many there are.
        let status = unsafe {
            (self.functions.heuristic)(
                self.handle,
                description.0,
                w.0,
                x.0,
                out.0,
                out.0,
                preference.0,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        if count == 0 {
            return Err(CudaError::Call {
                call: "cublasLtMatmulAlgoGetHeuristic",
                code: found.status,
                message: None,
            });
        }
        algorithms.insert(shape, found.algorithm);
        Ok(found.algorithm)
    }
}

fn check(call: &'static str, status: i32) -> Result<(), CudaError> {
    if status == 0 { Ok(()) } else { Err(CudaError::Call { call, code: status, message: None }) }
}
