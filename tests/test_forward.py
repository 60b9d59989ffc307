"""Pooled states and log-probabilities of a batch against one text at a time through transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.memory import peak_growth
from xcompress import forward
from xcompress.attention import NAME
from xcompress.checkpoint import Loaded
from xcompress.forward import POOLINGS, PassSize, layer_names, pool, resolve_layer, run, token_bytes
from xcompress.schema import UsageError

LENGTHS = (6, 1, 40, 2, 40, 17)


def texts(seed: int = 0) -> list[list[int]]:
    """Token ids of six texts of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 261, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(folder: Path, ids: list[int]) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Block inputs and outputs caught by hooks of the test's own, the normed state, and token log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    decoder = model.get_decoder()
    blocks = decoder.h if hasattr(decoder, "h") else decoder.layers
    seen: list[np.ndarray[Any, Any]] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0].numpy().copy())

    for block in blocks:
        block.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: Any, __: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0].numpy().copy())

    blocks[-1].register_forward_hook(after)
    with torch.inference_mode():
        normed = decoder(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        layers = list(seen)  # the second call below runs the hooks again
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    logprobs = np.array([float(logits[t, ids[t + 1]]) for t in range(len(ids) - 1)])
    return layers, normed, logprobs


def loop_pool(states: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Each pooling written as plain loops over tokens and dimensions."""
    tokens, width = states.shape
    result = {name: np.zeros(width) for name in POOLINGS}
    for d in range(width):
        column = [float(states[t, d]) for t in range(tokens)]
        result["max"][d], result["min"][d] = max(column), min(column)
        result["mean"][d], result["last"][d] = sum(column) / tokens, column[-1]
        result["absmax"][d] = max(column, key=abs)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_equal_single_texts(family: str, tiny: Callable[[str], Loaded], model_folder: Callable[[str], Path]) -> None:
    """All layers, poolings and token rules, and the NLL, agree with single-text loops to 1e-4 relative, whatever the batch."""
    loaded = tiny(family)
    expected = [reference(model_folder(family), ids) for ids in texts()]
    for budget in (1, 64, 4096):  # one text a batch, a few, all together
        results = dict(run(loaded, texts(), budget))
        assert sorted(results) == list(range(len(LENGTHS)))
        for index, (layers, normed, logprobs) in enumerate(expected):
            assert len(layers) == len(loaded.blocks) + 1
            np.testing.assert_allclose(results[index].token_logprobs.numpy(), logprobs, rtol=1e-4, atol=1e-5)
            for layer, states in enumerate([*layers, normed]):
                for rule, kept in enumerate((states, states[1:])):
                    got = results[index].pooled[rule, layer].numpy()
                    if not len(kept):
                        assert np.isnan(got).all()
                        continue
                    by_loop = loop_pool(kept)
                    for at, name in enumerate(POOLINGS):
                        np.testing.assert_allclose(got[at], by_loop[name], rtol=1e-4, atol=1e-4, err_msg=f"{layer} {name}")


def test_no_product_is_spent_on_padding(tiny: Callable[[str], Loaded]) -> None:
    """The blocks see as many tokens as there are, in as few passes as the budget allows."""
    loaded = tiny("llama")
    seen: list[int] = []
    hook = loaded.blocks[0].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    try:
        list(run(loaded, texts(), 50))
    finally:
        hook.remove()
    assert seen == [40, 40, 17 + 6 + 2 + 1] and sum(seen) == sum(LENGTHS)


def test_padding_never_wins_a_maximum() -> None:
    """All real activations negative in one dimension: the maximum is negative, not the padding's zero."""
    states = torch.full((2, 5, 3), -2.0)
    states[1, 2:] = 0.0  # padding of the second text
    pooled = pool(states, torch.tensor([5, 2]))
    assert float(pooled[0, 1].max()) == -2.0
    assert float(pooled[1, 1].max()) == -2.0
    states[1, 2:] = float("nan")
    assert bool(torch.isfinite(pool(states[:, :2], torch.tensor([2, 2]))).all())


def test_first_token_is_left_out_of_the_second_rule() -> None:
    """A sink at the first token dominates the first rule and is absent from the second."""
    states = torch.zeros(1, 4, 2)
    states[0, 0] = 900.0
    states[0, 1:] = torch.tensor([[1.0, -3.0], [2.0, -1.0], [0.5, -2.0]])
    pooled = pool(states, torch.tensor([4]))
    assert pooled[0, 0, 0].tolist() == [900.0, 900.0]
    expected = torch.tensor([[2.0, -1.0], [3.5 / 3, -2.0], [0.5, -2.0], [0.5, -3.0], [2.0, -3.0]])
    torch.testing.assert_close(pooled[1, 0], expected)


def test_overflow_stops_with_the_text(tiny: Callable[[str], Loaded]) -> None:
    """A non-finite state at a real token names the text and the dtype; it never reaches a table."""
    loaded = tiny("llama")
    weight = loaded.blocks[1].mlp.down_proj.weight
    kept = weight.clone()
    weight.fill_(float("inf"))
    try:
        with pytest.raises(ValueError, match=r"non-finite hidden states in torch.float32"):
            list(run(loaded, texts()))
    finally:
        weight.copy_(kept)
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        list(run(loaded, [[5], []]))


def test_a_pass_that_does_not_fit_is_halved(
    tiny: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device out of memory costs smaller passes, not the run; the size that fitted is kept; a single text is refused."""
    loaded, tried = tiny("llama"), []
    whole = dict(run(loaded, texts(), 4096))
    real = forward._batch

    def small(loaded: Loaded, batch: list[list[int]], members: list[int]) -> list[forward.Forward]:
        tried.append(sum(map(len, batch)))
        if tried[-1] > 50:
            raise torch.OutOfMemoryError("no room")
        return real(loaded, batch, members)

    monkeypatch.setattr(forward, "_batch", small)
    size = PassSize(loaded, 4096)
    found = dict(run(loaded, texts(), size))
    assert tried == [106, 40, 40, 26] and size.tokens == 53
    assert "a scoring pass of 106 tokens ran out of memory; going on with 53" in caplog.text
    for index, result in found.items():
        torch.testing.assert_close(result.pooled, whole[index].pooled, equal_nan=True)
    tried.clear()
    list(run(loaded, texts(), size))
    assert tried == [40, 40, 26], "remembered"
    with pytest.raises(UsageError, match="a text of 60 tokens does not fit on the reader's device"):
        list(run(loaded, [[5] * 60], size))


def test_memory_of_a_token_covers_what_a_pass_takes() -> None:
    """The estimate that pass sizes on a GPU rest on: not below the measured peak, and not many times above it."""
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=3, vocab_size=300, attn_implementation="sdpa"))
    model.set_attn_implementation(NAME)
    loaded = Loaded(Path("random"), model.eval().requires_grad_(False), None, torch.float32, torch.device("cpu"))
    batch = [[5 + at % 200] * 64 for at in range(128)]
    list(run(loaded, batch[:2]))
    grown = peak_growth(lambda: sum(1 for _ in run(loaded, batch, 8192)))
    if grown is None:
        pytest.skip("the kernel does not tell the peak of memory")
    logits = 2 * 2**24
    assert 0.25 * 8192 * token_bytes(loaded) < grown < 8192 * token_bytes(loaded) + logits


def test_layer_names_and_their_resolution() -> None:
    """One definition for all families: penultimate is the input of the last block, index L - 1 of 0..L."""
    assert layer_names(3) == ["0", "1", "2", "3", "normed"]
    assert [resolve_layer(name, 3) for name in ("embedding", "penultimate", "last", "normed", 0, "2", -1, -2)] == [
        *(0, 2, 3, 4, 0, 2, 3, 2)
    ]
    for wrong in (4, -5, "middle"):
        with pytest.raises(ValueError, match=r"out of range|not known"):
            resolve_layer(wrong, 3)
