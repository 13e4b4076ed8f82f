//! Memory of a GPU between two fences, which show when a kernel has written beyond it.
//!
//! On the host an unmapped page does that, and of reads too; a GPU lets a kernel go far beyond an allocation. Next: `machine`'s buffers.

use std::sync::Arc;

use worker_kernels::cuda::params::{Address, DeviceValue};
use worker_kernels::cuda::{Gpu, Memory};

/// As much as allocations are aligned to, so that what lies between the fences is aligned as if it were alone.
const FENCE_BYTES: usize = 256;
const FENCE: u8 = 0xa5;

pub(crate) struct Fenced {
    memory: Memory,
    bytes: usize,
}

impl Fenced {
    pub(crate) fn of<T: DeviceValue>(gpu: &Arc<Gpu>, values: &[T]) -> Self {
        let bytes = size_of_val(values);
        // SAFETY: so many bytes are there, and a `DeviceValue` has no padding among them.
        let between = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        let memory = Memory::kept(gpu, bytes + 2 * FENCE_BYTES).unwrap();
        memory.write(&[&[FENCE; FENCE_BYTES], between, &[FENCE; FENCE_BYTES]].concat()).unwrap();
        Self { memory, bytes }
    }

    pub(crate) fn address(&self) -> Address {
        self.memory.address() + FENCE_BYTES as u64
    }

    /// Waits for all work, looks at the fences, and reads everything between them.
    pub(crate) fn read<T: DeviceValue>(&self) -> Vec<T> {
        let all: Vec<u8> = self.memory.read(self.bytes + 2 * FENCE_BYTES).unwrap();
        let (before, rest) = all.split_at(FENCE_BYTES);
        let (between, after) = rest.split_at(self.bytes);
        for (fence, side) in [(before, "before"), (after, "after")] {
            assert!(fence.iter().all(|&byte| byte == FENCE), "wrote {side} {} bytes of memory", self.bytes);
        }
        let values = between.as_ptr().cast::<T>();
        // SAFETY: so many values are there; every bit pattern is one.
        (0..self.bytes / size_of::<T>()).map(|index| unsafe { values.add(index).read_unaligned() }).collect()
    }
}
