"""An independent trainer for the same numbers: `transformers`' LlamaForCausalLM under PyTorch.

    python3 bench/peer/torch_llama.py DIR OUR_METRICS.jsonl

DIR is what bench/peer_export wrote: initial weights, batches, learning rates. Trains BF16 weights with an FP32 master
copy (AdamW, clipping by the norm, no decay on norm gains) and, as the exact yardstick, FP32 weights throughout; prints
their losses beside ours, step by step. Fails if ours leaves the BF16 curve by more than 1e-3 in the first 20 updates,
or by more than 2 % in any: rounding differences grow with every update, and PyTorch's two curves part as well.
Not part of the trainer: it runs on a machine that has PyTorch.
"""
import argparse
import json
import sys

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


def build(p, weights, dtype, device):
    scaling = None
    if p["rope_llama3"]:
        scaling = dict(rope_type="llama3", factor=p["factor"], low_freq_factor=p["low_freq_factor"],
                       high_freq_factor=p["high_freq_factor"],
                       original_max_position_embeddings=p["original_context"])
    config = LlamaConfig(
        vocab_size=p["vocab"], hidden_size=p["width"], intermediate_size=p["ffn"], num_hidden_layers=p["layers"],
        num_attention_heads=p["heads"], num_key_value_heads=p["kv_heads"], head_dim=p["head_dim"],
        rms_norm_eps=p["norm_eps"], rope_theta=p["rope_theta"], rope_scaling=scaling, tie_word_embeddings=p["tied"],
        max_position_embeddings=p["seq_len"], attn_implementation="sdpa", use_cache=False)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(p["tied"] and name == "lm_head.weight" for name in missing), missing
    # Rotary tables stay FP32 whatever the weights are.
    return model.to(device=device, dtype=dtype)


def train(p, weights, tokens, targets, dtype, device):
    model = build(p, weights, dtype, device)
    names = {id(q): n for n, q in model.named_parameters()}
    params = list(model.parameters())
    master = [q.detach().float().clone() for q in params]
    for m, q in zip(master, params):  # the master starts from the exported FP32 values, not from their BF16 rounding
        m.copy_(weights[names[id(q)]].to(device))
    first = [torch.zeros_like(m) for m in master]
    second = [torch.zeros_like(m) for m in master]
    losses, norms = [], []
    for t in range(p["steps"]):
        x = torch.from_numpy(tokens[t]).long().to(device)
        y = torch.from_numpy(targets[t]).long().to(device)
        grads = [torch.zeros_like(m) for m in master]
        total = 0.0
        for b in range(x.shape[0]):  # sample by sample with FP32 accumulation, as ours
            logits = model(input_ids=x[b:b + 1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y[b], reduction="sum")
            total += loss.item()
            (loss / y.numel()).backward()
            for g, q in zip(grads, params):
                g += q.grad.float()
                q.grad = None
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads)).item()
        scale = min(1.0, p["clip"] / norm) if p["clip"] > 0 else 1.0
        lr, b1, b2 = p["lr"][t], p["beta1"], p["beta2"]
        with torch.no_grad():
            for q, w, g, m, v in zip(params, master, grads, first, second):
                g = g * scale
                m.mul_(b1).add_(g, alpha=1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                decay = p["weight_decay"] if q.dim() > 1 else 0.0
                step = (m / (1 - b1 ** (t + 1))) / ((v / (1 - b2 ** (t + 1))).sqrt() + p["eps"])
                w.sub_(lr * (step + decay * w))
                q.copy_(w)
        losses.append(total / y.numel())
        norms.append(norm)
    return losses, norms


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("metrics")
    args = parser.parse_args()
    p = json.load(open(f"{args.folder}/peer.json"))
    weights = load_file(f"{args.folder}/init.safetensors")
    shape = (p["steps"], p["batch"], p["seq_len"])
    tokens = np.fromfile(f"{args.folder}/tokens.i32", dtype="<i4").reshape(shape)
    targets = np.fromfile(f"{args.folder}/targets.i32", dtype="<i4").reshape(shape)
    ours = {row["step"]: row for row in map(json.loads, open(args.metrics))}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    bf16, bf16_norm = train(p, weights, tokens, targets, torch.bfloat16, device)
    fp32, fp32_norm = train(p, weights, tokens, targets, torch.float32, device)
    print(f"PyTorch {torch.__version__} on {device}; loss and norm of ours, torch BF16, torch FP32")
    early = worst = worst_torch = 0.0
    for t in range(p["steps"]):
        row = ours[t + 1]
        difference = abs(row["loss"] / bf16[t] - 1)
        worst = max(worst, difference)
        early = max(early, difference) if t < 20 else early
        worst_torch = max(worst_torch, abs(bf16[t] / fp32[t] - 1))
        if t < 5 or (t + 1) % 10 == 0 or t + 1 == p["steps"]:
            print(f"{t + 1:5d}  {row['loss']:.5f} {bf16[t]:.5f} {fp32[t]:.5f}   "
                  f"{row['grad_norm']:.4f} {bf16_norm[t]:.4f} {fp32_norm[t]:.4f}")
    print(f"largest relative difference of loss: ours to torch BF16 {early:.1e} in 20 updates, {worst:.1e} in all; "
          f"torch BF16 to torch FP32 {worst_torch:.1e}")
    if early > 1e-3 or worst > 2e-2:
        print("FAILED: limits 1e-3 and 2e-2")
        sys.exit(1)
    print("ok")


if __name__ == "__main__":
    main()
