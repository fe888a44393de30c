"""The settings of an exchange, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from comm_hooks.compressors.base import Compressor, Granularity
from comm_hooks.compressors.identity import Identity
from comm_hooks.config import COMPRESSORS, build, instead_of, option_names, parse_spec, unknown
from comm_hooks.memory.base import Memory
from comm_hooks.memory.error_feedback import fitting_memory
from comm_hooks.requirements import in_one_line, require_choice, require_integer, require_positive

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class ExchangeOptions(TypedDict, total=False):
        """The exchange settings that hooks and optimizers accept as further keywords."""

        min_numel: int
        min_ndim: int
        exempt_bits: int
        granularity: Granularity | Literal["auto"]
        ranks_per_node: int | None
        verify_every: int
        downlink: Compressor | None


Collective = Literal["auto", "all_reduce", "all_gather", "sharded", "hierarchical"]


@dataclass(frozen=True, eq=False)
class ExchangeSettings:
    """The settings of an exchange: frozen, checked, and equal on all ranks.

    Args:
        compressor: turns a parameter into a payload.
        memory: keeps residuals between rounds (:class:`~comm_hooks.ErrorFeedback` and others); None
            to drop them; ``"auto"``: error feedback if the compressor is biased.  It is a template:
            each exchange makes an empty copy (:attr:`Exchange.memory`).
        collective: moves payloads between ranks: ``"all_reduce"`` (linear compressors only),
            ``"all_gather"``, ``"sharded"``, or ``"auto"``: the one of these that moves the fewest
            bytes and leaves the algorithm as its source has it (:attr:`Exchange.source_collective`;
            never shards if payloads can be summed).  ``"hierarchical"``: averages vectors in
            full precision inside each node, and compresses only the exchange between nodes, by the
            cheapest of the others.
        seed: the seed of all random draws.
        min_numel: parameters with fewer elements are not compressed.
        min_ndim: parameters with fewer dimensions (norms and biases) are not compressed either; 1
            compresses them as well, for very slow links.
        exempt_bits: the bits per element of uncompressed parameters on the wire: 32 (float32) or 16
            (bfloat16, without a residual of the rounding).
        granularity: ``"parameter"`` compresses each parameter on its own; ``"bucket"`` the whole
            bucket, or each of its shards, as one vector (random draws then depend on the bucket);
            ``"auto"``: buckets for sketches, parameters for all other compressors.
        ranks_per_node: for ``"hierarchical"``: the number of consecutive ranks on a node; by
            default that of torchrun (``LOCAL_WORLD_SIZE``).
        verify_every: the number of steps between comparisons of a fingerprint of the replicas
            (the parameters, for hooks and optimizers), which is sent with the payload.  0: never,
            for machines with different arithmetic.
        downlink: compresses the means that owners of shards send; None for ``compressor``.  A mean
            of N sparse vectors has up to N times as many elements, and elements dropped here are
            late on all ranks at once, so a denser compressor pays from about five ranks on.

    Raises:
        ValueError: for invalid values, and for settings that exclude each other.

    Example::

        >>> from comm_hooks import Exchange, ExchangeSettings, TopK
        >>> settings = ExchangeSettings(TopK(density=1 / 64), collective="all_gather")
        >>> settings.memory
        ErrorFeedback(bits=32)
        >>> exchange = Exchange(settings)
    """

    compressor: Compressor
    memory: Memory | None = "auto"  # type: ignore[assignment]  # what it stands for, at once
    collective: Collective = "auto"
    seed: int = 0
    _: KW_ONLY
    min_numel: int = 1024
    min_ndim: int = 2
    exempt_bits: int = 32
    granularity: Granularity = "auto"  # type: ignore[assignment]  # what it stands for, at once
    ranks_per_node: int | None = None
    verify_every: int = 32
    downlink: Compressor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise ValueError(
                f"Exchange: compressor must be a Compressor such as TopK(density=1/64), "
                f"got {in_one_line(self.compressor)}"
            )
        memory: Any = self.memory
        if isinstance(memory, str) and memory == "auto":
            object.__setattr__(self, "memory", memory := fitting_memory(self.compressor))
        if memory is not None and not isinstance(memory, Memory):
            raise ValueError(
                "Exchange: memory must be None, 'auto' or a Memory such as ErrorFeedback(), got "
                f"{in_one_line(memory)}"
            )
        require_choice("Exchange", "collective", self.collective, get_args(Collective))
        granularity: Any = self.granularity
        require_choice("Exchange", "granularity", granularity, ("auto", *get_args(Granularity)))
        if granularity == "auto":
            object.__setattr__(self, "granularity", self.compressor.granularity)
        require_positive("Exchange", "min_numel", self.min_numel)
        require_positive("Exchange", "min_ndim", self.min_ndim)
        require_choice("Exchange", "exempt_bits", self.exempt_bits, (16, 32))
        if self.ranks_per_node is not None:
            require_positive("Exchange", "ranks_per_node", self.ranks_per_node)
            if self.collective != "hierarchical":
                raise ValueError(
                    f"Exchange: ranks_per_node goes with collective='hierarchical', not "
                    f"{self.collective!r}"
                )
        require_integer("Exchange", "seed", self.seed)
        require_integer("Exchange", "verify_every", self.verify_every)
        if self.verify_every != 0:
            require_positive("Exchange", "verify_every", self.verify_every)
        self.check(self.compressor)
        if self.downlink is not None:
            self._check_downlink(self.downlink)

    def _check_downlink(self, downlink: Compressor) -> None:
        if not isinstance(downlink, Compressor):
            raise ValueError(
                "Exchange: downlink must be None or a Compressor such as TopK(density=1/16), got "
                f"{in_one_line(downlink)}"
            )
        if self.collective not in ("auto", "sharded", "hierarchical"):
            raise ValueError(
                f"Exchange: downlink goes with collective='sharded', where means are compressed "
                f"again, not {self.collective!r}"
            )
        for compressor in (self.compressor, downlink):
            if "sharded" not in self.carriers(compressor):
                raise ValueError(
                    f"Exchange: downlink needs shards, and {type(compressor).__name__} gives each "
                    "rank its own elements"
                )
        self._check_residuals(downlink)

    @classmethod
    def of(
        cls, compressor: Compressor | str | Mapping[str, Any], /, **options: Any
    ) -> ExchangeSettings:
        """Return settings, given compressors and memories as names or as objects.

        Args:
            compressor: a compressor, or a specification of a compressor and of settings
                (:func:`~comm_hooks.config.parse_spec`).
            options: the settings above, and the options of a compressor given as a specification;
                ``memory`` and ``downlink`` may be specifications
                (:func:`~comm_hooks.config.build`).

        Raises:
            ValueError: for unknown names, with the nearest known name; for invalid values; and for
                settings that exclude each other.

        Example::

            >>> ExchangeSettings.of("topk", density=0.01, memory="none").compressor
            TopK(density=0.01, block_size=4096, value_bits=16, index_code='elias_fano', overlap=0.0)
        """
        settings = [field.name for field in fields(cls)[1:]]
        own: list[str] = []
        if isinstance(compressor, str | Mapping):
            compressor, given = parse_spec(compressor, "compressor")
            options, own = {**given, **options}, option_names(compressor)
        strangers = [key for key in options if key not in settings and key not in own]
        if strangers and not isinstance(compressor, str):
            raise ValueError(
                f"options {', '.join(strangers)} go with a compressor's name, but {compressor!r} "
                "is a compressor already: set them in its constructor"
            )
        if strangers:
            kind = f"setting with {compressor}"
            raise _SettingError(
                unknown(kind, strangers[0], ["compressor", *own, *settings]), strangers[0]
            )
        made: Compressor = build("compressor", compressor, **_only(own, options))
        named = {"memory": options.get("memory", "auto"), "downlink": options.get("downlink")}
        for name, spec in named.items():
            try:
                named[name] = build(name, spec, compressor=made)
            except ValueError as error:
                raise _SettingError(str(error), name) from None
        return cls(made, **{**_only(settings, options), **named})

    @classmethod
    def from_dict(cls, block: Mapping[str, Any], *, path: str = "comm_hooks") -> ExchangeSettings:
        """Return the settings that a block of a JSON configuration describes.

        Args:
            block: ``compressor``, a specification, and the options of :meth:`of`.
            path: the path of the block in the configuration, for messages.

        Raises:
            ValueError: as :meth:`of`, with the path in the message.

        Example::

            >>> ExchangeSettings.from_dict({"compressor": "sign", "min_ndim": 1}).min_ndim
            1
        """
        if not isinstance(block, Mapping):
            raise ValueError(f"{path}: must be an object with a 'compressor', got {block!r}")
        if "compressor" not in block:
            raise ValueError(
                f"{path}.compressor: missing; choose from {', '.join(COMPRESSORS)}"
                f"{instead_of('compressor', block)}"
            )
        try:
            name, own = parse_spec(block["compressor"], "compressor")
            option_names(name)
        except ValueError as error:
            raise ValueError(f"{path}.compressor: {error}") from None
        try:
            given = {str(k): v for k, v in block.items() if k != "compressor"}
            return cls.of(name, **{**own, **given})
        except _SettingError as error:
            where = f"{path}.{error.setting}" if error.setting.isprintable() else path
            raise ValueError(f"{where}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def exempt(self) -> Identity:
        """The compressor of the exempt parameters."""
        return Identity(self.exempt_bits)

    def exempts(self, shape: Sequence[int]) -> bool:
        """Return whether a parameter of this shape is sent uncompressed."""
        return len(shape) < self.min_ndim or math.prod(shape) < self.min_numel

    def carriers(self, compressor: Compressor | None = None) -> list[str]:
        """Return the collectives that can carry the compressor's payloads, the simplest first.

        Without ``"hierarchical"``, which uses one of these between nodes.

        Args:
            compressor: replaces the compressor of the settings.
        """
        compressor = compressor or self.compressor
        collectives = ["all_reduce"] if compressor.linear and self.exempt.linear else []
        collectives.append("all_gather")
        if not compressor.per_rank:
            collectives.append("sharded")
        return collectives

    def check(self, compressor: Compressor) -> None:
        """Raise ``ValueError`` for a compressor that does not fit the other settings."""
        name = type(compressor).__name__
        supported = [*self.carriers(compressor), "hierarchical"]
        if self.collective not in ("auto", *supported):
            reasons = {
                "all_reduce": (
                    "exempt parameters in bfloat16 cannot be summed"
                    if compressor.linear
                    else f"the payloads of {name} cannot be summed"
                ),
                "sharded": f"{name} gives each rank its own elements",
            }
            raise ValueError(
                f"Exchange: collective {self.collective!r} cannot be used: "
                f"{reasons[self.collective]}; choose from auto, {', '.join(supported)}"
            )
        self._check_residuals(compressor)

    def _check_residuals(self, compressor: Compressor) -> None:
        if self.memory and not compressor.bounds_residuals:
            is_random_k = type(compressor).__name__ == "RandomK"
            raise ValueError(
                f"{compressor} cannot be used with error feedback: it is not contractive, so the "
                f"residual would grow without bound. Use memory=None; its noise averages out over "
                f"steps{' (or RandomK(unbiased=False))' if is_random_k else ''}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, for comparison between ranks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {
            "compressor": type(self.compressor).__name__,
            **asdict(self.compressor),  # type: ignore[call-overload]  # compressors are dataclasses
            "memory": repr(self.memory),
            **values,
            "downlink": repr(self.downlink),
        }


def require_plain_gradients(is_scaled: bool, start_compression_step: int) -> None:
    """Raise ``ValueError`` for steps in which private gradients would not be bounded."""
    if is_scaled:
        raise ValueError(
            "private: gradients multiplied by a loss scale are not supported: use bfloat16, which "
            "needs no GradScaler"
        )
    if start_compression_step:
        raise ValueError(
            "private: start_compression_step must be 0: the placement of the noise is valid for "
            "steps with the compressor"
        )


def require_gradients(settings: ExchangeSettings, who: str) -> None:
    """Raise ``ValueError``, in the name of ``who``, if rounds average changes of gradients."""
    if settings.memory is not None and settings.memory.sends_changes:
        raise ValueError(
            f"{who}: {settings.memory} sends changes, which an optimizer behind a hook would take "
            "for gradients: use ErrorFeedback(), or optim.EF21 or CDAdam with skip_hook"
        )


class _SettingError(ValueError):
    """A ``ValueError`` with the name of the setting that is wrong."""

    def __init__(self, message: str, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


def _only(names: Collection[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in names}
