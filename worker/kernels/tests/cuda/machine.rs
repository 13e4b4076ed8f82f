//! A machine that runs kernels: buffers with guard pages, the kernels' files compiled by g++, launches; or a GPU, when
//! `ROUNDHOUSE_GPU` is set.
//!
//! `ROUNDHOUSE_KERNEL_SOURCES` names another directory than `cu/`: the mutation test's.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use worker_kernels::cuda::launch::Launch;
use worker_kernels::cuda::params::{Address, DeviceValue};
use worker_kernels::cuda::tensor_map::{Boxes, Matrix, TensorMap};
use worker_kernels::cuda::{CudaError, Gpu};

use crate::fake;
use crate::fenced::Fenced;

/// When a copy to shared memory lands that a kernel has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyMode {
    /// When it is waited for.
    Late = 0,
    /// At once.
    Early = 1,
    /// By chance.
    Random = 2,
}

pub(crate) const COPY_MODES: [CopyMode; 3] = [CopyMode::Late, CopyMode::Early, CopyMode::Random];

/// How a launch is run: nothing of it may change what comes out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) copies: CopyMode,
    pub(crate) seed: u64,
}

impl Run {
    /// One of many: the copies' mode follows from the number.
    pub(crate) fn number(number: usize) -> Self {
        Self { copies: COPY_MODES[number % 3], seed: 0x5eed + number as u64 * 7919 }
    }
}

/// The GPU that tests run on when `ROUNDHOUSE_GPU` is set.
pub(crate) fn gpu() -> Option<&'static Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    GPU.get_or_init(|| runs_on_gpu().then(|| Gpu::open(0).unwrap())).as_ref()
}

pub(crate) fn runs_on_gpu() -> bool {
    std::env::var_os("ROUNDHOUSE_GPU").is_some()
}

/// Whether that GPU is none of ours: one that has room and speed for large cases.
pub(crate) fn on_a_real_gpu() -> bool {
    std::env::var_os("ROUNDHOUSE_GPU").is_some_and(|kind| kind != "fake")
}

/// Random numbers of a test; `ROUNDHOUSE_SEED` gives fresh ones.
pub(crate) fn rng(seed: u64) -> StdRng {
    let fresh: u64 =
        std::env::var("ROUNDHOUSE_SEED").map_or(0, |seed| seed.parse().expect("a seed is a number"));
    StdRng::seed_from_u64(seed ^ fresh << 32)
}

const PAGE: usize = 4096;
const READ_WRITE: c_int = 3;
const PRIVATE_ANONYMOUS: c_int = 0x22;
const NO_RESERVE: c_int = 0x4000;
const NOW: c_int = 2;

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        bytes: usize,
        access: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, bytes: usize) -> c_int;
    fn mprotect(at: *mut c_void, bytes: usize, access: c_int) -> c_int;
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
    fn _exit(status: c_int) -> !;
}

/// Device memory. On the host it ends where an unmapped page begins, and another lies before it; on a GPU it has fences.
pub(crate) struct Buffer {
    place: Place,
    address: Address,
    bytes: usize,
}

enum Place {
    Host { mapping: *mut c_void, mapped_bytes: usize },
    Gpu(Fenced),
}

