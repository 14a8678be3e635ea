"""`python -m compress` is the command line, and so is the command `compress`."""

import os
import sys


def main() -> None:
    """Run the command line; a signal, also while it is imported, ends the process with one line."""
    try:
        from compress.cli import streams

        streams.open_all()  # before modules that ask whether the output is a terminal
        from compress import ranks
        from compress.cli import app, interruption, options
        from compress.progress import NOTES
    except KeyboardInterrupt:
        print("compress: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a process forks
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what libraries start imports nothing from the working directory
    if ranks.given()[0] > 0:
        streams.mute()
    try:
        interruption.install()
        NOTES.addHandler(options.NotePrinter())
        try:
            app.app()
        except SystemExit as end:
            code = end.code
        interruption.finish()
    except KeyboardInterrupt:  # where no command answers it: before it has begun, and behind its end
        interruption.finish()
        code = interruption.exit_code()
    if code and interruption.is_unreported():
        options.note("interrupted")
    sys.exit(streams.flush() or (code and (interruption.exit_code() or code)))


if __name__ == "__main__":
    main()
