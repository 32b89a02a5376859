"""Questions about documents with LlamaIndex, through Forebay.

    OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python rag.py

As with LangChain: the document comes before the question in the prompt, so that questions about one
document share a prefix. LlamaIndex's own template does so.
"""

import os
import re

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

TEXTS = {
    "cache": "A prefix cache keeps the keys and values of prompts that begin alike.",
    "queue": "A queue in front of the servers lets short chats pass long documents.",
    "tenant": "Tenants share the servers by weight, and each has its own prefix cache.",
}


class WordHashes(BaseEmbedding):
    """A stand-in, so that this runs anywhere: take your embedding model instead."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[sum(map(ord, word)) % 64] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


llm = OpenAILike(
    model=OpenAI().models.list().data[0].id,
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    context_window=131_072,
    max_tokens=16,
    max_retries=3,
    timeout=30,
)
documents = [Document(text=text, metadata={"name": name}) for name, text in TEXTS.items()]
index = VectorStoreIndex.from_documents(documents, embed_model=WordHashes())
engine = index.as_query_engine(llm=llm, similarity_top_k=1)

for question in (
    "What does a prefix cache keep?",
    "Which prompts does the cache of a prefix hold?",
):
    answer = engine.query(question)
    print(f"{answer.source_nodes[0].metadata['name']}: {answer}")
