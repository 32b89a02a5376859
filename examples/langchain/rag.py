"""Questions about documents with LangChain, through Forebay.

    OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python rag.py

The order of the prompt matters most: first what many requests share (the instructions, then the
document), last what differs (the question). Then the server's prefix cache holds the document, and
Forebay sends the next question about it where it is.
"""

import re

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from openai import OpenAI

TEXTS = {
    "cache": "A prefix cache keeps the keys and values of prompts that begin alike.",
    "queue": "A queue in front of the servers lets short chats pass long documents.",
    "tenant": "Tenants share the servers by weight, and each has its own prefix cache.",
}


class WordHashes(Embeddings):
    """A stand-in, so that this runs anywhere: take your embedding model instead."""

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[sum(map(ord, word)) % 64] += 1.0
        return vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer from the document.\n\n{document}"),  # shared: first
        ("human", "{question}"),  # differs: last
    ]
)
store = InMemoryVectorStore(WordHashes())
store.add_documents([Document(text, metadata={"name": name}) for name, text in TEXTS.items()])
llm = ChatOpenAI(model=OpenAI().models.list().data[0].id, max_tokens=16, max_retries=3, timeout=30)
chain = PROMPT | llm

for question in (
    "What does a prefix cache keep?",
    "Which prompts does the cache of a prefix hold?",
):
    (found,) = store.similarity_search(question, k=1)
    answer = chain.invoke({"document": found.page_content, "question": question})
    print(f"{found.metadata['name']}: {answer.content}")
