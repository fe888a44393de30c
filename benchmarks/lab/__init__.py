"""What experiments are made of, once for commands and studies.

One idea per file. What is trained: ``corpus``, ``model``, ``tasks``. With what: ``methods``, of
``crossings`` and ``optimizers``. By whom: ``training`` (a rank of its own process), ``processes``
(starting and watching such ranks; ``events`` is what they tell), ``simulated`` (all ranks in this
process). What comes out: ``runs`` (one method, one record; ``plain`` checks what was read),
``outcomes`` (a method tuned by ``search`` and run with several seeds). What commands do alike:
``conducting``. What people see: ``progress``, ``tables``, ``plots``, ``options`` (how it was run).
"""
