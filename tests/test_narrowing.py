"""The second pass goes on below a large head from the gradient that the first one kept there."""

import oracle
import pytest
import torch
from comparing import assert_dicts_close, gradients
from test_memory import Live, Ops
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.aside import OF_WHOLE
from ghostclip.narrowing import narrowing_of
from ghostclip.planner import Planner

EXAMPLES, POSITIONS, WIDTH, WORDS = 3, 5, 6, 50
MAX_NORM = 0.02


class Texts(nn.Module):
    """Losses [B] of texts: words, a part that mixes positions, a norm, and a head that scores each word."""

    def __init__(self, recurrent: bool = False, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixer: nn.Module = (
            nn.LSTM(WIDTH, WIDTH, batch_first=True) if recurrent else nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        )
        self.norm: nn.Module = nn.Identity() if recurrent else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.words.weight

    def features(self, words: Tensor) -> Tensor:
        """What the head reads, [B, T, d]."""
        hidden = self.words(words)
        arguments = (hidden,) * 3 if isinstance(self.mixer, nn.MultiheadAttention) else (hidden,)
        return self.norm(hidden + self.mixer(*arguments)[0])

    def scores(self, words: Tensor) -> Tensor:
        """[B, T, words]."""
        return self.head(self.features(words))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(self.scores(words).flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape).mean(1)


class OneOfSeveral(Texts):
    """The head reads one output of an operation that has two."""

    def features(self, words: Tensor) -> Tensor:
        return torch.cat([self.words(words), super().features(words)], 2).split(WIDTH, 2)[1]


class ReadTwice(Texts):
    """What the head reads is added to its scores as well."""

    def scores(self, words: Tensor) -> Tensor:
        features = self.features(words)
        return self.head(features) + features.sum(2, keepdim=True)


class TwoHeads(Texts):
    """Two heads read the same."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WORDS)

    def scores(self, words: Tensor) -> Tensor:
        features = self.features(words)
        return self.head(features) * self.other(features).tanh()


class HeadOnHead(Texts):
    """The head reads what it made of its own scores."""

    def scores(self, words: Tensor) -> Tensor:
        return self.head(super().scores(words)[..., :WIDTH].tanh())


class Checkpointed(Texts):
    """What is below the head is computed anew when its gradient comes."""

    def features(self, words: Tensor) -> Tensor:
        return checkpoint(super().features, words, use_reentrant=False)


class Doubled(Texts):
    """A hook doubles the gradient at what the head reads."""

    def features(self, words: Tensor) -> Tensor:
        features = super().features(words)
        if features.requires_grad:
            features.register_hook(lambda grad: 2 * grad)
        return features


def training(head: bool, rest: bool, **options: bool) -> Texts:
    """With the head or all else frozen."""
    model = Texts(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(head if name.startswith("head") else rest)
    return model


MODELS = {
    "attention": Texts,
    "lstm": lambda: Texts(recurrent=True),
    "tied": lambda: Texts(tied=True),
    "tied, lstm": lambda: Texts(recurrent=True, tied=True),
    "head frozen": lambda: training(head=False, rest=True),
    "head frozen, lstm": lambda: training(head=False, rest=True, recurrent=True),
    "only the head": lambda: training(head=True, rest=False),
    "one of several": OneOfSeveral,
    "read twice": ReadTwice,
    "two heads": TwoHeads,
    "head on head": HeadOnHead,
    "checkpointed": Checkpointed,
    "doubled": Doubled,
}
FORKED = {"read twice", "two heads", "only the head"}
ABOVE = {name: "none" if name.startswith("head frozen") else "head" for name in MODELS if name not in FORKED}


def texts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (EXAMPLES, POSITIONS)), torch.randint(WORDS, (EXAMPLES, POSITIONS))


def expected(model: nn.Module) -> dict[str, Tensor]:
    """The clipped sum by the loop, all examples clipped."""
    alone = oracle.per_example_grads(model, lambda losses: losses, texts())
    assert (oracle.norms(alone) > MAX_NORM).all()
    return oracle.clipped_sum(alone, MAX_NORM)


def clipper(model: nn.Module, **options: object) -> ghostclip.GhostClipper:
    """One that sets nothing aside, so that a second pass has to go all the way."""
    return ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM, memory_budget=1, **options)


def products(found: ghostclip.GhostClipper, **options: bool) -> list[tuple[int, ...]]:
    """Shapes of the products that hand a gradient of the scores down to what the head read."""
    found.backward(found.model(*texts()))
    found.model.zero_grad()
    losses = found.model(*texts())
    with Ops() as ops:
        found.backward(losses, **options)
    return [shape for _, shapes, args in ops.seen for shape in shapes
            if shape == (EXAMPLES * POSITIONS, WIDTH) and args[0].shape[-1] == WORDS]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_it_is_where_all_ways_lead_through(name):
    model = ghostclip.wrap(MODELS[name]().double())
    found = narrowing_of(model(*texts()))
    if name in FORKED:
        assert found is None
    else:
        layer = None if found.above is None else found.above.layer
        assert layer is (None if ABOVE[name] == "none" else model.head)


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_the_loop_s(name, retain_graph):
    model = MODELS[name]().double()
    exact = expected(model)
    each = clipper(model)
    for _ in range(3):
        model.zero_grad()
        each.backward(model(*texts()), retain_graph=retain_graph)
        assert_dicts_close(gradients(model), exact, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_the_loop_s_by_a_function(name):
    model = MODELS[name]().double()
    exact = expected(model)
    each = clipper(model)
    for _ in range(6):
        model.zero_grad()
        each.clip(lambda model, batch: model(*batch), texts())
        assert_dicts_close(gradients(model), exact, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_set_aside_changes_no_sum(name):
    model = MODELS[name]().double()
    exact = expected(model)
    each = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM)
    for _ in range(3):
        model.zero_grad()
        each.backward(model(*texts()))
        assert_dicts_close(gradients(model), exact, 1e-10)


@pytest.mark.parametrize("name", ["attention", "lstm", "tied", "tied, lstm", "head frozen", "head frozen, lstm"])
def test_the_product_into_what_the_head_read_is_formed_once(name):
    assert len(products(clipper(MODELS[name]().double()))) == 1
    # Nothing is kept for a graph that others may go over.
    assert len(products(clipper(MODELS[name]().double()), retain_graph=True)) == 2


def test_a_head_that_was_set_aside_is_not_visited_again():
    model = Texts().double()
    long = tuple(each.repeat(1, 8) for each in texts())
    alone = oracle.per_example_grads(model, lambda losses: losses, long)
    each = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM)
    # Keeping is fastest wherever there is room.
    each._passes._planner = Planner("direct", measure=lambda run, device, best: 1.0)
    for _ in range(2):
        model.zero_grad()
        losses = model(*long)
        run = each._passes.first_pass(losses, keep=False, retain_graph=True, aside=OF_WHOLE)
        assert id(model.head.weight) in run.aside
        assert id(model.words.weight) not in run.aside
        with Ops() as ops:
            each.backward(losses)
        assert_dicts_close(gradients(model), oracle.clipped_sum(alone, MAX_NORM), 1e-10)
    scores = [args for name, _, args in ops.seen if args[0].shape[-1] == WORDS and name in ("mm", "addmm")]
    assert len(scores) == 1


def test_hooks_on_parameters_have_an_ordinary_backward():
    model = Texts().double()
    exact, each, seen = expected(model), clipper(model), []
    model.head.weight.register_hook(seen.append)
    each.backward(model(*texts()))
    assert len(seen) == 1
    assert_dicts_close(gradients(model), exact, 1e-10)


@pytest.mark.parametrize("name", ["attention", "lstm", "head frozen"])
def test_an_example_that_is_not_finite_adds_nothing(name):
    model = MODELS[name]().double()
    inputs, targets = texts()
    alone = oracle.per_example_grads(model, lambda losses: losses, (inputs, targets))
    exact = oracle.clipped_sum({name: grads[[0, 2]] for name, grads in alone.items()}, MAX_NORM)
    each = clipper(model)
    for _ in range(2):
        model.zero_grad()
        each.backward(model(inputs, targets) * torch.tensor([1.0, torch.inf, 1.0], dtype=torch.float64))
        assert_dicts_close(gradients(model), exact, 1e-10)


@pytest.mark.parametrize("name", ["attention", "head frozen", "lstm"])
def test_the_graph_is_freed_all_the_same(name):
    model = MODELS[name]().double()
    each = clipper(model)
    each.backward(model(*texts()))
    with Live({EXAMPLES * POSITIONS * WORDS * 8}) as live:  # scores, and what is of their size
        losses = model(*texts())
        assert live.bytes() > 0
        each.backward(losses)
        assert live.bytes() == 0
    with pytest.raises(ghostclip.GhostClipError, match="freed"):
        each.backward(losses)


def test_what_was_kept_is_let_go_of():
    model = Texts().double()
    each = clipper(model)
    with Live({EXAMPLES * POSITIONS * WIDTH * 8}) as live:
        losses = model(*texts())
        each.backward(losses)
        assert live.bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype):
    model = Texts().to(dtype)
    wide = Texts().double()
    wide.load_state_dict(model.state_dict())
    exact = expected(wide)
    each = clipper(model, loss_scale=64.0)
    each.backward(model(*texts()))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient.double(), exact[name], rtol=0.05, atol=2e-4)
