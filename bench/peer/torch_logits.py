"""Logits of the same weights and tokens from `transformers`' LlamaForCausalLM.

    python3 bench/peer/torch_logits.py DIR

DIR is what bench/peer_export and then bench/peer_logits_cuda wrote. Prints relative L2 differences: of ours (GPU, CPU) and
of torch BF16 to torch FP32 with the same BF16 weights. Fails if ours is further from FP32 than 1.5 times torch BF16 is.
"""
import json
import sys

import numpy as np
import torch
from safetensors.torch import load_file

from torch_llama import build

folder = sys.argv[1]
p = json.load(open(f"{folder}/peer.json"))
weights = {k: v.to(torch.bfloat16).float() for k, v in load_file(f"{folder}/init.safetensors").items()}
tokens = torch.from_numpy(np.fromfile(f"{folder}/tokens.i32", dtype="<i4")[: p["seq_len"]]).long().cuda()[None]
torch.backends.cuda.matmul.allow_tf32 = False
with torch.no_grad():
    exact = build(p, weights, torch.float32, "cuda")(input_ids=tokens).logits[0].double().cpu()
    torch_bf16 = build(p, weights, torch.bfloat16, "cuda")(input_ids=tokens).logits[0].double().cpu()
ours = {
    name: torch.from_numpy(np.fromfile(f"{folder}/logits_{name}.f32", dtype="<f4").reshape(exact.shape)).double()
    for name in ("cuda", "cpu")
}


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


limit = 1.5 * distance(torch_bf16, exact)
print(f"logits {tuple(exact.shape)}, largest {exact.abs().max():.3f}; relative L2 to torch FP32: "
      f"torch BF16 {distance(torch_bf16, exact):.2e}, ours on CUDA {distance(ours['cuda'], exact):.2e}, "
      f"ours on the CPU {distance(ours['cpu'], exact):.2e}; CUDA to CPU {distance(ours['cuda'], ours['cpu']):.2e}; "
      f"largest difference to torch FP32 {(ours['cuda'] - exact).abs().max():.2e}")
if not all(distance(o, exact) <= limit for o in ours.values()):
    sys.exit(f"FAILED: limit {limit:.2e}")
print("ok")
