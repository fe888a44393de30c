"""Compressors: from a vector to a payload and back, without state and communication."""

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.compressors.identity import Identity
from comm_hooks.compressors.quantize import Quantize, Sign
from comm_hooks.compressors.sketch import SRHT, CountSketch, GaussianSketch
from comm_hooks.compressors.sparse import PermK, RandomK, TopK

__all__ = [
    "SRHT",
    "Cocktail",
    "Compressor",
    "CountSketch",
    "DCTTopK",
    "GaussianSketch",
    "Identity",
    "PermK",
    "Quantize",
    "RandomK",
    "Sign",
    "TopK",
]
