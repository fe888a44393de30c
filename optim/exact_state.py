"""State that checkpoints bring back as it was."""

from typing import Any

import torch


class ExactStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state comes back from a checkpoint in the dtypes in which it was saved.

    :class:`torch.optim.Optimizer` casts what it loads to the dtype of the parameters.  That rounds
    the float32 moments of a bfloat16 model, and turns indices and packed bits into floats.

    Not supported: tensors that are nested deeper in a parameter's state; they are cast.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict()`` returned, bit for bit, on the devices of the parameters.

        Raises:
            ValueError: if the parameter groups differ; nothing is changed.
        """
        seen: list[dict[str, Any]] = []

        def look(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            seen.append(state)

        # Other hooks may replace the state; this one comes last and sees what is really loaded.
        with self.register_load_state_dict_pre_hook(look):
            super().load_state_dict(state_dict)
        saved = seen[0]
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    loaded = self.state[parameter][name]
                    if loaded.dtype != value.dtype:
                        self.state[parameter][name] = value.to(loaded.device)
