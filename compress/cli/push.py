"""Share a checkpoint: `compress push`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress.cli.options import AsJson, Directory, app, errors
from compress.storage import paths


@app.command(epilog="Example: compress push models_out/my-model-int4 me/my-model-int4 --dry-run")
def push(
    directory: Directory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub: owner/name.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded and stop.")] = False,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a repository that is made. Default: the account's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch to write to. Default: main.")] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also this file, which has no name of a model's. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a checkpoint to the Hugging Face hub, once all of its files have the hashes of its manifest.

    Every file is named first. Files that the manifest does not list stay here. A listed one whose name is none of a
    model's is an error, unless it is given with --include. Weights in the repository (*.safetensors and their index)
    that are not among the uploaded files are deleted by the same commit; its other files stay. The token is that of
    `hf auth login`, or HF_TOKEN.
    """
    with errors():
        if not paths.HUB_ID.fullmatch(repo):
            raise typer.BadParameter("give owner/name", param_hint="REPO")
        paths.check_checkpoint(directory)
        from compress.export import push as pushing
        from compress.process_memory import show

        upload = pushing.check(directory, include or ())
        if not as_json:
            for name, nbytes in upload.files.items():
                print(f"{nbytes:>14,}  {name}")
            for name in upload.left:
                print(f"{'stays here':>14}  {name}")
            print(f"deleted from {repo}: {', '.join(pushing.STALE_PATTERNS)} at its top that are not listed above")
        address = None if dry_run else pushing.push(directory, pushing.PushTarget(repo, revision, private), upload)
        if as_json:
            print(json.dumps({"repo": repo, "files": upload.files, "left": upload.left, "commit": address}))
            return
        said = f"would upload to {repo}" if address is None else f"uploaded to {address}"
        print(f"{len(upload.files)} files, {show(upload.nbytes)}, {said}")
