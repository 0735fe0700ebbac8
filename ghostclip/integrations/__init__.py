"""One file for each outside system, imported only where that system is in use."""

__all__ = ["missing"]


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error of an import, with the extra that brings the package."""
    return ModuleNotFoundError(
        f'{error.name} is not installed; run in a checkout: pip install ".[{extra}]"', name=error.name
    )
