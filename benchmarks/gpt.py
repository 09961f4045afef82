"""A transformer of GPT-2's form in plain PyTorch, what it learns from, and its training: for benchmarks, nothing downloaded.

The norms are torch.nn.LayerNorm, attention is torch.nn.functional.scaled_dot_product_attention, looked up at each call, as
models have it; query, key and value are slices of one projection. There is no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LEARNING_RATE = 3e-4
LOSS_SCALE = 1024.0
"""Scale of the loss in float16, in which gradients of a mean over thousands of tokens are too small."""
_SUCCESSORS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    dtype: torch.dtype
    place: torch.device

    def __str__(self) -> str:
        sizes = f"{self.layers} layers, width {self.width}, {self.heads} heads, vocabulary {self.vocabulary}"
        return f"{sizes}, batch {self.batch} x {self.sequence}, {str(self.dtype).removeprefix('torch.')}"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Model(nn.Module):
    """Weights from a normal distribution of deviation 0.02, smaller where residuals add up, as Radford et al. 2019."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.to(device=shape.place)
        generator = torch.Generator(shape.place).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                residual = name.endswith(("out.weight", "down.weight"))
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.02 * ((2 * shape.layers) ** -0.5 if residual else 1), generator=generator)
                elif "norm" not in name:
                    parameter.zero_()
        self.to(dtype=shape.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    result: Tensor = model(tokens)
    return result


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Loss of predicting each token from those before it, in float32."""
    found = model(tokens[:, :-1])
    return functional.cross_entropy(found.float().flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """AdamW with weights and moments in float32, from which the model's own are rounded."""

    def __init__(self, model: nn.Module, shape: Shape) -> None:
        self.model = model
        self._weights = list(model.parameters())
        self._exact = [w.detach().float().clone() for w in self._weights]
        for weight in self._exact:
            weight.grad = torch.zeros_like(weight)
        self._scale = LOSS_SCALE if shape.dtype == torch.float16 else 1.0
        self._optimizer = torch.optim.AdamW(self._exact, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def step(self, tokens: Tensor, loss=loss) -> Tensor:  # type: ignore[no-untyped-def]
        """The loss before the step."""
        found = loss(self.model, tokens)
        (found * self._scale).backward()
        with torch.no_grad():
            gradients = [w.grad for w in self._exact]
            torch._foreach_copy_(gradients, [w.grad for w in self._weights])
            torch._foreach_div_(gradients, self._scale)
            self._optimizer.step()
            torch._foreach_copy_(self._weights, self._exact)
        self.model.zero_grad()
        return found.detach()


def batches(shape: Shape, count: int, seed: int) -> Tensor:
    """[count, batch, sequence + 1]: every token has four that may follow it, some of them frequent, some rare, so that
    there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.rand(shape.vocabulary, _SUCCESSORS, generator=generator)
    followers = (shape.vocabulary**ranks).long() - 1
    rows = count * shape.batch
    tokens = torch.empty(rows, shape.sequence + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(shape.vocabulary, (rows,), generator=generator)
    picks = torch.randint(_SUCCESSORS, tokens.shape, generator=generator)
    for i in range(1, tokens.shape[1]):
        tokens[:, i] = followers[tokens[:, i - 1], picks[:, i]]
    return tokens.view(count, shape.batch, -1).to(shape.place)
