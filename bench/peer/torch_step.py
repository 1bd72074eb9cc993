#!/usr/bin/env python3
"""The peer of `train_gpt8b configs/gpt8b_step_time.toml`: complete updates of a Llama-3.1-8B in PyTorch.

BF16 parameters, gradients and moments, torch.compile per block, cuDNN attention, a chunked head and cross entropy
whose gradient is made on the spot, clipping by the global norm, fused AdamW. Random tokens. Prints one line.

    python3 bench/peer/torch_step.py --batch 1 --tokens 4096 --updates 8
"""
import argparse
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4096, 32, 8, 128, 14336, 128256


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        matrix = lambda rows, cols: torch.nn.Parameter(torch.randn(rows, cols) * 0.02)
        self.input_norm = torch.nn.Parameter(torch.ones(WIDTH))
        self.qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH)
        self.out = matrix(WIDTH, HEADS * HEAD_DIM)
        self.mlp_norm = torch.nn.Parameter(torch.ones(WIDTH))
        self.gate_up = matrix(2 * FFN, WIDTH)
        self.down = matrix(WIDTH, FFN)

    def forward(self, x, cosine, sine):
        batch, tokens, _ = x.shape
        qkv = F.linear(F.rms_norm(x, (WIDTH,), self.input_norm, 1e-5), self.qkv)
        qkv = qkv.view(batch, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

        def rotate(y):
            a, b = y.float().chunk(2, -1)
            return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(torch.bfloat16)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + F.linear(y.transpose(1, 2).reshape(batch, tokens, -1), self.out)
        gate, up = F.linear(F.rms_norm(x, (WIDTH,), self.mlp_norm, 1e-5), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


@torch.compile
def softmax_gradient(logits, targets, scale):
    logits = logits.float()
    lse = torch.logsumexp(logits, -1, keepdim=True)
    loss = (lse.squeeze(-1) - logits.gather(-1, targets[:, None]).squeeze(-1)).sum()
    d = torch.exp(logits - lse)
    d = d - (torch.arange(logits.shape[-1], device=logits.device)[None] == targets[:, None]).float()
    return loss * scale, (d * scale).to(torch.bfloat16)


class Head(torch.autograd.Function):
    """Loss of chunks of rows; the gradients are made in forward, so that no chunk's logits outlive it."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        loss, scale = 0.0, 1.0 / targets.numel()
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
        for i in range(0, hidden.shape[0], chunk):
            part, d = softmax_gradient(hidden[i : i + chunk] @ weight.T, targets[i : i + chunk], scale)
            loss = loss + part
            dhidden[i : i + chunk] = d @ weight
            dweight.addmm_(d.T, hidden[i : i + chunk])
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    def backward(ctx, d):
        dhidden, dweight = ctx.saved_tensors
        return dhidden * d, dweight * d, None, None


class Llama(torch.nn.Module):
    def __init__(self, layers, recompute):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.02)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.norm = torch.nn.Parameter(torch.ones(WIDTH))
        self.head = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.02)
        self.recompute = recompute

    def forward(self, tokens, targets, cosine, sine):
        x = F.embedding(tokens, self.embed)
        for block in self.blocks:
            x = checkpoint(block, x, cosine, sine, use_reentrant=False) if self.recompute else block(x, cosine, sine)
        x = F.rms_norm(x, (WIDTH,), self.norm, 1e-5)
        return Head.apply(x.reshape(-1, WIDTH), self.head, targets.reshape(-1), 2048)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(1)
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    model = Llama(a.layers, a.recompute)
    for block in model.blocks:
        block.compile()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    angle = torch.arange(a.tokens).float()[:, None] * 500000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    cosine, sine = angle.cos().float(), angle.sin().float()
    times = []
    for update in range(a.updates + 3):
        tokens = torch.randint(0, VOCAB, (a.batch, a.tokens + 1))
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:], cosine, sine)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        loss = loss.item()
        if update >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    median = times[len(times) // 2]
    print(
        f"torch {torch.__version__} layers {a.layers} B {a.batch} T {a.tokens} recompute {int(a.recompute)}: "
        f"median {median:.1f} ms, {a.batch * a.tokens / median * 1e3:.0f} tokens/s, loss {loss:.3f}, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
