//! Drawing tokens where the logits are, so that a step brings one number of each row to the host instead of a vocabulary.
//!
//! Beside [`Kernels`](crate::Kernels), since on a CPU the sampler reads the logits as they lie. Caller: the model's backend.

use super::buffer::{CudaBuffer, Kind};
use super::kernels::{CudaKernels, mismatch};
use super::launch;
use super::memory::Memory;
use super::params::{AdjustParams, Draw, LogitChange, Penalties, SampleParams};
use crate::KernelError;

/// What is asked of rows of logits.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Draws {
    /// How each row's token is drawn.
    pub draws: Vec<Draw>,
    /// Each row's penalties.
    pub penalties: Vec<Penalties>,
    /// What happens to single tokens first, in any order; a token at most once for each row.
    pub changes: Vec<LogitChange>,
}

impl CudaKernels {
    /// Changes the logits, `[rows, vocab]`, and draws a token from each row; waits once. `None` for a row that has a number which is
    /// NaN or +inf.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `draws` do not fit the logits, or for a vocabulary of 2²⁴ tokens; [`KernelError::Device`].
    pub fn draw(&self, logits: &mut CudaBuffer, draws: &Draws) -> Result<Vec<Option<u32>>, KernelError> {
        logits.expect("draw", Kind::F32)?;
        let (rows, vocab) = (logits.rows(), logits.width());
        let Draws { draws, penalties, changes } = draws;
        if draws.len() != rows || penalties.len() != rows {
            let found = format!("{} draws and {} penalties", draws.len(), penalties.len());
            return Err(mismatch("draw", format!("{rows} of each"), found));
        }
        let outside = |change: &&LogitChange| change.row as usize >= rows || change.token as usize >= vocab;
        if let Some(change) = changes.iter().find(outside) {
            return Err(mismatch("draw", format!("changes within [{rows}, {vocab}]"), format!("{change:?}")));
        }
        let gpu = self.gpu();
        let launch = launch::sample(rows, vocab)?;
        if !changes.is_empty() {
            let (on_device, of_rows) = (Memory::passing(gpu, changes)?, Memory::passing(gpu, penalties)?);
            let params = AdjustParams {
                logits: logits.address(),
                changes: on_device.address(),
                penalties: of_rows.address(),
                count: changes.len() as u32,
                vocab: vocab as u32,
            };
            // SAFETY: rows and tokens of the changes are within the logits, and each row has its penalties.
            unsafe { gpu.launch(launch::adjust_logits(changes.len())?, &params) }?;
        }
        let (draws, tokens) = (Memory::passing(gpu, draws)?, Memory::passing_bytes(gpu, 4 * rows)?);
        let params = SampleParams {
            logits: logits.address(),
            draws: draws.address(),
            tokens: tokens.address(),
            vocab: vocab as u32,
            reserved: 0,
        };
        // SAFETY: there are as many draws, and as much room for tokens, as rows.
        unsafe { gpu.launch(launch, &params) }?;
        let drawn = tokens.read::<u32>(rows)?;
        Ok(drawn.into_iter().map(|token| (token != SampleParams::NO_TOKEN).then_some(token)).collect())
    }

    /// Some rows of a buffer in f32, one behind another; waits once.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a row that is not there, or a buffer in bf16; [`KernelError::Device`].
    pub fn read_rows(&self, x: &CudaBuffer, rows: &[usize]) -> Result<Vec<f32>, KernelError> {
        x.expect("read_rows", Kind::F32)?;
        if let Some(row) = rows.iter().find(|&&row| row >= x.rows()) {
            return Err(mismatch("read_rows", format!("rows below {}", x.rows()), row.to_string()));
        }
        Ok(x.memory()?.read_rows(rows, x.width())?)
    }
}
