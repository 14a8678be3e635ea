"""`python -m compress` is the command line."""

from compress.cli.app import main

main()
