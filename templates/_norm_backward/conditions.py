"""The calls of the backward operators of the norms that a variant may serve."""


def fits(*statistics: str) -> dict[str, str]:
    """Conditions by their reasons, as `Function.fits` has them. statistics: arguments that the forward saved of each row."""
    return {
        "no gradient of the input is wanted": "output_mask[0]",
        "a gradient of a weight is wanted that is not there": "weight is not None or not output_mask[1]",
        "normalized_shape is not the end of the shape of the input and of the gradient": (
            "len(normalized_shape) > 0 and input.shape[-len(normalized_shape):] == normalized_shape"
            " and grad_out.shape == input.shape"
        ),
        "weight is not contiguous and of normalized_shape": (
            "weight is None or weight.shape == normalized_shape and weight.is_contiguous()"
        ),
        **{
            f"{name} is not contiguous, one a row, in float32, or float64 for an input of that": (
                f"{name}.dtype == (torch.float64 if input.dtype == torch.float64 else torch.float32)"
                f" and {name}.numel() == input.numel() // prod(normalized_shape) and {name}.is_contiguous()"
            )
            for name in statistics
        },
    }
