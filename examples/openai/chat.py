"""The OpenAI client with Forebay: only the base URL differs from any other server.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python chat.py
"""

import openai

# A request that cannot be served in time is rejected at once with 429 and a Retry-After that the
# client obeys. `timeout` is sent along: Forebay starts nothing that would come too late for it.
client = openai.OpenAI(timeout=30.0, max_retries=3)
model = client.models.list().data[0].id

with client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why are prompts cached?"}],
    max_tokens=16,
    stream=True,
    extra_headers={"x-request-id": "why-cached-1"},  # for: forebay explain why-cached-1
) as stream:
    for event in stream:
        print(event.choices[0].delta.content or "" if event.choices else "", end="", flush=True)
print()

# Work that may wait: chats of people go first.
done = client.completions.create(
    model=model,
    prompt="Summarise: " + "the proxy keeps chats fast beside documents. " * 200,
    max_tokens=16,
    extra_headers={"x-forebay-class": "batch"},
)
print(f"batch: {done.usage.prompt_tokens} prompt tokens, {done.usage.completion_tokens} more")
