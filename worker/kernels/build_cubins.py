#!/usr/bin/env python3
"""Compiles the CUDA kernels of worker/kernels/cu for every architecture, without a GPU and without a CUDA toolkit.

    python3 worker/kernels/build_cubins.py           writes worker/kernels/cubins: machine code, PTX, and RESOURCES.md
    python3 worker/kernels/build_cubins.py --check   writes nothing; fails when what is committed there is not what the sources give

Both fail on a compiler warning, on a spilled register, on local memory, and on a kernel of tensor-core products whose machine code
has none. NVRTC and nvdisasm come from PyPI, pinned below, into target/cuda-toolchain (200 MB, once).
"""
import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE / "cu"
OUTPUT = HERE / "cubins"
TOOLCHAIN = HERE.parents[1] / "target" / "cuda-toolchain"

# 13.0, since a driver of the 580 series, the first for CUDA 13, refuses the PTX of later ones. nvdisasm reads what is older than itself.
PACKAGES = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.2.51"]

# Machine code for what is there, and PTX that a driver can compile for what comes.
TARGETS = ["sm_80", "sm_90a", "sm_100", "sm_120", "compute_80"]

# Registers, threads and shared memory of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MULTIPROCESSORS = {
    "sm_80": {"threads": 2048, "blocks": 32, "shared": 164 << 10},
    "sm_90a": {"threads": 2048, "blocks": 32, "shared": 228 << 10},
    "sm_100": {"threads": 2048, "blocks": 32, "shared": 228 << 10},
    "sm_120": {"threads": 1536, "blocks": 24, "shared": 100 << 10},
}
REGISTERS = 65536

OPTIONS = ["-std=c++17", "-default-device", "--ptxas-options=-v,--warn-on-spills,--warn-on-local-memory-usage", "-warn-double-usage=false"]


class Failed(Exception):
    """Something a person must see; its message says what."""


def fetch_toolchain():
    """Installs the packages unless these versions are there."""
    stamp = TOOLCHAIN / "packages"
    if stamp.exists() and stamp.read_text().split() == PACKAGES:
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade",
               "--retries", "2", "--timeout", "20", "--target", str(TOOLCHAIN), *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as expired:
        raise Failed("PyPI did not deliver the compiler within five minutes; try again where it is reachable") from expired
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
