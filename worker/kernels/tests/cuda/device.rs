//! Graphs, events, copies and pinned memory, on a fake GPU or on a real one.
//!
//! Each test runs itself once more on a fake machine, unless `ROUNDHOUSE_GPU` says that this one has a GPU.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use worker_kernels::cuda::params::SiluMulParams;
use worker_kernels::cuda::{CudaError, Gpu, Graph, Memory, launch};

use crate::fenced::Fenced;
use crate::gpu::{inside, machine_with_kernels, run_on};
use crate::machine::{POISON, runs_on_gpu};

/// Whether this process has a GPU; where not, the test has been run on a fake machine.
pub(crate) fn has_gpu(test: &str) -> bool {
    let has = inside() || runs_on_gpu();
    if !has {
        run_on(&machine_with_kernels(), test);
    }
    has
}

/// A launch over memory of its own: silu(gate) · up of one row.
struct Gate {
    gate_up: Memory,
    out: Memory,
}

impl Gate {
    fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gate_up: Memory::kept(gpu, 32).unwrap(), out: Memory::kept(gpu, 16).unwrap() }
    }

    fn launch(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let params =
            SiluMulParams { gate_up: self.gate_up.address(), out: self.out.address(), rows: 1, width: 8 };
        // SAFETY: a row of 16 numbers in, one of 8 out.
        unsafe { gpu.launch(launch::silu_mul(1, 8).unwrap(), &params) }
    }

    fn write(&self, up: f32) {
        let both = [vec![bf16::from_f32(30.0); 8], vec![bf16::from_f32(up); 8]].concat();
        self.gate_up.write(&both.into_iter().map(bf16::to_bits).collect::<Vec<u16>>()).unwrap();
    }

    fn result(&self) -> f32 {
        bf16::from_bits(self.out.read::<u16>(8).unwrap()[7]).to_f32()
    }
}

#[test]
fn a_graph_computes_anew_each_time_it_is_launched() {
    if !has_gpu("device::a_graph_computes_anew_each_time_it_is_launched") {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let gate = Gate::new(&gpu);
    gate.write(1.0);
    gate.launch(&gpu).unwrap();
    let graph = Graph::record(&gpu, || gate.launch(&gpu)).unwrap();
    gate.write(2.0);
    assert_eq!(gate.result(), 30.0, "recording runs nothing");
    for up in [3.0, 4.0] {
        gate.write(up);
        // SAFETY: the memory that it was recorded with is still there.
        unsafe { graph.launch() }.unwrap();
        assert_eq!(gate.result(), 30.0 * up);
    }
    assert_eq!(Graph::record(&gpu, || Ok(())).err(), Some(CudaError::EmptyGraph));
    // What is refused within leaves a stream that runs things again.
    let refused = |what: &'static str, forbidden: &dyn Fn() -> Result<(), CudaError>| {
        let recorded = Graph::record(&gpu, || gate.launch(&gpu).and_then(|()| forbidden()));
        assert_eq!(recorded.err(), Some(CudaError::Recorded(what)));
    };
    refused("a wait", &|| gpu.synchronize());
    refused("an allocation", &|| Memory::kept(&gpu, 16).map(drop));
    refused("a copy from the host", &|| gate.gate_up.write(&[1u16]));
    refused("a copy to the host", &|| gate.out.read::<u16>(8).map(drop));
    gate.launch(&gpu).unwrap();
    assert_eq!(gate.result(), 120.0);
}

#[test]
fn memory_is_copied_in_the_order_of_the_launches() {
    if !has_gpu("device::memory_is_copied_in_the_order_of_the_launches") {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let (gate, copy) = (Gate::new(&gpu), Memory::kept(&gpu, 16).unwrap());
    let step = || gate.launch(&gpu).and_then(|()| copy.copy_from(&gate.out));
    gate.write(2.0);
    step().unwrap();
    gate.write(3.0);
    gate.launch(&gpu).unwrap();
    assert_eq!((copy.read::<u16>(8).unwrap()[0], gate.result()), (bf16::from_f32(60.0).to_bits(), 90.0));
    let graph = Graph::record(&gpu, step).unwrap();
    // SAFETY: the memory that it was recorded with is still there.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(copy.read::<u16>(8).unwrap()[7], bf16::from_f32(90.0).to_bits());
}

/// A kernel that is told of more numbers than there are.
#[test]
fn writes_beyond_a_buffer_show() {
    if !has_gpu("device::writes_beyond_a_buffer_show") {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    for width in [8, 16] {
        let (gate_up, out) = (Fenced::of(&gpu, &[0u16; 32]), Fenced::of(&gpu, &[POISON; 8]));
        let params = SiluMulParams { gate_up: gate_up.address(), out: out.address(), rows: 1, width };
        // SAFETY: as many numbers as it is told, or in the second case still within the fence.
        unsafe { gpu.launch(launch::silu_mul(1, width as usize).unwrap(), &params) }.unwrap();
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| out.read::<u16>()));
        assert_eq!(read.ok(), (width == 8).then(|| vec![0; 8]));
    }
}

#[test]
fn work_is_done_when_its_time_is_known() {
    if !has_gpu("device::work_is_done_when_its_time_is_known") {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let gate = Gate::new(&gpu);
    gate.write(2.0);
    assert!(gpu.time(|| gate.launch(&gpu)).unwrap() > Duration::ZERO);
    assert_eq!(gate.result(), 60.0);
}

/// More uploads between two waits than the staging memory holds, and larger ones, all different.
#[test]
fn uploads_keep_their_values_until_they_are_copied() {
    if !has_gpu("device::uploads_keep_their_values_until_they_are_copied") {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let lengths = [1, 63, 64, 65, 1 << 20, 1 << 20, 7, (1 << 21) + 1, 100, 1 << 20];
    let upload = |number: usize, length: usize| {
        let values: Vec<u32> = (0..length as u32).map(|i| i * 7 + number as u32).collect();
        let memory = Memory::kept(&gpu, 4 * length).unwrap();
        let mut sent = values.clone();
        memory.write(&sent).unwrap();
        // As memory is that somebody else has by now.
        sent.fill(u32::MAX);
        drop(sent);
        (memory, values)
    };
    let uploads: Vec<_> =
        lengths.into_iter().enumerate().map(|(number, length)| upload(number, length)).collect();
    for (number, (memory, values)) in uploads.iter().enumerate() {
        assert!(memory.read::<u32>(values.len()).unwrap() == *values, "upload {number}");
    }
}
