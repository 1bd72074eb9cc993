#!/usr/bin/env python3
"""cuDNN's BF16 attention through PyTorch's SDPA, the peer of bench/attention_cuda: medians of CUDA events, random inputs.

Usage: torch_sdpa.py [runs]. Forward 4 B H T^2 D operations (half if causal), backward 2.5 times that.
"""
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def median_ms(call, runs):
    times = []
    for i in range(runs + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        if i >= 2:
            times.append((start, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[runs // 2]


def bench(batch, tokens, causal, runs):
    def draw(heads):
        x = torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = draw(32), draw(8), draw(8)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        grad = torch.randn_like(out)
        with torch.no_grad():
            forward = median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), runs)
        backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), runs)
    operations = 4 * batch * 32 * tokens * tokens * 128 * (0.5 if causal else 1)
    mask = "causal" if causal else "full"
    print(f"cudnn bf16 B{batch} T{tokens} {mask}: fwd {forward:.3f} ms, {operations / forward * 1e-9:.0f} TF/s; "
          f"bwd {backward:.3f} ms, {2.5 * operations / backward * 1e-9:.0f} TF/s", flush=True)


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for causal in (True, False):
        for batch, tokens in ((4, 4096), (2, 8192), (1, 16384), (1, 32768)):
            bench(batch, tokens, causal, runs)


main()
