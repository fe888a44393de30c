"""A recurrent network over bytes."""

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.lab.model import VOCABULARY

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentText(nn.Module):
    """A recurrent network that predicts bytes, with a tied output embedding.

    Args:
        cell: ``"lstm"`` (Hochreiter & Schmidhuber, 1997) or ``"gru"`` (Cho et al., 2014).
        layers: cells on top of one another.
        width: of embeddings and hidden states.
    """

    def __init__(self, *, cell: str, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.cell = CELLS[cell](width, width, num_layers=layers, batch_first=True)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (batch, time) to logits (batch, time, 256)."""
        states, _ = self.cell(self.tokens(tokens))
        return F.linear(self.norm(states), self.tokens.weight)
