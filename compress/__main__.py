"""`python -m compress` is the command line, and so is the command `compress`."""

import sys


def main() -> None:
    """Import the command line and run it; a signal while it is imported ends the process with one line."""
    try:
        from compress.cli.app import main as run
    except KeyboardInterrupt:
        print("compress: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
