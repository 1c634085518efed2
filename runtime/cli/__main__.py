"""`python -m runtime.cli` is `moe-studio`."""

from runtime.cli import main

main()
