"""What a model is to private training: ``ghostclip check`` and ``explain``.

The model is one of the paper's by name, or the user's own by import path.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import asdict

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip import models
from ghostclip.cli.arguments import Joined, UsageError, print_json, sizes
from ghostclip.self_check.checking import LAYERS_ALONE
from ghostclip.validate import positive_int

__all__ = ["add_check", "add_explain", "run_check", "run_explain"]

IMAGE, TEXT, VOCABULARY = (1, 28, 28), (256,), 10_000
TRIED = 5  # examples of a batch that is tried: few things but batches are as long
WITH_BATCH = (
    "nothing found in its layers, and none of {} random inputs changed another's output; your loss function and data "
    "were not tested: ghostclip.check(model, loss_fn, loader)"
)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``ghostclip check``."""
    parser.epilog = (
        "With --input-shape, a batch of random inputs is tried, and findings name the line of code where they can.\n"
        "example: ghostclip check mypackage.networks:make --input-shape 3 32 32\n"
        "exit status: 0 nothing found, 1 something found"
    )
    _add_model(parser)
    parser.set_defaults(batch_size=TRIED)


def run_check(arguments: argparse.Namespace) -> int:
    """Prints every finding and its remedy, of a batch too where the inputs' shape is known; 1 when there are any."""
    model = _model_of(arguments)
    inputs = _random_inputs(arguments)
    findings = ghostclip.check(model, None if inputs is None else _losses, inputs)
    if arguments.json:
        shown = {"model": arguments.model, "trainable": not findings, "findings": [asdict(f) for f in findings]}
        print_json({**shown, "tested": ["layers"] if inputs is None else ["layers", "random inputs"]})
    elif not findings:
        alone = LAYERS_ALONE.format("give --input-shape, or ")
        print(f"{arguments.model}: {alone if inputs is None else WITH_BATCH.format(len(inputs))}")
    else:
        print(f"{arguments.model}: {len(findings)} thing(s) to change")
        for number, finding in enumerate(findings, 1):
            print(f"  {number}. {'module ' if finding.path else ''}{finding}")
    return 1 if findings else 0


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``ghostclip explain``."""
    parser.epilog = (
        "Strategies are chosen by timing them on a batch. Random inputs of --input-shape serve as one.\n"
        "example: ghostclip explain mypackage.networks:make --input-shape 3 32 32 --batch-size 64"
    )
    _add_model(parser)
    parser.add_argument("--batch-size", type=int, default=32, help="of the batch that is timed (default: 32)")
    parser.add_argument("--second-pass", choices=("auto", "cached", "reweight"), default="auto", help="default: auto")


def run_explain(arguments: argparse.Namespace) -> int:
    """Prints the plan as a table."""
    clipper = ghostclip.GhostClipper(_model_of(arguments), second_pass=arguments.second_pass)
    inputs = _random_inputs(arguments)
    if inputs is not None:
        clipper.backward(_losses(clipper.model, inputs))
    plan = clipper.explain()
    if arguments.json:
        print_json({"model": arguments.model, "plan": [asdict(row) for row in plan]})
        return 0
    print(plan)
    if inputs is None:
        print("\nGive --input-shape to see which strategies are chosen for inputs of that shape.")
    return 0


def _losses(model: nn.Module, inputs: Tensor) -> Tensor:
    """Losses [B] that reach every output; which ones does not matter to the plan."""
    try:
        outputs = model(inputs)
    except Exception as error:
        raise UsageError(
            f"the model does not take random inputs of shape {list(inputs.shape)} and type {inputs.dtype}: "
            f"{type(error).__name__}: {error}; see --input-shape and --vocabulary-size"
        ) from error
    while isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        raise UsageError(
            f"the model must return a tensor [B, ...] to be explained; it returned {type(outputs).__name__}"
        )
    return outputs.flatten(1).square().mean(1) if outputs.dim() > 1 else outputs.square()


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model and what its inputs are."""
    add, names = parser.add_argument, ", ".join(models.NAMES)
    add("model", help=f"one of {names}, or module:factory, a callable that makes your model")
    shape = "shape of one input (default for the named models: 1 28 28, transformer: 256)"
    add("--input-shape", type=sizes, nargs="+", action=Joined, metavar="N", help=shape)
    ids = "inputs are token ids below N (default for transformer: 10000)"
    add("--vocabulary-size", type=int, metavar="N", help=ids)
    add("--classes", type=int, default=10, help="outputs of the named models (default: 10)")


def _model_of(arguments: argparse.Namespace) -> nn.Module:
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


def _imported(path: str) -> nn.Module:
    """What ``module:factory`` makes, with the working folder on the import path as under ``python -m``."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"expected module:factory, such as mypackage.networks:make; got {path!r}")
    if "/" in module_name or module_name.endswith(".py"):
        module = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise UsageError(f"{module_name} is a file; name its module, as import does: {module}:{attribute}")
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


def _random_inputs(arguments: argparse.Namespace) -> Tensor | None:
    """Inputs ``[batch_size, *input_shape]``; None when the shape is not known."""
    if arguments.input_shape is None:
        return None
    of_one = (positive_int(input_shape=size) for size in arguments.input_shape)
    shape = [positive_int(batch_size=arguments.batch_size), *of_one]
    if arguments.vocabulary_size is not None:
        # Id 0 is left out: models take it for padding, and a text of padding alone has no mean.
        return torch.randint(1, max(2, positive_int(vocabulary_size=arguments.vocabulary_size)), shape)
    return torch.rand(shape)
