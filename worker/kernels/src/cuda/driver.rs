//! The driver before anything is asked of it: is it there, is it new enough, has it all that is used.
//!
//! cudarc finds a function when it is first called, and panics where there is none. So whatever is called by this crate is looked for
//! here first, and a machine without a driver, or with one that is too old, is an error and not a crash. Next: [`super::gpu`].

use std::ffi::c_void;

use cudarc::driver::{DriverError, result, sys};

use super::error::CudaError;

/// All that is called of the driver, by this crate or by what it uses of cudarc. The fake driver of the tests has these and no others.
pub const FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemPoolSetAttribute",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuTensorMapEncodeTiled",
];

/// The first CUDA whose drivers load the machine code.
const NEEDED_VERSION: i32 = 13_000;

/// Opens and initialises the driver.
pub(super) fn open() -> Result<(), CudaError> {
    // SAFETY: opens the library; its constructors do nothing that Rust relies on.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: as above, and it is there.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: the address is taken as that of nothing in particular, and not used.
        if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(CudaError::MissingFunction(name));
        }
    }
    let mut version = 0;
    // SAFETY: writes the number it is given; needs no initialisation.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(during("cuDriverGetVersion"))?;
    if version < NEEDED_VERSION {
        return Err(CudaError::OldDriver { major: version / 1000, minor: version % 1000 / 10 });
    }
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(CudaError::NoDevice),
        done => done.map_err(during("cuInit")),
    }
}

/// Says which call it was that failed.
pub(super) fn during(call: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |error| CudaError::Call {
        call,
        of: None,
        code: error.0 as u32,
        message: error.error_string().ok().map(|text| text.to_string_lossy().into_owned()),
    }
}
