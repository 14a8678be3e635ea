"""Write checkpoints in the formats of other tools: one file or one folder a target, looked up by its name.

A target file, or the __init__.py of a target's folder, has
- `SUFFIX`: "" if it writes a directory, ".gguf" or the like if it writes one file;
- `refuses(weight) -> str | None`: why the target cannot hold a weight (compress/export/weights.py) as it is, and what
  a recipe would have to say. It is asked before anything is read, and of weights that are not quantized yet. A refused
  table (embeddings, output head) is written as plain numbers, and the user is told why unless the reason is ""; any
  other refused weight ends the export;
- `write(export, out) -> None`: write `out`, a path at which nothing is. What it has to write is in `Export`
  (compress/export/convert.py), and `export.notes` takes lines for the user;
- `check(export) -> None`, only where there are conditions on the whole model: ExportError, before anything is written;
- `nbytes(export, weight) -> int`, only where a weight is not written in about the size of the packed one;
- `decodes(weight) -> bool`, only where other refused weights than tables are written as plain numbers, too;
- `file_nbytes(export) -> int`, only for one file: at most so many bytes it takes, of a plan that nothing was made of;
- `RECIPE`, only where `compress quantize --export NAME` without --recipe takes another than usual;
- `TAKES`, only where there is something that users may ask for: names of `convert.Wishes` (`export.wishes`).

Directories of safetensors files are written by compress/export/directory.py. A name such as compressed_tensors is
written with a hyphen by users. Targets do not import each other.
"""
