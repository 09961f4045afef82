import torch

from evo.problem.function import Function


def picked(x, index, weight, factor=1.5):
    y = (x[index] * weight * factor).to(x.dtype)
    return y, (y > 0).to(torch.int8) - (y < 0).to(torch.int8)


FUNCTION = Function(
    signature="picked(Tensor x, Tensor index, Tensor weight, float factor=1.5) -> (Tensor, Tensor)",
    original=picked,
    tensors={"x": "x", "index": "index", "weight": "weight"},
    sizes={"rows": "x.shape[0]", "cols": "x.shape[1]"},
    results={"y": "x", "sign": "x"},
    fits={
        "x is no matrix": "x.ndim == 2",
        "index or weight does not fit": "index.shape == x.shape[:1] and weight.shape == x.shape[1:]",
    },
)
