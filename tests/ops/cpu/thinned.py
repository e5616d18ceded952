"""A pytest plugin that runs every fifth case of each test, another fifth of every other one: for slow builds."""

from collections import Counter

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if seen[name] % 5 == len(name) % 5 or name == item.nodeid:
            kept.append(item)
        seen[name] += 1
    items[:] = kept
