//! Launches that are recorded once and then started all at once, and how long work takes on the GPU itself.
//!
//! Serving launches eagerly as yet, though its layers can be recorded (`tests/cuda/gpu.rs`); measurements use both. Next: `examples/rates`.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

use super::driver::during;
use super::error::CudaError;
use super::gpu::Gpu;

/// Recorded launches.
pub struct Graph {
    gpu: Arc<Gpu>,
    graph: CudaGraph,
}

impl Graph {
    /// Records what `launches` launches, which is not run. What it does besides (allocations, copies from and to the host, waits) fails.
    ///
    /// # Errors
    /// Those of `launches`, before all others; [`CudaError::EmptyGraph`]; [`CudaError::Call`] when they cannot be recorded.
    pub fn record<E: From<CudaError>>(
        gpu: &Arc<Gpu>,
        launches: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let (stream, before) = (gpu.stream(), gpu.launched());
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(during("cuStreamBeginCapture"))?;
        gpu.set_recording(true);
        let outcome = launches();
        gpu.set_recording(false);
        // Ended in any case: a stream that records runs nothing.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(during("cuStreamEndCapture"));
        outcome?;
        // The driver has a graph for nothing, too.
        match graph? {
            Some(graph) if gpu.launched() > before => Ok(Self { gpu: Arc::clone(gpu), graph }),
            _ => Err(CudaError::EmptyGraph.into()),
        }
    }

    /// Starts what was recorded.
    ///
    /// # Errors
    /// [`CudaError::Call`] when it cannot be started; what fails later, the next synchronisation tells.
    ///
    /// # Safety
    /// As for each launch, now as well: what their parameters point to is still there.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        self.gpu.enter()?;
        self.graph.launch().map_err(during("cuGraphLaunch"))
    }
}

impl Gpu {
    /// How long the GPU takes for what `work` asks for, from when it begins to when it is done. Waits for it.
    ///
    /// # Errors
    /// Those of `work`; [`CudaError::Call`].
    pub fn time(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Duration, CudaError> {
        let record = || self.stream().record_event(Some(CU_EVENT_DEFAULT)).map_err(during("cuEventRecord"));
        let begin = record()?;
        work()?;
        let end = record()?;
        let milliseconds = begin.elapsed_ms(&end).map_err(during("cuEventElapsedTime"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}
