//! The driver's C interface: the functions that are used, found at run time.
//!
//! Nothing here is called before all are found, so that a machine without a driver, or with one that is too old, is an error and not
//! a crash. Next: [`super::gpu`] makes safe calls of them.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use super::error::CudaError;
use super::library::{Library, functions};
use super::params::Address;

/// A context, stream, module, function or event.
pub(super) type Handle = *mut c_void;

functions! {
    /// What is used of libcuda.
    Driver {
        init = "cuInit"(u32),
        driver_version = "cuDriverGetVersion"(*mut i32),
        error_string = "cuGetErrorString"(i32, *mut *const c_char),
        device_count = "cuDeviceGetCount"(*mut i32),
        device = "cuDeviceGet"(*mut i32, i32),
        device_name = "cuDeviceGetName"(*mut c_char, i32, i32),
        device_attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32),
        retain_context = "cuDevicePrimaryCtxRetain"(*mut Handle, i32),
        set_context = "cuCtxSetCurrent"(Handle),
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize),
        create_stream = "cuStreamCreate"(*mut Handle, u32),
        synchronize = "cuStreamSynchronize"(Handle),
        load_module = "cuModuleLoadData"(*mut Handle, *const c_void),
        function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char),
        set_function_attribute = "cuFuncSetAttribute"(Handle, i32, i32),
        launch = "cuLaunchKernel"(
            Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void,
        ),
        allocate = "cuMemAlloc_v2"(*mut Address, usize),
        free = "cuMemFree_v2"(Address),
        allocate_in_order = "cuMemAllocAsync"(*mut Address, usize, Handle),
        free_in_order = "cuMemFreeAsync"(Address, Handle),
        copy_to_device = "cuMemcpyHtoDAsync_v2"(Address, *const c_void, usize, Handle),
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, Address, usize, Handle),
    }
}

/// The first CUDA whose drivers load the machine code.
const NEEDED_VERSION: i32 = 13_000;

impl Driver {
    /// Opens and initialises the driver.
    pub(super) fn open(path: &Path) -> Result<Self, CudaError> {
        let library = Library::open(path).ok_or_else(|| CudaError::NoDriver(path.to_owned()))?;
        // SAFETY: the types are those of the driver API's documentation.
        let driver = unsafe { Self::find(library) }.map_err(CudaError::MissingFunction)?;
        let mut version = 0;
        // SAFETY: writes the number it is given; needs no initialisation.
        let status = unsafe { (driver.driver_version)(&raw mut version) };
        driver.check("cuDriverGetVersion", status)?;
        if version < NEEDED_VERSION {
            return Err(CudaError::OldDriver { major: version / 1000, minor: version % 1000 / 10 });
        }
        // SAFETY: may be called any number of times.
        match unsafe { (driver.init)(0) } {
            NO_DEVICE => Err(CudaError::NoDevice),
            status => driver.check("cuInit", status).map(|()| driver),
        }
    }

    /// Turns a status into a result.
    pub(super) fn check(&self, call: &'static str, status: i32) -> Result<(), CudaError> {
        if status == 0 {
            Ok(())
        } else {
            Err(CudaError::Call { call, code: status, message: self.message(status) })
        }
    }

    fn message(&self, status: i32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: writes the pointer it is given.
        let unknown = unsafe { (self.error_string)(status, &raw mut text) };
        // SAFETY: where the driver knows the status, the text is its own and terminated.
        (unknown == 0 && !text.is_null())
            .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: i32 = 100;
