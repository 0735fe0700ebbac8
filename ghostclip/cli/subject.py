"""The model that `check` and `explain` look at: one of the paper's by name, or the user's own by import path."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import torch
from torch import Tensor, nn

from ghostclip import models
from ghostclip.cli.arguments import UsageError
from ghostclip.validate import positive_int

__all__ = ["add_subject", "example_inputs", "subject_of"]

IMAGE, TEXT, VOCABULARY = (1, 28, 28), (256,), 10_000


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Adds the model and what its inputs are."""
    parser.add_argument(
        "model", help=f"one of {', '.join(models.NAMES)}, or module:factory, a callable that makes your model"
    )
    parser.add_argument(
        "--input-shape",
        type=int,
        nargs="+",
        metavar="N",
        help="shape of one input (default for the named models: 1 28 28, transformer: 256)",
    )
    parser.add_argument(
        "--vocabulary-size", type=int, metavar="N", help="inputs are token ids below N (default for transformer: 10000)"
    )
    parser.add_argument("--classes", type=int, default=10, help="outputs of the named models (default: 10)")


def subject_of(arguments: argparse.Namespace) -> nn.Module:
    """The model; fills in the inputs' shape for the named ones.

    Raises:
        UsageError: the import path leads nowhere, or to no model.
    """
    if ":" in arguments.model:
        return _imported(arguments.model)
    text = arguments.model == "transformer"
    if arguments.input_shape is None:
        arguments.input_shape = list(TEXT if text else IMAGE)
    if text and arguments.vocabulary_size is None:
        arguments.vocabulary_size = VOCABULARY
    if arguments.model not in models.NAMES:
        raise UsageError(f"model must be one of {', '.join(models.NAMES)}, or module:factory; got {arguments.model!r}")
    shape = tuple(positive_int(input_shape=size) for size in arguments.input_shape)
    return models.build(arguments.model, shape, arguments.classes, arguments.vocabulary_size)


def example_inputs(arguments: argparse.Namespace, batch_size: int) -> Tensor | None:
    """Random inputs ``[batch_size, *input_shape]``; None when the shape is not known."""
    if arguments.input_shape is None:
        return None
    shape = [positive_int(batch_size=batch_size), *(positive_int(input_shape=size) for size in arguments.input_shape)]
    if arguments.vocabulary_size is not None:
        # Id 0 is left out: models take it for padding, and a text of padding alone has no mean.
        return torch.randint(1, max(2, positive_int(vocabulary_size=arguments.vocabulary_size)), shape)
    return torch.rand(shape)


def _imported(path: str) -> nn.Module:
    """What ``module:factory`` makes, with the working folder on the import path as under ``python -m``."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"expected module:factory, such as mypackage.networks:make; got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        model = found if isinstance(found, nn.Module) else found()  # type: ignore[operator]
    except Exception as error:
        # The user's own code ran, and may fail in any way; its type and message are what they need to see.
        raise UsageError(f"{path} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{path} must make a torch.nn.Module; it made {type(model).__name__}")
    return model
