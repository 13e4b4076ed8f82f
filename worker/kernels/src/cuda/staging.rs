//! Pinned memory of the host, which copies go through.
//!
//! From and to other memory the driver copies by way of pinned memory of its own, and may wait for the GPU to do so. Here what is
//! uploaded lies side by side until somebody waits anyway: a step's lists cost no wait. Next: [`super::gpu`] holds the lock.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::driver::during;
use super::error::CudaError;
use super::params::{Address, DeviceValue};

/// Room for uploads between two waits: the block tables of a thousand sequences of 16k. What is larger, as weights are, goes through
/// the driver's, and is waited for.
const UPLOAD_BYTES: usize = 8 << 20;

/// Uploads begin at multiples of it.
const ALIGNMENT: usize = 256;

/// The pinned memory of one stream.
pub(super) struct Staging {
    context: Arc<CudaContext>,
    uploads: Option<Pinned>,
    used_bytes: usize,
    downloads: Option<Pinned>,
}

impl Staging {
    /// None as yet.
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: Arc::clone(context), uploads: None, used_bytes: 0, downloads: None }
    }

    /// Starts a copy of values, which may go away at once.
    ///
    /// # Safety
    /// There is room for them at `to`.
    pub(super) unsafe fn upload<T: DeviceValue>(
        &mut self,
        stream: &CudaStream,
        to: Address,
        values: &[T],
    ) -> Result<(), CudaError> {
        let (bytes, failed) = (size_of_val(values), during("cuMemcpyHtoDAsync"));
        if bytes > UPLOAD_BYTES {
            // SAFETY: the caller vouches for `to`, and the values stay until the copy is done: no driver promises that it is when the call returns.
            unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }.map_err(failed)?;
            return self.wait(stream);
        }
        if self.used_bytes + bytes > UPLOAD_BYTES {
            self.wait(stream)?;
        }
        let pinned = room(&mut self.uploads, &self.context, UPLOAD_BYTES)?;
        // SAFETY: within the memory, where no copy is under way: `used_bytes` falls only when all are done.
        let copy = unsafe {
            let place = pinned.at.byte_add(self.used_bytes).cast::<u8>();
            std::ptr::copy_nonoverlapping(values.as_ptr().cast(), place, bytes);
            std::slice::from_raw_parts(place, bytes)
        };
        self.used_bytes += bytes.next_multiple_of(ALIGNMENT);
        // SAFETY: the caller vouches for `to`; the copy stays until the stream has been waited for.
        unsafe { result::memcpy_htod_async(to, copy, stream.cu_stream()) }.map_err(failed)
    }

    /// Waits for all work, once, and copies values to the host: as many from each place, one behind another.
    ///
    /// # Safety
    /// At each of `from` there are as many values as fall to it.
    pub(super) unsafe fn download<T: DeviceValue>(
        &mut self,
        stream: &CudaStream,
        from: &[Address],
        values: &mut [T],
    ) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        let pinned = room(&mut self.downloads, &self.context, bytes)?;
        // SAFETY: so many bytes are there, and nobody else reads or writes them.
        let copy = unsafe { std::slice::from_raw_parts_mut(pinned.at.cast::<u8>(), bytes) };
        for (part, from) in copy.chunks_exact_mut(bytes / from.len().max(1)).zip(from) {
            // SAFETY: the caller vouches for `from`; the memory stays.
            unsafe { result::memcpy_dtoh_async(part, *from, stream.cu_stream()) }
                .map_err(during("cuMemcpyDtoHAsync"))?;
        }
        let copy = copy.as_ptr();
        self.wait(stream)?;
        // SAFETY: the copies have arrived; every bit pattern is a value.
        unsafe { std::ptr::copy_nonoverlapping(copy, values.as_mut_ptr().cast(), bytes) };
        Ok(())
    }

    /// Waits until all that was asked for is done.
    pub(super) fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        stream.synchronize().map_err(during("cuStreamSynchronize"))?;
        self.used_bytes = 0;
        Ok(())
    }
}

/// Memory of at least this size; nothing is under way in what was there.
fn room<'a>(
    memory: &'a mut Option<Pinned>,
    context: &Arc<CudaContext>,
    bytes: usize,
) -> Result<&'a Pinned, CudaError> {
    if memory.as_ref().is_none_or(|memory| memory.bytes < bytes) {
        // The old memory goes first: it may be much.
        *memory = None;
        *memory = Some(Pinned::new(context, bytes)?);
    }
    Ok(memory.as_ref().expect("there is one now"))
}

/// Memory of the host that the GPU reads and writes itself.
struct Pinned {
    context: Arc<CudaContext>,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: plain memory, which belongs to no thread.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        context.bind_to_thread().map_err(during("cuCtxSetCurrent"))?;
        // SAFETY: a context is current. Without flags, so that the host's caches hold it: downloads are read.
        let at = unsafe { result::malloc_host(bytes, 0) }.map_err(during("cuMemHostAlloc"))?;
        Ok(Self { context: Arc::clone(context), at, bytes })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // What fails here the next call tells.
        self.context.record_err(self.context.bind_to_thread().and_then(|()| {
            // SAFETY: allocated so; whoever lets it go has waited for the copies, or no longer cares for them.
            unsafe { result::free_host(self.at) }
        }));
    }
}
