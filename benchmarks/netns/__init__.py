"""Programs on slow links, made of network namespaces (:mod:`comm_hooks.launchers.netns`).

``python -m benchmarks.netns`` runs a command on such links, and ``check_predictions`` compares what
``comm-hooks advise`` predicts with what training on them takes.
"""
