#!/usr/bin/env python3
"""Compiles the CUDA kernels of worker/kernels/cu for every architecture, without a GPU and without a CUDA toolkit.

    python3 worker/kernels/build_cubins.py           writes worker/kernels/cubins: machine code, PTX, and RESOURCES.md
    python3 worker/kernels/build_cubins.py --check   writes nothing; fails when what is committed there is not what the sources give

Both fail on a file that does not open with algorithm, source, shapes and costs, on a compiler warning, on what it says of products that wait
for each other, on a spilled register, on local memory, on a kernel of tensor-core products whose machine code has none, on one that touches
memory before it has waited for the kernel before it, and on one by wgmma whose exponentials do not run under products. That bad kernels are refused is tried first, on one of each kind but the last. NVRTC and
nvdisasm come from PyPI, pinned below, into target/cuda-toolchain (200 MB, once).
"""
import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE / "cu"
OUTPUT = HERE / "cubins"
TOOLCHAIN = HERE.parents[1] / "target" / "cuda-toolchain"

# 13.0, since a driver of the 580 series, the first for CUDA 13, refuses the PTX of later ones. nvdisasm reads what is older than itself.
PACKAGES = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.2.51"]

# Machine code for what is there, and PTX that a driver can compile for what comes.
TARGETS = ["sm_80", "sm_90a", "sm_100", "sm_120", "compute_80"]

# Files of which there is machine code for one generation only.
ONLY = {"attention_prefill_wgmma.cu": ["sm_90a", "compute_90a"]}

# A multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"): threads, blocks, shared memory in bytes.
MULTIPROCESSORS = {
    "sm_80": (2048, 32, 164 << 10),
    "sm_90a": (2048, 32, 228 << 10),
    "sm_100": (2048, 32, 228 << 10),
    "sm_120": (1536, 24, 100 << 10),
}
REGISTERS = 65536  # of a multiprocessor, handed to warps 256 at a time
RESERVED_BYTES = 1024  # of shared memory, by each block

# Kernels whose machine code must have tensor-core products.
TENSOR_CORES = ("attention_prefill_", "attention_decode_", "attention_mixed_", "moe_gemm", "linear_few_rows_")

# Kernels that begin while the one before still runs (KERNEL_AHEAD in dev.cuh); all others wait before they touch memory.
AHEAD = ("linear_few_rows_", "attention_decode_", "rms_norm")

# Kernels that compute the first half of a tile's weights, so many exponentials of each thread, while the values of the tile before are added:
# between the wait that leaves one group of products under way and the next.
EXPONENTIALS = {"attention_prefill_wgmma_64": 32, "attention_prefill_wgmma_128": 32, "attention_prefill_wgmma_256": 16}


class Failed(Exception):
    """Something a person must see; its message says what."""


def fetch_toolchain():
    """Installs the packages unless these versions are there. Two minutes at most."""
    stamp = TOOLCHAIN / "packages"
    if stamp.exists() and stamp.read_text().split() == PACKAGES:
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade",
               "--retries", "1", "--timeout", "15", "--target", str(TOOLCHAIN), *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired as expired:
        raise Failed("PyPI did not deliver the compiler within 100 seconds; is it reachable from here?") from expired
    if done.returncode:
        raise Failed(f"PyPI did not deliver {' and '.join(PACKAGES)}; is it reachable from here? pip says:\n{done.stderr.strip()}")
    stamp.write_text("\n".join(PACKAGES) + "\n")


