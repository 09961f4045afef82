"""Softmax as PyTorch code calls it: over the last axis, with all axes before it gathered into rows."""

from evo.problem.function import Function

FUNCTION = Function(
    signature="softmax(Tensor input, int? dim=None, int _stacklevel=3, ScalarType? dtype=None) -> Tensor",
    original="torch.nn.functional.softmax",
    operator="aten.softmax(input, dim)",
    gradient="aten._softmax_backward_data(gradient, result, dim, input.dtype)",
    tensors={"x": "input"},
    sizes={"rows": "input.numel() // input.shape[-1]", "cols": "input.shape[-1]"},
    fits={
        "dim is not the last axis": "dim is not None and input.ndim > 0 and dim in (-1, input.ndim - 1)",
        "dtype is not the input's own": "dtype is None or dtype == input.dtype",
    },
    call={"dim": "-1"},
    modules={"Softmax": ("torch.nn.Softmax", "softmax(input, self.dim, _stacklevel=5)")},
    # Without dim PyTorch warns, and is to name the caller of ours.
    passes={"_stacklevel": "_stacklevel + 1 if dim is None else _stacklevel"},
)
