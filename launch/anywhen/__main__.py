"""`python -m launch.anywhen`: the turns of a job of the run."""

import sys

from launch.anywhen.turns import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
