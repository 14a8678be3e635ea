"""The command line. Where its packages are not installed, importing it ends the process with one line."""

from compress.errors import MissingPackageError, needs

try:
    with needs("typer", "the command line"):
        import typer  # noqa: F401
    with needs("rich", "the command line"):
        import rich  # noqa: F401
except MissingPackageError as error:
    raise SystemExit(f"compress: {error}; from Python, compress.quantize works without it") from None
