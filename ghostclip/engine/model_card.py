"""The model card of a privately trained model: what was promised, how, and what the promise doesn't cover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ghostclip import accounting

if TYPE_CHECKING:
    from ghostclip.engine.budget import Spending
    from ghostclip.engine.privacy_engine import PrivacyEngine

__all__ = ["add_guarantee", "new_card"]

TAGS = ["differential-privacy", "dp-sgd"]
# The place in a card's metadata.
KEY = "differential_privacy"
NOT_COVERED = (
    "the choice of hyperparameters, where several trainings on the data were compared",
    "metrics of evaluation data, and choices that followed them, unless these data are public or protected otherwise",
    "losses, norms and other figures of training batches that were logged or published",
    "data that the model was pretrained on",
    "what is true of the whole population, and would be learned without any one {unit}, too",
)


def new_card(engine: PrivacyEngine) -> Any:
    """An empty huggingface_hub ModelCard with a title; ModuleNotFoundError without huggingface_hub."""
    try:
        from huggingface_hub import ModelCard
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "model_card() needs huggingface_hub; pip install huggingface_hub (the extra huggingface has it)"
        ) from error

    return ModelCard(f"---\n{{}}\n---\n\n# {type(engine.model).__name__}, trained with differential privacy\n")


def add_guarantee(card: Any, engine: PrivacyEngine, spending: Spending) -> Any:
    """The ModelCard ``card`` with the guarantee in its metadata, and a section of text at its end; it is changed.

    All figures are public: settings, charges, and bounds that follow from them. None depends on which examples were
    drawn, or on losses and norms. ``spending`` is the engine's.
    """
    facts = _facts(engine, spending)
    card.data.tags = [*(tag for tag in card.data.tags or [] if tag not in TAGS), *TAGS]
    card.data[KEY] = facts
    not_covered = "\n".join(f"- {line.format(unit=spending.unit)}" for line in NOT_COVERED)
    section = (
        "## Differential privacy\n\n"
        f"Trained with DP-SGD by GhostClip {facts['ghostclip']}. The guarantee for the training data: "
        f"{engine.guarantee()}\n\n"
        f"| setting | value |\n| --- | --- |\n{_rows(facts)}\n\n"
        f"The guarantee does not cover:\n\n{not_covered}\n"
    )
    own = sum(spent.total() for spent in spending.runs.values())
    if (others := sum(event.count for event in engine.events) - own) > 0:
        section += (
            f"\nThe guarantee also covers {others:,} {'release' if others == 1 else 'releases'} in the same ledger "
            "that did not lead to this model: steps of other runs, and what a run that was killed had reserved.\n"
        )
    if (line := _last_line(engine)) is not None:
        section += f"\nThe last line of the ledger of all charges:\n\n```json\n{line}\n```\n"
    card.text = f"{card.text.rstrip()}\n\n{section}"
    return card


def _facts(engine: PrivacyEngine, spending: Spending) -> dict[str, Any]:
    """What the metadata say, {name: a string, a number or None}."""
    from ghostclip import __version__

    bound = engine.risk()
    rates = {f"{rate:g}": bound.true_positive_rate(rate) for rate in accounting.FALSE_POSITIVE_RATES}
    return {
        "epsilon": float(engine.epsilon()),
        "delta": engine.target_delta,
        "accountant": accounting.used_for(engine.events, "pld"),
        "unit": spending.unit,
        "neighboring": engine.neighboring,
        "membership_advantage": bound.advantage,
        "true_positive_rates": rates,
        "sampling": engine.sampling,
        "sample_rate": engine.sample_rate,
        "expected_batch_size": engine.batch_size,
        "noise_multiplier": engine.noise_multiplier,
        "noise": " and ".join(dict.fromkeys(mode for mode, _ in spending.noises)) or engine.noise,
        "clipping": repr(engine.clipping),
        "steps": engine.steps_taken,
        "planned_steps": engine.planned_steps,
        "ghostclip": __version__,
    }


def _rows(facts: dict[str, Any]) -> str:
    """The rows of a table in Markdown."""
    shown = {name: value for name, value in facts.items() if value is not None and not isinstance(value, dict)}
    return "\n".join(
        f"| {name.replace('_', ' ')} | {f'{value:.6g}' if isinstance(value, float) else f'`{value}`'} |"
        for name, value in shown.items()
    )


def _last_line(engine: PrivacyEngine) -> str | None:
    """Of the ledger, which is whole; None without one, or where another rank has it."""
    if engine.ledger is None:
        return None
    lines = engine.ledger.path.read_text(encoding="utf-8").splitlines()
    return lines[engine.ledger.head.records - 1]
