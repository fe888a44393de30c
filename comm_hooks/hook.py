"""What DDP calls: a state, two hooks, and a one-line way to register them.

No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with classes
and refuses strings.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from comm_hooks.checks import Collective, require_dense_floats
from comm_hooks.collectives.base import completed
from comm_hooks.collectives.requests import Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.config import build_compressor, build_memory
from comm_hooks.ddp import AccumulationWatch, DataParallelModel, require_bucket
from comm_hooks.exchange import Exchange
from comm_hooks.layout import Granularity, Layout, Segment
from comm_hooks.memory.base import Memory
from comm_hooks.sparse_gradients import average_sparse

logger = logging.getLogger(__name__)


class CompressionState:
    """The state of :func:`compression_hook`: an exchange, and the names of the parameters.

    Everything that lasts is tied to parameter names, so DDP may rebuild its buckets at will.

    Args:
        compressor: for instance ``TopK(density=1 / 64)``.
        memory: for instance ``ErrorFeedback()``; None for nothing.
        collective: ``"auto"``, ``"all_reduce"``, ``"all_gather"``, ``"sharded"`` or
            ``"hierarchical"``; see :class:`~comm_hooks.exchange.Exchange`, also for ``seed`` to
            ``ranks_per_node``.
        seed: equal on all ranks.
        min_numel: parameters with fewer elements are not compressed.
        min_ndim: nor are those with fewer dimensions.
        exempt_bits: 32 or 16.
        granularity: ``"parameter"`` or ``"bucket"``.
        ranks_per_node: of ``"hierarchical"``; by default what torchrun says.
        process_group: the group that DDP was given; the default group if None.
        named_parameters: ``model.named_parameters()``, which ties saved state to names.  Without
            it parameters are numbered in the order in which DDP first reduces them, which is the
            same in every run of one model and DDP configuration.  :func:`register` passes it.
        loss_scale: a function that returns the factor by which the loss is scaled at present
            (``grad_scaler.get_scale``).  Residuals are kept unscaled, so that they stay right when
            the factor changes.

    Raises:
        ValueError: for a combination that cannot work.

    Warns once if gradients are averaged a second time because nobody cleared them: accumulate
    under ``no_sync()``.

    Not supported: the same state in two models; DDP's ``python_reducer``.

    Example::

        >>> from comm_hooks import CompressionState, ErrorFeedback, TopK, compression_hook
        >>> state = CompressionState(TopK(density=1 / 64), memory=ErrorFeedback(), seed=0)
        >>> ddp_model.register_comm_hook(state, compression_hook)
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory | None = None,
        collective: Collective = "auto",
        seed: int = 0,
        *,
        min_numel: int = 1024,
        min_ndim: int = 2,
        exempt_bits: int = 32,
        granularity: Granularity = "parameter",
        ranks_per_node: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        if memory is not None and memory.sends_changes:
            raise ValueError(
                f"CompressionState: {memory} sends changes, which an optimizer behind a hook would "
                "take for gradients: use ErrorFeedback(), or optim.EF21 or CDAdam with skip_hook"
            )
        self.exchange = Exchange(
            compressor,
            memory,
            collective,
            seed,
            min_numel=min_numel,
            min_ndim=min_ndim,
            exempt_bits=exempt_bits,
            granularity=granularity,
            ranks_per_node=ranks_per_node,
            process_group=process_group,
        )
        self.loss_scale = loss_scale
        self._names = {p: name for name, p in named_parameters} if named_parameters else {}
        # Weak: the exchange drops a layout when DDP has rebuilt its bucket.
        self._layouts: WeakValueDictionary[tuple[int, ...], Layout] = WeakValueDictionary()
        self._accumulation = AccumulationWatch()

    def stats(self) -> dict[str, float]:
        """Return what this rank moved; see :meth:`~comm_hooks.exchange.Exchange.stats`."""
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save; see :meth:`~comm_hooks.exchange.Exchange.state_dict`."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: if the state is not this rank's or names parameters that this model lacks;
                nothing is changed.
        """
        self._refuse_strangers(state)
        self.exchange.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned on *all* ranks, on any number of ranks.

        See :meth:`~comm_hooks.exchange.Exchange.load_state_dicts`.

        Raises:
            ValueError: also if a state names parameters that this model lacks; nothing is changed.
        """
        for state in states:
            self._refuse_strangers(state)
        self.exchange.load_state_dicts(states)

    def _refuse_strangers(self, state: Mapping[str, Any]) -> None:
        memory = self.exchange.memory
        saved = memory.parameters_in(state.get("memory", {})) if memory else set()
        if self._names and not saved <= set(self._names.values()):
            strangers = ", ".join(sorted(saved - set(self._names.values()))[:3])
            raise ValueError(
                f"the state has residuals of parameters that this model does not have: {strangers}"
            )

    def layout(self, bucket: dist.GradBucket) -> Layout:  # type: ignore[name-defined]
        """Return the workspace for a bucket's parameters."""
        parameters = bucket.parameters()
        # id() is safe: a parameter of a live DDP model is never freed.
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            segments = [
                Segment(
                    self._names.setdefault(p, f"parameter.{len(self._names)}"),
                    (p.numel(),),
                    self.exchange.exempts(p.shape),
                )
                for p in parameters
            ]
            layout = self.exchange.layout(segments, bucket.buffer().device)
            self._layouts[key] = layout
        return layout


