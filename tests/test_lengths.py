"""Rows of examples of unequal lengths without an index: proofs hold for the lengths of the batch they were made on."""

from collections.abc import Callable

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence

from ghostclip import GhostClipper, UnsupportedModelError, wrap
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

EQUAL, UNEQUAL = (4, 4, 4, 4), (7, 4, 3, 2)
Texts = list[Tensor]


class Network(nn.Module):
    """Layers for forwards over texts [length, 3]; returns losses [B]."""

    def __init__(self, form: Callable[["Network", Texts], Tensor]) -> None:
        super().__init__()
        self.low, self.high, self.scale = nn.Linear(3, 5), nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.first, self.second = nn.GRU(5, 5), nn.LSTM(5, 5)
        self.words, self.bag, self.form = nn.Embedding(9, 1), nn.EmbeddingBag(9, 5, mode="sum"), form

    def forward(self, texts: Texts) -> Tensor:
        return self.form(self, texts).square().sum(1)


def packed(texts: Texts, in_order: bool = False) -> PackedSequence:
    return pack_sequence(texts, enforce_sorted=in_order)


def with_rows(rows: Tensor, like: PackedSequence) -> PackedSequence:
    return PackedSequence(rows, *like[1:])


def layer_below(m: Network, texts: Texts) -> Tensor:
    whole = packed(texts)
    return m.second(with_rows(m.low(whole.data).tanh(), whole))[1][0][-1]


def parameter_below(m: Network, texts: Texts) -> Tensor:
    whole = packed(texts)
    return m.second(with_rows(torch.cat([whole.data, whole.data[:, :2]], 1) * m.scale, whole))[1][0][-1]


def layer_between(m: Network, texts: Texts) -> Tensor:
    lengths = [len(text) for text in texts]
    padded = m.low(pad_sequence(texts, batch_first=True)).tanh()
    found, _ = m.first(pack_padded_sequence(padded, lengths, batch_first=True))
    return m.second(with_rows(m.high(found.data), found))[1][0][-1]


def layer_after_packing(m: Network, texts: Texts) -> Tensor:
    lengths = [len(text) for text in texts]
    whole = pack_padded_sequence(m.low(pad_sequence(texts, batch_first=True)), lengths, batch_first=True)
    return m.second(with_rows(m.high(whole.data), whole))[1][0][-1]


def bags(m: Network, texts: Texts) -> Tensor:
    ids, sizes = torch.arange(sum(map(len, texts))) % 9, torch.tensor([len(text) for text in texts])
    return m.bag(ids, sizes.cumsum(0) - sizes, per_sample_weights=m.words(ids)[:, 0])


def bags_in_texts(m: Network, texts: Texts) -> Tensor:
    """Words are bags of two letters, whose vectors are the rows of a packed sequence."""
    whole = packed(texts)
    words = m.bag(torch.arange(2 * len(whole.data)) % 9, torch.arange(0, 2 * len(whole.data), 2))
    return m.second(with_rows(words, whole))[1][0][-1]


