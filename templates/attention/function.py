"""Attention as PyTorch code calls it: four dimensions of any strides, with or without a mask, without dropout."""

from evo.problem.function import Function

_SHAPE_OF_SCORES = "(query.shape[0], query.shape[1], query.shape[2], key.shape[2])"
_VECTORS = "{0}.stride(3) == 1 and {0}.stride(0) % 8 == 0 and {0}.stride(1) % 8 == 0 and {0}.stride(2) % 8 == 0"

FUNCTION = Function(
    signature=(
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0,"
        " bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
    original="torch.nn.functional.scaled_dot_product_attention",
    operator=(
        "aten.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,"
        " enable_gqa=enable_gqa)"
    ),
    autocast="lower",
    tensors={"q": "query", "k": "key", "v": "value", "attn_mask": "attn_mask"},
    apart=("attn_mask",),
    expanded={"attn_mask": _SHAPE_OF_SCORES},
    results={"o": "query"},  # its axes in memory in the order of the query's, as PyTorch's fast back ends have it
    sizes={
        "batch": "query.shape[0]",
        "heads": "query.shape[1]",
        "kv_heads": "key.shape[1]",
        "q_len": "query.shape[2]",
        "kv_len": "key.shape[2]",
        "head_dim": "query.shape[3]",
    },
    options={
        "causal": "is_causal",
        "additive": "attn_mask is not None and attn_mask.dtype != torch.bool",
        "scale": "0.0 if scale is None else scale",
    },
    fits={
        "there is dropout": "dropout_p == 0.0",
        "scale is not a number from 1e-6 to 1e6": "scale is None or 1e-6 <= scale <= 1e6",
        "a back end was chosen (torch.nn.attention.sdpa_kernel, torch.backends.cuda)": (
            "backend('math') and (backend('flash') or backend('efficient') or backend('cudnn'))"
        ),
        "query, key or value has not four dimensions": "query.ndim == 4 and key.ndim == 4 and value.ndim == 4",
        "the shapes of query, key and value do not fit": (
            "key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3] and value.shape == key.shape"
        ),
        "key has other heads than query, and they are not asked to share": (
            "query.shape[1] == key.shape[1] or enable_gqa and query.shape[1] % key.shape[1] == 0"
        ),
        # PyTorch's mask starts at the first key, the variants' ends at the last.
        "a causal mask over unequal lengths": "not is_causal or query.shape[2] == key.shape[2]",
        "a tensor's last dimension is not dense, or its rows start between vectors": " and ".join(
            _VECTORS.format(name) for name in ("query", "key", "value")
        ),
        "attn_mask and is_causal exclude each other": "attn_mask is None or not is_causal",
        # Variants read such a one, but slowly; of added ones PyTorch's read what is not there.
        "attn_mask starts between vectors": (
            "attn_mask is None or attn_mask.dtype != torch.bool or not query.is_cuda or attn_mask.data_ptr() % 16 == 0"
        ),
        "attn_mask is neither boolean nor of the dtype of query": (
            "attn_mask is None or attn_mask.dtype == torch.bool or attn_mask.dtype == query.dtype"
        ),
        "the shape of attn_mask does not fit those of query and key": (
            f"attn_mask is None or attn_mask.ndim >= 2 and expands(attn_mask.shape, {_SHAPE_OF_SCORES})"
        ),
    },
    call={"is_causal": "causal", "scale": "scale or None", "enable_gqa": "heads != kv_heads", "dropout_p": "0.0"},
    served={"kv_len": "q_len if causal else kv_len"},
    timed={"mask_axes": "qk"},  # a number for each head would take more memory than the calls that masks are made for
    data_decide=("attn_mask",),
)
