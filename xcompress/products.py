"""Matrix products in float32 on a CPU by oneDNN, where it is the faster library.

PyTorch gives float32 products to MKL, which keeps to AVX2 on processors of other makers than Intel; oneDNN, which is part of
the same PyTorch, uses AVX-512 on all of them: twice the rate on an AMD EPYC (``results/bench.md``). The rule depends on the
machine alone, never on a measurement, so that a run repeats bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

_PACKED_BYTES = 2**30  # a larger model's weights are not held twice
_PACKED_ROWS = 32  # rows that the order is chosen for: those of a decoding step


@lru_cache(maxsize=1)
def faster() -> bool:
    """Whether oneDNN is to be used here. Its operators are not part of the public interface."""
    built: Any = torch.backends.mkldnn.is_available
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    there = built() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and there


def use_onednn(model: torch.nn.Module) -> int:
    """Let every plain linear layer of ``model`` multiply by oneDNN; returns how many do (0 where it would gain nothing).

    Weights stay where and what they are; those of a small model are also kept in oneDNN's own order, which is the faster one.
    Layers of other classes, dtypes or devices are left alone.
    """
    found = [module for module in model.modules() if type(module) is torch.nn.Linear and _fits(module.weight)]
    small = sum(module.weight.numel() for module in found) * 4 <= _PACKED_BYTES
    for module in found:
        module.__class__ = OneDNNLinear
        assert isinstance(module, OneDNNLinear)
        module.pack(small)
    return len(found)


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x`` [..., D] times ``matrix`` [D, R]."""
    return _linear(x, matrix.T, None) if _fits(matrix) and _fits(x) else x @ matrix


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose product is oneDNN's; for inference (the operator has no gradient). Made by :func:`use_onednn`."""

    _packed: torch.Tensor | None
    _of: int  # the weight's version that was packed

    def pack(self, yes: bool) -> None:
        """Keep a second copy of the weight in oneDNN's order, or none."""
        reorder: Any = torch.ops.mkldnn._reorder_linear_weight
        yes = yes and not self.weight.is_inference()  # such a tensor does not say whether it was changed
        self._packed = reorder(self.weight.detach(), _PACKED_ROWS) if yes else None
        self._of = self.weight._version if yes else 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        usable = self._packed is not None and self.weight._version == self._of  # else it was changed in place since
        return _linear(input, self._packed if usable else self.weight, self.bias)


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and faster()


def _linear(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise
    result: torch.Tensor = operator(x, weight, bias, "none", [], "")
    return result
