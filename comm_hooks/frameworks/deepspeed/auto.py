"""Importing this makes every DeepSpeed engine whose configuration asks for it compress.

    import comm_hooks.frameworks.deepspeed.auto

For programs that do not call ``deepspeed.initialize`` themselves: the Trainer of transformers,
Accelerate, Lightning's DeepSpeed strategy, pipelines.  It wraps ``DeepSpeedEngine.__init__``, which
all of them go through; an engine without a ``comm_hooks`` block, and without an optimizer of
comm-hooks, is left as it was.  Import it on all ranks, before the engine is made.
"""

import functools
import inspect
from typing import Any

from comm_hooks.frameworks.deepspeed.block import find_block
from comm_hooks.frameworks.deepspeed.engine import attach
from comm_hooks.frameworks.deepspeed.initializing import import_deepspeed, prepare


def _wrap_constructor() -> None:
    import_deepspeed()
    from deepspeed.runtime.engine import DeepSpeedEngine

    construct = DeepSpeedEngine.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        parsed = given["config_class"]
        settings = parsed._param_dict
        block = find_block(settings)
        optimizer = given.get("optimizer")
        given["optimizer"], exchanged = prepare(settings, block, given)
        if given["optimizer"] is not optimizer:
            # As initializing.without_optimizer, in a configuration that is parsed already.
            parsed.optimizer_name = parsed.optimizer_params = None
            parsed.zero_allow_untested_optimizer = True
        construct(*call.args, **call.kwargs)
        attach(given["self"], exchanged)

    DeepSpeedEngine.__init__ = __init__


_wrap_constructor()
