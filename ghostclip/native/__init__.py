"""C kernels for inner loops that tensor operations can't do well, their bindings, and custom operations for graphs.

A wheel brings them compiled; elsewhere they are compiled on first use, where a compiler is. Each has a twin in tensor
operations, which does the same where there is none, and is tested both ways. experiments/kernels.py times a kernel
against its twin: one that saves less than a tenth of the steps of every workload is not worth its lines.
"""

from ghostclip.native.build import kernels, library, seconds_compiling

__all__ = ["kernels", "library", "seconds_compiling"]
