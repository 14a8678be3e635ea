"""`python -m compress` is the command line."""

from compress.cli import main

main()
