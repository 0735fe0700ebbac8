"""Laws that the code breaks are expected to fail, and to be taken off the list of open cases once they hold."""

import pytest
from open_cases import KNOWN


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The ordinary run takes one case in two; an open case that passes fails; ids in KNOWN that are no test's fail."""
    own = {f"{item.path.stem}::{item.name}": item for item in items if item.path.name.startswith("test_law_")}
    for name, item in own.items():
        if "traps" not in name:
            item.add_marker(pytest.mark.one_in(2))
    for name in KNOWN & own.keys():
        own[name].add_marker(pytest.mark.xfail(strict=True, reason="open case"))
    modules = {name.partition("::")[0] for name in own}
    stale = [name for name in sorted(KNOWN - own.keys()) if name.partition("::")[0] in modules]
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"open_cases.KNOWN names tests that don't exist: {stale[:5]}")
