"""``python -m mllm_compile``: the command line."""

import sys

from mllm_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
