"""`python -m rlinf` is the command `rlinf`."""

from rlinf.commands.cli import main

main()
