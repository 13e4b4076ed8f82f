//! Machines with a fake GPU, and kernels for it: what g++ makes of `fake_cuda.cpp` and of `cu/`, once for the same sources.
//!
//! The libraries are found by name, so a machine is a search path: a process started with [`FakeMachine::enter`] sees that GPU and no
//! other. Knows nothing of what is run there. Used by the tests here, and by the worker's (`worker/tests/cuda.rs`).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A search path for libraries, and what the fake driver reads of its environment; by default, this machine as it is.
#[derive(Default)]
pub(crate) struct FakeMachine {
    directories: Vec<PathBuf>,
    environment: Vec<(&'static str, String)>,
}

impl FakeMachine {
    /// A GPU of compute capability 9.0 under the first driver that is new enough, and cuBLASLt; no kernels.
    pub(crate) fn new(crate_directory: &Path) -> Self {
        Self::built(crate_directory, "")
    }

    /// The same with a driver from before memory in the stream's order.
    pub(crate) fn with_an_ancient_driver(crate_directory: &Path) -> Self {
        Self::built(crate_directory, "-DANCIENT")
    }

    /// No NVIDIA driver, even where there is one.
    pub(crate) fn without_driver() -> Self {
        let directories = vec![broken(&["libcuda.so", "libcuda.so.1"])];
        Self { directories, ..Self::default() }
    }

    /// The same without cuBLASLt.
    pub(crate) fn without_blas(mut self) -> Self {
        let names = ["", ".13", ".12", ".11"].map(|version| format!("libcublasLt.so{version}"));
        self.directories.insert(0, broken(&names));
        self
    }

    /// Sets what fake_cuda.cpp reads: `FAKE_VERSION`, `FAKE_DEVICES`, `FAKE_CAPABILITY_MAJOR`, `FAKE_INIT_STATUS`.
    pub(crate) fn set(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// All kernels of `cu/`, for this CPU.
    pub(crate) fn with_kernels(self, crate_directory: &Path) -> Self {
        let sources = crate_directory.join("cu");
        let libraries: Vec<String> = kernel_files(&sources)
            .iter()
            .map(|source| compile(&sources, source, "-Werror").to_str().expect("a plain path").to_owned())
            .collect();
        self.set("FAKE_LIBRARIES", libraries.join(":"))
    }

    /// Makes a process that is not yet started see this machine.
    pub(crate) fn enter(&self, command: &mut Command) {
        if !self.directories.is_empty() {
            let path = std::env::join_paths(&self.directories).expect("plain paths");
            command.env("LD_LIBRARY_PATH", path);
        }
        command.envs(self.environment.iter().cloned());
    }

    fn built(crate_directory: &Path, macros: &str) -> Self {
        let source = crate_directory.join("tests/cuda/fake_cuda.cpp");
        let flags = format!("{FAKE_FLAGS} {macros}");
        let digest = digest(std::slice::from_ref(&source), &flags);
        let directory = once(&format!("fake-{digest:016x}"), |unfinished| {
            std::fs::create_dir(unfinished).expect("the directory of a build is writable");
            let library = unfinished.join("libcuda.so");
            run_compiler(&source, &flags, &library);
            // One library under two names, so that both see the same memory.
            let link = std::os::unix::fs::symlink("libcuda.so", unfinished.join("libcublasLt.so"));
            link.expect("the directory of a build is writable");
        });
        Self { directories: vec![directory], ..Self::default() }
    }
}

const FAKE_FLAGS: &str = "-std=c++17 -O2 -Wall -Werror -shared -fPIC";

/// Of each library its own kernels and its own machine: nothing is shared between them. An access that is not aligned as its type
/// says, which a GPU refuses and this CPU would let pass, ends the process (SIGILL).
const KERNEL_FLAGS: &str = "-x c++ -std=c++17 -O2 -Wall -DHOST_SHIM -shared -fPIC -fvisibility=hidden \
    -fno-gnu-unique -fno-exceptions -fno-rtti -fno-strict-aliasing -fsanitize=alignment -fsanitize-undefined-trap-on-error";

/// Products and sums in one instruction, as NVRTC makes them: what they round differently shows here as well, if this CPU has them.
fn fused_multiply_add() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        return "-mfma -ffp-contract=fast";
    }
    "-ffp-contract=fast"
}

/// The files of kernels.
pub(crate) fn kernel_files(sources: &Path) -> Vec<String> {
    let mut files = names_in(sources, &["cu"]);
    files.sort();
    files.iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect()
}

/// Compiles a kernel's file for this CPU; `warnings` is the flag that says what becomes of those.
pub(crate) fn compile(sources: &Path, source: &str, warnings: &str) -> PathBuf {
    let mut files = names_in(sources, &["cuh"]);
    files.extend(names_in(&sources.join("host"), &["h"]));
    files.extend(with_included_kernels(sources, source));
    files.sort();
    let flags = format!("{KERNEL_FLAGS} {} {warnings}", fused_multiply_add());
    once(&format!("{source}-{:016x}.so", digest(&files, &flags)), |unfinished| {
        run_compiler(&sources.join(source), &flags, unfinished);
    })
}

/// A file of kernels, and those that it takes parts from.
fn with_included_kernels(sources: &Path, source: &str) -> Vec<PathBuf> {
    let path = sources.join(source);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix(".cu\""));
    included.map(|name| sources.join(format!("{name}.cu"))).chain([path.clone()]).collect()
}

fn names_in(directory: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("the kernels' sources are there");
    let paths = entries.map(|entry| entry.expect("the kernels' sources are readable").path());
    let wanted =
        |path: &PathBuf| path.extension().is_some_and(|found| extensions.iter().any(|want| found == *want));
    paths.filter(wanted).collect()
}

fn run_compiler(source: &Path, flags: &str, to: &Path) {
    let output = Command::new("g++")
        .args(flags.split_whitespace())
        .arg("-o")
        .arg(to)
        .arg(source)
        .output()
        .expect("g++ is needed to run CUDA kernels on this machine's CPU; Debian's package is g++");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "g++ refuses {}:\n{errors}", source.display());
}

/// Where the file or directory of this name is, which is made unless that was done before.
fn once(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let wanted = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if wanted.exists() {
        return wanted;
    }
    let unfinished =
        wanted.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    make(&unfinished);
    if std::fs::rename(&unfinished, &wanted).is_err() {
        // Another process was quicker with the directory.
        assert!(wanted.exists(), "{} cannot be renamed", unfinished.display());
        let _ = std::fs::remove_dir_all(&unfinished);
    }
    wanted
}

/// A directory in which these libraries are none.
fn broken(names: &[impl AsRef<str>]) -> PathBuf {
    once(&format!("broken-{}", names[0].as_ref()), |unfinished| {
        std::fs::create_dir(unfinished).expect("the directory of a build is writable");
        for name in names {
            let written = std::fs::write(unfinished.join(name.as_ref()), "no library");
            written.expect("the directory of a build is writable");
        }
    })
}

/// Of files and flags.
fn digest(files: &[PathBuf], flags: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    flags.hash(&mut hasher);
    for file in files {
        let contents = std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        contents.hash(&mut hasher);
    }
    hasher.finish()
}
