"""In place of SGLang's compiled kernels, which PyPI has for GPUs alone: names that can be imported, and that fail when they are called.

On a CPU without AMX, SGLang 0.5.23 computes a dense model with PyTorch's own operators, and wants these names only while it is imported.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_named):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return absent
