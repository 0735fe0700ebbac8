"""The ordinary run takes one case in two of each law."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_law_") and "traps" not in item.path.name:
            item.add_marker(pytest.mark.one_in(2))
