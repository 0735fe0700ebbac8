"""What a launcher tells each process that it starts, told to the forked ones of a test."""

import os

import torch.distributed as dist


def told() -> bool:
    """Whether this is one of two forked processes, whose group is there already; then libraries find that they are."""
    if joined := dist.is_initialized():
        rank = str(dist.get_rank())
        os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2"})
        os.environ.update({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    return joined
