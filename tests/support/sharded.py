"""Models under FSDP2 for tests: networks, batches, meshes, and what is left of them as whole tensors."""

from typing import Any

import private_runs as runs
import torch
import torch._dynamo  # which each forked process would import by itself, for seconds
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

# Forking after gloo began, and what FSDP2 says of layers whose outputs are views, which is of no concern to the passes.
QUIET = ("ignore:.*fork.*:DeprecationWarning", "ignore:FSDP2-wrapped module.*returned a view:UserWarning")


class Tagger(nn.Module):
    """A transformer over words with a tied head, and a parameter outside of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 15, batch_first=True, dropout=0.0)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.scale = nn.Parameter(torch.ones(8))
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.words(words))) * self.scale)


def tagger() -> Tagger:
    torch.manual_seed(1)
    return Tagger().double()


def words(size: int = 7) -> Tensor:
    return torch.randint(0, 11, (size, 6), generator=torch.Generator().manual_seed(2))


def losses_of_words(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).transpose(1, 2), batch.roll(1, 1), reduction="none").mean(1)


def rows(size: int = 7) -> list[Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randn(size, 5, dtype=torch.float64, generator=made), torch.arange(size) % 3]


MODELS: dict[str, Any] = {
    "network": (lambda: runs.network(torch.float64), runs.losses_of, rows),
    "tagger": (tagger, losses_of_words, words),
}


def mesh_of(hybrid: bool = False) -> Any:
    """All processes in one row, or two replicas of the shards."""
    size = dist.get_world_size()
    if hybrid:
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (size,))


def sharded(model: nn.Module, hybrid: bool = False, children: bool = True, **options: Any) -> nn.Module:
    """``fully_shard`` of the first layer or the body, then of the model; of nothing in a process alone."""
    if not dist.is_initialized():
        return model
    options = {"mesh": mesh_of(hybrid), **options}
    if children:
        fully_shard(getattr(model, "body", None) or model[0], **options)  # type: ignore[index]
    return fully_shard(model, **options)


def settled(model: nn.Module) -> nn.Module:
    """The model with shards in the places of whole parameters, where a forward left those of the root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([whole(parameter).flatten() for parameter in settled(model).parameters()])


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in settled(model).named_parameters() if p.grad is not None}


def share(batch: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [each[rank::size] for each in batch] if isinstance(batch, list) else batch[rank::size]
