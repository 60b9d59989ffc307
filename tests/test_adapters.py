"""Adapters against the real libraries, with tiny models underneath: what goes in, what comes out, and what is missing."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from xcompress import UsageError, XCompress
from xcompress.adapters.flashrag import XCompressRefiner
from xcompress.config import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTION = "What stands by the river?"
PASSAGES = [("Mill", "The old mill stands by the river."), ("Bridge", "A bridge of stone."), ("", "Nothing else is there.")]


@pytest.fixture(scope="module")
def controller(model_folder: Callable[[str], Path]) -> XCompress:
    """A controller of tiny models; it samples two summaries and does not answer."""
    return XCompress.from_config(
        "experiment=laptop",
        f"reader.model={model_folder('llama')}",
        f"compressor.model={model_folder('llama')}",
        "compressor.max_new_tokens=12",
        "generation.candidates=2",
        "method.gate=none",
        answers=False,
    )


def package(name: str, extra: str) -> Any:
    """The module, or a skip that says what to install."""
    return pytest.importorskip(name, reason=f"needs pip install -e '.[{extra}]'")


# ---- LangChain


def test_langchain_documents(controller: XCompress) -> None:
    """One document: the summary that the controller chooses, with its scores and where it comes from; async alike."""
    core = package("langchain_core.documents", "langchain")
    from langchain_core.documents.compressor import BaseDocumentCompressor

    from xcompress.adapters.langchain import XCompressDocumentCompressor

    documents = [core.Document(page_content=text, metadata={"title": title, "at": title}) for title, text in PASSAGES]
    compressor = XCompressDocumentCompressor(controller=controller)
    assert isinstance(compressor, BaseDocumentCompressor)
    expected = controller.compress(QUESTION, PASSAGES)
    (found,) = compressor.compress_documents(documents, QUESTION)
    assert found.page_content == expected.summary
    assert found.metadata == {**expected.scores(), "sources": [document.metadata for document in documents]}
    assert found.metadata["candidates"] == 3 and found.metadata["sps"] > 0 and found.metadata["gate"] == "off"
    assert list(asyncio.run(compressor.acompress_documents(documents, QUESTION))) == [found]
    untitled = XCompressDocumentCompressor(controller=controller, title_key="none")
    bare = controller.compress(QUESTION, [text for _, text in PASSAGES])
    assert untitled.compress_documents(documents, QUESTION)[0].page_content == bare.summary
    assert compressor.compress_documents([], QUESTION) == []
    with pytest.raises(UsageError, match="the question is blank"):
        compressor.compress_documents(documents, " ")


def test_langchain_in_a_chain(controller: XCompress) -> None:
    """As a step of a runnable chain after a retriever, invoked in a batch (LangChain uses threads for it)."""
    core = package("langchain_core.documents", "langchain")
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableLambda, RunnablePassthrough

    from xcompress.adapters.langchain import XCompressDocumentCompressor

    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Any]:
            return [core.Document(page_content=text, metadata={"title": title}) for title, text in PASSAGES]

    compressor = XCompressDocumentCompressor(controller=controller)
    chain = {"documents": Fixed(), "query": RunnablePassthrough()} | RunnableLambda(
        lambda given: compressor.compress_documents(given["documents"], given["query"])[0].page_content
    )
    questions = [QUESTION, "What is of stone?", "What else is there?", QUESTION]
    assert chain.batch(questions) == [controller.compress(question, PASSAGES).summary for question in questions]


# ---- LlamaIndex


def test_llama_index_nodes(controller: XCompress) -> None:
    """One node with the best score given, whose metadata an LLM does not see; a query is needed; async alike."""
    schema = package("llama_index.core.schema", "llama-index")
    from xcompress.adapters.llama_index import XCompressPostprocessor

    nodes = [
        schema.NodeWithScore(node=schema.TextNode(text=text, metadata={"title": title}, id_=f"n{at}"), score=0.5 - at / 10)
        for at, (title, text) in enumerate(PASSAGES)
    ]
    postprocessor = XCompressPostprocessor(controller=controller)
    expected = controller.compress(QUESTION, PASSAGES)
    (found,) = postprocessor.postprocess_nodes(nodes, query_str=QUESTION)
    assert found.node.text == expected.summary and found.score == 0.5
    assert found.node.metadata == {**expected.scores(), "sources": ["n0", "n1", "n2"]}
    assert found.node.get_content(metadata_mode=schema.MetadataMode.LLM) == expected.summary
    (again,) = asyncio.run(postprocessor.apostprocess_nodes(nodes, query_str=QUESTION))
    assert again.node.text == expected.summary
    assert postprocessor.postprocess_nodes([], query_str=QUESTION) == []
    assert "controller" not in postprocessor.to_dict()
    with pytest.raises(UsageError, match="needs the query"):
        postprocessor.postprocess_nodes(nodes)


def test_llama_index_query_engine(controller: XCompress) -> None:
    """In a real index and query engine: its source nodes are the one summary of what it retrieved."""
    core = package("llama_index.core", "llama-index")
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.llms import MockLLM

    from xcompress.adapters.llama_index import XCompressPostprocessor

    documents = [
        core.Document(text=text, metadata={"title": title}, doc_id=f"d{at}") for at, (title, text) in enumerate(PASSAGES)
    ]
    index = core.VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=4))
    engine = index.as_query_engine(
        llm=MockLLM(), similarity_top_k=3, node_postprocessors=[XCompressPostprocessor(controller=controller)]
    )
    response = engine.query(QUESTION)
    (source,) = response.source_nodes
    given = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    passages = [(node.node.metadata["title"], node.node.text) for node in given]
    assert source.node.text == controller.compress(QUESTION, passages).summary
    assert source.node.ref_doc_id == given[0].node.ref_doc_id
    assert source.node.text in str(response), "the LLM was given the summary (the mock repeats its prompt)"


# ---- FlashRAG


@dataclass
class Item:
    """The part of a FlashRAG item that a refiner reads."""

    question: str
    retrieval_result: list[dict[str, str]]


def test_flashrag_interface(controller: XCompress) -> None:
    """`contents` is title, line break, text; a batch gives what single runs give, whatever its size."""
    documents = [{"id": str(at), "contents": f"{title}\n{text}"} for at, (title, text) in enumerate(PASSAGES)]
    items = [Item(question, documents) for question in (QUESTION, "What is of stone?", "What else?")]
    refiner = XCompressRefiner(controller)
    single = [refiner.run(item) for item in items]
    assert single[0] == controller.compress(QUESTION, PASSAGES).summary and len(set(single)) > 1
    assert refiner.batch_run(items) == refiner.batch_run(items, batch_size=2) == single
    assert refiner.batch_run([]) == [] and refiner.name == "xcompress" and refiner.input_prompt_flag is False
    with pytest.raises(UsageError, match="there are no passages"):
        refiner.run(Item("Who?", []))


# ---- what is missing


@pytest.mark.parametrize(
    ("module", "absent", "extra"), [("langchain", "langchain_core", "langchain"), ("llama_index",) * 2 + ("llama-index",)]
)
def test_a_missing_package_is_one_sentence(module: str, absent: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules['{absent}'] = None\n"
        f"try: import xcompress.adapters.{module}\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("\n") == 1 and f"pip install -e '.[{extra}]'" in done.stdout


def test_adapters_are_thin() -> None:
    """They hold no generation, scoring or selection of their own: nothing but the controller and the other library."""
    for name in ("langchain", "llama_index", "flashrag"):
        text = (ROOT / "xcompress" / "adapters" / f"{name}.py").read_text(encoding="utf-8")
        used = {line.split()[1] for line in text.splitlines() if line.startswith("from xcompress")}
        assert used <= {"xcompress.controller", "xcompress.schema"}, name
    assert importlib.import_module("xcompress.adapters.flashrag")