class Nvrtc:
    """The compiler, through its C interface."""

    def __init__(self):
        [library] = TOOLCHAIN.glob("nvidia/*/lib/libnvrtc.so.13")
        # NVRTC asks for this one by its bare name, and gets what is loaded already.
        ctypes.CDLL(str(library.with_name("libnvrtc-builtins.so.13.0")), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))

    def call(self, name, *arguments):
        return getattr(self.library, "nvrtc" + name)(*arguments)

    def text(self, program, what):
        size = ctypes.c_size_t()
        if self.call(f"Get{what}Size", program, ctypes.byref(size)) or not size.value:
            return b""
        text = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, text)
        return text.raw

    def compile(self, path, target, headers):
        """The cubin or PTX of a file, and the compiler's log."""
        program = ctypes.c_void_p()
        sources = [text.encode() for text in headers.values()]
        names = [name.encode() for name in headers]
        array = ctypes.c_char_p * len(headers)
        self.call("CreateProgram", ctypes.byref(program), path.read_bytes(), path.name.encode(), len(headers),
                  array(*sources), array(*names))
        options = [f"--gpu-architecture={target}", "-std=c++17", "-default-device"]
        if target.startswith("sm_"):
            options += ["--ptxas-options=-v", "--ptxas-options=--warn-on-local-memory-usage", "--ptxas-options=--warn-on-spills"]
        failed = self.call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
        log = self.text(program, "ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise Failed(f"{path.name} for {target}:\n{log}")
        code = self.text(program, "CUBIN") if target.startswith("sm_") else self.text(program, "PTX").rstrip(b"\0")
        self.call("DestroyProgram", ctypes.byref(program))
        return code, log


def compile_one(job):
    """Runs in a process of its own: the compiler works on one program at a time."""
    path, target = job
    headers = {header.name: header.read_text() for header in sorted(SOURCES.glob("*.cu*")) if header != path}
    try:
        code, log = Nvrtc().compile(path, target, headers)
        report = {} if target.startswith("compute_") else resources(path, target, code, log)
        return code, report, None
    except Failed as failed:
        return b"", {}, str(failed)


def resources(path, target, code, log):
    """Registers of each kernel; fails on whatever makes one slow without anybody noticing."""
    # C75..: what becomes of wgmma and setmaxnreg, of which the compiler says some in passing ("info").
    warnings = [line for line in log.splitlines() if "warning" in line.lower() or "(C75" in line]
    if warnings:
        raise Failed(f"{path.name} for {target}:\n" + "\n".join(warnings))
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, log, re.S)
    if not found:
        raise Failed(f"{path.name} for {target}: the compiler says nothing of registers:\n{log}")
    assembly = disassembled(code)
    products = tensor_core_products(assembly)
    report = {}
    for kernel, stack, stores, loads, registers in found:
        if any(int(number) for number in (stack, stores, loads)):
            raise Failed(f"{kernel} for {target}: {stack} bytes of stack, {stores} and {loads} bytes spilled")
        if kernel.startswith(TENSOR_CORES) != bool(products.get(kernel)):
            raise Failed(f"{kernel} for {target}: {products.get(kernel, 0)} tensor-core products in its machine code")
        report[kernel] = (int(registers), products.get(kernel, 0))
        if target != "sm_80" and (problem := touches_memory_early(kernel, assembly[kernel])):
            raise Failed(f"{kernel} for {target}: {problem}")
        if kernel in EXPONENTIALS and (found := exponentials_under_products(assembly[kernel])) < EXPONENTIALS[kernel]:
            raise Failed(f"{kernel} for {target}: {found} of {EXPONENTIALS[kernel]} exponentials run under the products of values; the wait has moved")
    return report


# What must be refused, and a word of the reason: so that a compiler that says it in other words is noticed.
BAD_KERNELS = {
    "warning": 'extern "C" __global__ void bad(int* p) { int unused; *p = 1; }',
    "spilled": """extern "C" __global__ void __launch_bounds__(1024, 2) bad(float* p) {
        float a[64];
        for (int i = 0; i < 64; i++) a[i] = p[i * 1024 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; i++) p[i * 1024 + threadIdx.x] = a[63 - i] * a[i];
    }""",
    "C7519": """extern "C" __global__ void bad(float* p, unsigned long long a) {
        float d[4] = {p[0], p[1], p[2], p[3]};
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;\\n"
                     "wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
        for (int i = 0; i < 4; i++) p[threadIdx.x * 4 + i] = d[i];
    }""",
    "0 tensor-core products": 'extern "C" __global__ void attention_decode_64(int* p) { *p = 1; }',
    "before it waits for the kernel before it: ": """extern "C" __global__ void bad(int* p) {
        int first = p[threadIdx.x];
        asm volatile("griddepcontrol.wait;" ::: "memory");
        p[threadIdx.x] = first + 1;
    }""",
    "before it waits for the kernel before it: REDG": """extern "C" __global__ void bad(int* p) {
        atomicAdd(p, 1);
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }""",
    "before it waits for the kernel before it: CALL": """__device__ __noinline__ void before(int* p) { *p = 1; }
    extern "C" __global__ void bad(int* p) {
        before(p);
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }""",
    "does not wait": 'extern "C" __global__ void bad(float* p) { *p = 1.f; }',
}


