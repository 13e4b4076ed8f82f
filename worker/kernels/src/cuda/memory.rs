//! Device memory, and copies to and from it.
//!
//! What is kept is allocated plainly, so that another process may be given it; what serves one operation comes and goes in the order of
//! the stream's work. Next: [`super::kernels`] and the tests read and write it.

use std::sync::Arc;

use cudarc::driver::result;

use super::driver::during;
use super::error::CudaError;
use super::gpu::Gpu;
use super::params::{Address, DeviceValue};

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
        gpu.refuse_while_recording("an allocation")?;
        gpu.enter()?;
        // The driver refuses to allocate nothing.
        let wanted = bytes.max(16);
        let address = match lifetime {
            // SAFETY: a context is current.
            Lifetime::Long => unsafe { result::malloc_sync(wanted) }.map_err(during("cuMemAlloc")),
            // SAFETY: as above; the stream is ours.
            Lifetime::InOrder => unsafe { result::malloc_async(gpu.stream().cu_stream(), wanted) }
                .map_err(during("cuMemAllocAsync")),
        }?;
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
        // SAFETY: there is room for them.
        unsafe { self.gpu.upload(self.address, values) }
    }

    /// Starts a copy of all of `from` to the beginning; both are of one GPU.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// When it is larger than this, or of another GPU.
    pub fn copy_from(&self, from: &Self) -> Result<(), CudaError> {
        assert!(Arc::ptr_eq(&self.gpu, &from.gpu), "memory of one GPU");
        assert!(from.bytes <= self.bytes, "{} bytes into {}", from.bytes, self.bytes);
        if from.bytes == 0 {
            return Ok(());
        }
        self.gpu.enter()?;
        // SAFETY: so many bytes are there on both sides, and stay until the stream's work is done: see `Lifetime`.
        unsafe {
            result::memcpy_dtod_async(self.address, from.address, from.bytes, self.gpu.stream().cu_stream())
        }
        .map_err(during("cuMemcpyDtoDAsync"))?;
        self.gpu.count_launch();
        Ok(())
    }

    /// Waits for all work, and reads `count` values from the beginning.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// When there are not so many.
    pub fn read<T: DeviceValue + Default>(&self, count: usize) -> Result<Vec<T>, CudaError> {
        self.read_rows(&[0], count)
    }

    /// Waits for all work, and reads rows of `width` values, one behind another in this order.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// When a row is not there.
    pub(super) fn read_rows<T: DeviceValue + Default>(
        &self,
        rows: &[usize],
        width: usize,
    ) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); rows.len() * width];
        let row_bytes = width * size_of::<T>();
        let end = rows.iter().max().map_or(0, |last| (last + 1) * row_bytes);
        assert!(end <= self.bytes, "{end} bytes out of {}", self.bytes);
        if values.is_empty() {
            self.gpu.synchronize()?;
            return Ok(values);
        }
        let from: Vec<Address> = rows.iter().map(|row| self.address + (row * row_bytes) as u64).collect();
        // SAFETY: the rows are there.
        unsafe { self.gpu.download(&from, &mut values) }?;
        Ok(values)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (context, stream) = (self.gpu.context(), self.gpu.stream().cu_stream());
        // What fails here the next call tells.
        context.record_err(context.bind_to_thread().and_then(|()| {
            // SAFETY: allocated so, and nothing refers to it any more but work that was started before.
            unsafe {
                match self.lifetime {
                    Lifetime::Long => result::free_sync(self.address),
                    Lifetime::InOrder => result::free_async(self.address, stream),
                }
            }
        }));
    }
}
