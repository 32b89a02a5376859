"""Metrics for autoscalers: by main model, of traffic through a whole proxy."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families
from stages.proxy_stage import RawBackend, by_request, stage


def by_model(text: str, name: str) -> dict[str, float]:
    return {
        sample.labels["model"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_a_running_proxy_says_how_much_of_each_model_is_used() -> None:
    """Under the model that a server lists first, whichever of its adapters is asked for."""
    async with RawBackend(by_request).running() as one, RawBackend(by_request).running() as two:
        models = {"b0": ["llama", "sql-adapter"], "b1": ["qwen"]}
        backends = [
            {"name": name, "url": backend.url, "models": models[name]}
            for name, backend in (("b0", one), ("b1", two))
        ]
        async with stage([], wait_up=2, backends=backends) as on:
            for _ in range(20):
                body = {"model": "sql-adapter", "prompt": "word " * 4_000, "max_tokens": 3}
                assert await on.status(body) == 200
                await asyncio.sleep(1)
            text = on.proxy.metrics.text().decode()
    saturation = by_model(text, "forebay_saturation")
    wanted = by_model(text, "forebay_backends_wanted")
    assert set(saturation) == set(wanted) == {"llama", "qwen"}
    assert saturation["qwen"] == 0.0
    assert 0.0 < saturation["llama"] < 1.0
