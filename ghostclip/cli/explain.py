"""ghostclip explain: the plan for a model, layer by layer: which rule, which way to its norms, and why"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from torch import Tensor, nn

import ghostclip
from ghostclip.cli.arguments import UsageError, add_json, print_json
from ghostclip.cli.subject import add_subject, example_inputs, subject_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "Strategies are chosen by timing them on a batch. Random inputs of --input-shape serve as one.\n"
        "example: ghostclip explain mypackage.networks:make --input-shape 3 32 32 --batch-size 64"
    )
    add_subject(parser)
    parser.add_argument("--batch-size", type=int, default=32, help="of the batch that is timed (default: 32)")
    parser.add_argument("--second-pass", choices=("auto", "cached", "reweight"), default="auto", help="default: auto")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan as a table."""
    clipper = ghostclip.GhostClipper(subject_of(arguments), second_pass=arguments.second_pass)
    inputs = example_inputs(arguments, arguments.batch_size)
    if inputs is not None:
        clipper.backward(_some_losses(_outputs(clipper.model, inputs)))
    plan = clipper.explain()
    if arguments.json:
        print_json({"model": arguments.model, "plan": [asdict(row) for row in plan]})
        return 0
    print(plan)
    if inputs is None:
        print("\nGive --input-shape to see which strategies are chosen for inputs of that shape.")
    return 0


def _outputs(model: nn.Module, inputs: Tensor) -> object:
    """What the model returns; a model that does not take such inputs is the user's mistake."""
    try:
        return model(inputs)
    except Exception as error:
        raise UsageError(
            f"the model does not take random inputs of shape {list(inputs.shape)} and type {inputs.dtype}: "
            f"{type(error).__name__}: {error}; see --input-shape and --vocabulary-size"
        ) from error


def _some_losses(outputs: object) -> Tensor:
    """Losses [B] that reach every output; which ones does not matter to the plan."""
    while isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        raise UsageError(
            f"the model must return a tensor [B, ...] to be explained; it returned {type(outputs).__name__}"
        )
    return outputs.flatten(1).square().mean(1) if outputs.dim() > 1 else outputs.square()
