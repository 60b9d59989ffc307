"""Tiny random models of the reader families, saved to disk and loaded back the way any checkpoint is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from xcompress.checkpoint import Loaded, load

torch.set_num_threads(1)  # threads only cost time on models this small
SHARED = Path(__file__).parents[2] / "shared"
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITH_START = "{{ bos_token }}" + CHAT
CHAT_WITHOUT_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHAT
SPECIAL = ["<|end|>", "<|start|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY = 256 + len(SPECIAL)


def make_tokenizer(start: bool, chat: str | None = CHAT) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 261 ids; ``start`` says whether it puts a start token before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>", chat_template=chat)


_SIZE: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": None}
_BODY: dict[str, Any] = {
    **_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
}


# Engines with kernels of their own take no attention heads as small as those.
_WIDE_BODY: dict[str, Any] = {**_BODY, "hidden_size": 128, "intermediate_size": 160, "head_dim": 32}


def _model(family: str, wide: bool = False) -> Any:
    torch.manual_seed(sum(map(ord, family)))
    body = _WIDE_BODY if wide else _BODY
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**_SIZE, n_embd=body["hidden_size"], n_layer=3, n_head=4, n_positions=512))
    if family == "mistral":  # a sliding window shorter than the texts
        return MistralForCausalLM(MistralConfig(**body, sliding_window=7))
    if family == "gemma3":  # local and global layers, scaled embedding
        return Gemma3ForCausalLM(Gemma3TextConfig(**body, sliding_window=7, layer_types=layers))
    if family == "gemma3_nested":  # the image-text layout: the language model is one part of the checkpoint
        text = {**body, "sliding_window": 7, "layer_types": layers}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        images = {"boi_token_index": 2, "eoi_token_index": 3, "image_token_index": 4, "mm_tokens_per_image": 4}
        size = {"image_size": 28, "patch_size": 14}
        config = Gemma3Config(text_config=text, vision_config={**vision, **size}, **images, bos_token_id=1, eos_token_id=0)
        return Gemma3ForConditionalGeneration(config)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**body))
    return LlamaForCausalLM(LlamaConfig(**body, tie_word_embeddings=False))


FAMILIES = ("llama", "gpt2", "mistral", "gemma3", "gemma3_nested", "qwen3")
STARTS = {"llama": True, "gpt2": False, "mistral": True, "gemma3": True, "gemma3_nested": True, "qwen3": False}


def save_tiny(family: str, path: Path, wide: bool = False) -> None:
    """A tiny random checkpoint of a family with its tokenizer; ``wide`` has attention heads of 32, else 8."""
    model = _model(family, wide).float()
    # Random weights of the usual small scale give nearly flat distributions; larger ones make every token matter.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0 if "embed" not in name and "wte" not in name else 8.0)
    model.save_pretrained(path)
    make_tokenizer(STARTS[family]).save_pretrained(path)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: family name to the folder of a tiny random model of it (made once a session)."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path = root / family
        if not path.exists():
            save_tiny(family, path)
        return path

    return folder


@pytest.fixture(scope="session")
def tiny(model_folder: Callable[[str], Path]) -> Callable[[str], Loaded]:
    """A function: family name to the loaded tiny model (float32, CPU), as the stages load it."""
    kept: dict[str, Loaded] = {}

    def loaded(family: str) -> Loaded:
        if family not in kept:
            kept[family] = load(model_folder(family), "float32", "cpu")
        return kept[family]

    return loaded


@pytest.fixture(scope="session")
def eager(model_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A function: family name to transformers' own model with its plain attention, the reference for ours."""
    kept: dict[str, Any] = {}

    def model(family: str) -> Any:
        if family not in kept:
            auto: Any = AutoModelForCausalLM
            kept[family] = auto.from_pretrained(model_folder(family), dtype=torch.float32, attn_implementation="eager").eval()
        return kept[family]

    return model


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are much faster on one thread, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM need vLLM, which `make test` does not install."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; they run with: make test-vllm"))
