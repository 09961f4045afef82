"""What function.py beside a kernel.py takes: the statement of the function that PyTorch code calls."""

from evo.runtime.statement import Function as Function
