"""The calls of the backward operators of the norms that a variant may serve."""

ALIKE = {"weight and bias have different dtypes": "weight is None or bias is None or weight.dtype == bias.dtype"}
"""The condition for functions that have both."""


def fits(
    *statistics: str, input: str = "input", shape: str = "normalized_shape", mask: str = "output_mask", weight: int = 1
) -> dict[str, str]:
    """Conditions by their reasons, as `Function.fits` has them. statistics: arguments that the forward saved of each row.
    input, shape, mask: expressions of what was normalised, of the weight's shape and of the gradients that are wanted, among
    which that of the weight has a place."""
    return {
        f"no gradient of the {input} is wanted": f"{mask}[0]",
        "a gradient of a weight is wanted that is not there": f"weight is not None or not {mask}[{weight}]",
        f"{shape} is not the end of the shape of the {input} and of the gradient": (
            f"len({shape}) > 0 and {input}.shape[-len({shape}):] == {shape} and grad_out.shape == {input}.shape"
        ),
        f"weight is not contiguous and of {shape}": f"weight is None or weight.shape == {shape} and weight.is_contiguous()",
        **{
            f"{name} is not contiguous, one a row, in float32, or float64 for an {input} of that": (
                f"{name}.dtype == (torch.float64 if {input}.dtype == torch.float64 else torch.float32)"
                f" and {name}.numel() == {input}.numel() // prod({shape}) and {name}.is_contiguous()"
            )
            for name in statistics
        },
    }
