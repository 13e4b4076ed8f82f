//! Read-only mapped files: weights are mapped, not read. Lives here because mapping is unsafe.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file, mapped into memory.
///
/// Whoever shortens the file while it is mapped makes this process die with `SIGBUS`; model directories are taken to be
/// immutable while they are loaded.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps the whole of `path`.
    ///
    /// # Errors
    /// Whatever opening or mapping the file reports; an empty file cannot be mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only, and model files are immutable while they are loaded (see the type's docs).
        unsafe { memmap2::Mmap::map(&file) }.map(Self)
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
