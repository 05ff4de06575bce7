"""A tiny Hugging Face model with a tokenizer of its own, and small data files, made on the spot."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.examples.launch import EXAMPLES

sys.path.insert(0, str(EXAMPLES))  # where a script that is started finds its neighbours

WORDS = "red green blue one two three cat dog bird sun moon star".split()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Llama of width 32 with tied embeddings, and a tokenizer of at most 300 tokens."""
    torch = pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny-model")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([" ".join(WORDS)] * 4, vocab_size=300, special_tokens=["<end>", "<pad>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 lines: the prompt is a few words, the completion of one to nine tokens repeats the first word."""
    rng = random.Random(0)
    lines = []
    for number in range(120):
        words = [rng.choice(WORDS) for _ in range(4)]
        lines.append(json.dumps({"prompt": f"{number} " + " ".join(words) + " : ", "completion": (words[0] + " ") * (number % 3 + 1)}))
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
