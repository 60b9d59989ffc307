"""LlamaIndex: XCompress as a node postprocessor (``pip install -e '.[llama-index]'``).

postprocessor = XCompressPostprocessor(controller=XCompress.from_config("experiment=laptop", answers=False))
engine = index.as_query_engine(node_postprocessors=[postprocessor])
"""

from __future__ import annotations

from pydantic import Field

from xcompress.controller import XCompress
from xcompress.schema import Passage, UsageError

try:
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise ImportError("the LlamaIndex adapter needs llama-index-core; get it with `pip install -e '.[llama-index]'`") from error


class XCompressPostprocessor(BaseNodePostprocessor):
    """Turns retrieved nodes into one: the chosen summary.

    Args:
        controller: makes and chooses the summary. It may be shared among threads.
        title_key: metadata key that holds a node's title; nodes without it have none.

    The node's metadata: ``sps``, ``ppl``, ``chosen``, ``gate``, ``candidates`` (how many there were) and ``sources`` (ids of
    the nodes that went in). It is left out of what an LLM or an embedder sees. The node's score is that of the best node given.
    """

    controller: XCompress = Field(exclude=True)
    title_key: str = "title"

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex lists the postprocessor."""
        return "XCompressPostprocessor"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        if not nodes:
            return []
        if query_bundle is None:
            raise UsageError("XCompressPostprocessor needs the query: postprocess_nodes(nodes, query_str=...)")
        passages = [
            Passage(str(node.node.metadata.get(self.title_key) or ""), node.node.get_content(metadata_mode=MetadataMode.NONE))
            for node in nodes
        ]
        result = self.controller.compress(query_bundle.query_str, passages)
        if not result.summary.strip():
            return []
        metadata = {**result.scores(), "sources": [node.node.node_id for node in nodes]}
        summary = TextNode(
            text=result.summary,
            metadata=metadata,
            excluded_llm_metadata_keys=list(metadata),
            excluded_embed_metadata_keys=list(metadata),
        )
        best = nodes[0].node
        if best.source_node is not None:
            summary.relationships = {NodeRelationship.SOURCE: best.source_node}
        scores = [node.score for node in nodes if node.score is not None]
        return [NodeWithScore(node=summary, score=max(scores) if scores else None)]
