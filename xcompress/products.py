"""Matrix products in float32 on a CPU by oneDNN, where it is the faster library.

PyTorch gives float32 products to MKL, which keeps to AVX2 on processors of other makers than Intel; oneDNN, which is part of
the same PyTorch, uses AVX-512 on all of them: twice the rate on an AMD EPYC (``results/bench.md``). The rule depends on the
machine alone, never on a measurement, so that a run repeats bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)
def faster() -> bool:
    """Whether oneDNN is to be used here. Its operator is not part of the public interface, so it may be missing."""
    built: Any = torch.backends.mkldnn.is_available
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and built() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(model: torch.nn.Module) -> int:
    """Let every plain linear layer of ``model`` multiply by oneDNN; returns how many do (0 where it would gain nothing).

    Weights stay where and what they are. Layers of other classes, dtypes or devices are left alone.
    """
    found = [module for module in model.modules() if type(module) is torch.nn.Linear and _fits(module.weight)]
    for module in found:
        module.__class__ = OneDNNLinear
    return len(found)


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x`` [..., D] times ``matrix`` [D, R]."""
    return _linear(x, matrix.T, None) if _fits(matrix) and _fits(x) else x @ matrix


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose product is oneDNN's; for inference (the operator has no gradient)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        return _linear(input, self.weight, self.bias)


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and faster()


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise
    result: torch.Tensor = operator(x, weight, bias, "none", [], "")
    return result