# What every kernel's opening comment says; where its algorithm is from is a paper with its year, or stands behind "Source:".
OPENING = ("Algorithm:", "Shapes:", "Grid:", "Bytes", "FLOPs")
SOURCE = re.compile(r"\b(19[5-9]\d|20[0-3]\d)\b|Source:")


def check_openings():
    """Fails when a file does not begin by saying what its kernels do, on what, and at what cost."""
    for path in sorted(SOURCES.glob("*.cu")):
        opening = path.read_text().split("\n#", 1)[0]
        if missing := [word for word in OPENING if word not in opening]:
            raise Failed(f"{path.name} begins without {', '.join(missing)}")
        if not SOURCE.search(opening):
            raise Failed(f"{path.name} begins without a source: a paper with its year, or what follows \"Source:\"")


def check_refusals():
    """Fails when a bad kernel is not refused."""
    for reason, source in BAD_KERNELS.items():
        with tempfile.NamedTemporaryFile(suffix=".cu", mode="w") as file:
            file.write(source)
            file.flush()
            _, _, problem = compile_one((pathlib.Path(file.name), "sm_90a" if "wgmma" in source or "wait" in reason else "sm_80"))
        # Of what nvdisasm says, the address before the instruction is left out.
        if reason not in re.sub(r"/\*[0-9a-f]+\*/\s*|@!?U?P\d\s*", "", problem or ""):
            raise Failed(f"a kernel with {reason} in it was not refused: {problem}")


