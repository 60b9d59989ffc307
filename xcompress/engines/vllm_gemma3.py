"""Gemma 3's image-text checkpoints as what they are used for here: their language model alone, under vLLM.

vLLM's own class for them brings the image tower, its processor and torchvision, none of which a text needs. This one is vLLM's
text-only Gemma 3, which takes the language part out of the checkpoint. Every vLLM process has to know it: vLLM calls
:func:`register` in each of them (entry point ``vllm.general_plugins`` in ``pyproject.toml``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ARCHITECTURE = "XCompressGemma3Text"
NESTED = "Gemma3ForConditionalGeneration"  # in the ``architectures`` of config.json
_PLACES = ("language_model.", "model.language_model.")  # where checkpoints keep it; the second came later


def register() -> None:
    """Make the class known to vLLM in this process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM

    class XCompressGemma3Text(Gemma3ForCausalLM):  # type: ignore[misc]  # vLLM is not typed here
        """See the module."""

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
            """The language part's weights under the names that the text-only model has for them."""
            found: set[str] = super().load_weights(
                (name, tensor) for full, tensor in weights if (name := language_name(full)) is not None
            )
            return found

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, XCompressGemma3Text)


def language_name(name: str) -> str | None:
    """The text-only name of a weight, None for one of the image part.

    ``language_model.model.norm.weight`` and ``model.language_model.norm.weight`` are both ``model.norm.weight``.
    """
    if name.startswith(_PLACES[0]):
        return name.removeprefix(_PLACES[0])
    if name.startswith(_PLACES[1]):
        return f"model.{name.removeprefix(_PLACES[1])}"
    return name if name.startswith("lm_head.") else None


def text_part(config: Any) -> Any:
    """The configuration of the language part (a transformers configuration), for the class above."""
    text = config.get_text_config()
    text.architectures = [ARCHITECTURE]
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    return text
