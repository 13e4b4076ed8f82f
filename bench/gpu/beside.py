"""What PyTorch reaches on this GPU, beside our kernels: attention (flash and cuDNN), a copy, a product. One line of JSON each."""
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def measure(what, step, flops=None, size=None):
    """Runs `step` for about half a second after a warm-up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    times = max(1, int(0.5 / max(time.perf_counter() - begun, 1e-6)))
    begun = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / times
    line = {"name": "pytorch", "what": what, "microseconds": round(seconds * 1e6, 2), "launches": times}
    if flops:
        line["tflops"] = round(flops / seconds / 1e12, 2)
    if size:
        line["gbytes_per_second"] = round(size / seconds / 1e9, 2)
    print(json.dumps(line), flush=True)


def attention(head_dim, rows, heads=32, kv_heads=8):
    shape = lambda n: torch.randn(1, n, rows, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = shape(heads), shape(kv_heads), shape(kv_heads)
    for name, backend in [("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)]:
        try:
            with sdpa_kernel(backend):
                step = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                measure(f"PyTorch SDPA {name} head_dim {head_dim}, {rows} rows", step, flops=4 * heads * head_dim * rows**2 / 2)
        except RuntimeError as error:
            print(json.dumps({"name": "pytorch", "what": f"PyTorch SDPA {name} head_dim {head_dim}, {rows} rows", "error": str(error).splitlines()[0]}))


def main():
    print(json.dumps({"name": "pytorch", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for head_dim, rows in [(64, 8192), (128, 8192), (256, 8192), (128, 16384)]:
        attention(head_dim, rows)
    source = torch.randint(0, 255, (4 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    measure("copy of 4 GiB, read and written", lambda: target.copy_(source), size=2 * source.numel())
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    measure("product of 8192 x 8192 bf16", lambda: a @ b, flops=2 * 8192**3)


if __name__ == "__main__":
    main()
