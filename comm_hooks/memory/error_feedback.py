"""Error feedback: keep the compression error of a round and add it to the next vector."""

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.quantize import Quantize
from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.base import Memory
from comm_hooks.memory.rows import Rows, replace_
from comm_hooks.randomness import Draw, Keys, derive_keys
from comm_hooks.requirements import require_choice, require_flag, require_within


def fitting_memory(compressor: Compressor) -> "ErrorFeedback | None":
    """Return the memory for ``memory="auto"``: error feedback if needed and possible, else None.

    It is needed for biased compressors, and possible for those with bounded residuals.
    """
    return ErrorFeedback() if compressor.bounds_residuals and not compressor.unbiased else None


class ErrorFeedback(Memory):
    """Keeps the compression error of every parameter and adds it to the next vector.

    Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.  Per round and parameter, with
    vector g, residual e (zero at first), compressor C and decompressor D:

    1. a = g + decay e;
    2. send C(a);
    3. e = a - D(C(a)), unless some rank's vector was not finite, or g is all zero: then e stays.

    With ``decay=1``, summed over rounds, the true gradients equal the decompressed payloads plus e.

    Args:
        bits: bits per element of the stored residual: 32 (float32), 16 (bfloat16) or 4 (min-max
            codes in blocks of 256, 0.53 bytes per element).  The rounding of the residual is lost:
            16 keeps 8 significant bits of every element, 4 the range of a block in 15 steps.
        decay: the old residual's factor, in (0, 1]; below 1 it fades (SparseLoCo 0.95, DeMo 0.999).
        stochastic: 4 bits only: round at random, so that rounding errors are zero in the mean.

    Memory: 4, 2 or 0.53 bytes per compressed parameter and rank.  Each rank's residual is its own:
    save and load it on every rank.
    Not supported: compressors that are not contractive (sketches, unbiased RandomK, PermK), for
    which the residual grows without bound.

    Example::

        >>> ErrorFeedback(bits=16)
        ErrorFeedback(bits=16)
    """

    def __init__(self, bits: int = 32, *, decay: float = 1.0, stochastic: bool = False) -> None:
        require_choice(self, "bits", bits, (4, 16, 32))
        require_within(self, "decay", decay, "(0, 1]")
        require_flag(self, "stochastic", stochastic)
        if stochastic and bits != 4:
            raise ValueError(f"ErrorFeedback: stochastic=True needs bits=4, got bits={bits}")
        super().__init__()
        self.bits = bits
        self.linear = bits == 32
        self.decay = decay
        self.stochastic = stochastic
        self._codec = Quantize(bits=4, stochastic=stochastic) if bits == 4 else None
        self._dtype = {4: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[bits]

    def __repr__(self) -> str:
        decay = f", decay={self.decay!r}" if self.decay < 1 else ""
        stochastic = ", stochastic=True" if self.stochastic else ""
        return f"ErrorFeedback(bits={self.bits}{decay}{stochastic})"

    def fresh(self) -> "ErrorFeedback":
        return type(self)(self.bits, decay=self.decay, stochastic=self.stochastic)

    def for_server(self) -> "ErrorFeedback":
        return self.fresh()

    def compensate(self, rows: Rows, active: Tensor, scale: float) -> Residual:
        stored, factor = self._kept.matrix(rows), scale * self.decay
        vectors = self._decode(stored, rows.matrix.shape[1]) if self._codec else stored
        if active.device.type == "cpu" and active.all():
            return Residual(vectors, factor)
        return Residual(vectors, active * factor)

    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        left = rows.matrix if scale == 1 else rows.matrix / scale
        if self._codec:
            left = self._encode(left, derive_keys(key, 0, rows.names))
        # The copy rounds other dtypes.
        replace_(self._kept.matrix(rows), left, accept)

    def _width(self, numel: int) -> int:
        return self._codec.payload_nbytes(numel) if self._codec else numel

    def _encode(self, vectors: Tensor, keys: Keys) -> Tensor:
        if self._codec is None:
            return super()._encode(vectors, keys)
        return self._codec.encode(vectors, Draw(keys))

    def _decode(self, stored: Tensor, numel: int) -> Tensor:
        if self._codec is None:
            return super()._decode(stored, numel)
        matrix = torch.empty(len(stored), numel, device=stored.device, dtype=torch.float32)
        self._codec.decode(matrix, stored, Draw((0,) * len(stored)))
        return matrix
