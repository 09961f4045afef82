"""Uses the exported LayerNorm as user code would, and compares it with torch.nn.functional.layer_norm."""

import sys

import torch
from layernorm import layer_norm
from torch.nn import functional

device, dtype, rows, cols = (
    ("cuda", torch.float16, 4096, 4096) if torch.cuda.is_available() else ("cpu", torch.float32, 4096, 1024)
)
x = 3 * torch.randn(rows, cols, device=device, dtype=dtype) + 1
weight, bias = torch.randn(2, cols, device=device, dtype=dtype)

exact = functional.layer_norm(x.double(), (cols,), weight.double(), bias.double())
own = (layer_norm(x, (cols,), weight, bias) - exact).abs().max().item()
torchs = (functional.layer_norm(x, (cols,), weight, bias) - exact).abs().max().item()
print(f"{rows}x{cols} {dtype} on {device}: largest error {own:.3g}, PyTorch's {torchs:.3g} (against float64)")
sys.exit(not own <= 2 * torchs)
