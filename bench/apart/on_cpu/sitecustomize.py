"""Memory of the host is pinned for a GPU, which is not there: SGLang's adapters ask for it wherever they are."""

import builtins

_import = builtins.__import__


def _unpinned(function):
    def call(*args, **named):
        named.pop("pin_memory", None)
        return function(*args, **named)

    return call


def _importing(name, *args, **named):
    module = _import(name, *args, **named)
    if name == "torch" and not getattr(module.__spec__, "_initializing", True) and not hasattr(module, "_unpinned"):
        module._unpinned = True
        module.Tensor.pin_memory = lambda tensor, *_args: tensor
        for made in ("tensor", "empty", "zeros", "ones"):
            setattr(module, made, _unpinned(getattr(module, made)))
    return module


builtins.__import__ = _importing
