"""Every message about what can't be trained is read here: it names the module, what is wrong, what to write instead.

A row makes one message come up. That no message is missing is checked against the source: every string of words in the
files that refuse must be part of a message that a row brought up.
"""

import ast
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import ragged_refusals
import torch
from case_fallback import ScaleAndDouble, with_parameters
from case_models import Wired
from comparing import every_pass
from penalties import Once, sloped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip import GhostClipError, GhostClipper, check, wrap
from ghostclip.norms.outer import OuterProduct

ROOT = Path(ghostclip.__file__).parent
# test_same_as_refusals.py reads what is said of declared classes; test_sharding.py and test_fsdp.py of sharded models;
# test_private_mean.py of centred inputs.
# moves.py has reasons, which are not raised.
FOLDERS = [path for folder in ("nn", "graph") for path in sorted((ROOT / folder).rglob("*.py"))]
FILES = [
    *(ROOT / name for name in ("wrap.py", "clipper/first_pass.py", "clipper/second_pass.py")),
    *(path for path in FOLDERS if path.stem not in ("declared", "sharding", "moves", "centre")),
]
# Words that are no messages: a rule's name, what torch says, a line of the log, names of operations.
OTHERS = {
    r'File "(.+)", line (\d+)',
    "BatchNorm in eval mode",
    "modified by an inplace operation",
    "backward through the graph a second time",
    "a hook, given None while the graph was freed, raised %s: %s",
    # Of a step that can't be compiled, which are not raised.
    "whose rows are whose must be measured in every batch of this forward, so no step can be compiled",
}
# How messages begin that other tests bring up.
ELSEWHERE = (
    "{} defines no per_example",
    "a hook or torch.autograd.Function of your own",
    "examples of this batch are not finite",
    "{} got an input without a batch dimension (its output",
    "in this batch one example's loss depends on rows of others",
    "{} depends on the examples could not be tried: nothing changed",
    "whether what all examples share depends on them could not be tried",
    "all examples share what the {} gives, and it has another size",
    "{} is given a tensor that all examples share",
    "the losses come from parameters, or layers",
    "an example whose loss or gradient is not finite spoils the gradients of others",
    "some float16 gradients are too small beside the batch's largest",
    "{}: this batch doesn't show which of several dimensions",
    "{}: gates of this LSTM with proj_size have gradients of zero",
    "{}: this batch doesn't show which example's gradient is not finite",
    "{} computes a feature in another precision",
    "load the model with BitsAndBytesConfig",
    "{} of Opacus has hooks on the layers",
    "take them off: model = model.to_standard_module()",
)

X = torch.linspace(-1, 2, 4 * 6 * 3).view(4, 6, 3)


