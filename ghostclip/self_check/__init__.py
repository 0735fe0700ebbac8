"""What an engine tries in its first steps, and now and then later: are gradients right, do examples mix, what moves.

| compared | with | where |
| --- | --- | --- |
| two examples' gradients, and their sum, by the layers' rules | autograd's | `agreement.gradients_agree` |
| each trained parameter behind the first update | itself before it | `agreement.untrained` |
| what the model keeps of a batch | what it keeps of other examples, or of half of them | `MixingTest.kept` |
| rows that a data set reads by one call | the same rows read beside others | `MixingTest.read` |
| losses and gradient norms of two halves | those of the whole batch | `MixingTest.mixed` |
| losses of rows that stay | where copies of one of them replace the others | `MixingTest.mixed` |
| losses of copies of one row | those of different rows | `MixingTest.ignored` |
| operations of a forward | where two rows are exchanged, once losses were found to mix | `mixing_place` |

`first_steps` says when an engine compares what. `check` tries all of `MixingTest` on a batch or a loader, and asks the
clipper for norms, which are refused where the graph shows that examples mix.
"""

from ghostclip.self_check.checking import check
from ghostclip.self_check.first_steps import SelfCheck

__all__ = ["SelfCheck", "check"]
