"""What the FSDP2 tests run on every rank: small models, sharded over 2 of 4 ranks."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from comm_hooks.frameworks.fsdp import (
    CompressedReduction,
    compress_all_reduce,
    compress_reduce_scatter,
)
from comm_hooks.frameworks.fsdp.reduce_scatter import reduce_scatter

MIN_NUMEL = 64


class Net(nn.Module):
    """Two blocks of awkward sizes: shards that are uneven, empty, exempt, frozen, along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 31), nn.GELU(), nn.Linear(31, 12)) for _ in range(2)
        )
        self.row = nn.Parameter(torch.randn(1, 128))  # rank 1 has none of it
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.head = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor, use_head: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * self.row[:, :12].sum() + self.frozen
        return (self.head(x) if use_head else x) * self.row.square().mean()


def two_by_two() -> DeviceMesh:
    return _mesh(torch.get_default_device().type, (2, 2), ("replicate", "shard"))


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the same mesh to all tests: groups take a while to connect, and keep threads."""
    return init_device_mesh(device, shape, mesh_dim_names=names)


def build(mesh: DeviceMesh, seed: int = 0, reduce_dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the same weights on all devices
        model = Net()
    model.to(torch.get_default_device())
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    for block in model.blocks:
        # The second weight, (12, 31), can only be cut evenly along its first dimension.
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 12, generator=generator, device="cpu")
    return inputs.to(torch.get_default_device())


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def true_gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return one rank's own gradient at the initial weights, in float64."""
    torch.manual_seed(0)
    model = Net().double()
    model(batch(rank, step).double()).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole gradients."""
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def local(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the shards of the gradients that this rank holds."""
    return {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def hybrid(
    compressor: str, reduce_dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, CompressedReduction]:
    mesh = two_by_two()
    model = build(mesh["shard"], reduce_dtype=reduce_dtype)
    options = {"min_numel": MIN_NUMEL, **options}
    return model, compress_all_reduce(model, compressor, mesh=mesh["replicate"], **options)


def flat(
    compressor: str, reduce_dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, CompressedReduction]:
    mesh = _mesh(torch.get_default_device().type, (dist.get_world_size(),), ("shard",))
    model = build(mesh, reduce_dtype=reduce_dtype)
    options = {"min_numel": MIN_NUMEL, **options}
    return model, compress_reduce_scatter(model, compressor, **options)


def inside_native(compressor: str, **options: Any) -> tuple[nn.Module, CompressedReduction]:
    """Compress inside nodes, while FSDP itself averages between them."""
    model = build(two_by_two())
    return model, compress_reduce_scatter(model, compressor, min_numel=MIN_NUMEL, **options)


def both(compressor: str, **options: Any) -> tuple[nn.Module, CompressedReduction]:
    """Compress inside nodes and between them."""
    model, state = hybrid(compressor, **options)
    compress_reduce_scatter(model, compressor, min_numel=MIN_NUMEL, **options)
    return model, state


Setup = Callable[..., tuple[nn.Module, CompressedReduction]]


def gradients_of_steps(
    setup: Setup, compressor: str, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Run backward passes at the initial weights; return what the ranks saw."""
    model, state = setup(compressor, **options)
    shards, wholes = [], []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        shards.append({n: g.clone() for n, g in local(model).items()})
        wholes.append(gathered(model))
    return {
        "shards": shards,
        "wholes": wholes,
        "state": state.state_dict(),
        "stats": state.stats(),
    }


def micro_steps(switch: str) -> dict[str, Any]:
    """Take three micro-steps, the first two without (all of) the communication."""
    model, state = hybrid("topk", density=0.25)
    bytes_sent = []
    for micro_step in range(3):
        getattr(model, switch)(micro_step == 2)
        loss_of(model, dist.get_rank(), micro_step).backward()
        bytes_sent.append(state.stats()["bytes_sent"])
    return {"bytes": bytes_sent, "gradients": gathered(model), "state": state.state_dict()}


def scaled(setup: Setup, scale: float) -> dict[str, torch.Tensor]:
    """Return the residuals after two steps with a scaled loss."""
    model, state = setup("topk", density=0.1, loss_scale=lambda: scale)
    for step in range(2):
        (loss_of(model, dist.get_rank(), step) * scale).backward()
    return state.state_dict()["memory"]


def same_batch_everywhere(setup: Setup) -> dict[str, torch.Tensor]:
    """Let each rank send its own part of what is one vector."""
    model, _ = setup("perm_k")
    loss_of(model, 0, 0).backward()
    return gathered(model)


def padding() -> bool:
    """Reduce into memory that held something else; return whether the padding is zero."""
    _, state = flat("sign")
    unit = next(unit for unit in state._units if unit.name == "blocks.0")
    pieces = unit.pieces()
    padded = sum(piece.padded for piece in pieces)
    output = torch.full((padded,), 7.0)
    flat_gradient = torch.ones(4 * padded)
    reduce_scatter(state.exchange, unit, output, flat_gradient, mean=True)
    own = [piece.shards[dist.get_rank()].numel() for piece in pieces]
    return int((output == 0).sum()) == padded - sum(own)


def beyond_float16(mean: bool, steps: int) -> dict[str, Any]:
    """Let residuals gather until float16 cannot hold what arrives; return what this shard got."""
    _, state = flat("topk", density=0.05, value_bits=32)
    unit = next(unit for unit in state._units if unit.name == "blocks.0")
    pieces, ranks, own = unit.pieces(), dist.get_world_size(), dist.get_rank()
    padded = sum(piece.padded for piece in pieces)
    generator = torch.Generator().manual_seed(own)
    arrived, sent = torch.zeros(padded).double(), torch.zeros(ranks, padded).double()
    largest, finite = 0.0, True
    for _ in range(steps):
        drawn = torch.rand(ranks * padded, generator=generator)
        gradient = (drawn * (2e4 if mean else 5e3)).half()
        output = torch.empty(padded, dtype=torch.float16)
        reduce_scatter(state.exchange, unit, output, gradient, mean=mean)
        state.exchange.end_step()
        finite &= bool(output.isfinite().all())
        largest = max(largest, float(output.max()))
        arrived += output.double() / (1 if mean else ranks)
        sent += gradient.double().view(ranks, padded)

    def compressed(shard: int, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        segments, tensors = unit.views(pieces, vector, shard, state.exchange.settings.exempts)
        pairs = zip(segments, tensors, strict=True)
        return {s.name: t.flatten() for s, t in pairs if not s.exempt}

    return {
        "arrived": compressed(own, arrived),
        "sent": {n: t for shard in range(ranks) for n, t in compressed(shard, sent[shard]).items()},
        "memory": state.state_dict()["memory"],
        "largest": largest,
        "finite": finite,
    }


def drift(setup: Setup, verify_every: int, steps: int) -> tuple[int, str]:
    """Change a weight on rank 3 after the first step; return how many steps went well, and why."""
    model, _ = setup("sign", verify_every=verify_every)
    for step in range(steps):
        try:
            loss_of(model, dist.get_rank(), step).backward()
        except ValueError as error:
            return step, str(error)
        if step == 0 and dist.get_rank() == 3:
            with torch.no_grad():
                model.head.weight.to_local()[-1, -1] += 1e-6  # type: ignore[union-attr, operator]
    return steps, ""


def residual_that_is_not_finite(verify_every: int) -> bool:
    """Return whether the gradients are finite behind a residual that is not."""
    model, state = flat("topk", density=0.1, verify_every=verify_every)
    loss_of(model, dist.get_rank(), 0).backward()
    for _, row, _ in state.exchange.memory._kept.items():  # type: ignore[union-attr]
        row.fill_(float("inf"))
    loss_of(model, dist.get_rank(), 1).backward()
    return all(bool(g.isfinite().all()) for g in local(model).values())


def train(
    setup: Setup, compressor: str, options: dict[str, Any], steps: Sequence[int], saved: Any = None
) -> dict[str, Any]:
    """Train with momentum; ``saved`` is, per rank, what another run returned."""
    model, state = setup(compressor, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if saved is not None:
        own = saved[dist.get_rank()]
        for parameter, shard in zip(model.parameters(), own["weights"], strict=True):
            with torch.no_grad():
                parameter.to_local().copy_(shard)  # type: ignore[attr-defined]
        optimizer.load_state_dict(own["optimizer"])
        state.load_state_dict(own["state"])
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return {
        "weights": [p.detach().to_local().clone() for p in model.parameters()],  # type: ignore[attr-defined]
        "optimizer": optimizer.state_dict(),
        "state": state.state_dict(),
        "stats": state.stats(),
    }


def resume_on_one_node(states: list[dict[str, Any]]) -> dict[str, Any]:
    """On 2 ranks: a shard each, no other node, the states of 4 ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = build(mesh["shard"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = compress_all_reduce(
            model, "topk", density=0.1, min_numel=MIN_NUMEL, mesh=mesh["replicate"]
        )
    shard = dist.get_rank()
    state.load_state_dicts([states[shard], states[2 + shard]])
    return state.state_dict()


def load_foreign_state(states: list[dict[str, Any]]) -> None:
    """Load the state of the other shard of the same node."""
    _, state = hybrid("topk", density=0.1)
    state.load_state_dict({**states[dist.get_rank() ^ 1], "rank": dist.get_rank() // 2})


def unused_on_one_node() -> dict[str, torch.Tensor]:
    """Let FSDP reduce zeros where a parameter got no gradient."""
    model, _ = hybrid("identity")
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    rank = dist.get_rank()
    model(batch(rank, 0), use_head=rank < 2).square().mean().backward()
    return {name: g for name, g in gathered(model).items() if name.startswith("head")}


# --- what must be refused -------------------------------------------------------------------------


def native_hsdp() -> None:
    mesh = two_by_two()
    compress_all_reduce(build(mesh), "topk", mesh=mesh["replicate"])


def two_registrations() -> None:
    mesh = two_by_two()
    model = build(mesh["shard"])
    compress_all_reduce(model, "topk", mesh=mesh["replicate"])
    compress_all_reduce(model, "sign", mesh=mesh["replicate"])


def two_reduce_scatters() -> None:
    model, _ = flat("sign")
    compress_reduce_scatter(model, "sign")


def not_sharded() -> None:
    compress_all_reduce(nn.Linear(4, 4), "topk", mesh=two_by_two()["replicate"])


def mesh_of_two_dimensions() -> None:
    mesh = two_by_two()
    compress_all_reduce(build(mesh["shard"]), "topk", mesh=mesh)


def mesh_inside_the_node() -> None:
    mesh = two_by_two()
    compress_all_reduce(build(mesh["shard"]), "topk", mesh=mesh["shard"])


def mesh_across() -> None:
    """Join rank 0 with 3 and 1 with 2, which hold different shards."""
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mesh = two_by_two()
    own = groups[dist.get_rank() in (1, 2)]
    compress_all_reduce(build(mesh["shard"]), "topk", mesh=own)


def other_settings_on_one_rank() -> None:
    mesh = two_by_two()
    seed = 5 if dist.get_rank() == 3 else 0
    compress_all_reduce(build(mesh["shard"]), "topk", mesh=mesh["replicate"], seed=seed)


def other_model_on_one_node() -> None:
    mesh = two_by_two()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8 + dist.get_rank() // 2), mesh=mesh["shard"])
    compress_all_reduce(model, "topk", mesh=mesh["replicate"])


def changes() -> None:
    hybrid("topk", memory="differences")


def other_weights_in_one_shard() -> None:
    """Change the order of elements that only rank 3 holds, so that their sum is the same."""
    model, _ = hybrid("topk")
    if dist.get_rank() == 3:
        weight = model.head.weight.to_local()  # type: ignore[union-attr, operator]
        weight.data.copy_(weight.data.flip(1).clone())
    loss_of(model, dist.get_rank(), 0).backward()


def unused_parameter() -> None:
    model, _ = hybrid("topk")
    model(batch(0, 0), use_head=False).sum().backward()


def divide_factor() -> None:
    model, _ = flat("sign")
    for module in (model, *model.blocks):  # type: ignore[misc]
        module.set_gradient_divide_factor(3.0)
    loss_of(model, dist.get_rank(), 0).backward()


def unsharded_parameters() -> list[str]:
    mesh = two_by_two()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh["shard"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compress_all_reduce(model, "topk", mesh=mesh["replicate"])
    return [str(w.message) for w in caught if "fully_shard" in str(w.message)]


def not_finite_on_one_rank(setup: Setup) -> dict[str, Any]:
    model, state = setup("topk", density=0.1)
    loss_of(model, dist.get_rank(), 0).backward()
    before = state.state_dict()["memory"]
    model.zero_grad()
    loss = loss_of(model, dist.get_rank(), 1)
    (loss * (float("inf") if dist.get_rank() == 2 else 1.0)).backward()
    after = state.state_dict()["memory"]
    return {
        "nan": all(bool(g.isnan().all()) for g in local(model).values() if g.numel()),
        "kept": all(torch.equal(before[n], after[n]) for n in before),
    }


def module_used_twice() -> float:
    mesh = two_by_two()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = compress_all_reduce(model, "topk", density=0.5, mesh=mesh["replicate"])
    for _ in range(3):
        model(model(torch.randn(4, 16))).sum().backward()
    return state.stats()["steps"]


def names_of_wrapped_modules() -> list[str]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = two_by_two()
    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(64, 64)), nn.Linear(64, 64))
    fully_shard(model[0], mesh=mesh["shard"])
    compiled = torch.compile(fully_shard(model, mesh=mesh["shard"]), backend="eager")
    state = compress_all_reduce(compiled, "topk", mesh=mesh["replicate"])  # type: ignore[arg-type]
    model(torch.randn(4, 64)).sum().backward()
    return sorted(state.state_dict()["memory"])
