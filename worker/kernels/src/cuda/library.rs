//! Libraries that may or may not be on this machine, opened when asked for.
//!
//! Knows no CUDA. Next: [`super::driver`] and [`super::blas`] say which functions they need.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `RTLD_NOW`, and names of its own.
const NOW: c_int = 2;

/// An open library; it stays open as long as the process runs, since its functions are kept by value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library(*mut c_void);

impl Library {
    /// Opens a library by path or by bare name; `None` when it is not there or cannot be loaded.
    pub(super) fn open(path: &Path) -> Option<Self> {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: a terminated string. Constructors of the CUDA libraries do nothing that Rust relies on.
        let handle = unsafe { dlopen(path.as_ptr(), NOW) };
        (!handle.is_null()).then_some(Self(handle))
    }

    /// The address of a function.
    pub(super) fn symbol(self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the library is open, the string terminated.
        let address = unsafe { dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// A struct of C functions that return a status, and how to find them in a library.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal ($($argument:ty),* $(,)?),)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name { $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> i32,)* }

        impl $name {
            /// Finds all of them; the error is the name of one that is missing.
            ///
            /// # Safety
            /// In this library the names stand for functions of these types.
            unsafe fn find(library: $crate::cuda::library::Library) -> Result<Self, &'static str> {
                // SAFETY: the caller vouches for the types.
                unsafe {
                    Ok(Self { $($field: std::mem::transmute::<*mut std::ffi::c_void,
                        unsafe extern "C" fn($($argument),*) -> i32>(library.symbol($symbol).ok_or($symbol)?),)* })
                }
            }
        }
    };
}
pub(super) use functions;
