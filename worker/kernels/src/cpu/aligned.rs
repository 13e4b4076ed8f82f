//! Zeroed memory on page boundaries, taken from the system in one piece and backed when first written.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use half::bf16;
use memmap2::MmapMut;

use crate::KernelError;

/// Numbers for which all-zero bytes are a valid value.
///
/// # Safety
/// Implement it only for plain numbers: zeroed memory is handed out as `Self`, and never dropped.
pub(crate) unsafe trait Number: Copy + Send + Sync + 'static {}

// SAFETY: zero bytes are 0.0.
unsafe impl Number for f32 {}
// SAFETY: zero bytes are 0.0; bf16 is a transparent u16.
unsafe impl Number for bf16 {}

/// A boxed slice whose first element lies on a page, in huge pages where the system has them: weights and KV are read from
/// one end to the other in each step, and small pages would cost an address translation every 4 KiB.
#[derive(Debug)]
pub(crate) struct AlignedBox<T: Number> {
    /// `None` for an empty slice, which cannot be mapped.
    memory: Option<MmapMut>,
    len: usize,
    numbers: PhantomData<T>,
}

impl<T: Number> AlignedBox<T> {
    /// `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Result<Self, KernelError> {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes == 0 {
            return Ok(Self { memory: None, len: 0, numbers: PhantomData });
        }
        let memory = MmapMut::map_anon(bytes).map_err(|_| KernelError::OutOfMemory { bytes })?;
        ask_for_huge_pages(&memory);
        Ok(Self { memory: Some(memory), len, numbers: PhantomData })
    }
}

/// A wish: where it is not granted, small pages do the same more slowly.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(memory: &MmapMut) {
    let _ = memory.advise(memmap2::Advice::HugePage);
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_memory: &MmapMut) {}

impl<T: Number> Deref for AlignedBox<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let Some(memory) = &self.memory else { return &[] };
        // SAFETY: the map starts on a page, has room for `len` numbers, and any of its bytes make valid ones.
        unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), self.len) }
    }
}

impl<T: Number> DerefMut for AlignedBox<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let Some(memory) = &mut self.memory else { return &mut [] };
        // SAFETY: as in `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_aligned() {
        let numbers = AlignedBox::<f32>::zeroed(1000).unwrap();
        assert_eq!(numbers.len(), 1000);
        assert!(numbers.iter().all(|&number| number == 0.0));
        assert_eq!(numbers.as_ptr() as usize % 4096, 0);
        assert!(AlignedBox::<bf16>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for len in [usize::MAX / 8, usize::MAX] {
            let error = AlignedBox::<f32>::zeroed(len).unwrap_err();
            assert!(matches!(error, KernelError::OutOfMemory { .. }));
        }
    }
}