impl Buffer {
    /// Zeros on the host, backed by memory where they are touched.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        // The kernels rely on 16-byte alignment, as cuMemAlloc gives.
        let data_bytes = bytes.next_multiple_of(16).next_multiple_of(PAGE).max(PAGE);
        let mapped_bytes = data_bytes + 2 * PAGE;
        // SAFETY: a new mapping, of which two pages are taken back from use before anybody knows it.
        unsafe {
            let flags = PRIVATE_ANONYMOUS | NO_RESERVE;
            let mapping = mmap(std::ptr::null_mut(), mapped_bytes, READ_WRITE, flags, -1, 0);
            assert!(mapping as isize != -1, "no {mapped_bytes} bytes of address space");
            assert_eq!(mprotect(mapping, PAGE, 0), 0);
            assert_eq!(mprotect(mapping.byte_add(PAGE + data_bytes), PAGE, 0), 0);
            let address = mapping.byte_add(PAGE + data_bytes - bytes.next_multiple_of(16)) as Address;
            Self { place: Place::Host { mapping, mapped_bytes }, address, bytes }
        }
    }

    pub(crate) fn of<T: DeviceValue>(values: &[T]) -> Self {
        let bytes = size_of_val(values);
        let Some(gpu) = gpu() else {
            let buffer = Self::zeroed(bytes);
            buffer.write(0, values);
            return buffer;
        };
        let memory = Fenced::of(gpu, values);
        Self { address: memory.address(), place: Place::Gpu(memory), bytes }
    }

    pub(crate) fn of_bf16(numbers: &[bf16]) -> Self {
        Self::of(&numbers.iter().map(|number| number.to_bits()).collect::<Vec<u16>>())
    }

    /// So many values that show when nobody wrote them: a NaN as bf16 and as f32.
    pub(crate) fn poisoned<T: DeviceValue>(count: usize) -> Self {
        Self::of(&vec![POISON; count * size_of::<T>() / 2])
    }

    pub(crate) fn address(&self) -> Address {
        self.address
    }

    pub(crate) fn read<T: DeviceValue>(&self) -> Vec<T> {
        match &self.place {
            Place::Host { .. } => self.read_at(0, self.bytes / size_of::<T>()),
            Place::Gpu(memory) => memory.read(),
        }
    }

    pub(crate) fn read_bf16(&self) -> Vec<bf16> {
        self.read::<u16>().into_iter().map(bf16::from_bits).collect()
    }

    /// Writes `values` at byte `offset` of a buffer on the host.
    pub(crate) fn write<T: DeviceValue>(&self, offset: usize, values: &[T]) {
        assert!(matches!(self.place, Place::Host { .. }) && offset + size_of_val(values) <= self.bytes);
        let to = (self.address + offset as u64) as *mut u8;
        // SAFETY: so many bytes are there, and values are plain.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), to, size_of_val(values)) }
    }

    /// Reads `count` values at byte `offset` of a buffer on the host.
    pub(crate) fn read_at<T: DeviceValue>(&self, offset: usize, count: usize) -> Vec<T> {
        assert!(matches!(self.place, Place::Host { .. }) && offset + count * size_of::<T>() <= self.bytes);
        let from = (self.address + offset as u64) as *const T;
        // SAFETY: so many values are there; every bit pattern is one.
        (0..count).map(|index| unsafe { from.add(index).read_unaligned() }).collect()
    }
}

pub(crate) const POISON: u16 = 0x7fff;

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Place::Host { mapping, mapped_bytes } = self.place {
            // SAFETY: our own mapping, to which nothing refers any more.
            unsafe { munmap(mapping, mapped_bytes) };
        }
    }
}

/// The struct of the same name in `cu/host/machine.h`.
#[repr(C)]
struct HostLaunch {
    kernel: *const c_char,
    params: *const c_void,
    params_bytes: u64,
    blocks: *const u32,
    block_count: u64,
    seed: u64,
    grid: u32,
    threads: u32,
    shared_bytes: u32,
    copy_mode: u32,
    copied_bytes: *mut u64,
}

/// The struct of the same name in `cu/host/tensor_copies.h`: what the host's machine has for a tensor map.
#[repr(C)]
struct HostMap {
    magic: u64,
    address: Address,
    columns: u64,
    rows: u64,
    row_bytes: u64,
    box_columns: u32,
    box_rows: u32,
    dimensions: u32,
    nothing: [u32; 19],
}

/// What a launch is told of a matrix.
pub(crate) fn map(matrix: Matrix) -> Result<TensorMap, CudaError> {
    if runs_on_gpu() {
        return matrix.map();
    }
    let Matrix { address, rows, columns, row_bytes, boxes } = matrix;
    let (box_columns, box_rows, dimensions) = match boxes {
        Boxes::Columns(rows) => (Boxes::COLUMNS, rows, 2),
        Boxes::Groups(rows) => (columns as u32, rows, 4),
    };
    let (magic, nothing) = (0x7061_6d20_726f_6f48, [0; 19]);
    let map =
        HostMap { magic, address, columns, rows, row_bytes, box_columns, box_rows, dimensions, nothing };
    // SAFETY: plain numbers of the same size.
    Ok(unsafe { std::mem::transmute::<HostMap, TensorMap>(map) })
}

type HostLaunchFn = unsafe extern "C" fn(*const HostLaunch, *mut c_char, u64) -> c_int;

/// Runs all blocks of a launch.
pub(crate) fn launch<P: DeviceValue>(launch: Launch, params: &P, run: Run) -> Result<(), String> {
    launch_blocks(launch, params, run, &[])
}

