"""Short C functions for inner loops that tensor operations can't do well, compiled on first use where a compiler is.

Everything they do is done by tensor operations too, where there is none, and tested both ways.
"""

from ghostclip.native.build import library

__all__ = ["library"]
