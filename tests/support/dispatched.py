"""What torch's dispatcher sees of a block: the operations that form products, and the storages alive."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FUSED = {"convolution_backward", "native_layer_norm_backward", "embedding_dense_backward"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", *FUSED}


class Ops(TorchDispatchMode):
    """Notes each operation that multiplies matrices or is a fused backward: (name, output shapes, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]], tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.seen.append((name, [tuple(t.shape) for t in tree_leaves(result) if isinstance(t, Tensor)], args))
        return result


class Live(TorchDispatchMode):
    """Sums the bytes of all storages made under it that are alive, and remembers the most there were."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        super().__init__()
        self.sizes = set(sizes)  # when given: only storages of these many bytes
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def bytes(self) -> int:
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and (not self.sizes or storage.nbytes() in self.sizes):
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes())
        return result
