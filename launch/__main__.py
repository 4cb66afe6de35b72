"""`python -m launch submit|sweep|status|watch|report`: the commands of `lockstep` that this package holds."""

import sys

from lockstep.__main__ import main

if __name__ == "__main__":
    main(["sweep"] * (sys.argv[1:2] == ["report"]) + sys.argv[1:])
