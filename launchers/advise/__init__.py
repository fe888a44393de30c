"""``comm-hooks advise``: which method for this link, before anything is trained.

``step`` is what is asked about, ``ranks`` and ``links`` measure the network, ``rehearsal`` plays
each method's arithmetic, ``cost_model`` makes a step time of both, ``shares`` knows what methods
keep of what exchanging is worth, ``advice`` chooses, ``snippets`` says how to switch it on, and
``run`` puts it together; ``report`` and ``plot`` are what people see.
"""

from comm_hooks.launchers.advise.step import Step, measure_step

__all__ = ["Step", "measure_step"]