def other_lengths_below(m: Network, texts: Texts) -> Tensor:
    """The rows of one recurrent layer go to another with lengths of its own."""
    lengths = [len(text) for text in texts]
    padded = pad_sequence(texts, batch_first=True)
    below = pack_padded_sequence(torch.cat([padded, padded[..., :2]], 2), lengths, batch_first=True)
    found, _ = m.first(below)
    equal = pack_padded_sequence(torch.zeros(4, sum(lengths) // 4, 1), [sum(lengths) // 4] * 4, batch_first=True)
    return m.second(with_rows(found.data, equal))[1][0][-1]


def offsets_of(texts: Texts) -> Tensor:
    return torch.tensor([0, *map(len, texts)]).cumsum(0)


def padded_nested(m: Network, texts: Texts) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(m.low(torch.cat(texts)).tanh(), offsets_of(texts))
    return nested.to_padded_tensor(0.0).sum(1)


def parts_of_nested(m: Network, texts: Texts) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(m.low(torch.cat(texts)).tanh() * m.scale, offsets_of(texts))
    return torch.stack([part.sum(0) for part in nested.unbind()])


FORMS = {
    "a layer below": layer_below,
    "a parameter below": parameter_below,
    "a layer between": layer_between,
    "a layer after packing": layer_after_packing,
    "bags": bags,
    "bags in texts": bags_in_texts,
    "other lengths below": other_lengths_below,
    "nested, padded": padded_nested,
    "nested, in parts": parts_of_nested,
}


def made(form: Callable[[Network, Texts], Tensor]) -> tuple[Network, GhostClipper]:
    torch.manual_seed(0)
    model = wrap(Network(form).double())
    return model, GhostClipper(model)


def texts_of(lengths: tuple[int, ...]) -> Texts:
    return [torch.randn(length, 3, dtype=torch.float64) for length in lengths]


def assert_exact(clipper: GhostClipper, losses: Tensor) -> None:
    expected = oracle.norms_by_single_losses(clipper.model, losses)
    torch.testing.assert_close(clipper.norms(losses), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_other_lengths_of_as_many_rows_are_refused(name: str) -> None:
    model, clipper = made(FORMS[name])
    for _ in range(2):
        assert_exact(clipper, model(texts_of(EQUAL)))
    with pytest.raises(UnsupportedModelError, match="belong"):
        clipper.norms(model(texts_of(UNEQUAL)))
    assert_exact(clipper, model(texts_of(EQUAL)))


def test_the_way_out_is_said_and_works() -> None:
    model, clipper = made(layer_below)
    assert_exact(clipper, model(texts_of(EQUAL)))
    with pytest.raises(UnsupportedModelError, match=r"say which example each row is of \(batch_index="):
        clipper.norms(model(texts_of(UNEQUAL)))
    owners = packed([torch.full((length,), number) for number, length in enumerate(UNEQUAL)]).data
    losses = model(texts_of(UNEQUAL))
    expected = oracle.norms_by_single_losses(model, losses)
    torch.testing.assert_close(clipper.norms(losses, batch_index=owners), expected, rtol=1e-10, atol=0)


def test_a_bag_of_nothing_beside_a_larger_one() -> None:
    model, clipper = made(bags)
    assert_exact(clipper, model(texts_of((1, 1, 1, 1))))
    with pytest.raises(UnsupportedModelError, match="belong"):
        clipper.norms(model(texts_of((2, 0, 1, 1))))


def test_an_order_of_examples_that_changes() -> None:
    """As many rows, as long texts, in another order of examples."""

    def form(m: Network, texts: Texts) -> Tensor:
        rows = m.low(torch.cat(texts)).tanh()
        order = torch.arange(4) if form.in_order else torch.tensor([1, 0, 2, 3])
        return m.second(PackedSequence(rows, torch.tensor([4]), order, order))[1][0][-1]

    model, clipper = made(form)
    form.in_order = True
    assert_exact(clipper, model(texts_of((1, 1, 1, 1))))
    form.in_order = False
    with pytest.raises(UnsupportedModelError, match="belong"):
        clipper.norms(model(texts_of((1, 1, 1, 1))))


def padded_rows(m: Network, texts: Texts) -> Tensor:
    whole = m.low(pad_sequence(texts, batch_first=True)).tanh()
    lengths = torch.tensor([len(text) for text in texts])
    found, _ = m.first(pack_padded_sequence(whole, lengths, batch_first=True, enforce_sorted=False))
    return m.second(with_rows(found.data.tanh(), found))[1][0][-1]


def test_lengths_of_rows_that_were_padded_before_they_were_packed_make_no_difference() -> None:
    model, clipper = made(padded_rows)
    for lengths in (EQUAL, UNEQUAL, (2, 6, 1, 5)):
        losses = model(texts_of(lengths))
        assert read_graph(losses, ParameterNames(model)).lengths is None
        assert_exact(clipper, losses)


def test_bags_without_learned_weights_hold_for_all_lengths() -> None:
    def form(m: Network, texts: Texts) -> Tensor:
        sizes = torch.tensor([len(text) for text in texts])
        return m.bag(torch.arange(int(sizes.sum())) % 9, sizes.cumsum(0) - sizes)

    model, clipper = made(form)
    for lengths in (EQUAL, UNEQUAL, (2, 0, 1, 5)):
        losses = model(texts_of(lengths))
        assert read_graph(losses, ParameterNames(model)).lengths is None
        assert_exact(clipper, losses)
