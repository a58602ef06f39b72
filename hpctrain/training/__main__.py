"""Entry of a rank: `python -m hpctrain.training RUN_DIR ATTEMPT`."""

import sys

from hpctrain.training.rank import main

if __name__ == "__main__":
    main(sys.argv[1:])
