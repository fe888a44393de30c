"""Putting an exchange into a DeepSpeed engine."""

import logging
import warnings
from typing import Any

from comm_hooks.checkpoints.optimizer_state import OptimizerState
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.exchange.settings import require_gradients
from comm_hooks.frameworks import adaptive
from comm_hooks.frameworks.deepspeed import checkpoint, optimizers, reductions
from comm_hooks.frameworks.deepspeed.block import BLOCK
from comm_hooks.frameworks.deepspeed.unsupported import check_averaging, check_parallelism
from comm_hooks.optim import LocalRounds

logger = logging.getLogger(__name__)


class EngineCompression:
    """What an engine that compresses has as ``engine.comm_hooks``.

    Attributes:
        exchange: the :class:`~comm_hooks.Exchange`; the optimizer's own, if it has one.
        state: what every rank saves for itself: that exchange, or the optimizer's part.
    """

    def __init__(self, exchange: Exchange, state: OptimizerState | LocalRounds | Exchange) -> None:
        self.exchange = exchange
        self.state = state

    def stats(self) -> dict[str, float]:
        """Return what this rank moved; see :meth:`~comm_hooks.Exchange.stats`.

        ``steps`` counts exchanges: one per step of the optimizer, or at ZeRO stage 2 one per
        backward pass; with rounds, local steps.  The parameters that DeepSpeed gathers at ZeRO
        stages 1 and 2 are not counted.
        """
        return self.state.stats()


def attach(engine: Any, averaging: reductions.Averaging | None) -> EngineCompression | None:
    """Put an exchange in the place of an engine's all-reduce; again, it changes nothing.

    All ranks must call it.

    Args:
        engine: a ``DeepSpeedEngine``.
        averaging: how its gradients travel; None if DeepSpeed averages them, or the optimizer does.

    Returns:
        ``engine.comm_hooks``; None if there is nothing to exchange.

    Raises:
        ValueError: for a feature of DeepSpeed that compression does not support.
        ConfigMismatchError: if ranks are configured differently.
    """
    attached: EngineCompression | None = engine.__dict__.get("comm_hooks")
    if attached is not None:
        return attached
    if averaging is not None and engine.basic_optimizer is None:
        warnings.warn(
            f"{BLOCK}: this engine has no optimizer, so no gradients are exchanged", stacklevel=2
        )
        return None
    owned = optimizers.attach(engine)
    # An engine that lacks what the others have would leave them waiting at the first exchange.
    presence = {BLOCK: "absent" if owned is None and averaging is None else "present"}
    transport = TorchDistributed()
    check_agreement(transport.perform(AllGatherObject(presence)), transport.ranks)
    state: OptimizerState | LocalRounds | Exchange
    if owned is not None:
        exchange, state = owned.exchange, owned
        check_parallelism(engine)
    elif averaging is not None:
        check_parallelism(engine)
        check_averaging(engine)
        require_gradients(averaging.settings, f"{BLOCK}.memory")
        exchange = state = Exchange(
            averaging.settings, process_group=engine.seq_data_parallel_group
        )
        start = averaging.start_compression_step
        exchange.agree_on(
            {"zero_stage": engine.zero_optimization_stage(), "start_compression_step": start}
        )
        reductions.replace(engine, exchange, start)
        adaptive.warn_of(exchange.compressor, engine.basic_optimizer)
    else:
        return None
    exchange.agree_now()
    checkpoint.include(engine, state)
    attached = engine.comm_hooks = EngineCompression(exchange, state)
    logger.info("DeepSpeed exchanges through %s, %s", exchange.compressor, exchange.memory)
    return attached


def require(engine: Any) -> EngineCompression:
    """Return ``engine.comm_hooks``, or raise if the engine exchanges uncompressed gradients.

    DeepSpeed ignores blocks that it does not know, so a program that forgets to switch compression
    on trains without it, in silence.  One call after the engine is made turns that into an error.

    Args:
        engine: a ``DeepSpeedEngine``.

    Raises:
        ValueError: if nothing is attached to the engine.

    Example::

        >>> from comm_hooks.frameworks.deepspeed import require
        >>> require(model)
        Traceback (most recent call last):
        ...
        ValueError: Linear exchanges gradients uncompressed: ...
    """
    attached: EngineCompression | None = engine.__dict__.get("comm_hooks")
    if attached is None:
        raise ValueError(
            f"{type(engine).__name__} exchanges gradients uncompressed: give its configuration a "
            f"{BLOCK!r} block, and make it with comm_hooks.frameworks.deepspeed.initialize or "
            "after importing comm_hooks.frameworks.deepspeed.auto"
        )
    return attached
