"""The communication hooks of DDP, their state, and the function that registers them.

No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with classes
and refuses strings.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from comm_hooks.collectives.base import after_all, completed
from comm_hooks.collectives.requests import Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Collective, Exchange, ExchangeSettings
from comm_hooks.exchange.routes.route import fill_nan_
from comm_hooks.exchange.saved_state import seal_own
from comm_hooks.exchange.settings import require_gradients, require_plain_gradients
from comm_hooks.exchange.sparse import average_sparse
from comm_hooks.frameworks.ddp.backward import PendingExchanges
from comm_hooks.frameworks.ddp.model import (
    AccumulationCheck,
    check_options,
    check_private_options,
    gradients_in,
    loss_scale_of,
    named_parameters,
    register_hook,
    require_bucket,
    require_ddp,
)
from comm_hooks.frameworks.ddp.optimizer import register_optimizer
from comm_hooks.memory.base import Memory
from comm_hooks.registered_model import RegisteredModel, watch
from comm_hooks.requirements import (
    in_one_line,
    require_callable,
    require_dense_floats,
    require_integer,
    require_within,
)
from comm_hooks.warnings import warn_at_first_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from comm_hooks.exchange.settings import ExchangeOptions

logger = logging.getLogger(__name__)


class Privacy(Protocol):
    """Makes gradients private; see :class:`~comm_hooks.optim.private.RankLevel`."""

    def attach(self, exchange: Exchange, module: torch.nn.Module) -> None:
        """Protect all rounds of an exchange from now on; collective."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer."""


