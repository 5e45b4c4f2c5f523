"""Many processes by PyTorch's own means: torchrun starts them, DDP or FSDP2 joins them. One process needs none of it.

Every process draws the whole global batch from (seed, step) and computes its own share of the records, and sums that a
mean is taken of are reduced over all of them: the loss is that of one process with the same global batch, up to the
order of sums.
"""

import torch
import torch.distributed as dist
from torch import nn

KINDS = ("ddp", "fsdp")


def start(device="cpu"):
    """Joins the group of processes that torchrun started, if it did. Returns (rank, processes)."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")  # nccl: not yet run on hardware
    return rank(), size()


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n):
    """The rows of a global batch of n that this process computes."""
    if n % size():
        raise ValueError(f"train: batch was {n}, must be a multiple of the number of processes, {size()}")
    return slice(rank(), n, size())


@torch.no_grad()
def total(values):
    """The sum over all processes of a tensor [k] (f64, so that counts are exact)."""
    values = values.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class Trainee(nn.Module):
    """A model whose forward is a function of it: so all that a step does with its weights happens within the forward
    that DDP and FSDP2 watch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, function):
        return function(self.model)


def wrap(model, kind="ddp"):
    """The module to call in a step. kind: "ddp" (whole weights everywhere) or "fsdp" (FSDP2: weights, gradients and
    moments in shares; as one unit, since context and carried rows use layers' k_proj and v_proj apart from the rest)."""
    if kind not in KINDS:
        raise ValueError(f"train: parallel was {kind!r}, must be 'ddp' or 'fsdp'")
    trainee = Trainee(model)
    if not dist.is_initialized():
        return trainee
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        kind_of_device = next(model.parameters()).device.type
        mesh = dist.device_mesh.init_device_mesh(kind_of_device, (size(),))
        return fully_shard(trainee, mesh=mesh)
    # a step in which this process carries nothing leaves the mark without a gradient
    return nn.parallel.DistributedDataParallel(trainee, find_unused_parameters=True)


def model_state(model, optimizers):
    """(weights, optimizers' states) as whole tensors on rank 0, whatever the layout; every process must call it."""
    if not any(_sharded(p) for p in model.parameters()):
        return model.state_dict(), [o.state_dict() for o in optimizers]
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizers, options=options)
    return weights, [states]


def load_state(model, optimizers, weights, states):
    """Puts back what model_state gave, in the same layout."""
    if not any(_sharded(p) for p in model.parameters()):
        model.load_state_dict(weights)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=states[0], options=options)


def whole_weights(model):
    """The state_dict with every tensor whole; every process must call it."""
    return {k: v.full_tensor() if _sharded(v) else v for k, v in model.state_dict().items()}


def _sharded(tensor):
    return hasattr(tensor, "full_tensor")