/// Runs some blocks of a launch; none means all.
pub(crate) fn launch_blocks<P: DeviceValue>(
    launch: Launch,
    params: &P,
    run: Run,
    blocks: &[u32],
) -> Result<(), String> {
    assert!(blocks.iter().all(|&block| block < launch.grid));
    if let Some(gpu) = gpu() {
        // SAFETY: the tests give each kernel its own parameters.
        return unsafe { gpu.launch(launch, params) }
            .and_then(|()| gpu.synchronize())
            .map_err(|error| error.to_string());
    }
    launch_on_host(launch, params, run, blocks).map(drop)
}

/// Runs all blocks of a launch on the host; returns how many bytes its copies to shared memory read.
pub(crate) fn copied_bytes<P: DeviceValue>(launch: Launch, params: &P, run: Run) -> Result<u64, String> {
    assert!(!runs_on_gpu(), "a GPU does not count them");
    launch_on_host(launch, params, run, &[])
}

fn launch_on_host<P: DeviceValue>(
    launch: Launch,
    params: &P,
    run: Run,
    blocks: &[u32],
) -> Result<u64, String> {
    let kernel = CString::new(launch.kernel).unwrap();
    let mut copied_bytes = 0;
    let description = HostLaunch {
        kernel: kernel.as_ptr(),
        params: std::ptr::from_ref(params).cast(),
        params_bytes: size_of::<P>() as u64,
        blocks: blocks.as_ptr(),
        block_count: blocks.len() as u64,
        seed: run.seed,
        grid: launch.grid,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        copy_mode: run.copies as u32,
        copied_bytes: &raw mut copied_bytes,
    };
    let mut error = [0; 512];
    let library = library(&source_of(launch.kernel));
    let host_launch = library.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: the function has this signature; what it is given lives until it returns. What the kernel does is what is tested.
    let failed = unsafe { host_launch(&raw const description, error.as_mut_ptr(), error.len() as u64) };
    // SAFETY: terminated by snprintf.
    let message = unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
    if failed == 0 { Ok(copied_bytes) } else { Err(format!("{message} ({run:?})")) }
}

/// The file a kernel is in.
fn source_of(kernel: &str) -> String {
    match kernel {
        "embed" | "select_rows" => "gather.cu".into(),
        _ => format!("{}.cu", kernel.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_')),
    }
}

type Library = OnceLock<Mutex<HostLaunchFn>>;

/// A file's kernels, compiled once a process; one launch at a time.
fn library(source: &str) -> &'static Mutex<HostLaunchFn> {
    static LIBRARIES: Mutex<BTreeMap<String, &'static Library>> = Mutex::new(BTreeMap::new());
    let mut libraries = LIBRARIES.lock().unwrap();
    let library: &'static Library =
        libraries.entry(source.to_owned()).or_insert_with(|| Box::leak(Box::default()));
    // Others may compile while this one does.
    drop(libraries);
    library.get_or_init(|| Mutex::new(load(&compile(source))))
}

fn load(library: &Path) -> HostLaunchFn {
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: the library is ours; its constructors only enter kernels in a list. `host_launch` has the signature it is given.
    unsafe {
        let handle = dlopen(path.as_ptr(), NOW);
        assert!(!handle.is_null(), "{}", CStr::from_ptr(dlerror()).to_string_lossy());
        let function = dlsym(handle, c"host_launch".as_ptr());
        assert!(!function.is_null(), "{} has no host_launch", library.display());
        std::mem::transmute::<*mut c_void, HostLaunchFn>(function)
    }
}

const OTHER_SOURCES: &str = "ROUNDHOUSE_KERNEL_SOURCES";

/// Of a mutant one failure is enough: the process ends with it, and what it says is not kept from the log.
fn end_at_the_first_failure() {
    std::panic::set_hook(Box::new(|failure| {
        let _ = writeln!(std::io::stderr(), "{failure}");
        // SAFETY: ends the process at once: another test's kernel still runs, and destructors would take its machine away.
        unsafe { _exit(101) }
    }));
}

/// Compiles a kernel's file.
fn compile(source: &str) -> PathBuf {
    match std::env::var_os(OTHER_SOURCES) {
        None => fake::compile(&crate_directory().join("cu"), source, "-Werror"),
        Some(sources) => {
            end_at_the_first_failure();
            // A mutant may leave a variable unused.
            fake::compile(Path::new(&sources), source, "-w")
        }
    }
}

pub(crate) fn crate_directory() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
