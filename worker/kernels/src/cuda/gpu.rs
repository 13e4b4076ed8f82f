//! One GPU: its context, one stream, the kernels, and memory.
//!
//! All work goes to the one stream and is done in order; only [`Gpu::synchronize`] and [`Memory::read`] wait for it. Every call's status
//! is looked at. Next: [`super::kernels`] computes with it.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use super::driver::{Driver, Handle};
use super::error::CudaError;
use super::launch::Launch;
use super::modules::MODULES;
use super::params::{Address, DeviceValue};

/// Where the libraries of a machine with a GPU are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Libraries {
    /// The driver.
    pub driver: PathBuf,
    /// cuBLASLt.
    pub blas: PathBuf,
}

impl Libraries {
    /// Where the system's loader finds them.
    #[must_use]
    pub fn system() -> Self {
        Self { driver: "libcuda.so.1".into(), blas: "libcublasLt.so.13".into() }
    }
}

/// A GPU.
pub struct Gpu {
    driver: Driver,
    context: Handle,
    stream: Handle,
    functions: HashMap<&'static str, Handle>,
    name: String,
    capability: (i32, i32),
}

// SAFETY: the driver may be called from any thread; each call makes the context current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing here changes after `open`.
unsafe impl Sync for Gpu {}

const CAPABILITY_MAJOR: i32 = 75;
const CAPABILITY_MINOR: i32 = 76;
const MAX_DYNAMIC_SHARED_BYTES: i32 = 8;
const NON_BLOCKING: u32 = 1;

/// Shared memory of a block that needs no asking.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// Opens GPU `ordinal`, counted from 0, and loads the kernels for it.
    ///
    /// # Errors
    /// [`CudaError`], which says what is missing on this machine.
    pub fn open(libraries: &Libraries, ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::open(&libraries.driver)?;
        let device = find_device(&driver, ordinal)?;
        let (name, capability) = describe(&driver, device)?;
        if capability < (8, 0) {
            return Err(CudaError::OldDevice { name, major: capability.0, minor: capability.1 });
        }
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a device that the driver named; the context stays as long as the process.
        driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (driver.retain_context)(&raw mut context, device)
        })?;
        // SAFETY: the context was just made.
        driver.check("cuCtxSetCurrent", unsafe { (driver.set_context)(context) })?;
        // SAFETY: a context is current.
        driver.check("cuStreamCreate", unsafe { (driver.create_stream)(&raw mut stream, NON_BLOCKING) })?;
        let functions = load_functions(&driver, capability)?;
        Ok(Arc::new(Self { driver, context, stream, functions, name, capability }))
    }

    /// What the driver calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability.
    #[must_use]
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Bytes of memory that are free.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        let (mut free, mut total) = (0, 0);
        self.enter()?;
        // SAFETY: a context is current; writes two numbers.
        let status = unsafe { (self.driver.memory_info)(&raw mut free, &raw mut total) };
        self.driver.check("cuMemGetInfo", status)?;
        Ok(free)
    }

    /// Waits until all that was asked for is done.
    ///
    /// # Errors
    /// [`CudaError::Call`], also for whatever failed in between.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream is ours.
        self.driver.check("cuStreamSynchronize", unsafe { (self.driver.synchronize)(self.stream) })
    }

    /// Starts a kernel; no blocks are no launch.
    ///
    /// # Errors
    /// [`CudaError::Call`] when it cannot be started; what fails later, the next synchronisation tells.
    ///
    /// # Safety
    /// `params` is the struct of this kernel, and what it points to is as large as the kernel takes it to be.
    pub unsafe fn launch<P: DeviceValue>(&self, launch: Launch, params: &P) -> Result<(), CudaError> {
        if launch.grid == 0 {
            return Ok(());
        }
        self.enter()?;
        let function = self.functions[launch.kernel];
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the parameters before it returns; the caller vouches for what they say.
        let status = unsafe {
            (self.driver.launch)(
                function,
                launch.grid,
                1,
                1,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.driver.check(launch.kernel, status)
    }

    /// The stream, for cuBLASLt.
    pub(super) fn stream(&self) -> Handle {
        self.stream
    }

    /// Makes the context current in this thread, which may be new to it.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is ours.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.set_context)(self.context) })
    }
}

fn find_device(driver: &Driver, ordinal: usize) -> Result<i32, CudaError> {
    let (mut count, mut device) = (0, 0);
    // SAFETY: writes a number.
    driver.check("cuDeviceGetCount", unsafe { (driver.device_count)(&raw mut count) })?;
    match usize::try_from(count) {
        Ok(0) | Err(_) => return Err(CudaError::NoDevice),
        Ok(found) if ordinal >= found => return Err(CudaError::NoSuchDevice { asked: ordinal, found }),
        Ok(_) => {}
    }
    // SAFETY: writes a number; there are more devices than `ordinal`.
    driver.check("cuDeviceGet", unsafe { (driver.device)(&raw mut device, ordinal as i32) })?;
    Ok(device)
}

