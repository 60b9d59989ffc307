"""XCompress where retrieval pipelines are built: LangChain, LlamaIndex, FlashRAG. Each needs its own package."""