def scripted(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(layer)


def losses(output: Tensor) -> Tensor:
    return output.float().square().flatten(1).mean(1)


def one(layer: nn.Module) -> nn.Module:
    """A model that hands its input to ``layer``, which it calls that."""
    return Wired(lambda m, x: m.layer(x), layer=layer)


def clip(model: nn.Module, inputs: Any = X, loss: Callable[[Any], Tensor] = losses, **options: Any) -> None:
    clipper = GhostClipper(model, **options)
    clipper.backward(loss(model(inputs)))


def used(wiring: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> nn.Module:
    """A model with a Linear of 3 and Parameters of the given shapes."""
    return with_parameters(wiring, shapes, layer=nn.Linear(3, 3))


def with_rule(rule: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    """A model of a layer of the user's own, with this rule."""

    class Ruled(ghostclip.nn.GhostLayer, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.capture(x * self.weight, x, parameters=("weight",))

        def per_example(self, name: str, call: Any, inputs: tuple[Tensor, ...], grad: Tensor) -> Any:
            return rule(grad, inputs[0])

        @classmethod
        def parameter_names(cls, module: nn.Module) -> tuple[str, ...]:
            return ("weight",)

    return one(Ruled())


class OwnBatchNorm(nn.BatchNorm1d):
    """With a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight


def tracking() -> nn.Module:
    """Keeps a mean of what it has seen."""
    layer = nn.Identity()
    layer.track_running_stats = True
    layer.register_buffer("running_mean", torch.zeros(3))
    return layer


class CompiledFunction(torch.autograd.Function):
    """What torch.compile makes of a function, by its name."""

    forward = staticmethod(lambda ctx, h: h * 2)
    backward = staticmethod(lambda ctx, grad: grad * 2)


def compiled_in_place(layer: nn.Module) -> nn.Module:
    layer.compile(backend="aot_eager")
    return layer


def switched(layer: nn.Module) -> nn.Module:
    """A model that was wrapped in eval mode, and trains now."""
    return wrap(one(layer).eval()).train()


def stale(change: str) -> None:
    model = wrap(one(nn.Linear(3, 3)))
    inputs = X.clone()
    clipper, found = GhostClipper(model), losses(model(inputs))
    if change == "input":
        inputs.mul_(2)
    else:
        clipper.norms(found)
    clipper.backward(found)


def both_outputs(m: Any, x: Tensor) -> Tensor:
    scaled, doubled = ScaleAndDouble.apply(x, m.p)
    return m.layer(scaled) + doubled


def mixed(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Tensor = X) -> str:
    """What `check` finds in a batch."""
    return " | ".join(str(finding) for finding in check(model, loss, batch))


def clip_outside() -> None:
    """A sum of a parameter and data that no call of the model computed."""
    model = wrap(used(lambda m, x: x, p=(3,)))
    clipper = GhostClipper(model)
    clipper.backward(losses(model.layer(X) + model.p * X.mean()))


def frozen_too_late() -> None:
    model = wrap(one(nn.Linear(3, 3)))
    clipper, found = GhostClipper(model), losses(model(X))
    model.requires_grad_(False)
    clipper.backward(found)


def branching(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) + (m.p.exp() if torch.equal(x[2], x[3]) else m.p.sin()) * x.mean()


def failing(m: Any, x: Tensor) -> Tensor:
    if torch.equal(x[2], x[3]):
        raise ValueError("two rows are alike")
    return m.layer(x) + m.p * x.mean()


def grouped(m: Any, x: Tensor) -> Tensor:
    """Rows of three experts, and one of none."""
    rows = torch.cat([x[:, 0], x[:, 1, :1]], 1)
    return torch._grouped_mm(rows, m.p, offs=torch.tensor([1, 2, 3], dtype=torch.int32))


def half(m: Any, x: Tensor) -> Tensor:
    return (lambda h: h - h.mean(0))(m.layer(x.half()))


# name: (what brings the message up, or returns it; the module it names; what is wrong; what to write instead)
Row = tuple[Callable[[], Any], str, str, str]
GROUPNORM = '"GroupNorm"}), which normalizes each example by itself'
FIRST = "examples first"
NO_BATCH = "without a batch dimension"
OWN = "compute each loss from its own example"


def hooked() -> None:
    """The engine's step on a model with a hook on a parameter."""
    engine = runs.engine_for(runs.network(), sampling="without_replacement", self_check=False)
    engine.model[0].bias.register_hook(lambda grad: 2 * grad)
    engine.step(next(iter(engine.batches())), runs.losses_of)


def in_place(m: Any, x: Tensor) -> Tensor:
    """Multiplies a part of a tensor with a bare parameter, in place, and has met an input that isn't finite."""
    h = x * torch.tensor([torch.nan, 1.0, 1.0, 1.0]).view(4, 1, 1)
    h[:, 0] *= m.p
    return h


ROWS: dict[str, Row] = {
    "in place": (lambda: clip(used(in_place, p=(3,))), "", "in an operation in place", "write it out of place"),
    "a hook of a parameter": (hooked, "'0.bias'", "a hook, which would see no gradient", "remove it"),
    # check and wrap
    "batchnorm in a model": (lambda: wrap(one(nn.BatchNorm1d(6))), "layer: BatchNorm1d", "which mixes", GROUPNORM),
    "own batchnorm": (lambda: wrap(one(OwnBatchNorm(6))), "layer: OwnBatchNorm", "mixes the examples",
                      "use GroupNorm in its place"),
    "batchnorm without statistics": (
        lambda: wrap(one(nn.BatchNorm1d(6, track_running_stats=False).eval())), "layer: BatchNorm1d",
        "mean and variance of the batch", "it has no running statistics for eval mode"),
    "copies": (lambda: wrap(one(nn.DataParallel(nn.Linear(3, 3)))), "layer: DataParallel", "in threads", "its .module"),
    "scripted": (lambda: wrap(scripted(nn.Linear(3, 3))), "RecursiveScriptModule", "compiled by torch.jit",
                 "give the model that it was made of"),
    "lazy": (lambda: wrap(one(nn.LazyLinear(3))), "layer: LazyLinear", "has no sizes yet", "run one batch through"),
    "statistics": (lambda: wrap(one(tracking())), "layer: Identity", "private data", "set track_running_stats=False"),
    "complex": (lambda: wrap(one(nn.Linear(3, 3, dtype=torch.cfloat))), "layer: Linear", "has complex parameters",
                "use real ones"),
    "compiled": (lambda: wrap(one(compiled_in_place(nn.Linear(3, 3)))), "layer: Linear", "compiled by torch.compile",
                 "without torch.compile, and call engine.compile()"),
    "compiled whole": (lambda: wrap(torch.compile(nn.Linear(3, 3), backend="aot_eager")), "",
                       "compiled by torch.compile", "without torch.compile, and call engine.compile()"),
    "compiled function": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: losses(CompiledFunction.apply(h))), "",
                          "compiled the model, or a function in it", "leave torch.compile out"),
    "max_norm": (lambda: wrap(one(nn.Embedding(3, 2, max_norm=1.0))), "layer: Embedding", "max_norm rescales",
                 "set max_norm=None"),
    "by frequency": (lambda: wrap(one(nn.Embedding(3, 2, scale_grad_by_freq=True))), "layer: Embedding",
                     "mixes examples", "set scale_grad_by_freq=False"),
    "sparse": (lambda: wrap(one(nn.Embedding(3, 2, sparse=True))), "layer: Embedding", "can't hold noise",
               "set sparse=False"),
    "instance statistics": (lambda: wrap(one(nn.InstanceNorm1d(6, track_running_stats=True))),
                            "layer: InstanceNorm1d", "without noise", "build it with track_running_stats=False"),
    "half a try": (lambda: check(one(nn.Linear(3, 3)), batch=X), "", "or neither", "takes loss_fn and batch together"),
    "batch_dim below zero": (lambda: wrap(one(nn.Linear(3, 3)), batch_dim=-1), "", "got -1", "a dimension >= 0"),
    "no module": (lambda: wrap(len), "", "got builtin_function_or_method", "model must be a torch.nn.Module"),
    "batch_dim of another type": (lambda: wrap(one(nn.Linear(3, 3)), batch_dim="first"), "", "got 'first'",
                                  "an int or {name pattern: int}"),
    "replacement of another type": (lambda: wrap(one(nn.Linear(3, 3)), replace="GroupNorm"), "", "got 'GroupNorm'",
                                    "a dict such as"),
    "batch_dim of nothing": (lambda: wrap(one(nn.Linear(3, 3)), batch_dim={"head": 1}), "head", "has such a name",
                             "take names of model.named_modules()"),
    "replacement": (lambda: wrap(one(nn.BatchNorm1d(6)), replace={"BatchNorm1d": "Linear"}), "", "got 'BatchNorm1d'",
                    "into GroupNorm, LayerNorm or Identity"),
    "replacing itself": (lambda: wrap(nn.BatchNorm1d(6), replace={"BatchNorm1d": "GroupNorm"}), "",
                         "can't replace the model itself", "put it into a Sequential"),
    "replacing nothing": (lambda: wrap(one(nn.Linear(3, 3)), replace={"BatchNorm1d": "GroupNorm"}), "",
                          "but the model has none", "replace named BatchNorm1d"),
    # layers by themselves
    "constructor": (lambda: ghostclip.nn.BatchNorm2d(3), "BatchNorm2d", "no per-example gradient exists", GROUPNORM),
    "batchnorm switched": (lambda: clip(switched(nn.BatchNorm1d(6))), "layer: BatchNorm1d", "which mixes", GROUPNORM),
    "batchnorm switched later": (lambda: switched(nn.BatchNorm1d(6))(X), "layer (BatchNorm1d)", "which mixes",
                                 GROUPNORM),
    "statistics switched later": (lambda: switched(nn.InstanceNorm1d(6, affine=True, track_running_stats=True))(X),
                                  "layer (InstanceNorm1d)", "from private data", "call .eval() on it and keep it so"),
    "no such dimension": (lambda: clip(wrap(one(nn.Linear(3, 3)), batch_dim=4)), "layer (Linear)", "in dimension 4",
                          "set wrap(model, batch_dim=...)"),
    "one step": (lambda: clip(one(nn.GRUCell(3, 3)), X[0, 0]), "layer (GRUCell)", "one step of one sequence",
                 "[B, features]"),
    "one image": (lambda: clip(one(nn.Conv1d(6, 2, 1)), X[0]), "layer (Conv1d)", NO_BATCH, FIRST),
    "one image up": (lambda: clip(one(nn.ConvTranspose1d(6, 2, 1)), X[0]), "layer (ConvTranspose1d)", NO_BATCH, FIRST),
    "one image normalized": (lambda: clip(one(nn.InstanceNorm1d(6, affine=True)), X[0]), "layer (InstanceNorm1d)",
                             NO_BATCH, FIRST),
    "one sequence": (lambda: clip(one(nn.LSTM(3, 3, batch_first=True)), X[0]), "layer (LSTM)", "of shape [6, 3]",
                     "examples in one of them: [B, T, features]"),
    "one query": (lambda: clip(Wired(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(3, 1)), X[0]),
                  "layer (MultiheadAttention)", "a query of shape [6, 3]", "[B, T, E] with batch_first=True"),
    "nested bags": (lambda: wrap(one(nn.EmbeddingBag(7, 3)))(torch.nested.as_nested_tensor(
                        [torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)),
                    "layer (EmbeddingBag)", "nested indices", "give it indices.values() and indices.offsets()"),
    "parts' parameters": (lambda: ghostclip.nn.TransformerEncoderLayer(4, 1).per_example("weight", None, (), X),
                          "TransformerEncoderLayer", "has no parameter 'weight'", "of its own"),
    # how examples go through the model
    "checkpoint": (lambda: clip(Wired(lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=True), a=nn.Linear(3, 3),
                                      b=nn.Linear(3, 3))),
                   "", "hides the layers inside", "use_reentrant=False"),
    "once_differentiable": (lambda: clip(one(nn.Linear(3, 3)), loss=sloped(Once.apply)),
                            "", "marked with @once_differentiable", "make its backward of differentiable operations"),
    "no second derivative": (lambda: clip(one(nn.Linear(3, 3)), loss=sloped(lambda h: torch.cdist(h, h))),
                             "", "torch can't differentiate twice", "SDPBackend.MATH"),
    "F.batch_norm": (lambda: clip(one(nn.Linear(3, 3)),
                                  loss=lambda h: losses(F.batch_norm(h, None, None, training=True))),
                     "", "a batch of shape [4, 6, 3] is normalized", "use F.group_norm, F.layer_norm"),
    "batch_dim elsewhere": (lambda: clip(wrap(one(nn.Linear(3, 3)), batch_dim=1)), "layer",
                            "says that examples are in dimension 1", "but they are in dimension 0"),
    "centred": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: losses(h - h.mean(0))), "layer", "examples mix", OWN),
    "dimension 0": (lambda: clip(one(nn.GRU(3, 3)), loss=lambda h: losses(h[0])), "layer", "examples mix",
                    "build it with batch_first=True if its input has examples in dimension 0"),
    "token losses": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: h.square().mean(2).flatten()), "layer",
                     "examples mix", OWN),
    "own rule": (lambda: clip(with_rule(lambda grad, x: (grad * x).sum(0))), "layer (Ruled)",
                 "a gradient for each example, of shape [4, 3]", "got [6, 3]"),
    "own rule's term": (lambda: clip(with_rule(lambda grad, x: None)), "layer (Ruled)",
                        "must return a term of shape [3]", "or the gradients as a tensor; got NoneType"),
    "centred in float16": (lambda: clip(with_parameters(half, {}, layer=nn.Linear(3, 3)).half()), "layer",
                           "examples mix", "give loss_scale=1024.0"),
    "parameter of all": (lambda: clip(used(lambda m, x: (lambda h: h - h.mean(0))(x * m.p), p=(3,))), "",
                         "in what MulBackward0 gives ([4, 6, 3])", OWN),
    "parameter of some results": (lambda: clip(used(both_outputs, p=(3,))), "", "in what ScaleAndDouble", OWN),
    "parameter by frequency": (lambda: clip(used(lambda m, x: F.embedding((x[..., 0] > 0).long(), m.p,
                                                                          scale_grad_by_freq=True), p=(2, 3))),
                               "a table is looked up", "how often others", "leave scale_grad_by_freq out"),
    "a row of no expert": (lambda: clip(used(grouped, p=(3, 4, 4))), "", "only 3 of its 4 rows to an expert",
                           "leave out the others"),
    "shared in a loop": (lambda: clip_outside(), "MulBackward0", "could not be tried", "call engine.step"),
    "shared by a branch": (lambda: clip(used(branching, p=(3,))), "MulBackward0", "takes another way",
                           "remove branches that depend on the examples"),
    "shared where it fails": (lambda: clip(used(failing, p=(3,))), "MulBackward0", "could not be tried",
                              "raised ValueError: two rows are alike"),
    "frozen too late": (lambda: frozen_too_late(), "", "frozen between the forward and the backward",
                        "freeze it before the forward"),
    # losses
    "a number": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: 1.0), "", "got float", "leave out .item()"),
    "no losses": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: None), "", "got NoneType", "is a `return` missing"),
    "a list of losses": (lambda: clip(one(nn.Linear(3, 3)), loss=list), "", "got list", "return a tensor"),
    "a mean": (lambda: clip(one(nn.Linear(3, 3)), loss=torch.mean), "", "not []", 'compute them with reduction="none"'),
    "broadcast": (lambda: clip(one(nn.Linear(3, 1)), X[:, 0], lambda h: (h - torch.arange(4.0)).square()), "",
                  "not [4, 4]", "give outputs [B, 1] and labels [B] one shape, by outputs[:, 0]"),
    "one column": (lambda: clip(one(nn.Linear(3, 1)), X[:, 0], torch.square), "", "not [4, 1]", "take [:, 0] of them"),
    "tokens' losses": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: h.sum(2)), "", "not [4, 6]",
                       "average over all dimensions but the first"),
    "whole numbers": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: torch.ones(4, dtype=torch.int64)), "",
                      "got torch.int64", "must be floating point"),
    "too large a scale": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: losses(h).half(), loss_scale=2.0**17), "",
                          "can't be multiplied", "compute them in float32"),
    "detached": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: losses(h).detach()), "", "not attached to a graph",
                 "compute them from the model's output with gradients on"),
    "a leaf": (lambda: clip(one(nn.Linear(3, 3)), loss=lambda h: nn.Parameter(torch.ones(4))), "",
               "a parameter, or another tensor that nothing computed", "compute them from the batch"),
    "changed in place": (lambda: stale("input"), "", "was modified in place", "clone it before the change"),
    "freed": (lambda: stale("graph"), "", "was freed", "retain_graph=True"),
    # check with a batch
    "check: module": (lambda: mixed(one(OwnBatchNorm(3).eval()), lambda m, x: losses(m(x))), "layer: OwnBatchNorm",
                      "depends on the data of example 0", "use a layer that treats each example by itself"),
    "check: loss": (lambda: mixed(one(nn.Linear(3, 3)), lambda m, x: losses(m(x)) / losses(m(x)).sum()),
                    "the model itself", "depends on the data of example", "compute each loss from its own example"),
    "check: shape": (lambda: mixed(one(nn.Linear(3, 3)), lambda m, x: m(x)), "the model itself", "not [4, 6, 3]",
                     "average over all dimensions but the first"),
    "check: dimension 0": (lambda: mixed(one(nn.GRU(3, 3)), lambda m, x: losses(m(x)[0])), "layer: GRU",
                           "depends on the data of example 0", "build it with batch_first=True, or transpose"),
    "check: one example": (lambda: mixed(one(nn.Linear(3, 3)), lambda m, x: losses(m(x)), X[:1]), "", "got 1",
                           "at least two examples"),
    **ragged_refusals.ROWS,
}  # fmt: skip