class CompressionState:
    """The state of :func:`compression_hook`: an exchange, and the names of the parameters.

    All state is tied to parameter names, so DDP may rebuild its buckets.

    Args:
        compressor: for instance ``TopK(density=1 / 64)``; or a complete
            :class:`~comm_hooks.ExchangeSettings`; or an :class:`~comm_hooks.Exchange` over the
            process group of the DDP model.
        memory, collective, seed, options: see :class:`~comm_hooks.ExchangeSettings`; only with a
            compressor.
        process_group: the process group of the DDP model; the default group if None.
        named_parameters: ``model.named_parameters()``, which ties saved state to names.  Without
            it parameters are numbered in the order in which DDP first reduces them, which is the
            same in every run of one model and DDP configuration.  :func:`register` passes it.
        loss_scale: a function that returns the present factor of the loss
            (``grad_scaler.get_scale``).  Residuals are kept unscaled, so that they stay valid when
            the factor changes.
        start_compression_step: the number of first steps with exactly averaged gradients,
            as ``start_powerSGD_iter`` of PyTorch's PowerSGD hook, so that an optimizer's moments
            settle on true gradients.  Steps before a loaded checkpoint count.

    Attributes:
        private: the privacy of each rank's gradients; None without it.

    Raises:
        ValueError: for settings that exclude each other.

    Warns once if gradients not cleared are averaged again: accumulate under ``no_sync()``.

    A copy of a hooked model (``copy.deepcopy``, ``AveragedModel``) has a copy of the state.  It is
    for evaluation: PyTorch does not register the hook with the copy, so its backward passes average
    uncompressed gradients.

    Not supported: the same state in two models; DDP's ``python_reducer``.

    Example::

        >>> from comm_hooks import CompressionState, ErrorFeedback, TopK, compression_hook
        >>> state = CompressionState(TopK(density=1 / 64), memory=ErrorFeedback(), seed=0)
        >>> ddp_model.register_comm_hook(state, compression_hook)
    """

    def __init__(
        self,
        compressor: Compressor | ExchangeSettings | Exchange,
        memory: Memory | Literal["auto"] | None = "auto",
        collective: Collective = "auto",
        seed: int = 0,
        *,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        loss_scale: Callable[[], float] | None = None,
        start_compression_step: int = 0,
        **options: "Unpack[ExchangeOptions]",
    ) -> None:
        if isinstance(compressor, Exchange):
            self.exchange = compressor
        else:
            self.exchange = Exchange(
                compressor, memory, collective, seed, process_group=process_group, **options
            )
        require_gradients(self.exchange.settings, "CompressionState")
        if loss_scale is not None:
            require_callable(self, "loss_scale", loss_scale)
        require_integer(self, "start_compression_step", start_compression_step)
        require_within(self, "start_compression_step", start_compression_step, "[0, inf)")
        self.loss_scale = loss_scale
        self.start_compression_step = start_compression_step
        self.exchange.agree_on({"start_compression_step": start_compression_step})
        self._names = _by_parameter(named_parameters)
        self._known_names = set(self._names.values()) or None
        self.exchange.owner = self
        self._saved_buckets: list[list[str]] = []
        self._accumulation = AccumulationCheck()
        self._pending = PendingExchanges()
        self._buffers: list[torch.Tensor] = []
        self._model: RegisteredModel | None = None
        self._passes = 0
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._has_model, self._is_its_pass = bool(self._names), False
        self.private: Privacy | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressionState":
        """Return a state for a copy of the model, with the same names for its parameters."""
        duplicate = memo[id(self)] = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__)
        duplicate.exchange = copy.deepcopy(self.exchange, memo)
        duplicate._names = {copy.deepcopy(p, memo): name for p, name in self._names.items()}
        duplicate.exchange.owner = duplicate
        duplicate._pending = PendingExchanges()
        duplicate._buffers = []
        duplicate._model, duplicate._seen = None, WeakKeyDictionary()
        duplicate._accumulation = AccumulationCheck()
        return duplicate

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "CompressionState cannot be pickled: save state_dict(), on every rank, and load it "
            "into a new state"
        )

    def hyperparameters(self) -> dict[str, Any]:
        """Return an empty dictionary: a hook has no hyperparameters of an optimizer."""
        return {}

    def replica(self) -> Sequence[torch.Tensor]:
        """Return the parameters with gradients that were exchanged."""
        known = {name for bucket in self.exchange.buckets for name in bucket.layout.names}
        return [parameter for parameter, name in self._names.items() if name in known]

    def names(self) -> Collection[str] | None:
        """Return the names of the model's parameters, or None if they were not given."""
        return self._known_names

    def __repr__(self) -> str:
        settings = repr(self.exchange).removeprefix("Exchange")
        if self.loss_scale is not None:
            settings = f"{settings[:-1]}, loss_scale={self.loss_scale!r})"
        if self.start_compression_step:
            settings = f"{settings[:-1]}, start_compression_step={self.start_compression_step})"
        return f"CompressionState{settings}"

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank; see :meth:`~comm_hooks.Exchange.stats`."""
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, to be saved on every rank.

        See :meth:`~comm_hooks.Exchange.state_dict`.
        """
        return seal_own({**self.exchange.state_dict(), "buckets": self._buckets()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the :meth:`state_dict` of this rank.

        Raises:
            ValueError: if another rank saved the state, or it names parameters that this model
                lacks; nothing is changed.
        """
        self.exchange.load_state_dict(state)
        self._saved_buckets = list(state.get("buckets", []))

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the :meth:`state_dict` of *all* ranks, on any number of ranks.

        See :meth:`~comm_hooks.Exchange.load_state_dicts`.

        Raises:
            ValueError: if states do not belong together, or not to this model; nothing is changed.
        """
        self.exchange.load_state_dicts(states)
        self._saved_buckets = list(states[0].get("buckets", []))

    def _buckets(self) -> list[list[str]]:
        """Return the parameter names of each bucket; [] unless buckets are compressed whole."""
        if self.exchange.settings.granularity != "bucket":
            return []
        return [[s.name for s in bucket.layout.segments] for bucket in self.exchange.buckets]

    def _check_model(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Raise ``ValueError`` at the end of a backward pass if all of its parameters are new.

        DDP may be constructed again for a model with more trainable parameters.  A second model is
        refused: steps of both would be counted together, and their residuals mixed.
        """
        self._is_its_pass |= any(p in self._names for p in bucket.parameters())
        if not bucket.is_last():
            return
        is_its_pass, self._is_its_pass = self._is_its_pass, False
        if self._has_model and not is_its_pass:
            raise ValueError(
                "CompressionState: this state belongs to another model: give each DDP model a "
                "state of its own"
            )
        self._has_model = True

    def parts(self, parameters: Sequence[torch.nn.Parameter]) -> list[list[int]]:
        """Return the indices of a bucket's parameters, in groups that are compressed together.

        DDP's first bucket in a process has all parameters, later ones are smaller.  If a bucket is
        compressed as one vector, its random draws depend on its content.  A resumed run therefore
        divides the first bucket into the saved buckets; otherwise there is one group.
        """
        places = {self._name(p): place for place, p in enumerate(parameters)}
        saved = [names for names in self._saved_buckets if not places.keys().isdisjoint(names)]
        if sorted(name for names in saved for name in names) != sorted(places):
            return [list(places.values())]
        return [[places[name] for name in names] for names in saved]

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; return a future of the bucket's buffer with the mean.

        Errors are raised at the end of the backward pass.
        """
        future = completed(bucket.buffer())
        if bucket.index() == 0:
            self._pending.begin(self._finish)
            self._buffers.clear()
            self.exchange.transport.begin()
        with self._pending.noting(), self.exchange.failing_together():
            self._check(bucket)
            if not self._pending.has_failed:
                future = self._average(bucket)
        self._pending.add(future, is_last=bucket.is_last())
        return future

    def _check(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        self._check_model(bucket)
        # After an overflow a GradScaler leaves gradients in place as well.
        if bucket.index() == 0 and self.loss_scale is None:
            self._accumulation.check(bucket)
        if not bucket.buffer().is_sparse:
            require_dense_floats(bucket.buffer())

    def _average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        exchange, buffer = self.exchange, bucket.buffer()
        if buffer.is_sparse:
            return average_sparse(exchange, buffer)  # a bucket of one parameter
        self._buffers.append(buffer)
        parameters, gradients = bucket.parameters(), gradients_in(bucket)
        options: dict[str, Any] = {
            "compress": exchange.step >= self.start_compression_step,
            "scale": float(self.loss_scale()) if self.loss_scale else 1.0,
        }

        def round_(part: list[int]) -> Round[torch.Tensor]:
            own = [parameters[place] for place in part]
            with self._pending.noting(), exchange.failing_together():
                tensors = [gradients[place] for place in part]
                own_bucket = exchange.buckets.of_parameters(own, tensors, self._name)
                yield from exchange.bucket_round(
                    own_bucket, tensors, replica=own, partial=True, **options
                )
            return buffer

        rounds = [round_(part) for part in self.parts(parameters)]
        futures = [exchange.transport.run_async(each, buffer.device) for each in rounds]
        return after_all(futures, buffer.device)

    def _finish(self, *, has_failed: bool) -> None:
        """End the step; fill all buckets with NaN if one was not finite, or has failed."""
        buffers, self._buffers = self._buffers, []
        self._passes += 1
        if has_failed:
            self.exchange.leave_step()
        health = torch.tensor(torch.nan) if has_failed else self.exchange.end_step()
        for buffer in buffers:
            fill_nan_(buffer, health.to(buffer.device))

    def watch(self, module: torch.nn.Module) -> None:
        """Check before every step of an optimizer that it is one of this module's gradients."""
        self._model = RegisteredModel(module, is_fixed=True)
        watch(module.parameters(), self)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` on all ranks if an optimizer is about to use other gradients.

        They are others if the model has changed since :func:`register`, or if no backward pass
        since the optimizer's last step went through DDP.
        """
        with self.exchange.failing_together():
            if self._model:
                self._model.require_unchanged()
            if self.private:
                self.private.prepare(optimizer)
            passes, self._seen[optimizer] = self._seen.get(optimizer, 0), self._passes
            if passes == self._passes:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                gradients = [p.grad for p in own if p in self._names and p.grad is not None]
                # Zeros are made by those who want an optimizer to make its state.
                if any(bool(gradient.any()) for gradient in gradients):
                    raise ValueError(
                        "the gradients of this step were not exchanged: call the DDP model itself, "
                        "not its module, with require_backward_grad_sync, and make no other DDP "
                        "model of the same module"
                    )

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(parameter, f"parameter.{len(self._names)}")


def _by_parameter(
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.Tensor, str]:
    """Return names by parameter; raise ``ValueError`` for items other than (name, parameter)."""
    pairs = [] if named is None else [*named] if isinstance(named, Iterable) else [named]
    for pair in pairs:
        match pair:
            case (str(), torch.Tensor()):
                pass
            case _:
                raise ValueError(
                    "CompressionState: named_parameters must be what model.named_parameters() "
                    f"returns, got {in_one_line(pair)}"
                )
    return {parameter: name for name, parameter in pairs}


def compression_hook(
    state: CompressionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients through a compressor.

    1. split the bucket into its parameters; those with fewer than ``min_ndim``
       dimensions or ``min_numel`` elements are sent uncompressed in the same payload;
    2. add the residual, compress, send one payload in one collective;
    3. decompress all payloads in rank order and take the mean over ranks: the hook owns the
       division, DDP does not divide when a hook is registered;
    4. keep the new residual; return the bucket's own buffer, overwritten.

    With a gradient that is not finite on any rank, all ranks get NaN everywhere (so a GradScaler
    skips the step on all of them) and the residual stays as it was.

    Args:
        state: a :class:`CompressionState`.
        bucket: the bucket from DDP.

    Returns:
        A future of the averaged bucket.

    Raises:
        ValueError: under DDP's ``python_reducer``, which would ignore the result.

    At the end of the backward pass, on all ranks; gradients are NaN then:

    Raises:
        ValueError: for gradients that cannot be exchanged; for a state of another model.
        PeerError: if a rank has failed, has ended, is stopped or came too late.
        PayloadError: if ranks are not in the same step of the same model.

    Example::

        >>> from comm_hooks import CompressionState, CountSketch, compression_hook
        >>> state = CompressionState(CountSketch(ratio=0.05))
        >>> ddp_model.register_comm_hook(state, compression_hook)
    """
    require_bucket(bucket)
    return state.average(bucket)


def skip_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Communicate nothing: a communication hook with which every rank keeps its own gradient.

    For optimizers that own the exchange (``optim.OneBitAdam``), and as the control of any method.

    Example::

        >>> from comm_hooks import skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
    """
    require_bucket(bucket)
    return completed(bucket.buffer())


@overload
def register(
    model: torch.nn.Module,
    compressor: Compressor | str,
    *,
    loss_scale: Callable[[], float] | None = None,
    start_compression_step: int = 0,
    private: Privacy | None = None,
    **settings: Any,
) -> CompressionState: ...
@overload
def register(model: torch.nn.Module, compressor: Optimizer) -> Any: ...


def register(
    model: torch.nn.Module,
    compressor: Compressor | str | Optimizer,
    *,
    loss_scale: Callable[[], float] | None = None,
    start_compression_step: int = 0,
    private: Privacy | None = None,
    **settings: Any,
) -> Any:
    """Let a DDP model exchange compressed gradients, or leave the exchange to its optimizer.

    With a compressor, :func:`compression_hook` is registered.  All ranks must call this function:
    it compares their configurations.

    With an optimizer that exchanges by itself (``comm_hooks.optim``), :func:`skip_hook` is
    registered.  If it is an optimizer of local steps (``low_communication``), the model in
    evaluation mode and its ``state_dict()`` are from then on those that all ranks share: see
    :func:`~comm_hooks.shared_model.attach_shared_model`.  A model without DDP is accepted, too.

    Args:
        model: a ``DistributedDataParallel``, or a module with one inside: the result of
            ``torch.compile``, Fabric's ``setup`` or Accelerate's ``prepare``, a
            ``LightningModule`` in training, a module of your own.
        compressor: a compressor, or a name in ``comm_hooks.config.COMPRESSORS``; or an optimizer.
        loss_scale: see :class:`CompressionState`; by default that of Fabric or Lightning, if any.
        start_compression_step: see :class:`CompressionState`.
        private: makes each rank's gradients differentially private: a
            :class:`~comm_hooks.optim.private.RankLevel`.
        settings: ``memory``, ``collective``, ``seed``, ``min_numel``, ``min_ndim``,
            ``exempt_bits``, ``granularity``, ``ranks_per_node``, ``verify_every``, ``downlink``:
            see :class:`~comm_hooks.ExchangeSettings`; and the compressor's own arguments, if it is
            given by name.  ``memory`` may be given by name, too: ``"none"``, ``"error_feedback"``,
            ``{"type": "error_feedback", "bits": 4}``.  With an optimizer no settings are allowed.

    Returns:
        The state with ``stats()``, which every rank saves by
        :func:`~comm_hooks.checkpoints.rank_files.save_rank_file`: a :class:`CompressionState`; the
        optimizer itself if it takes local steps; else an
        :class:`~comm_hooks.checkpoints.optimizer_state.OptimizerState`.

    Raises:
        ValueError: for bad settings; if there is not exactly one DDP model in ``model``; if it has
            a hook already (DDP takes one hook; ``mixed_precision=`` and an optimizer that runs in
            the backward pass need it too); if its hooks are ignored (``python_reducer``) or not
            always called (``skip_all_reduce_unused_params=True``); for an optimizer that exchanges
            nothing, or parameters of another model.  In the first forward pass, if that is under
            ``no_sync()`` with ``static_graph=True``.
        ConfigMismatchError: if ranks are configured differently.

    Warns in the first step of an optimizer that the compressor is known to mislead: sparse and
    one-bit gradients under Adam and its kin.

    Not supported: FSDP (``comm_hooks.frameworks.fsdp``), DeepSpeed
    (``comm_hooks.frameworks.deepspeed``) and the composable ``replicate``.

    Example::

        >>> import torch
        >>> from comm_hooks import register
        >>> state = register(ddp_model, "topk", density=1 / 64)
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> state.stats()["steps"]
        1
    """
    if isinstance(compressor, Optimizer):
        own = {
            "loss_scale": loss_scale,
            "start_compression_step": start_compression_step,
            "private": private,
        }
        if given := sorted(settings) + [name for name, value in own.items() if value]:
            raise ValueError(
                f"register(): {', '.join(given)} cannot be given with an optimizer: pass settings "
                "to its exchange"
            )
        return register_optimizer(model, compressor, skip_hook)
    ddp = require_ddp(model)
    check_options(ddp)
    state = CompressionState(
        Exchange(ExchangeSettings.of(compressor, **settings), process_group=ddp.process_group),
        named_parameters=named_parameters(ddp),
        loss_scale=loss_scale or loss_scale_of(model),
        start_compression_step=start_compression_step,
    )
    if private is not None:
        require_plain_gradients(state.loss_scale is not None, start_compression_step)
        check_private_options(ddp)
        private.attach(state.exchange, ddp.module)
        state.private = private
    state.exchange.agree_now()
    register_hook(ddp, state, compression_hook)
    warn_at_first_step(state.exchange.compressor, ddp.module.parameters())
    state.watch(ddp.module)
    logger.info("registered %s", state)
    return state
