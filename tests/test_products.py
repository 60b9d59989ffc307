"""Products by oneDNN against float64, and which layers use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from xcompress import products
from xcompress.checkpoint import Loaded
from xcompress.products import OneDNNLinear, product, use_onednn

needs_onednn = pytest.mark.skipif(not products.faster(), reason="needs a CPU with AVX-512 and a PyTorch with oneDNN")


@pytest.fixture
def other_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule on a processor without AVX-512."""
    monkeypatch.setattr(products, "faster", lambda: False)
    yield


@needs_onednn
@torch.inference_mode()
def test_layers_agree_with_float64() -> None:
    """With and without bias, for one row and many, whatever the leading axes."""
    generator = torch.Generator().manual_seed(0)
    for bias in (True, False):
        layer = torch.nn.Linear(96, 33, bias=bias)
        model = torch.nn.Sequential(layer)
        for shape in ((96,), (1, 96), (2, 7, 96)):
            x = torch.randn(shape, generator=generator)
            expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
            if type(layer) is torch.nn.Linear:
                assert use_onednn(model) == 1
            assert type(layer) is OneDNNLinear
            torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert use_onednn(model) == 0  # once is enough


@torch.inference_mode()
def test_product_agrees_with_float64() -> None:
    """A product with a matrix of either memory order."""
    x, matrix = torch.randn(2, 5, 64), torch.randn(40, 64).T
    for each in (matrix, matrix.contiguous()):
        torch.testing.assert_close(product(x, each).double(), x.double() @ matrix.double(), rtol=1e-5, atol=1e-5)


def test_other_layers_are_left_alone(other_processor: None) -> None:
    """Nothing changes where the rule says no, in other dtypes, or in classes that compute something else."""
    model = torch.nn.Linear(4, 4)
    assert use_onednn(model) == 0 and type(model) is torch.nn.Linear


@needs_onednn
def test_only_plain_float32_layers(tiny: Callable[[str], Loaded]) -> None:
    """bfloat16 keeps its own path; a loaded reader's layers and output head are all covered."""
    assert use_onednn(torch.nn.Linear(4, 4, dtype=torch.bfloat16)) == 0

    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    assert use_onednn(Scaled(4, 4)) == 0
    model: Any = tiny("llama").model
    assert all(type(m) is OneDNNLinear for m in model.modules() if isinstance(m, torch.nn.Linear))


@needs_onednn
def test_a_changed_weight_is_used() -> None:
    """A weight that is changed in place after it was packed is the one that is multiplied with."""
    layer = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
    assert use_onednn(layer) == 1
    x = torch.randn(4, 16)
    before = layer(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before)


@needs_onednn
@torch.inference_mode()
def test_large_models_are_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the weight itself is multiplied with, to the same result."""
    x = torch.randn(3, 16)
    with torch.inference_mode(False):
        layer = torch.nn.Linear(16, 16).requires_grad_(False)
    expected = layer(x)
    monkeypatch.setattr(products, "_PACKED_BYTES", 16 * 16 * 4 - 1)
    assert use_onednn(layer) == 1 and isinstance(layer, OneDNNLinear) and layer._packed is None
    torch.testing.assert_close(layer(x), expected)
