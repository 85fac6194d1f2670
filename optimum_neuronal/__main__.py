"""`torchrun -m optimum_neuronal prune ...`: the commands of `optimum-cli neuronal`, for launchers that want a module."""

import sys

from optimum.commands.optimum_cli import main


if __name__ == "__main__":
    sys.argv = ["optimum-cli", "neuronal", *sys.argv[1:]]
    main()
