"""What the fuzzer found, and what became of it; written by hand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FOUND", "Found"]


@dataclass(frozen=True)
class Found:
    """One cause.

    Attributes:
        what: the defect.
        by: commit and seed that show it.
        then: how it ended.
    """

    what: str
    by: str
    then: str


FOUND: tuple[Found, ...] = (
    Found(
        "the self-check compared sums of groups that loss_scale had multiplied, and refused every model",
        "7698785",
        "fixed; engine/test_self_check.py, a planted bug",
    ),
    Found(
        "weights of a Custom policy were compared with those of norms without the rounding margin: an example "
        "whose positions cancel stopped training",
        "b167716, 300 cases from 100000",
        "fixed; engine/test_weighing.py, a planted bug",
    ),
    Found(
        "a bfloat16 or float16 parameter that is a single number raised IndexError in the engine, and so did "
        "a hook on it",
        "2b0fb3f, 300 s",
        "fixed; engine/test_engine.py, two planted bugs",
    ),
    Found(
        "NaN in one loss: a shared tensor with unused rows was taken for the examples' own rows, and norms "
        "were too small (1.22 C)",
        "46a664d, 200003",
        "fixed; laws/test_coinciding_sizes.py, planted bugs",
    ),
    Found(
        "one denormal example in bfloat16 refused the whole batch",
        "46a664d, 500372",
        "fixed; laws/test_coinciding_sizes.py, a planted bug",
    ),
    Found(
        "a [T, T] table looked up as a bias was refused at batch sizes that divide T",
        "46a664d, 500195",
        "fixed; laws/test_coinciding_sizes.py",
    ),
    Found(
        "the self-check divided by zero where autograd's gradients are exactly zero",
        "7698785",
        "fixed; engine/test_self_check.py",
    ),
    Found(
        "a model that is one layer, clipped by layer in the loop over single examples: norms without their "
        "group's name",
        "cac0b00, 700604",
        "fixed: that strategy is removed",
    ),
    Found(
        "an operation in place on a part of a tensor with a bare parameter: one example that isn't finite "
        "left out all others",
        "cac0b00, 700407",
        "such a batch is refused; clipper/test_nonfinite_shared.py, SECURITY.md",
    ),
    Found(
        "a layer on a bare parameter is refused in a first batch as long as the parameter",
        "cac0b00, 701516",
        "left: trains once another size was seen (SECURITY.md)",
    ),
    Found(
        "float16 gradients that round to zero look as if examples mixed",
        "cac0b00, 700939",
        "left: the message says to give loss_scale",
    ),
    Found(
        "one example that isn't finite left out all others, at a parameter above which nothing has a gradient",
        "9e51745, 10",
        "such a batch is refused; clipper/test_nonfinite_shared.py, SECURITY.md",
    ),
    Found(
        "beside an example with gradients over 1,000 times as large, rows folded by time were taken for rows by "
        "example in a first batch, and norms of others were too small",
        "9e51745, 952235",
        "fixed; clipper/test_mixing_scales.py, two planted bugs",
    ),
    Found(
        "a layer on a table refused in a first batch at a size that coincides",
        "9e51745, 951224, 1200555, 1202727, 1200609",
        "fixed in clip and engine.step; backward's message says what to do. laws/test_coinciding_sizes.py",
    ),
    Found(
        "float16 gradients of 1e-6 at a bare parameter look as if examples mixed",
        "4d953b1, 1202761",
        "the message says to give loss_scale",
    ),
    Found(
        "of a model whose only trained layer reads a frozen parameter it isn't told whether losses are one an example",
        "4d953b1, 1200397",
        "left: refused",
    ),
    Found(
        "the fuzzer took a model for another at examples that are zero, and too few draws of rounding for all of it",
        "4d953b1, 950670, 951582, 1200146, 1200263, 1201231, 1201581, 1201711",
        "fixed in the fuzzer",
    ),
    Found(
        "the cross term of a tied embedding and head cancelled by itself, where positions cancel in both, and was "
        "trusted (1.033 C)",
        "f8cebf8, 3000588, 3001904",
        "fixed; laws/test_rounding.py, a planted bug",
    ),
    Found(
        "squares of an input overflow below a gradient of zero, beside another example's NaN: the weights of its group "
        "were NaN, and so was the sum",
        "f8cebf8, 3004685",
        "fixed; test_groupwise_weights.py, a planted bug",
    ),
    Found(
        "float16: gradients below a mask of attention are too small to show whose they are",
        "f8cebf8, 3001761",
        "the message says to give loss_scale",
    ),
    Found(
        "several frozen parameters stacked with a trained one to as many rows as the batch (or a multiple) has",
        "f8cebf8, 3003141",
        "left: refused, since constants aren't told from data there",
    ),
    Found(
        "a normalization whose squares overflow gives zero by torch's kernel and a finite gradient by ours",
        "f8cebf8, 3001474",
        "left: such an example's part stays bounded",
    ),
    Found(
        "a table of distances, read behind an index assignment and as long as a multiple of the first batch: one "
        "example that isn't finite left out all others",
        "fd45c23, 5001666",
        "fixed; laws/test_coinciding_sizes.py, a planted bug",
    ),
    Found(
        "an example with NaN and a finite loss, below prompts that leave nothing of its input, made the first layer "
        "count as a table: others were left out (1.54 C)",
        "8b610fb, 6001574, 6001688, 6002473",
        "fixed; one commit had it; laws/test_coinciding_sizes.py",
    ),
    Found(
        "the outer product of a frozen parameter and a trained one, as long as the batch, was refused",
        "8b610fb, 6001871",
        "fixed; laws/test_coinciding_sizes.py",
    ),
    Found(
        "an instance normalization over two positions leaves of a table's gradient only rounding, in which the "
        "self-check sees a wrong rule",
        "8b610fb, 6003724",
        "left: the message names the table; self_check=False",
    ),
    Found(
        "a model that centres the batch was clipped where what mixes is less than a thousandth of each gradient",
        "c5bf40f, 3301217",
        "left: SECURITY.md says so; sums of such models are held to that thousandth",
    ),
    Found(
        "a table of positions for all pairs of positions, as long as the first batch, behind a folded product: the "
        "refusal didn't say to begin with another size",
        "c5bf40f, 3300246",
        "fixed; clipper/test_refusals.py",
    ),
    Found(
        "clipping each layer by itself gave the weight NaN to an example whose squares overflow only where the margin "
        "is added: all sums of a group-wise policy were NaN",
        "11ecd7b, 5501777",
        "fixed: that strategy is removed; test_groupwise_weights.py has the others",
    ),
    Found(
        "of as many positions as examples, only one of which has gradients, rows that aren't finite went to the wrong "
        "example: everybody was left out",
        "547a0d1, 6601709",
        "fixed; clipper/test_mixing_scales.py, a planted bug",
    ),
    Found(
        "a table of positions, only one row of which has gradients, in a batch that divides its length: where the "
        "row's place was that of a very large example, it counted as that one's own (1.12 C)",
        "a947f66, 7715060",
        "fixed; laws/test_coinciding_sizes.py, a planted bug",
    ),
    Found(
        "the first mending of that took a layer on data for a table beside a saturated example of inf",
        "f33e797, 9906614",
        "fixed; only lookups are taken for tables; laws/test_coinciding_sizes.py",
    ),
    Found(
        "a layer of several rows an example that only rounding errors reach is refused",
        "c5bf40f, 3307562",
        "left: the batch shows nothing of whose its rows are; the message says what to do",
    ),
    Found(
        "float16: a share of 1.00024, taken of the policy's bound and not of the sensitivity that was reported",
        "f33e797, 9907909",
        "fixed in the fuzzer",
    ),
    Found(
        "an empty batch of a model of which no trained parameter takes part",
        "759aba7, 12300795",
        "fixed in the fuzzer",
    ),
    Found(
        "a frozen linear layer on a parameter of as many rows as there are examples is refused",
        "a3096ca, 77001024",
        "left: the graph doesn't hold what is added there, a frozen bias or data",
    ),
    Found(
        "a clipped sum that is larger than any float16 number overflows in p.grad",
        "23c1a9a, 9549063213",
        "fixed in the fuzzer",
    ),
    Found(
        "normalizations over two positions, whose gradients cancel to next to nothing: a clipped sum off by nine times "
        "what the fuzzer takes for rounding (1e-7 of it, in float64), a weight of float32 over 1% too small",
        "23c1a9a, 9549057729, 9549061531",
        "left: rounding, and the weight is on the safe side",
    ),
    Found(
        "an example with a finite loss and an input of inf below a saturated function, at a matrix used outside of "
        "every layer: its gradient there, zero times inf, was measured as zero, and the example had a weight",
        "2e7d1e4, 9551188647",
        "fixed; clipper/test_nonfinite_shared.py, a planted bug",
    ),
    Found(
        "rows in no order below attention, beside inputs of 1e13 and more, fitted the marks of one example loosely: an "
        "example of ordinary size got the norm of the large one (1.75 of the bound)",
        "b0fbc00, 9581077656",
        "fixed; such batches are refused; clipper/test_ownership.py, a planted bug",
    ),
    Found(
        "batches with inputs of 1e9 and more below attention are refused",
        "58f708c, 9581889254, 9581889349, 9581892336, 9581893358",
        "left: whose their rows are can't be read from their gradients",
    ),
    Found(
        "a batch whose tensors lay in memory in another way than those that a graph was made with raised an error",
        "58f708c, 9581893017",
        "fixed; clipper/test_compiled_branches.py",
    ),
    Found(
        "float16: beside an example with inputs of inf, a bias lost its gradient for all examples in 6 of 40 draws of "
        "marks, in norms and sums alike",
        "58f708c, 9581896110",
        "left: each example's part stays bounded",
    ),
)
