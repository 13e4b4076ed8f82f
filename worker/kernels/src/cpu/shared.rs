//! One output buffer, written by several threads in places that do not overlap.

use std::marker::PhantomData;

/// A `&mut [f32]` that tasks share. The tiles of a row-major matrix are no slices, so `split_at_mut` cannot part them.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a> {
    start: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a unique borrow of plain numbers; `slice` makes its callers vouch that they do not overlap.
unsafe impl Send for SharedMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedMut<'_> {}

impl<'a> SharedMut<'a> {
    pub(crate) fn new(numbers: &'a mut [f32]) -> Self {
        Self { start: numbers.as_mut_ptr(), len: numbers.len(), borrow: PhantomData }
    }

    /// `len` numbers from `start` on.
    ///
    /// # Safety
    /// While the slice lives nobody else has any of these numbers.
    ///
    /// # Panics
    /// Panics when the range is not within the buffer.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: the range was checked, and the caller vouches that it is unshared.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
