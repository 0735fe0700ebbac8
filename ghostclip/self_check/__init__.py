"""What an engine looks at in its first steps: are gradients right, do examples stay apart, do the parameters move."""

from ghostclip.self_check.checking import check
from ghostclip.self_check.first_steps import SelfCheck
from ghostclip.self_check.loading import LoadedRows

__all__ = ["LoadedRows", "SelfCheck", "check"]
