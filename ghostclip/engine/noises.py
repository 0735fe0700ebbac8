"""Which noise the charged steps had, in words: they may be of several runs, machines and modes."""

from __future__ import annotations

__all__ = ["Noises", "generators_in_words"]

# (mode, generator in words) of noise, each once, in the order of charges; a generator that wasn't recorded is "".
Noises = list[tuple[str, str]]


def generators_in_words(noises: Noises) -> str:
    """A sentence for the guarantee; "" where no generator is known."""
    known = list(dict.fromkeys(generator for _, generator in noises if generator))
    if not known:
        return ""
    others = [f"from {generator}" for generator in known[1:]]
    if any(not generator for _, generator in noises):
        others.append("from a generator that was not recorded")
    return f" Its noise comes from {'; of other steps '.join([known[0], *others])}."
