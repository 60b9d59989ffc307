"""FlashRAG: XCompress with the interface of its refiners (RUC-NLPIR/FlashRAG, ``flashrag/refiner``).

    pipeline = SequentialPipeline(config)
    pipeline.refiner = XCompressRefiner(XCompress.from_config("experiment=laptop", answers=False))

FlashRAG itself is not imported: an item is anything with ``question`` and ``retrieval_result``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from xcompress.controller import XCompress


class Item(Protocol):
    """What a refiner reads of a FlashRAG data set's item."""

    @property
    def question(self) -> str:
        """The question's text."""
        ...

    @property
    def retrieval_result(self) -> Sequence[Mapping[str, Any]]:
        """Documents, best first, each with ``contents`` (title, line break, text)."""
        ...


class XCompressRefiner:
    """A refiner: retrieved documents in, one summary an item out.

    Args:
        controller: makes and chooses the summaries.
        name: under which FlashRAG's pipelines know it. They treat names with "llmlingua" or "selective-context" specially.
    """

    def __init__(self, controller: XCompress, name: str = "xcompress") -> None:
        self.controller = controller
        self.name = name
        self.input_prompt_flag = False  # it refines documents, not finished prompts

    def run(self, item: Item) -> str:
        """The chosen summary of an item's documents.

        Raises:
            xcompress.UsageError: the item has no question or no document with text.
        """
        return self.controller.compress(item.question, item.retrieval_result).summary

    def batch_run(self, dataset: Iterable[Item], batch_size: int = 8) -> list[str]:
        """The summaries of all items, in order; ``batch_size`` items share forward passes."""
        items = list(dataset)
        summaries: list[str] = []
        for at in range(0, len(items), batch_size):
            asked = [(item.question, item.retrieval_result) for item in items[at : at + batch_size]]
            summaries += [result.summary for result in self.controller.compress_batch(asked)]
        return summaries
