"""The parts of experiments, once for commands and studies.

One idea per file. Data and models: ``corpus``, ``model``, ``tasks``. Methods: ``methods``, made of
``communication`` and ``optimizers``. Executors: ``training`` (a rank of its own process),
``processes`` (starts and watches such ranks; ``events`` are their reports), ``simulated`` (all
ranks in this process). Records: ``runs`` (one method, one record; ``plain`` checks records that are
read), ``outcomes`` (a method tuned by ``search`` and run with several seeds). Parts of commands:
``runner``, ``progress``, ``tables``, ``plots``, ``output``.
"""
