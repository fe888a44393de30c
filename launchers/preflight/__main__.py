"""``comm-hooks preflight`` as a module, for launchers that start modules on all nodes."""

import sys

from comm_hooks.launchers.main import app

if __name__ == "__main__":
    app(["preflight", *sys.argv[1:]])