def compression_hook(
    state: CompressionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients through a compressor.

    1. split the bucket into its parameters; those with fewer than ``min_ndim``
       dimensions or ``min_numel`` elements travel uncompressed in the same payload;
    2. add the residual, compress, send one payload in one collective;
    3. decompress all payloads in rank order and take the mean over ranks: the hook owns the
       division, DDP does not divide when a hook is registered;
    4. keep what was not sent; return the bucket's own buffer, overwritten.

    With a gradient that is not finite on any rank, all ranks get NaN everywhere (so a GradScaler
    skips the step on all of them) and the residual stays as it was.

    Args:
        state: a :class:`CompressionState`.
        bucket: what DDP passes.

    Returns:
        A future of the averaged bucket.

    Raises:
        ValueError: under DDP's ``python_reducer``, which would ignore the result.

    Example::

        >>> from comm_hooks import CompressionState, CountSketch, compression_hook
        >>> state = CompressionState(CountSketch(ratio=0.05))
        >>> ddp_model.register_comm_hook(state, compression_hook)
    """
    require_bucket(bucket)
    exchange, buffer = state.exchange, bucket.buffer()
    # An overflow under a GradScaler leaves gradients standing as well.
    if state.loss_scale is None and bucket.index() == 0:
        state._accumulation.look(bucket)
    if buffer.is_sparse:
        # DDP gives a sparse gradient a bucket of its own.
        future = average_sparse(exchange, buffer)
    else:
        require_dense_floats(buffer)
        layout = state.layout(bucket)
        pieces = buffer.split([segment.numel for segment in layout.segments])
        scale = float(state.loss_scale()) if state.loss_scale else 1.0

        def round_() -> Round[torch.Tensor]:
            yield from exchange.bucket_round(layout, pieces, scale=scale)
            return buffer

        future = exchange.transport.run_async(round_(), buffer.device)
    if bucket.is_last():
        exchange.step += 1
    return future


def skip_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Communicate nothing: every rank keeps its own gradient.

    For optimizers that own the exchange (``optim.CompressedAdam``), and as the control that any
    method must beat.

    Example::

        >>> from comm_hooks import skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
    """
    require_bucket(bucket)
    return completed(bucket.buffer())


def register(
    model: torch.nn.Module,
    compressor: Compressor | str,
    *,
    memory: Memory | str | Mapping[str, Any] | None = "auto",
    collective: Collective = "auto",
    seed: int = 0,
    min_numel: int = 1024,
    min_ndim: int = 2,
    exempt_bits: int = 32,
    granularity: Granularity = "parameter",
    ranks_per_node: int | None = None,
    loss_scale: Callable[[], float] | None = None,
    **options: Any,
) -> CompressionState:
    """Register :func:`compression_hook` with a DDP model and return its state.

    All ranks must call it: it compares their configurations.

    Args:
        model: a ``DistributedDataParallel``, or what has one inside: what ``torch.compile``,
            Fabric's ``setup`` and Accelerate's ``prepare`` return, a ``LightningModule`` in
            training, a module of your own.  Or what the composable ``replicate`` was applied to.
        compressor: an object, or a name from ``comm_hooks.config.COMPRESSORS``.
        memory: an object, None, ``"none"``, ``"error_feedback"``, ``{"type": "error_feedback",
            "bits": 4}``, or ``"auto"``: error feedback where the compressor is biased.
        loss_scale: see :class:`CompressionState`; by default that of Fabric or Lightning where
            they scale the loss.
        options: arguments of the compressor, when it is given by name.
        collective, seed, min_numel, min_ndim, exempt_bits, granularity, ranks_per_node: see
            :class:`CompressionState`.

    Raises:
        ValueError: for bad settings; if there is not exactly one DDP model in ``model``; if it has
            a hook already (DDP takes one; ``mixed_precision=`` and an optimizer that runs in the
            backward pass need it too); if its hooks are ignored (``python_reducer``) or not always
            called (``skip_all_reduce_unused_params=True``).  In the first forward pass, if that is
            under ``no_sync()`` with ``static_graph=True``.
        ConfigMismatchError: if ranks are configured differently.

    Not supported: FSDP (``comm_hooks.frameworks.fsdp``), DeepSpeed
    (``comm_hooks.frameworks.deepspeed``) and ``replicate_with_fsdp``.

    Example::

        >>> import torch
        >>> from comm_hooks import register
        >>> state = register(ddp_model, "topk", density=1 / 64)
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> state.stats()["steps"]
        1
    """
    replicas = DataParallelModel(model)
    if isinstance(compressor, str):
        compressor = build_compressor(compressor, **options)
    elif options:
        raise ValueError(
            f"options {', '.join(options)} go with a compressor's name, but {compressor!r} is one "
            f"already: set them there"
        )
    state = CompressionState(
        compressor,
        build_memory(memory, compressor),
        collective,
        seed,
        min_numel=min_numel,
        min_ndim=min_ndim,
        exempt_bits=exempt_bits,
        granularity=granularity,
        ranks_per_node=ranks_per_node,
        process_group=replicas.process_group,
        named_parameters=replicas.named_parameters(),
        loss_scale=loss_scale or replicas.loss_scale,
    )
    state.exchange.transport.run(state.exchange.agree())
    replicas.register_comm_hook(state, compression_hook)
    logger.info("registered %s with %s", compressor, state.exchange.memory)
    return state
