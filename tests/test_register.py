"""register() finds DDP in what frameworks make of a model, and refuses what cannot work."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from comm_hooks import CompressionState, TopK, compression_hook, register, skip_hook
from comm_hooks.frameworks.ddp.model import named_parameters, require_ddp
from comm_hooks.optim import low_communication
from tests.ranks import RanksOf
from tests.test_hook import SMALL_BUCKETS_MB, Net, backward


class Wrapper(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def wrappings() -> dict[str, bool]:
    """Return, for each way to wrap a DDP model, whether register() finds that very model."""
    found = {}
    ways: dict[str, Callable[[DistributedDataParallel], nn.Module]] = {
        "itself": lambda ddp: ddp,
        "compiled": torch.compile,
        "in place": lambda ddp: ddp.compile() or ddp,
        "Fabric's": lambda ddp: Wrapper(_forward_module=torch.compile(ddp), _original=ddp.module),
        "twice": lambda ddp: torch.compile(Wrapper(inner=Wrapper(a=ddp, b=ddp, c=nn.Linear(2, 2)))),
        "nested": lambda ddp: DistributedDataParallel(Wrapper(inner=ddp, more=nn.Linear(2, 2))),
    }
    for name, wrap in ways.items():
        ddp = DistributedDataParallel(Net())
        wrapped = wrap(ddp)
        expected = wrapped if name == "nested" else ddp
        register(wrapped, "topk")
        assert isinstance(expected, DistributedDataParallel)
        found[name] = [hook for hook, _ in expected._comm_hooks] == [compression_hook]
    return found


def test_ddp_is_found_in_whatever_wraps_it(ranks_of: RanksOf) -> None:
    for found in ranks_of(2).run(wrappings):
        assert all(found.values()), found


def not_ddp() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    cases: dict[str, Callable[[], Any]] = {
        "Net": Net,
        "compiled": lambda: torch.compile(Net()),
        "inner module": lambda: DistributedDataParallel(Net()).module,
        "two": lambda: Wrapper(a=DistributedDataParallel(Net()), b=DistributedDataParallel(Net())),
        "FSDP": lambda: FullyShardedDataParallel(Net(), device_id=torch.device("cpu")),
        "FSDP2": lambda: fully_shard(Net(), mesh=mesh),
        "inside FSDP2": lambda: Wrapper(layer=fully_shard(Net(), mesh=mesh)),
        "replicate": lambda: replicate(Net()),
        "replicate_with_fsdp": lambda: replicate_with_fsdp(Net(), mesh=mesh),
        "DeepSpeed": engine,
        "DataParallel": lambda: nn.DataParallel(Net()),
        "no model": lambda: "topk",
    }
    messages = {}
    for name, make in cases.items():
        try:
            register(make(), "topk")
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_what_is_not_ddp_is_refused_with_what_to_do(ranks_of: RanksOf) -> None:
    expected = {
        "Net": "got Net: wrap the model first",
        "compiled": "got Net: wrap the model first",
        "inner module": "got Net: wrap the model first",
        "two": "Wrapper has 2 DistributedDataParallel models inside: register each",
        "FSDP": "sharded by FSDP: see comm_hooks.frameworks.fsdp",
        "FSDP2": "sharded by FSDP: see comm_hooks.frameworks.fsdp",
        "inside FSDP2": "sharded by FSDP: see comm_hooks.frameworks.fsdp",
        "replicate": "of replicate(), a private interface of PyTorch",
        "replicate_with_fsdp": "of replicate(), a private interface of PyTorch",
        "DeepSpeed": "got DeepSpeedEngine: see comm_hooks.frameworks.deepspeed",
        "DataParallel": "got DataParallel",
        "no model": "register() takes a model, got str",
    }
    for messages in ranks_of(2).run(not_ddp):
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name]
            assert "\n" not in messages[name]


def names_of_compiled() -> list[list[str]]:
    plain = DistributedDataParallel(Net())
    compiled = DistributedDataParallel(torch.compile(Net()))
    part = Net()
    part.a = torch.compile(part.a)  # type: ignore[assignment]
    models = [plain, torch.compile(plain), compiled, DistributedDataParallel(part)]
    return [[name for name, _ in named_parameters(require_ddp(m))] for m in models]


def test_names_do_not_depend_on_compilation(ranks_of: RanksOf) -> None:
    for plain, *others in ranks_of(2).run(names_of_compiled):
        assert plain == [name for name, _ in Net().named_parameters()]
        assert all(other == plain for other in others)


def registered_twice() -> dict[str, list[str]]:
    """Return what is said of the second hook, and what DDP then has noted."""

    def built_in(ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def other(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, skip_hook)

    def ours(ddp: DistributedDataParallel) -> None:
        register(ddp, "topk", density=0.1)

    def directly(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(CompressionState(TopK()), compression_hook)

    def in_backward(ddp: DistributedDataParallel) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), {"lr": 0.1})

    def in_first_forward(ddp: DistributedDataParallel) -> None:
        in_backward(ddp)
        backward(ddp, 0, 0)

    results = {}
    orders = {
        "ours, ours": (ours, ours),
        "other, ours": (other, ours),
        "built-in, ours": (built_in, ours),
        "ours, other": (ours, other),
        "ours, directly": (ours, directly),
        "in backward, ours": (in_backward, ours),
        "ours, in backward": (ours, in_first_forward),
    }
    for name, (first, second) in orders.items():
        ddp = DistributedDataParallel(Net())
        first(ddp)
        try:
            second(ddp)
        except ValueError as error:
            results[name] = [str(error), *(hook.__name__ for hook, _ in ddp._comm_hooks)]
    return results


def test_a_second_hook_is_refused_before_ddp_notes_it(ranks_of: RanksOf) -> None:
    already = "this model has a communication hook already, "
    expected = {
        "ours, ours": [already + "compression_hook", "compression_hook"],
        "other, ours": [already + "skip_hook", "skip_hook"],
        "built-in, ours": [already + "BuiltinCommHookType.FP16_COMPRESS"],
        "ours, other": [already + "compression_hook", "compression_hook"],
        "ours, directly": [already + "compression_hook", "compression_hook"],
        "in backward, ours": ["an optimizer runs in the backward pass"],
        "ours, in backward": [already + "compression_hook", "compression_hook"],
    }
    for results in ranks_of(2).run(registered_twice):
        assert results.keys() == expected.keys()
        for name, (message, *hooks) in expected.items():
            assert results[name][0].startswith(message)
            assert "\n" not in results[name][0]
            assert results[name][1:] == hooks


def unusable() -> list[str]:
    messages = []
    for options in (
        {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    ):
        ddp = DistributedDataParallel(Net(), **options)
        try:
            register(ddp, "topk")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_options_that_take_the_hook_or_skip_it_are_refused(ranks_of: RanksOf) -> None:
    for taken, skipped in ranks_of(2).run(unusable):
        assert taken.startswith("DistributedDataParallel(mixed_precision=...) takes the only")
        assert skipped.startswith("skip_all_reduce_unused_params=True may skip the last bucket")


def python_reducer(hook: str) -> str:
    before = torch._dynamo.config.optimize_ddp
    # DDP sets these two for good.
    inductor = torch._inductor.config
    fuse = inductor._fuse_ddp_communication, inductor._fuse_ddp_bucket_size
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp = DistributedDataParallel(Net())
        if hook == "register":
            register(ddp, "topk")
            raise AssertionError("register() must refuse")
        ddp.register_comm_hook(CompressionState(TopK()), compression_hook)
        backward(ddp, 0, dist.get_rank())
    except ValueError as error:
        return str(error)
    finally:
        torch._dynamo.config.optimize_ddp = before
        inductor._fuse_ddp_communication, inductor._fuse_ddp_bucket_size = fuse
    return "not refused"


@pytest.mark.parametrize("hook", ["register", "compression_hook"])
def test_python_reducer_is_refused(ranks_of: RanksOf, hook: str) -> None:
    for message in ranks_of(2).run(python_reducer, hook):
        assert "'python_reducer' calls hooks parameter by parameter" in message
        assert "ddp_optimizer" in message


def static_graph(order: str) -> str:
    """Run backward passes, with (s) and without (n) synchronization; return the refusal."""
    model = DistributedDataParallel(Net(), static_graph=True)
    state = register(model, "topk", min_numel=64)
    with torch.no_grad():
        model(torch.ones(1, 40))  # evaluating first is no backward pass
    for sync in order:
        model.require_backward_grad_sync = sync == "s"
        try:
            backward(model, 0, dist.get_rank())
        except ValueError as error:
            return str(error)
    return f"{state.stats()['steps']} exchanges, {len(model._forward_pre_hooks)} left"


def test_a_static_graph_must_start_with_an_exchange(ranks_of: RanksOf) -> None:
    for message in ranks_of(2).run(static_graph, "ns"):
        assert message.startswith("static_graph=True: the first backward pass must not be under")
    assert ranks_of(2).run(static_graph, "snsns") == ["3 exchanges, 0 left"] * 2


def delayed_parameters() -> tuple[list[str], float]:
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=list(model.b.named_parameters(prefix="b")),
            param_to_hook_all_reduce=model.head.weight,
        )
        state = register(ddp, "topk", min_numel=64)
    backward(ddp, 0, dist.get_rank())
    return [str(w.message) for w in caught], state.stats()["steps"]


def test_parameters_that_never_reach_the_hook_are_said_to(ranks_of: RanksOf) -> None:
    for messages, steps in ranks_of(2).run(delayed_parameters):
        assert any(m.startswith("2 parameters in delay_all_reduce_named_params") for m in messages)
        assert steps == 1


# What happens between backward passes, and whether the warning must come.
BETWEEN = {
    "nothing": True,
    "zero_grad": False,
    "step": False,
    "no_sync": False,
    "join": False,
    "loss scale": False,
}


def accumulate(between: str) -> list[str]:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
    scale = (lambda: 1.0) if between == "loss scale" else None
    register(ddp, "topk", min_numel=64, loss_scale=scale)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if between == "join":
            with ddp.join():
                for step in range(5 if rank else 1):
                    optimizer.zero_grad()
                    backward(ddp, step, rank)
                    optimizer.step()
        for step in range(5):
            if between == "no_sync":
                optimizer.step()
                optimizer.zero_grad()
                with ddp.no_sync():
                    backward(ddp, 10 + step, rank)
            backward(ddp, step, rank)
            if between == "step":
                optimizer.step()
            if between in ("zero_grad", "join"):
                optimizer.zero_grad()
    return [str(w.message) for w in caught if "are averaged again" in str(w.message)]


@pytest.mark.parametrize("between", BETWEEN)
def test_accumulating_what_is_averaged_already_warns_once(ranks_of: RanksOf, between: str) -> None:
    for messages in ranks_of(2).run(accumulate, between):
        assert len(messages) == BETWEEN[between]


def register_with_others() -> str:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    ddp_model = DistributedDataParallel(Net(), process_group=own)
    named = list(ddp_model.module.named_parameters())
    with pytest.raises(ValueError, match="give the optimizer the same process_group") as refusal:
        register(ddp_model, low_communication(named, lr=0.01, bits_per_parameter=8.0))
    register(
        ddp_model,
        low_communication(named, lr=0.01, bits_per_parameter=8.0, process_group=own),
    )
    return str(refusal.value)


def test_an_optimizer_that_exchanges_with_other_ranks_is_refused(ranks_of: RanksOf) -> None:
    for rank, message in enumerate(ranks_of(2).run(register_with_others)):
        assert f"exchanges with ranks [0, 1], DistributedDataParallel with [{rank}]" in message
