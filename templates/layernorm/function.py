"""LayerNorm as PyTorch code calls it: over the last dimensions, with all axes before them gathered into rows."""

from evo.problem.function import Function

from ._norm.statistics import statistics

FUNCTION = Function(
    signature=(
        "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor"
    ),
    original="torch.nn.functional.layer_norm",
    operator="aten.layer_norm(input, normalized_shape, weight, bias, eps)",
    autocast="float32",
    tensors={"x": "input", "weight": "weight", "bias": "bias"},
    saved=("mean", "rstd"),
    returned=lambda given, y, x, normalized_shape, weight, bias, eps: (
        statistics(given, x, len(normalized_shape), eps, centred=True)
    ),
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    fits={
        "normalized_shape is not the end of the input's shape": (
            "len(normalized_shape) > 0 and input.shape[-len(normalized_shape):] == normalized_shape"
        ),
        "weight is not contiguous and of normalized_shape": (
            "weight is None or weight.shape == normalized_shape and weight.is_contiguous()"
        ),
        "bias is not contiguous and of normalized_shape": (
            "bias is None or bias.shape == normalized_shape and bias.is_contiguous()"
        ),
        # With less, a constant row is noise, and PyTorch's own noise is what is expected.
        "eps is not a float from 1e-12 to 1e+06": "1e-12 <= eps <= 1e6",
    },
    call={"normalized_shape": "(cols,)"},
    modules={
        "LayerNorm": ("torch.nn.LayerNorm", "layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)")
    },
)
