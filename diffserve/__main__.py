"""``python -m diffserve`` is the same as ``diffserve``."""

from diffserve.cli import main

if __name__ == "__main__":
    main()
