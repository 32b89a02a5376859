"""Files that start a real vLLM come first: as the last ones they would keep one worker busy."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "vllm" not in item.path.name)
