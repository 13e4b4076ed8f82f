//! One GPU: its context, one stream, and the kernels loaded for it.
//!
//! All work goes to the one stream and is done in order; only [`Gpu::synchronize`] and [`super::Memory::read`] wait for it. Every call's
//! status is looked at; what fails while something is given back, the next call tells. Next: [`super::kernels`] computes with it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
use cudarc::driver::sys::CUfunction_attribute::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
};
use cudarc::driver::sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, result};

use super::driver::{self, during};
use super::error::CudaError;
use super::launch::{Launch, large_shared_memory};
use super::modules::{HOPPER_MODULES, MODULES};
use super::params::{Address, DeviceValue};
use super::staging::Staging;

/// A GPU.
pub struct Gpu {
    staging: Mutex<Staging>,
    stream: Arc<CudaStream>,
    functions: HashMap<&'static str, CudaFunction>,
    name: String,
    capability: (i32, i32),
    multiprocessors: u32,
    /// Whether its kernels start while the one before still runs, and wait for its end themselves.
    overlaps: AtomicBool,
    launched: AtomicU64,
    recording: AtomicBool,
}

/// The compute capability that wgmma is for, and no other.
const HOPPER: (i32, i32) = (9, 0);

/// Shared memory of a block that needs no asking.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// Opens GPU `ordinal`, counted from 0, and loads the kernels for it.
    ///
    /// # Errors
    /// [`CudaError`], which says what is missing on this machine.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        driver::open()?;
        let found = CudaContext::device_count().map_err(during("cuDeviceGetCount"))?;
        match usize::try_from(found) {
            Ok(0) | Err(_) => return Err(CudaError::NoDevice),
            Ok(found) if ordinal >= found => return Err(CudaError::NoSuchDevice { asked: ordinal, found }),
            Ok(_) => {}
        }
        let context = CudaContext::new(ordinal).map_err(during("cuDevicePrimaryCtxRetain"))?;
        let name = context.name().map_err(during("cuDeviceGetName"))?;
        let capability = context.compute_capability().map_err(during("cuDeviceGetAttribute"))?;
        if capability < (8, 0) {
            return Err(CudaError::OldDevice { name, major: capability.0, minor: capability.1 });
        }
        let multiprocessors = context
            .attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(during("cuDeviceGetAttribute"))?;
        // SAFETY: there is one stream, on which everything is in order already.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(during("cuStreamCreate"))?;
        keep_freed_memory(&context)?;
        let functions = load_functions(&context, capability)?;
        let staging = Mutex::new(Staging::new(&context));
        let (launched, recording) = (AtomicU64::new(0), AtomicBool::new(false));
        let multiprocessors = u32::try_from(multiprocessors).unwrap_or(1).max(1);
        Ok(Arc::new(Self {
            staging,
            stream,
            functions,
            name,
            capability,
            multiprocessors,
            overlaps: AtomicBool::new(MODULES.iter().all(|module| module.overlaps(capability))),
            launched,
            recording,
        }))
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

    /// Whether it has the kernels by wgmma.
    #[must_use]
    pub fn has_wgmma(&self) -> bool {
        self.capability == HOPPER
    }

    /// Its multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// From here on no kernel starts before the one before it has ended.
    pub fn keep_kernels_apart(&self) {
        self.overlaps.store(false, Ordering::Relaxed);
    }

    /// Bytes of memory that are free.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.context().mem_get_info().map(|(free, _)| free).map_err(during("cuMemGetInfo"))
    }

    /// Waits until all that was asked for is done.
    ///
    /// # Errors
    /// [`CudaError::Call`], also for whatever failed in between.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.refuse_while_recording("a wait")?;
        self.staging().wait(&self.stream)
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
        let mut overlapping = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let shape = CUlaunchConfig {
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut overlapping,
            numAttrs: u32::from(self.overlaps.load(Ordering::Relaxed)),
        };
        let function = self.functions[launch.kernel].cu_function();
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: the driver copies shape and parameters before it returns; the caller vouches for what the latter say.
        unsafe {
            sys::cuLaunchKernelEx(&raw const shape, function, arguments.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(|error| during("cuLaunchKernelEx")(error).of(|| format!("{launch:?}")))?;
        self.count_launch();
        Ok(())
    }

    /// Kernels and products that were launched or recorded, ever.
    pub(super) fn launched(&self) -> u64 {
        self.launched.load(Ordering::Relaxed)
    }

    /// Notes that there was another.
    pub(super) fn count_launch(&self) {
        self.launched.fetch_add(1, Ordering::Relaxed);
    }

    /// Says whether launches are recorded from now on.
    pub(super) fn set_recording(&self, recording: bool) {
        self.recording.store(recording, Ordering::Relaxed);
    }

    /// A driver would record copies and allocations too, and do them over and over with memory that is something else by then.
    pub(super) fn refuse_while_recording(&self, what: &'static str) -> Result<(), CudaError> {
        if self.recording.load(Ordering::Relaxed) { Err(CudaError::Recorded(what)) } else { Ok(()) }
    }

    /// Starts a copy of values, which may go away at once.
    ///
    /// # Safety
    /// There is room for them at `to`.
    pub(super) unsafe fn upload<T: DeviceValue>(&self, to: Address, values: &[T]) -> Result<(), CudaError> {
        self.refuse_while_recording("a copy from the host")?;
        self.enter()?;
        // SAFETY: as the caller says.
        unsafe { self.staging().upload(&self.stream, to, values) }
    }

    /// Waits for all work, once, and copies values to the host: as many from each place, one behind another.
    ///
    /// # Safety
    /// At each of `from` there are as many values as fall to it.
    pub(super) unsafe fn download<T: DeviceValue>(
        &self,
        from: &[Address],
        values: &mut [T],
    ) -> Result<(), CudaError> {
        self.refuse_while_recording("a copy to the host")?;
        self.enter()?;
        // SAFETY: as the caller says.
        unsafe { self.staging().download(&self.stream, from, values) }
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Makes the context current in this thread, which may be new to it.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        self.context().bind_to_thread().map_err(during("cuCtxSetCurrent"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Copies may still be under way from and to the pinned memory, which goes next. What fails here nobody can be told.
        let _ = self.stream.synchronize();
    }
}

/// Lets the pool behind memory of the stream's order keep what it has: by default each synchronisation gives all of it back, and the next
/// step would have to ask the system again.
fn keep_freed_memory(context: &CudaContext) -> Result<(), CudaError> {
    let mut threshold_bytes = u64::MAX;
    // SAFETY: a device that there is.
    let pool = unsafe { result::device::get_default_mem_pool(context.cu_device()) }
        .map_err(during("cuDeviceGetDefaultMemPool"))?;
    // SAFETY: the device's own pool; the attribute is a number of 64 bits.
    unsafe {
        result::mem_pool::set_attribute(
            pool,
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold_bytes).cast(),
        )
    }
    .map_err(during("cuMemPoolSetAttribute"))
}

/// Loads all modules, and lets each kernel have the shared memory it needs.
fn load_functions(
    context: &Arc<CudaContext>,
    capability: (i32, i32),
) -> Result<HashMap<&'static str, CudaFunction>, CudaError> {
    let mut functions = HashMap::new();
    let common = MODULES.iter().map(|module| (module.name, module.image(capability), module.kernels));
    let hopper = HOPPER_MODULES.iter().filter(|_| capability == HOPPER);
    let modules = common.chain(hopper.map(|module| (module.name, module.image(), module.kernels)));
    for (name, image, kernels) in modules {
        let loaded = context
            .load_module(image)
            .map_err(|error| during("cuModuleLoadData")(error).of(|| name.to_owned()))?;
        for &kernel in kernels {
            let function = loaded
                .load_function(kernel)
                .map_err(|error| during("cuModuleGetFunction")(error).of(|| kernel.to_owned()))?;
            functions.insert(kernel, function);
        }
    }
    for (kernel, shared_bytes) in large_shared_memory(PLAIN_SHARED_BYTES) {
        let Some(function) = functions.get(kernel) else { continue }; // of another generation
        function
            .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes as i32)
            .map_err(during("cuFuncSetAttribute"))?;
        // Two or three of its blocks fit a multiprocessor when that keeps as little as it can for the cache.
        function
            .set_attribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            .map_err(during("cuFuncSetAttribute"))?;
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
