"""Make DeepSpeed engines that average gradients through an exchange instead of an all-reduce."""

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from comm_hooks.checkpoints.optimizer_state import OptimizerState
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.exchange.settings import require_gradients, require_plain_gradients
from comm_hooks.frameworks.deepspeed import checkpoint, exchanging_optimizers, reductions
from comm_hooks.frameworks.deepspeed.settings import BLOCK, EngineSettings, find_block, named_groups
from comm_hooks.frameworks.deepspeed.unsupported import check_averaging, check_parallelism
from comm_hooks.optim import LocalRounds
from comm_hooks.warnings import warn_if_misled, warn_program

if TYPE_CHECKING:
    from comm_hooks.optim.private import RankLevel

logger = logging.getLogger(__name__)


class EngineCompression:
    """The attribute ``engine.comm_hooks`` of an engine that compresses.

    Attributes:
        exchange: the :class:`~comm_hooks.Exchange` of gradients, or of the optimizer if it has one.
        state: the state that every rank saves for itself: the exchange, or the optimizer's state.
        private: the privacy of each rank's gradients; None without it.
    """

    def __init__(
        self, state: OptimizerState | LocalRounds | Exchange, private: "RankLevel | None" = None
    ) -> None:
        self.exchange: Exchange = state if isinstance(state, Exchange) else state.exchange
        self.state = state
        self.private = private

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank; see :meth:`~comm_hooks.Exchange.stats`.

        ``steps`` counts exchanges: one per step of the optimizer, or at ZeRO stage 2 one per
        backward pass; for an optimizer of local steps it counts these.  The parameters that
        DeepSpeed gathers at ZeRO stages 1 and 2 are not counted.
        """
        return self.state.stats()


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` for an engine that exchanges as its configuration says.

    1. DeepSpeed reads the configuration;
    2. before the engine is constructed, its ``comm_hooks`` block is checked, and the optimizer is
       made if ``optimizer.type`` names an optimizer of comm-hooks;
    3. after that, unsupported features are refused, the settings of all ranks are compared, and the
       exchange takes the place of the engine's all-reduce.

    All ranks must call it.  ``DeepSpeedEngine.__init__`` is wrapped during the call only.

    Args:
        args, kwargs: the arguments of ``deepspeed.initialize``.

    Returns:
        The result of ``deepspeed.initialize``: engine, optimizer, training dataloader and learning
        rate scheduler.  ``engine.comm_hooks`` is an
        :class:`~comm_hooks.frameworks.deepspeed.EngineCompression`.

    Raises:
        ImportError: without DeepSpeed.
        ValueError: for settings that are unknown or exclude each other, with their path in the
            JSON, and for a feature of DeepSpeed that compression does not support.
        ConfigMismatchError: if ranks are configured differently.

    Not supported: see the page on DeepSpeed in the documentation.

    Example::

        >>> from comm_hooks.frameworks.deepspeed import initialize
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 8,
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        ...     "comm_hooks": {"compressor": "topk", "density": 1 / 64},
        ... }
        >>> engine, _, _, _ = initialize(model=model, config=config)  # doctest: +SKIP
        >>> engine.comm_hooks.stats()["compression_ratio"]  # doctest: +SKIP
        1.0
    """
    with _wrapped_constructor():
        import deepspeed

        result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    engine = result[0]
    if "comm_hooks" not in engine.__dict__ and find_block(engine._config._param_dict) is None:
        warn_program(
            f"the DeepSpeed configuration has no {BLOCK!r} block: gradients are exchanged "
            "uncompressed"
        )
    return result


def wrap_constructor() -> None:
    """Let every DeepSpeed engine that is made from now on exchange as its configuration says."""
    engine = _engine_class()
    construct = engine.__init__
    if hasattr(construct, "is_of_comm_hooks"):
        return
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given, parsed = call.arguments, call.arguments["config_class"]
        settings = EngineSettings.read(parsed._param_dict, given.get("optimizer"))
        if settings.make_optimizer is not None:
            members = given.get("model_parameters")
            members = list(given["model"].parameters() if members is None else members)
            groups = named_groups(members, given["model"])
            given["optimizer"] = settings.make_optimizer(groups)
            given["model_parameters"] = members
            # DeepSpeed knows no optimizer of that name, or has one of its own up to 0.19.6.
            parsed.optimizer_name = parsed.optimizer_params = None
            parsed.optimizer_legacy_fusion = False
            parsed.zero_allow_untested_optimizer = True
        with exchanging_optimizers.paused(given.get("optimizer")):
            construct(*call.args, **call.kwargs)
        attach(given["self"], settings)

    __init__.is_of_comm_hooks = True  # type: ignore[attr-defined]
    engine.__init__ = __init__


@contextmanager
def _wrapped_constructor() -> Iterator[None]:
    """Wrap the constructor of engines within this context; it stays wrapped if it was before."""
    engine = _engine_class()
    construct = engine.__init__
    wrap_constructor()
    try:
        yield
    finally:
        engine.__init__ = construct


def _engine_class() -> Any:
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine
    except ImportError as error:
        raise ImportError(
            f'DeepSpeed cannot be imported ({error}): pip install "comm-hooks[deepspeed]"'
        ) from error
    return DeepSpeedEngine


def attach(engine: Any, settings: EngineSettings) -> EngineCompression | None:
    """Replace a constructed engine's all-reduce by the exchange of its settings or its optimizer.

    All ranks must call it.

    Args:
        engine: a ``DeepSpeedEngine``.
        settings: the settings in the engine's configuration.

    Returns:
        ``engine.comm_hooks``; None if nothing is exchanged.

    Raises:
        ValueError: for a feature of DeepSpeed that compression does not support.
        ConfigMismatchError: if ranks are configured differently.
    """
    if settings.exchange is not None and engine.basic_optimizer is None:
        warn_program(f"{BLOCK}: this engine has no optimizer, so no gradients are exchanged")
        return None
    owned = exchanging_optimizers.attach(engine)
    # An engine without an exchange would leave the others waiting at the first one.
    presence = {BLOCK: "absent" if owned is None and settings.exchange is None else "present"}
    transport = TorchDistributed()
    check_agreement(transport.perform(AllGatherObject(presence)), transport.ranks)
    if owned is not None:
        check_parallelism(engine)
        attached = EngineCompression(owned)
    elif settings.exchange is not None:
        check_parallelism(engine)
        check_averaging(engine)
        require_gradients(settings.exchange, f"{BLOCK}.memory")
        exchange = Exchange(settings.exchange, process_group=engine.seq_data_parallel_group)
        start = settings.start_compression_step
        exchange.agree_on(
            {"zero_stage": engine.zero_optimization_stage(), "start_compression_step": start}
        )
        private = settings.private
        if private is not None:
            require_plain_gradients(bool(engine.fp16_enabled()), start)
            private.attach(exchange, engine.module)
            private.prepare(engine.basic_optimizer)
        reductions.replace(engine, exchange, start)
        warn_if_misled(exchange.compressor, engine.basic_optimizer)
        attached = EngineCompression(exchange, private)
    else:
        return None
    attached.exchange.agree_now()
    checkpoint.include(engine, attached.state)
    engine.comm_hooks = attached
    logger.info("DeepSpeed exchanges through %s", attached.exchange)
    return attached


def require(engine: Any) -> EngineCompression:
    """Return ``engine.comm_hooks``, or raise if the engine exchanges uncompressed gradients.

    DeepSpeed ignores unknown blocks, so a program that does not import comm-hooks trains without
    compression and without a message.  One call after the engine is made turns that into an error.

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
