"""Upload a finished checkpoint to the Hugging Face hub: the files of its manifest, once they are compared with it.

Weights of an earlier upload that the manifest does not list go, in the same commit: transformers reads
model.safetensors before any shards. Other files of the repository stay.

Needs the network and a token, as huggingface_hub finds it (HF_TOKEN, or `hf auth login`).
"""

from __future__ import annotations

import fnmatch
import glob
import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, cast

from compress.errors import CheckpointError, OutputError, first_line
from compress.storage import paths
from compress.storage.checkpoint import CONFIG, MANIFEST
from compress.storage.manifest import Manifest, is_inside, is_published

NAMED = 8  # files in an error
STALE_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
)  # files that a repository loses where they are not uploaded


class Upload(NamedTuple):
    """What goes to the hub, and what stays."""

    files: dict[str, int]  # name -> bytes
    left: list[str]  # files beside them, which the manifest does not list

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(self.files.values())


class PushTarget(NamedTuple):
    """Where it goes."""

    repo: str  # owner/name
    revision: str | None = None  # branch, made where there is none; None: main
    private: bool | None = None  # of a repository that is made; None: as the account has it


def check(directory: Path, included: Collection[str] = ()) -> Upload:
    """Return what would be uploaded of a checkpoint.

    Raises CheckpointError for one that is unfinished, was saved again by other software, or is not as it was written:
    every file is read and its hash compared. Raises it for files that are none of a model's, unless they are
    `included` by name, and for links out of the directory.
    """
    paths.check_checkpoint(directory)
    manifest = Manifest.read(directory)
    if manifest is None:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is unfinished, or was saved by other software; give a directory that "
            "`compress quantize` has finished"
        )
    manifest.check_listed({CONFIG, *(path.name for path in directory.glob("*.safetensors"))})
    read, left = manifest.unlisted()
    manifest.check_listed(read)
    _check_known(directory, manifest.files, included)
    for name in sorted(manifest.files):
        manifest.check_size(name)
        manifest.check_hash(name)
    names = sorted({*manifest.files, MANIFEST})
    return Upload({name: (directory / name).stat().st_size for name in names}, left)


def _check_known(directory: Path, names: Collection[str], included: Collection[str]) -> None:
    """Raise CheckpointError for a listed file that may be no part of the model, and for a link to one elsewhere."""
    if missing := sorted(set(included) - set(names)):
        raise CheckpointError(f"{directory} has no {missing[0]} that {MANIFEST} lists; give other names of files")
    unknown = sorted(name for name in names if not is_published(name) and name not in included)
    if unknown:
        options = " ".join(f"--include {shlex.quote(name)}" for name in unknown[:NAMED])
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        raise CheckpointError(
            f"{directory} lists what is no part of a model: {', '.join(unknown[:NAMED])}{more}; write the checkpoint "
            f"again, which leaves it out, or upload it all the same with {options}"
        )
    for name in sorted(names):
        if os.path.lexists(directory / name) and not is_inside(directory / name):
            raise CheckpointError(f"{directory / name} is a link to elsewhere, or no file; put the file in its place")


def stale(names: list[str], upload: Upload) -> list[str]:
    """Return patterns of the weights among a repository's files that would lie beside those of an upload."""
    return [
        glob.escape(name)
        for name in names
        if "/" not in name
        and name not in upload.files
        and any(fnmatch.fnmatch(name, pattern) for pattern in STALE_PATTERNS)
    ]


def push(directory: Path, target: PushTarget, upload: Upload, endpoint: str | None = None) -> str:
    """Upload files of a checkpoint that `check` has returned, as one commit; return its address.

    The commit deletes `stale` weights of the repository.

    endpoint: address of the hub; None: that of huggingface_hub. Raises OutputError where the hub is not reached, knows
    no token, or refuses.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if huggingface_hub.get_token() is None:
        raise OutputError("the hub knows no token of yours: run `hf auth login`, or set HF_TOKEN")
    http_error: type[Exception] = cast(Any, HfHubHTTPError.__bases__[0])  # of the library that huggingface_hub uses
    api = huggingface_hub.HfApi(endpoint=endpoint)
    try:
        repo = api.create_repo(target.repo, private=target.private, exist_ok=True).repo_id
        if target.revision is not None:
            api.create_branch(repo, branch=target.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=directory,
            revision=target.revision,
            allow_patterns=[glob.escape(name) for name in upload.files],
            delete_patterns=stale(api.list_repo_files(repo, revision=target.revision), upload) or None,
            commit_message=f"Upload {directory.resolve().name}, written by compress",
        )
    except OfflineModeIsEnabled as error:
        raise OutputError("HF_HUB_OFFLINE is set; unset it to push, or look with --dry-run") from error
    except HfHubHTTPError as error:
        reason = first_line(error)[:150]
        raise OutputError(
            f"the hub refuses {target.repo} ({reason}); check its name, and the rights of your token"
        ) from error
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise OutputError(f"{target.repo}: {first_line(error)}; give owner/name and a token that may write") from error
    except (http_error, OSError) as error:
        raise OutputError(f"the hub could not be reached ({first_line(error)[:150]}); try again when online") from error
    return str(commit.commit_url)
