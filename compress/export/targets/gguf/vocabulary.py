"""Describe a tokenizer in the keys of GGUF files, so that llama.cpp cuts text into the same tokens.

llama.cpp knows two kinds of vocabularies that are merged from parts. Those of bytes list their merges, and name how
text is split before: only splits that it has are written. Those of sentencepiece have scores instead of merges:
whichever two neighbours make the token of the best score are merged. That is the same where every way to cut a token in
two is a merge, and all of its merges stand together, as they do in tokenizers that were made of a sentencepiece model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from compress.errors import ExportError
from compress.export.targets.gguf.settings import DATA, TOOL
from compress.model.load import load_tokenizer
from compress.storage.checkpoint import read_json

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens; OWN: matched before anything is split
SPACE = "▁"  # stands for a space in vocabularies of sentencepiece
GENERATION = "generation_config.json"
IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "unknown_token_id": "unk_token_id"}
IDS["padding_token_id"] = "pad_token_id"


def metadata(directory: Path, rows: int) -> dict[str, Any]:
    """Return the keys, all with their prefix, and values for the tokenizer in a directory.

    rows: of the table of embeddings, which may have some beyond the vocabulary. Raises ExportError for a tokenizer that
    llama.cpp would read as another one.
    """
    tokenizer = load_tokenizer(directory)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(directory, f"it is a {type(tokenizer).__name__} without a tokenizer.json")
    facts = json.loads(backend.to_str())
    model, added = facts["model"], {each["content"]: each for each in facts["added_tokens"]}
    if model["type"] != "BPE" or not model["merges"]:
        raise _refusal(directory, f"it is of the kind {model['type']}, or has no merges")
    tokens = _tokens(directory, backend.get_vocab(with_added_tokens=True), rows)
    types = [_type(token, added, model) for token in tokens]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    if model.get("byte_fallback"):
        keys = _sentencepiece(directory, facts, tokens, merges)
        tokens = [_restore_spaces(token) if kind == OWN else token for token, kind in zip(tokens, types, strict=True)]
    else:
        keys = _byte_level(directory, facts, merges)
    keys |= {"ggml.tokens": tokens, "ggml.token_type": types, **_ends(directory, tokenizer)}
    if isinstance(tokenizer.chat_template, str):
        keys["chat_template"] = tokenizer.chat_template
    return {f"tokenizer.{key}": value for key, value in keys.items()}


def _refusal(directory: Path, reason: str) -> ExportError:
    return ExportError(
        f"the tokenizer of {directory} cannot be described to {TOOL}: {reason}; export to a target that reads "
        "tokenizer.json, such as mlx"
    )


def _tokens(directory: Path, vocabulary: Mapping[str, int], rows: int) -> list[str]:
    """Return the tokens in the order of their ids, [PADn] for rows of the table that no token has."""
    if max(vocabulary.values()) >= rows:
        raise _refusal(directory, f"it has {max(vocabulary.values()) + 1} tokens, the table of embeddings {rows} rows")
    tokens = [f"[PAD{index}]" for index in range(rows)]
    for token, index in vocabulary.items():
        tokens[index] = token
    return tokens


def _type(token: str, added: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return the type of a token."""
    if token == model.get("unk_token") and model.get("byte_fallback"):
        return UNKNOWN
    if token in added:
        return CONTROL if added[token]["special"] else OWN
    if token not in model["vocab"]:
        return UNUSED
    is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return BYTE if is_byte else NORMAL


def _byte_level(directory: Path, facts: Mapping[str, Any], merges: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Return what is said of a vocabulary of bytes: its merges, and the name of the split."""
    split = _split(facts["pre_tokenizer"])
    ignores = bool(facts["model"].get("ignore_merges"))
    names = [
        name
        for name, each in DATA["splits"].items()
        if each["text"] == split and each.get("ignore_merges", False) == ignores
    ]
    if not names:
        raise _refusal(directory, f"it splits text in a way that {TOOL} has no name for, or that is not known here")
    if facts["normalizer"] not in (None, {"type": "NFC"}):  # most text is in that form already
        raise _refusal(directory, f"it changes text first ({facts['normalizer'].get('type')})")
    return {
        "ggml.model": DATA["vocabularies"]["byte_level"],
        "ggml.pre": names[0],
        "ggml.merges": [" ".join(merge) for merge in merges],
    }


def _split(facts: Mapping[str, Any] | None) -> list[str] | None:
    """Return the steps in which text is split into words, as `DATA` writes them; None for others."""
    steps: list[str] = []
    if facts is None:
        return None
    parts = facts["pretokenizers"] if facts["type"] == "Sequence" else [facts]
    for part in parts:
        kind = part["type"]
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"] and "Regex" in part["pattern"]:
            steps.append(part["pattern"]["Regex"])
        elif kind == "Digits" and part["individual_digits"]:
            steps.append("digits")
        elif kind == "ByteLevel" and not part["add_prefix_space"] and part is parts[-1]:
            steps += ["bytes"] if part["use_regex"] else []
        else:
            return None
    return steps


def _sentencepiece(
    directory: Path, facts: Mapping[str, Any], tokens: Sequence[str], merges: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Return what is said of a vocabulary with scores: minus the place of a token among those that are merged."""
    places: dict[str, int] = {}
    for merge in merges:
        places.setdefault("".join(merge), len(places))
    vocabulary, known = facts["model"]["vocab"], set(merges)
    order = [places["".join(merge)] for merge in merges]
    whole = all(
        (token[:cut], token[cut:]) in known
        for token in places
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    if order != sorted(order) or not whole:
        raise _refusal(directory, f"its merges do not follow from one score for each token, as {TOOL} has them")
    return {
        "ggml.model": DATA["vocabularies"]["sentencepiece"],
        "ggml.scores": [float(-places.get(token, len(places))) for token in tokens],
        "ggml.add_space_prefix": _has_prefix(directory, facts),
    }


def _has_prefix(directory: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether a space is put before a text; ExportError for other changes of it."""
    normalizer, split = facts["normalizer"], facts["pre_tokenizer"]
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    kinds = [step["type"] for step in steps if step]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if split is None and kinds in (["Prepend", "Replace"], ["Replace"]) and steps[-1] == spaces:
        return len(kinds) == 2
    if not kinds and split and split["type"] == "Metaspace" and not split.get("split", True):
        return bool(split["prepend_scheme"] != "never")
    is_whole = split and split["type"] == "Split" and split["pattern"] == {"String": " "}
    if kinds == ["Replace"] and steps[-1] == spaces and is_whole and split["behavior"] == "MergedWithPrevious":
        return False  # nothing is left to split: there are no spaces any more
    raise _refusal(directory, "it changes or splits text in another way than vocabularies of sentencepiece do")


def _restore_spaces(token: str) -> str:
    """Return a token that is matched in the text as it stands, with spaces as they stand there."""
    return token.replace(SPACE, " ")


def _ends(directory: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the tokens that begin and end a text, and whether they are put there."""
    keys: dict[str, Any] = {f"ggml.{key}": getattr(tokenizer, name, None) for key, name in IDS.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    ids = tokenizer("a")["input_ids"]
    keys["ggml.add_bos_token"] = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    keys["ggml.add_eos_token"] = tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id
    settings = read_json(directory / GENERATION) if (directory / GENERATION).is_file() else {}
    ends = settings.get("eos_token_id")
    if others := [end for end in ends if end != tokenizer.eos_token_id] if isinstance(ends, list) else []:
        keys["ggml.eot_token_id"] = others[0]
    return keys
