"""Which files beside a model go along, and which do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers.utils import hub

from compress.storage import manifest

SECRET = ("id_rsa", "token.txt", "secrets.env", "train.log", "private_eval.jsonl", "optimizer.npz", "deploy.sh")
SECRET += ("modeling_own.py", "tokenization_own.py", "tokenizer_own.py", "vocab.pkl", "notes.md", ".env", "a.json")
SECRET += ("vocab.npz", "tokenizer.ckpt", "1_Pooling/id_rsa", "x/config.json", "1_Pooling/../config.json")
COPIED = ("LICENSE", "LICENSE.md", "License.txt", "NOTICE", "tokenizer.json", "vocab.txt", "merges.txt", "x.tiktoken")
COPIED += ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
COPIED += ("chat_template.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")
COPIED += ("USE_POLICY.md", "MODEL_LICENSE", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors")


def names_of_transformers() -> Iterator[str]:
    """Yield the names of files that tokenizers of transformers read, from its sources."""
    for path in Path(transformers.__file__).parent.glob("**/*.py"):
        text = path.read_text(encoding="utf-8")
        if "VOCAB_FILES_NAMES" in text or "vocab_files_names" in text:
            for node in ast.walk(ast.parse(text)):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names = {ast.unparse(target).lower() for target in targets if target is not None}
                if "vocab_files_names" in names and isinstance(getattr(node, "value", None), ast.Dict):
                    yield from (each.value for each in node.value.values if isinstance(each, ast.Constant))  # type: ignore[attr-defined]


def test_all_files_of_tokenizers_and_processors_are_known() -> None:
    names = set(names_of_transformers())
    assert len(names) > 20 and [name for name in names if not manifest.is_copied(name)] == []
    constants = {value for key, value in vars(transformers.utils).items() if key.endswith("_NAME")}
    processors = {name for name in constants if isinstance(name, str) and "processor" in name}
    assert len(processors) > 2 and all(map(manifest.is_copied, {*processors, hub.CHAT_TEMPLATE_FILE}))


@pytest.mark.parametrize("name", SECRET)
def test_what_is_no_part_of_a_model_stays(name: str) -> None:
    assert not manifest.is_copied(name) and not manifest.is_published(name)


@pytest.mark.parametrize("name", COPIED)
def test_what_belongs_to_a_model_goes_along(name: str) -> None:
    assert manifest.is_copied(name) and manifest.is_published(name)


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    """A file of the hub's cache is a link into the blobs of its own model; any other link leads out."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    for folder in (snapshot, tmp_path / "models--a--b" / "blobs", tmp_path / "models--c--d" / "blobs", tmp_path / "m"):
        folder.mkdir(parents=True)
    for path in ("models--a--b/blobs/x", "models--c--d/blobs/x", "models--a--b/token", "token", "m/real"):
        (tmp_path / path).write_text("text")
    links = {
        **{"own": ("../../blobs/x", True), "other": ("../../../models--c--d/blobs/x", False)},
        **{"token": ("../../token", False), "absolute": (str(tmp_path / "token"), False), "gone": ("nowhere", False)},
        "folder": ("../../blobs", False),
    }
    for name, (target, is_inside) in links.items():
        (snapshot / name).symlink_to(target)
        assert manifest.is_inside(snapshot / name) == is_inside, name
    for name, target in {"within": "real", "out": "../token", "blob": "../models--a--b/blobs/x"}.items():
        (tmp_path / "m" / name).symlink_to(target)
        assert manifest.is_inside(tmp_path / "m" / name) == (name == "within"), name
    assert manifest.is_inside(tmp_path / "m" / "real")
    (tmp_path / "alias").symlink_to(tmp_path / "m")
    assert manifest.is_inside(tmp_path / "alias" / "real") and not manifest.is_inside(tmp_path / "alias" / "out")
