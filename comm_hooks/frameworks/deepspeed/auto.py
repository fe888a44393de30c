"""Importing this module lets every DeepSpeed engine exchange as its configuration says.

    import comm_hooks.frameworks.deepspeed.auto

For programs that do not call ``deepspeed.initialize`` themselves: the Trainer of transformers,
Accelerate, Lightning's DeepSpeed strategy, pipelines.  It wraps ``DeepSpeedEngine.__init__``; an
engine without a ``comm_hooks`` block, and without an optimizer of comm-hooks, is unchanged.  Import
it on all ranks, before the engine is made.
"""

from comm_hooks.frameworks.deepspeed.engine import wrap_constructor

wrap_constructor()
