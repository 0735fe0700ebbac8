"""The privacy settings of transformers' Trainer, which `transformers.HfArgumentParser` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ghostclip.ledger import Ledger
from ghostclip.sampling.unit_ids import users_of_rows
from ghostclip.validate import RefusesNames

__all__ = ["PrivacyArguments", "users_in"]

# Trainer's uploads leave out names that begin with "_": the ledger says when each step was taken, which may tell how
# many examples it had. Earlier versions gave it the other name.
LEDGER, FORMER = "_privacy.ledger", "privacy.ledger"
# Fields of `PrivacyArguments` that the trainer follows, not the engine.
OF_TRAINER = {"log_private_loss", "unit_ids", "public_evaluation"}


@dataclass
class PrivacyArguments(RefusesNames):
    """The privacy settings of a `PrivateTrainer`. `transformers.HfArgumentParser` makes command line options of them.

    Values are checked when training starts.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity. Give this or ``target_epsilon``.
        target_epsilon: the noise is the least that keeps all steps of the training within it.
        target_delta: the delta of the guarantee; it should be well below 1 / len(train_dataset).
        max_epsilon: training ends before a step that would exceed it. None: no limit but ``target_epsilon``.
        clipping: a max norm or a policy of `ghostclip.clipping`.
        second_pass, noise, seed, self_check, sampling, neighboring: as for `PrivacyEngine`.
        ledger: the file to which each step is charged before its release. An existing file is continued: its charges
            count. None: ``_privacy.ledger`` in ``output_dir``, or ``privacy.ledger`` where that is there.
        log_private_loss: keep the training loss in log rows and checkpoints, under the name ``private_loss``. It is
            private data.
        unit_ids: the name of a column of ``train_dataset`` that says whose each row is (or one value for each row, as
            for `PrivacyEngine`). A user is then the unit of privacy, and batch sizes count users. None: each row.
        max_rows_per_unit: with ``unit_ids`` only: a user's first so many rows are used. None: all, of which
            ``per_device_train_batch_size`` must have room for each user's.
        public_evaluation: states that the evaluation data are public, so that training may follow their metrics
            (``load_best_model_at_end``, early stopping) without a warning.

    Raises:
        TypeError: an argument has the name that another library gives it; the message names ours.
    """

    refused_names: ClassVar[Mapping[str, str]] = {
        "max_grad_norm": "clipping", "epsilon": "target_epsilon", "delta": "target_delta",
        "epochs": "num_train_epochs of TrainingArguments", "steps": "max_steps of TrainingArguments",
        "batch_size": "per_device_train_batch_size and gradient_accumulation_steps of TrainingArguments",
        "max_physical_batch_size": "per_device_train_batch_size of TrainingArguments",
    }  # fmt: skip

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float = 1e-5
    max_epsilon: float | None = None
    clipping: float = 1.0
    second_pass: str = "auto"
    noise: str = "standard"
    seed: int | None = None
    self_check: bool = True
    sampling: str = "poisson"
    neighboring: str = "add_or_remove_one"
    ledger: str | None = None
    log_private_loss: bool = False
    unit_ids: str | None = None
    max_rows_per_unit: int | None = None
    public_evaluation: bool = False

    def for_engine(self, steps: int, folder: str) -> dict[str, Any]:
        """The keyword arguments of `PrivacyEngine`.

        Args:
            steps: of the whole training.
            folder: where the default ledger is.
        """
        given = {name: value for name, value in vars(self).items() if name not in OF_TRAINER}
        if self.target_epsilon is not None:
            given["steps"] = steps
        # A step of a language model takes far longer than flushing its charge to the disk.
        given["ledger"] = self.ledger_in(folder)
        return given

    def ledger_in(self, folder: str) -> Ledger:
        """The ledger of a training whose ``output_dir`` is ``folder``."""
        former = os.path.join(folder, FORMER)
        default = former if os.path.exists(former) else os.path.join(folder, LEDGER)
        return Ledger(self.ledger or default, block=1)


def users_in(dataset: Any, unit_ids: Any) -> list[Any] | None:
    """The user of each row of a data set, by ``unit_ids`` of `PrivacyArguments`; None: rows are units."""
    if unit_ids is None:
        return None
    if not isinstance(unit_ids, str):
        return users_of_rows(unit_ids, len(dataset))
    if unit_ids not in (columns := getattr(dataset, "column_names", None) or ()):
        raise ValueError(
            f"unit_ids={unit_ids!r} of PrivacyArguments must be a column of train_dataset; it has "
            f"{', '.join(columns) or 'no columns'}"
        )
    try:
        users = list(dataset[unit_ids])
    except KeyError as error:
        raise ValueError(
            f"the column {unit_ids!r} of train_dataset, which unit_ids of PrivacyArguments names, can't be read, since "
            "the data set's transform or format leaves it out; keep it in there (set_transform, set_format), or give "
            "unit_ids one value for each row, read before the transform was set"
        ) from error
    return users_of_rows(users, len(dataset))
