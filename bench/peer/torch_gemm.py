#!/usr/bin/env python3
"""Peer of bench/gemm_cuda.c: the same products in PyTorch, median of 9 calls between CUDA events
after 50 ms of the same calls, random data.

BF16 by torch.matmul (BF16 output), FP8 by torch._scaled_mm with scales per tensor (both operands with the contraction
contiguous, as cuBLASLt wants them)."""
import torch

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
          "head": (128256, 4096)}
CALLS, WARM_MS = 9, 50


def timed_ms(call):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def median_ms(call):
    spent = 0.0
    while spent < WARM_MS:
        spent += timed_ms(call)
    return sorted(timed_ms(call) for _ in range(CALLS))[CALLS // 2]


def line(name, what, m, n, k, call):
    try:
        ms = median_ms(call)
        print(f"{name:8} {what:22} {m:6} {n:6} {k:6} {ms:8.3f} {2e-9 * m * n * k / ms:7.0f}")
    except RuntimeError as error:
        print(f"{name:8} {what:22} {m:6} {n:6} {k:6} refused: {str(error).splitlines()[0][:60]}")


def normal(rows, cols, dtype=torch.bfloat16):
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    scale = {torch.bfloat16: 1, torch.float8_e4m3fn: 64, torch.float8_e5m2: 8192}[dtype]
    return (x * scale).to(dtype)


def bf16_lines(name, m, out, width):
    x, w, dy = normal(m, width), normal(out, width), normal(m, out)
    line(name, "bf16 y", m, out, width, lambda: torch.matmul(x, w.t()))
    line(name, "bf16 dx", m, width, out, lambda: torch.matmul(dy, w))
    line(name, "bf16 dw", out, width, m, lambda: torch.matmul(dy.t(), x))


def fp8_lines(name, m, out, width):
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    one = torch.ones((), device="cuda")

    def product(a, b, dtype=torch.bfloat16, fast=False):
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=fast)

    x, w = normal(m, width, e4m3), normal(out, width, e4m3)
    line(name, "fp8 y", m, out, width, product(x, w))
    line(name, "fp8 y fast", m, out, width, product(x, w, fast=True))
    dy, turned = normal(m, out, e5m2), normal(width, out, e4m3)
    line(name, "fp8 dx", m, width, out, product(dy, turned))
    dy, x = normal(out, m, e5m2), normal(width, m, e4m3)
    line(name, "fp8 dw", out, width, m, product(dy, x))
    line(name, "fp8 dw fp32", out, width, m, product(dy, x, dtype=torch.float32))


def main():
    torch.manual_seed(1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for m in (4096, 16384):
        for name, (out, width) in SHAPES.items():
            if name == "head" and m > 4096:
                continue
            bf16_lines(name, m, out, width)
            if name != "head":
                fp8_lines(name, m, out, width)


if __name__ == "__main__":
    main()
