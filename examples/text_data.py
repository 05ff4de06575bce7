"""Text for a causal language model: a user's own file or ready pairs, split, tokenized and put into batches."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

IGNORED = -100  # label of a token that the loss does not count
HELD_OUT_SHARE = 0.1


class BadInput(ValueError):
    """What the user gave cannot be used; the message is one line that says what, where and what to do."""


@dataclass(frozen=True)
class Pair:
    """The model reads `prompt` and is trained on `completion` only; with an empty prompt, on the whole text."""

    prompt: str
    completion: str
    group: str  # pairs of one group never lie on both sides of the split


@dataclass(frozen=True)
class Example:
    """One tokenized example: `labels` is as long as `ids` and is IGNORED where the loss does not count."""

    ids: list[int]
    labels: list[int]

    def prompt(self) -> list[int]:
        """The ids up to the first target; of plain text, its first half."""
        first = next(i for i, label in enumerate(self.labels) if label != IGNORED)
        return self.ids[:first] if first > 1 else self.ids[: max(1, len(self.ids) // 2)]

    def silent(self) -> Example:
        """The same ids without any target: a filler that adds nothing to a loss."""
        return Example(self.ids, [IGNORED] * len(self.ids))


def read_pairs(path: Path) -> tuple[list[Pair], list[Pair]]:
    """(training, held-out) pairs of a `.jsonl` or `.txt` file.

    `.jsonl`: each line {"prompt": str, "completion": str} or {"text": str}; lines of one prompt stay together.
    `.txt`: one running text whose last tenth is held out.
    """
    if not path.is_file():
        raise BadInput(f"--data {path}: no such file")
    if path.suffix not in (".jsonl", ".txt"):
        raise BadInput(f"--data {path}: the name must end in .jsonl or .txt, which says how to read it")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"--data {path}: not UTF-8 text (byte {error.start})") from None
    if not content.strip():
        raise BadInput(f"--data {path}: the file is empty")
    if path.suffix == ".txt":
        cut = int(len(content) * (1 - HELD_OUT_SHARE))
        return [Pair("", content[:cut], "")], [Pair("", content[cut:], "")]
    lines = enumerate(content.split("\n"), start=1)
    return split_by_group([_pair(line, f"--data {path}, line {number}") for number, line in lines if line.strip()])


def _pair(line: str, where: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise BadInput(f"{where}: a JSON object is needed, not {type(record).__name__}")
    if "text" in record:
        keys: tuple[str, ...] = ("text",)
    elif "prompt" in record or "completion" in record:
        keys = ("prompt", "completion")
    else:
        raise BadInput(f'{where}: needs the keys "prompt" and "completion", or "text"; has {sorted(record)}')
    for key in keys:
        if key not in record:
            raise BadInput(f'{where}: the key "{key}" is missing; has {sorted(record)}')
        if not isinstance(record[key], str):
            raise BadInput(f'{where}: "{key}" must be a string, not {type(record[key]).__name__}')
    if not record[keys[-1]].strip():
        raise BadInput(f'{where}: "{keys[-1]}" is empty, so there is nothing to learn')
    prompt = record["prompt"] if "prompt" in keys else ""
    return Pair(prompt, record[keys[-1]], prompt or record[keys[-1]])


def split_by_group(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """(training, held-out) pairs. Whole groups, in the order of a hash of their names, are held out up to a tenth.

    The split depends on nothing but the pairs themselves: every rank and every later run makes the same one.
    """
    sizes = Counter(pair.group for pair in pairs)
    missing = max(1, int(len(pairs) * HELD_OUT_SHARE))
    held_out: set[str] = set()
    for group in sorted(sizes, key=lambda name: (zlib.crc32(name.encode()), name)):
        if sizes[group] <= missing:
            held_out.add(group)
            missing -= sizes[group]
    if not held_out and len(sizes) > 1:
        held_out.add(min(sizes, key=lambda name: (sizes[name], name)))
    return [p for p in pairs if p.group not in held_out], [p for p in pairs if p.group in held_out]


def tokenize(pairs: Sequence[Pair], tokenizer: Any, max_length: int) -> tuple[list[Example], int]:
    """Examples of at most `max_length` tokens, and how many pairs were left out because they are longer.

    A prompt and its completion are tokenized apart, so that the border is a border of tokens. Text without a prompt is
    cut into windows instead of being left out.
    """
    examples: list[Example] = []
    too_long = 0
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if not pairs:
        return examples, too_long
    prompts = tokenizer([pair.prompt for pair in pairs])["input_ids"]
    completions = tokenizer([pair.completion for pair in pairs], add_special_tokens=False)["input_ids"]
    for pair, prompt, completion in zip(pairs, prompts, completions, strict=True):
        if pair.prompt:
            ids = [*prompt, *completion, *end]
            if len(ids) > max_length:
                too_long += 1
            else:
                examples.append(Example(ids, [IGNORED] * len(prompt) + ids[len(prompt) :]))
            continue
        ids = [*prompt, *completion, *end]
        windows = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
        examples += [Example(window, window) for window in windows if len(window) > 1]  # one token predicts nothing
    return examples, too_long


@dataclass(frozen=True)
class Collate:
    """Pads examples at their right to the longest of the batch: int64 tensors of shape [batch, tokens]."""

    pad_id: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        width = max(len(example.ids) for example in examples)

        def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
            return torch.tensor([row + [filler] * (width - len(row)) for row in rows])

        return {
            "input_ids": padded([example.ids for example in examples], self.pad_id),
            "attention_mask": padded([[1] * len(example.ids) for example in examples], 0),
            "labels": padded([example.labels for example in examples], IGNORED),
        }


def count_targets(batch: dict[str, torch.Tensor]) -> int:
    """Tokens that the loss of `batch` averages over: the first label of a row has no token before it."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
