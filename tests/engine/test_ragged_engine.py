"""Private steps over ragged examples: against a loop written by hand, with empty batches, and what is refused."""

import copy

import oracle
import private_runs as runs
import pytest
import torch
from case_models import Wired
from ragged_models import CASES, FEATURES, alone, gathered, gradients, graphs, joined, losses
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine, VerificationError
from ghostclip.clipper.trial import is_trial

EXAMPLES = 24
pytestmark = pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced")


def dataset(dtype=torch.float64):
    """Graphs of 0 to 8 nodes."""
    whole = graphs(torch.randint(0, 9, (EXAMPLES,)).tolist(), dtype)
    return [alone(whole, example) for example in range(EXAMPLES)]


def engine_for(model, examples=None, collate_fn=joined, **options):
    loader = DataLoader(dataset() if examples is None else examples, batch_size=6, collate_fn=collate_fn)
    options = {"noise_multiplier": 0.0, "clipping": 0.5, "noise": "test", "seed": 7, "batch_size": 6, **options}
    return PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.5), loader, **options)


@pytest.mark.parametrize("case", [CASES[name] for name in ("gat", "packed text")])
def test_steps_are_those_of_a_loop_written_by_hand(case):
    model, plain = case.build().double(), case.build().double()
    engine, sizes = engine_for(model, max_physical_batch_size=4), []
    for batch in engine.batches():
        plain.load_state_dict(model.state_dict())
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        seen: list = []
        batch.pass_through(lambda physical, seen=seen: physical if is_trial() else seen.append(physical) or physical)
        record = engine.step(batch, losses, case.index)
        for physical in seen:
            for name, total in oracle.clipped_sum(gradients(plain, physical), 0.5).items():
                expected[name] -= 0.5 * total / 6
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-8, atol=1e-10)
        sizes.append(len(record.losses))
    assert max(sizes) > 4


def test_engine_backward_takes_an_index_too():
    case = CASES["gat"]
    model = case.build()
    twin, examples = copy.deepcopy(model), dataset(torch.float32)
    engine, other = (engine_for(each, examples, self_check=False) for each in (model, twin))
    for batch, same in zip(engine.batches(), other.batches(), strict=True):
        engine.step(batch, losses, case.index)
        for physical in same.physical():
            other.backward(losses(twin, physical), batch_index=case.index(physical))
        other.optimizer.step()
        other.optimizer.zero_grad()
    torch.testing.assert_close(runs.weights(model), runs.weights(twin))


def raw_sum(m, batch):
    """Sums features of neighbours before any layer, where no gradient shows whose they are."""
    x, (source, target) = batch["x"], batch["edges"]
    h = m.first(x + gathered(x[source], target, len(x))).tanh()
    return m.head(gathered(h, batch["rows"], len(batch["y"])))


def connected(examples):
    """A collate_fn that joins each graph to the next by an edge."""
    batch = joined(examples)
    borders = (batch["rows"].diff() != 0).nonzero().flatten()
    return {**batch, "edges": torch.cat([batch["edges"], torch.stack([borders, borders + 1])], 1)}


@pytest.mark.parametrize("collate_fn", [joined, connected])
def test_features_that_pass_from_graph_to_graph_before_any_layer_are_found_by_the_self_check(collate_fn):
    model = Wired(raw_sum, first=nn.Linear(FEATURES, 6), head=nn.Linear(6, 3)).double()
    engine = engine_for(model, None, collate_fn)

    def train():
        for batch in engine.batches():
            engine.step(batch, losses, CASES["gcn"].index)

    if collate_fn is joined:
        train()
    else:
        with pytest.raises(VerificationError, match="the self-check found examples that mix"):
            train()


@pytest.mark.parametrize(
    ("options", "index", "message"),
    [
        ({}, torch.zeros(3, dtype=torch.int64), "must be a function of a physical batch"),
        ({"max_physical_batch_size": "auto"}, CASES["gcn"].index, 'batch_index and max_physical_batch_size="auto"'),
        ({"unit_ids": [n // 2 for n in range(EXAMPLES)]}, CASES["gcn"].index, "batch_index and unit_ids don't go"),
        (None, CASES["gcn"].index, r"batch_index and compile\(\) don't go together; leave one of them out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_computed(options, index, message):
    engine = engine_for(CASES["gcn"].build().double(), **(options or {}))
    engine.compile() if options is None else None
    with pytest.raises((TypeError, ValueError), match=message):
        engine.step(next(batch for batch in engine.batches() if batch.sizes), losses, index)
    assert engine.steps_taken == 0
