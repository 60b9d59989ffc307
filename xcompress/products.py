"""Matrix products of float32 models on a CPU by oneDNN, where it is the faster library.

PyTorch gives float32 products to MKL, which keeps to AVX2 on processors of other makers than Intel; oneDNN, which is part of the
same PyTorch, uses AVX-512 on all of them: twice the rate on an AMD EPYC (``results/bench.md``). The rule depends on the machine
alone, never on a measurement, so that a run repeats bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch


def use_onednn(model: torch.nn.Module) -> int:
    """Let every plain linear layer of ``model`` multiply by oneDNN; returns how many do (0 where it would gain nothing).

    Weights stay where and what they are. Layers of other classes, dtypes or devices are left alone.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not available():
        return 0
    found = [module for module in model.modules() if type(module) is torch.nn.Linear and _fits(module.weight)]
    for module in found:
        module.__class__ = OneDNNLinear
    return len(found)


def available() -> bool:
    """Whether this build of PyTorch has oneDNN and the operator (it is not part of the public interface)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose product is oneDNN's; for inference (the operator has no gradient)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        operator: Any = torch.ops.mkldnn._linear_pointwise
        product: torch.Tensor = operator(input, self.weight, self.bias, "none", [], "")
        return product
