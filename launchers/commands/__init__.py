"""The options of every subcommand, whose work is in the package of its name.

That is imported when it runs: ``--help`` does not wait for torch.
"""
