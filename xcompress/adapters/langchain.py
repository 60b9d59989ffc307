"""LangChain: XCompress as a document compressor (``pip install -e '.[langchain]'``).

from langchain_classic.retrievers import ContextualCompressionRetriever
compressor = XCompressDocumentCompressor(controller=XCompress.from_config("experiment=laptop", answers=False))
retriever = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=my_retriever)
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ConfigDict

from xcompress.controller import XCompress
from xcompress.schema import Passage

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import Document
    from langchain_core.documents.compressor import BaseDocumentCompressor
except ImportError as error:
    raise ImportError("the LangChain adapter needs langchain-core; get it with `pip install -e '.[langchain]'`") from error


class XCompressDocumentCompressor(BaseDocumentCompressor):
    """Turns retrieved documents into one: the chosen summary.

    Args:
        controller: makes and chooses the summary. It may be shared among threads.
        title_key: metadata key that holds a document's title; documents without it have none.

    The document's metadata: ``sps``, ``ppl``, ``chosen``, ``gate``, ``candidates`` (how many there were) and ``sources`` (the
    metadata of the documents that went in).
    """

    controller: XCompress
    title_key: str = "title"
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """One document for those given (in their order, best first); none for none, or where every summary is blank.

        Raises:
            xcompress.UsageError: the query is blank, or no document has text.
        """
        if not documents:
            return []
        passages = [Passage(str(doc.metadata.get(self.title_key) or ""), doc.page_content) for doc in documents]
        result = self.controller.compress(query, passages)
        if not result.summary.strip():
            return []
        return [
            Document(
                page_content=result.summary,
                metadata={**result.scores(), "sources": [dict(document.metadata) for document in documents]},
            )
        ]