@functools.cache
def said(name: str) -> str:
    """The message of one row."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = ROWS[name][0]()
    except (GhostClipError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return found if isinstance(found, str) else "".join(str(each.message) for each in warned)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_message_names_the_module_what_is_wrong_and_what_to_write_instead(name: str) -> None:
    _, module, problem, remedy = ROWS[name]
    message = said(name)
    assert re.search(rf"(^|[\s(']){re.escape(module)}", message), message
    assert problem in message
    assert remedy in message


def templates(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, pattern, words) of every string of at least four words in ``source`` that is no docstring."""
    tree = list(ast.walk(ast.parse(source)))
    skipped = {node.value for node in tree if isinstance(node, ast.Expr)}
    skipped |= {part for node in tree if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in tree:
        if node in skipped or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        values = [getattr(part, "value", None) for part in getattr(node, "values", [node])]
        words = [value if isinstance(value, str) else None for value in values]
        text = "".join(word or "{}" for word in words)
        if text.count(" ") >= 3:
            yield node.lineno, "".join(".*" if word is None else re.escape(word) for word in words), text


COMPILED = {"whole": lambda model: torch.compile(model, backend="aot_eager"), "in place": compiled_in_place}


@pytest.mark.filterwarnings("ignore")  # what dynamo says of code that it traces
@pytest.mark.parametrize("way", COMPILED.values(), ids=COMPILED)
@pytest.mark.one_in(math.inf)
def test_a_model_compiled_after_the_engine_was_built_is_refused_at_the_first_batch(way: Any) -> None:
    torch._dynamo.reset()
    engine = runs.engine_for(runs.network(), sampling="without_replacement")
    compiled, before = way(engine.model), runs.weights(engine.model)
    with pytest.raises(ghostclip.UnsupportedModelError, match=r"torch\.compile.*engine\.compile\(\)"):
        engine.step(next(iter(engine.batches())), lambda _, batch: runs.losses_of(compiled, batch))
    assert engine.steps_taken == 0
    assert torch.equal(runs.weights(engine.model), before)
    torch._dynamo.reset()


RULES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "turned": lambda grad, x: (grad * x).sum(1).T,
    "one number": lambda grad, x: (grad * x).sum(),
    "positions left": lambda grad, x: grad * x,
    "examples missing": lambda grad, x: (grad * x).sum(1)[:3],
    "wider": lambda grad, x: F.pad((grad * x).sum(1), (0, 1)),
    "a term of a matrix": lambda grad, x: OuterProduct(x, grad, torch.Size((3, 3))),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@every_pass
def test_a_rule_of_a_wrong_shape_names_its_layer(rule: Any, second_pass: str) -> None:
    clip(with_rule(lambda grad, x: (grad * x).sum(1)), second_pass=second_pass)
    with pytest.raises(GhostClipError, match=r"layer \(Ruled\): its rule, per_example\('weight'\), must return"):
        clip(with_rule(rule), second_pass=second_pass)


def test_no_message_is_left_unread() -> None:
    messages = [said(name) for name in ROWS]
    unread = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in FILES
        for line, pattern, text in templates(file.read_text())
        if text not in OTHERS
        and not text.startswith(ELSEWHERE)
        and file.name != "operations.py"  # names of torch's operations
        and "-> Tensor" not in text  # a custom operation's schema
        and not any(re.search(pattern, message, re.DOTALL) for message in messages)
    ]
    assert unread == []


def test_a_message_that_nobody_reads_is_noticed() -> None:
    source = 'def f(x):\n    """A docstring of several words."""\n    raise ValueError(f"{x} must not be like this")\n'
    assert [text for _, _, text in templates(source)] == ["{} must not be like this"]