def disassembled(code):
    """The instructions of each kernel, a line each, as nvdisasm shows them."""
    [program] = TOOLCHAIN.glob("nvidia/*/bin/nvdisasm")
    program.chmod(0o755)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([program, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"nvdisasm: {done.stderr.strip()}")
    kernels, lines = {}, None
    for line in done.stdout.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            lines = kernels.setdefault(section[1], [])
        elif lines is not None:
            lines.append(line)
    return kernels


def tensor_core_products(assembly):
    """HMMA and HGMMA instructions of each kernel that has any."""
    counts = {kernel: sum(bool(re.search(r"\bHG?MMA\.", line)) for line in lines) for kernel, lines in assembly.items()}
    return {kernel: count for kernel, count in counts.items() if count}


# What reads or writes memory beyond a thread's own, and what goes elsewhere, where this cannot look.
TOUCHES = re.compile(r"\b(LDG|LDGMC|LDGSTS|LD|STG|ST|ATOM\w*|RED\w*|UBLK\w*|UTMA\w*|BRA|BRX|JMP|JMX|CALL|RET|EXIT)\b")


def touches_memory_early(kernel, lines):
    """What is wrong with how a kernel waits for the one before it, if anything."""
    wait = next((at for at, line in enumerate(lines) if re.search(r"\bACQBULK\b", line)), None)
    if wait is None:
        return "it does not wait for the kernel before it"
    early = next((line.strip() for line in lines[:wait] if TOUCHES.search(line)), None)
    return None if early is None or kernel.startswith(AHEAD) else f"it may touch memory before it waits for the kernel before it: {early}"


def exponentials_under_products(lines):
    """How many stand between a wait that leaves a group of products under way and the wait after it."""
    count, counting = 0, False
    for line in lines:
        if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            if counting:
                break
            counting = wait[1] == "1"
        elif counting and "MUFU.EX2" in line:
            count += 1
    return count


def blocks_at_once(target, threads, shared, registers):
    """How many blocks of a kernel fit on a multiprocessor."""
    most_threads, most_blocks, shared_bytes = MULTIPROCESSORS[target]
    warps = threads // 32
    registers_of_a_warp = -(-registers * 32 // 256) * 256
    # Each quarter of a multiprocessor has registers of its own.
    by_registers = REGISTERS // 4 // registers_of_a_warp * 4 // warps
    return min(most_blocks, most_threads // threads, by_registers, shared_bytes // (shared + RESERVED_BYTES))


def table(ptx, reports):
    """RESOURCES.md: what each kernel takes."""
    targets = list(MULTIPROCESSORS)
    lines = [
        "# What the kernels take",
        "",
        "Written by `worker/kernels/build_cubins.py`, which refuses spilled registers, local memory and warnings. For each architecture:",
        "registers of a thread, blocks that fit on a multiprocessor at once with the warps that makes, and tensor-core products (HMMA, HGMMA)",
        "in the machine code. Of kernels by wgmma the registers are those a block begins with; its warpgroups trade them.",
        "",
        "| kernel | threads | shared memory | " + " | ".join(targets) + " |",
        "|---|---|---|" + "---|" * len(targets),
    ]
    for kernel in sorted(set().union(*reports.values())):
        threads = int(re.search(rf"\.entry {kernel}\(.*?\.maxntid (\d+)", ptx, re.S)[1])
        shared = int(re.search(rf"\.u32 {kernel}_shared_bytes(?: = (\d+))?;", ptx)[1] or 0)
        cells = []
        for target in targets:
            if kernel not in reports[target]:
                cells.append("none")
                continue
            registers, products = reports[target][kernel]
            blocks = blocks_at_once(target, threads, shared, registers)
            if not blocks:
                raise Failed(f"{kernel} does not fit on {target}: {threads} threads, {shared} bytes, {registers} registers")
            cells.append(f"{registers}, {blocks} × {threads // 32}" + (f", {products}" if products else ""))
        lines.append(f"| {kernel} | {threads} | {shared:,} B | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def build():
    """All files of the output directory, by name."""
    paths = sorted(SOURCES.glob("*.cu"))
    jobs = [(path, target) for path in paths for target in ONLY.get(path.name, TARGETS)]
    # The slow ones first.
    jobs.sort(key=lambda job: -job[0].stat().st_size)
    files, reports, problems, ptx = {}, {target: {} for target in MULTIPROCESSORS}, [], ""
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for (path, target), (code, report, problem) in zip(jobs, pool.map(compile_one, jobs)):
            if problem:
                problems.append(problem)
            elif target.startswith("compute_"):
                ptx += code.decode()
                if target in TARGETS:
                    files[f"{path.stem}.ptx"] = code
            else:
                files[f"{path.stem}.{target}.cubin"] = code
                reports[target] |= report
    if problems:
        raise Failed("\n".join(problems))
    files["RESOURCES.md"] = table(ptx, reports).encode()
    return files


def compare(files):
    """Fails when the output directory has anything else."""
    committed = {path.name: path.read_bytes() for path in OUTPUT.iterdir()} if OUTPUT.is_dir() else {}
    stale = sorted(name for name in files.keys() | committed.keys() if files.get(name) != committed.get(name))
    if stale:
        raise Failed(f"not what the sources give: {', '.join(stale)}\nrun python3 worker/kernels/build_cubins.py and commit worker/kernels/cubins")


def write(files):
    """Replaces the output directory's files."""
    OUTPUT.mkdir(exist_ok=True)
    for path in OUTPUT.iterdir():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        (OUTPUT / name).write_bytes(contents)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="compare instead of writing")
    check = arguments.parse_args().check
    try:
        check_openings()
        fetch_toolchain()
        check_refusals()
        files = build()
        compare(files) if check else write(files)
    except Failed as failed:
        sys.exit(f"kernels: {failed}")
    code = sum(len(contents) for contents in files.values())
    print(f"kernels: {len(files) - 1} files of {code / 1e6:.1f} MB for {', '.join(TARGETS)}: {'up to date' if check else 'written'}")


if __name__ == "__main__":
    main()
