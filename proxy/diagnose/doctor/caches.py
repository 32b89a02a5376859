"""Check that the prefix caches of the backends work, and that the proxy knows their contents."""

from forebay.proxy.config.advice import NO_ISOLATION, NO_ISOLATION_REMEDY, unknown_isolation
from forebay.proxy.diagnose.doctor.finding import FEW, GONE, Found
from forebay.proxy.diagnose.scene import Scene
from forebay.traces.ground.command_line.messages import shortlist

LARGEST_BLOCK = 256  # tokens, of --block-size
ANSWERS = 10  # without a count of cached tokens: then it is known that a backend gives none
KEPT = 0.5  # share of its KV cache: below this a backend has other clients, or a smaller cache


def prefix_caching(scene: Scene) -> Found:
    """Every backend keeps prefixes in its cache."""
    engines = {fact["name"]: fact["engine"] or {} for fact in scene.facts}
    for name, engine in engines.items():
        if engine.get("prefix_caching") is False:
            yield (
                "error",
                f"{name} runs without prefix caching: it computes every prompt anew",
                "start vLLM with --enable-prefix-caching, its default",
            )
    for name, backend in scene.backends().items():
        index, engine = backend["prefix_index"], engines.get(name, {})
        if index["answers"] < FEW or index["kept_share"] >= KEPT:
            continue
        # After a restart the cache was empty once. It loses prefixes if answers still say so.
        answered = scene.lifetime("forebay_backend_requests_total", backend=name, outcome="ok")
        restarted = engine.get("prompts", answered) < (1.0 - GONE) * answered
        predicted = scene.total("forebay_predicted_cached_tokens_total", backend=name)
        reported = scene.total("forebay_reported_cached_tokens_total", backend=name)
        answers = scene.total("forebay_cached_tokens_answers_total", backend=name)
        losing = answers >= FEW and reported < KEPT * predicted
        if engine.get("prefix_caching") is not False and (losing or not restarted):
            yield (
                "warning",
                f"{name} keeps only {index['kept_share']:.0%} of the prefixes that its KV cache "
                f"should hold ({index['answers']} answers)",
                "look for other clients, or a KV cache that is smaller than affinity.kv_tokens",
            )


def short_prompts(scene: Scene) -> Found:
    """Prompts are longer than one block of the prefix cache."""
    for fact in scene.facts:
        engine = fact["engine"] or {}
        prompts, block = engine.get("prompts", 0.0), engine.get("block_tokens")
        if prompts < FEW or not block or engine.get("prefix_hits", 0.0):
            continue
        mean_tokens = engine["prompt_tokens"] / prompts
        if mean_tokens < block:
            yield (
                "warning",
                f"prompts of {fact['name']} do not reach one block of its prefix cache, so none "
                f"is found there: they have {mean_tokens:,.0f} tokens on average, a block has "
                f"{block:,}",
                "nothing, if prompts are that short; blocks of hybrid models are large, and a "
                "smaller --block-size helps where vLLM takes it",
            )


def chunks(scene: Scene) -> Found:
    """The chunk of long prompts is a multiple of the large KV blocks of hybrid models."""
    backends = scene.backends()
    for fact in scene.facts:
        block = (fact["engine"] or {}).get("block_tokens") or 0
        chunk = backends.get(fact["name"], {}).get("long_prefill_token_threshold") or 0
        # Blocks that --block-size sets are divided. Only a recurrent state makes them larger.
        if block > LARGEST_BLOCK and chunk % block:
            rounded = -(-chunk // block) * block
            used = f"{chunk // block * block:,}" if chunk > block else "a part of a block"
            yield (
                "warning",
                f"{fact['name']} has KV blocks of {block:,} tokens for its recurrent states, and "
                f"long_prefill_token_threshold {chunk:,}: vLLM computes {used} in a step",
                f"give {rounded} to the server's --long-prefill-token-threshold and to the "
                "configuration",
            )


def token_details(scene: Scene) -> Found:
    """Every backend says how many prompt tokens were cached."""
    silent, answers = [], 0.0
    for name, backend in scene.backends().items():
        served = scene.total("forebay_backend_requests_total", backend=name, outcome="ok")
        # After a restart the mode is "believed" again, although the answers report cached tokens.
        reported = scene.total("forebay_cached_tokens_answers_total", backend=name)
        if served >= ANSWERS and not reported and backend["prefix_index"]["mode"] == "believed":
            silent.append(name)
            answers += served
    if silent:
        yield (
            "info",
            f"none of {answers:.0f} answers of {shortlist(silent)} says how many prompt tokens "
            "were cached, so what the caches hold is only believed",
            "start vLLM with --enable-prompt-tokens-details; streams say it to clients that "
            "send stream_options: {include_usage: true}",
        )


def isolation(scene: Scene) -> Found:
    """Every backend keeps the caches of tenants apart, if that is on."""
    for fact in scene.facts:
        if paths := fact.get("ignores_salt"):
            text = f"{fact['name']} {NO_ISOLATION}: {shortlist(paths)}"
            yield "error", text, NO_ISOLATION_REMEDY
        if paths := fact.get("salt_unknown"):
            yield "warning", unknown_isolation(fact["name"], paths), NO_ISOLATION_REMEDY
