"""Attention forward for PyTorch, in place of torch.nn.functional.scaled_dot_product_attention.

Tuned for
    batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16,causal=true,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=8,heads=12,kv_heads=12,q_len=128,kv_len=128,head_dim=64,dtype=float16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=1,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=4,heads=16,kv_heads=16,q_len=2048,kv_len=2048,head_dim=64,dtype=bfloat16,causal=true,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=2,heads=16,kv_heads=16,q_len=4096,kv_len=4096,head_dim=128,dtype=bfloat16,causal=true,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=4,heads=16,kv_heads=16,q_len=2048,kv_len=2048,head_dim=64,dtype=bfloat16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=2,heads=16,kv_heads=16,q_len=4096,kv_len=4096,head_dim=128,dtype=bfloat16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
    batch=1,heads=32,kv_heads=32,q_len=8192,kv_len=8192,head_dim=128,dtype=bfloat16,causal=false,layout=bhsd,lse=false,scale=0.0:  sm_90, sm_89 (compiled), compute_89 (compiled)
Everything else is left to PyTorch. Found and written by evo 0.1.0+checkout; manifest.json tells how.

    python -m PACKAGE build     build the native launcher: cheaper calls
    python -m PACKAGE check     compare with PyTorch and float64
    python -m PACKAGE bench     time beside PyTorch
"""

from .frontend import also_serve, build, explain, patch, scaled_dot_product_attention, variants

__all__ = ["also_serve", "build", "explain", "patch", "scaled_dot_product_attention", "variants"]