fn describe(driver: &Driver, device: i32) -> Result<(String, (i32, i32)), CudaError> {
    let mut name = [0; 256];
    // SAFETY: writes at most so many characters, the last of them zero.
    driver.check("cuDeviceGetName", unsafe {
        (driver.device_name)(name.as_mut_ptr(), name.len() as i32, device)
    })?;
    // SAFETY: terminated by the driver.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: writes a number.
        let status = unsafe { (driver.device_attribute)(&raw mut value, attribute, device) };
        driver.check("cuDeviceGetAttribute", status).map(|()| value)
    };
    Ok((name, (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?)))
}

/// Loads all modules, and lets each kernel have the shared memory it needs.
fn load_functions(
    driver: &Driver,
    (major, minor): (i32, i32),
) -> Result<HashMap<&'static str, Handle>, CudaError> {
    let mut functions = HashMap::new();
    for module in MODULES {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a whole cubin, or PTX that ends with a zero; modules stay loaded as long as the process.
        let status =
            unsafe { (driver.load_module)(&raw mut handle, module.image(major, minor).as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        for &kernel in module.kernels {
            let name = CString::new(kernel).expect("names of kernels have no zeros");
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name is terminated.
            let status = unsafe { (driver.function)(&raw mut function, handle, name.as_ptr()) };
            driver.check("cuModuleGetFunction", status)?;
            functions.insert(kernel, function);
        }
    }
    for (kernel, shared_bytes) in super::launch::large_shared_memory(PLAIN_SHARED_BYTES) {
        // SAFETY: a function that was just found.
        let status = unsafe {
            (driver.set_function_attribute)(functions[kernel], MAX_DYNAMIC_SHARED_BYTES, shared_bytes as i32)
        };
        driver.check("cuFuncSetAttribute", status)?;
    }
    Ok(functions)
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name)
            .field("capability", &self.capability)
            .finish_non_exhaustive()
    }
}

/// How memory is handed out and taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lifetime {
    /// By a call that waits for the GPU.
    Long,
    /// In the order of the stream's work: what was started before may still use it when it is dropped.
    InOrder,
}

/// Device memory.
pub struct Memory {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: usize,
    lifetime: Lifetime,
}

impl Memory {
    /// Memory that is kept. Its contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn kept(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        Self::allocate(gpu, bytes, Lifetime::Long)
    }

    /// Memory for one operation, with these values.
    pub(super) fn passing<T: DeviceValue>(gpu: &Arc<Gpu>, values: &[T]) -> Result<Self, CudaError> {
        let memory = Self::allocate(gpu, size_of_val(values), Lifetime::InOrder)?;
        memory.write(values)?;
        Ok(memory)
    }

    /// Memory for one operation, with whatever was there.
    pub(super) fn passing_bytes(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        Self::allocate(gpu, bytes, Lifetime::InOrder)
    }

    fn allocate(gpu: &Arc<Gpu>, bytes: usize, lifetime: Lifetime) -> Result<Self, CudaError> {
        gpu.enter()?;
        // The driver refuses to allocate nothing.
        let (mut address, wanted) = (0, bytes.max(16));
        let (call, status) = match lifetime {
            // SAFETY: writes the address.
            Lifetime::Long => ("cuMemAlloc", unsafe { (gpu.driver.allocate)(&raw mut address, wanted) }),
            Lifetime::InOrder => {
                // SAFETY: writes the address; the stream is ours.
                ("cuMemAllocAsync", unsafe {
                    (gpu.driver.allocate_in_order)(&raw mut address, wanted, gpu.stream)
                })
            }
        };
        gpu.driver.check(call, status)?;
        Ok(Self { gpu: Arc::clone(gpu), address, bytes, lifetime })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes values at the beginning.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// When they are larger than the memory.
    pub fn write<T: DeviceValue>(&self, values: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        assert!(bytes <= self.bytes, "{bytes} bytes into {}", self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.enter()?;
        // SAFETY: so many bytes are here and there. From pageable memory the driver copies before it returns.
        let status = unsafe {
            (self.gpu.driver.copy_to_device)(self.address, values.as_ptr().cast(), bytes, self.gpu.stream)
        };
        self.gpu.driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Waits for all work, and reads `count` values from the beginning.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// When there are not so many.
    pub fn read<T: DeviceValue + Default>(&self, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); count];
        let bytes = size_of_val(values.as_slice());
        assert!(bytes <= self.bytes, "{bytes} bytes out of {}", self.bytes);
        if bytes > 0 {
            self.gpu.enter()?;
            // SAFETY: so many bytes are here and there, and `values` lives until the synchronisation below.
            let status = unsafe {
                (self.gpu.driver.copy_to_host)(
                    values.as_mut_ptr().cast(),
                    self.address,
                    bytes,
                    self.gpu.stream,
                )
            };
            self.gpu.driver.check("cuMemcpyDtoHAsync", status)?;
        }
        self.gpu.synchronize()?;
        Ok(values)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A context that is broken has nothing to give back to.
        if self.gpu.enter().is_err() {
            return;
        }
        // SAFETY: allocated so, and nothing refers to it any more but work that was started before.
        let _ = unsafe {
            match self.lifetime {
                Lifetime::Long => (self.gpu.driver.free)(self.address),
                Lifetime::InOrder => (self.gpu.driver.free_in_order)(self.address, self.gpu.stream),
            }
        };
    }
}
