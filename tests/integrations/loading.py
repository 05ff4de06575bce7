"""What the ranks run for loading under ZeRO-3: transformers' own path through zero.Init."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tests.integrations.jobs import arguments, fresh_accelerate
from tests.integrations.tiny import Sentences, deepspeed_config, losses_of, model_config, stand_in

MIB = 2**20


def zero3() -> Any:
    """What makes transformers load under ZeRO-3, as long as it lives."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2})


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters. Collective."""
    import deepspeed

    copied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters(p):
            copied[name] = p.detach().clone()
    return copied


def is_cut(model: nn.Module) -> bool:
    return all(hasattr(p, "ds_id") for p in model.parameters())


def load_before_everything(rank: int, world: int, pretrained: str, folder: str) -> dict[str, Any]:
    """The model first, before a process group or arguments exist."""
    stand_in()
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

    told = zero3()
    started = torch.distributed.is_initialized()
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    result: dict[str, Any] = {"started": started, "cut": is_cut(model), "values": whole(model)}
    result["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    result["buffers"] = {n: b.clone() for n, b in model.named_buffers()}
    args = arguments(folder, deepspeed=deepspeed_config(3, optimizer=False, scheduler=False), max_steps=2)
    trainer = Trainer(model, args, train_dataset=Sentences(22))
    trainer.train()
    result["losses"] = losses_of(trainer)
    result["state_dict"] = refuses(lambda: torch.save(trainer.model.state_dict(), Path(folder) / f"inner{rank}.bin"))
    result["save_pretrained"] = refuses(lambda: trainer.model.save_pretrained(Path(folder) / f"inner{rank}"))
    result["resize"] = refuses(lambda: step_after_resizing(trainer))
    trainer.accelerator.free_memory(trainer.model_wrapped)
    result["evaluated_first"] = trainer_evaluates(pretrained, folder)
    told = zero3()  # the arguments since then were told something of their own
    torch.manual_seed(rank)  # unlike seeds must not matter
    fresh = LlamaForCausalLM._from_config(model_config())
    result["from_config"] = (is_cut(fresh), {n: v.std().item() for n, v in whole(fresh).items()}, whole(fresh))
    del told
    return result


def step_after_resizing(trainer: Any) -> None:
    """The new table is not what the engine trains."""
    trainer.model.resize_token_embeddings(80)
    ids = Sentences(2).ids
    engine = trainer.model_wrapped
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def trainer_evaluates(pretrained: str, folder: str) -> float:
    """evaluate() of a Trainer that never trains, which makes an engine without an optimizer."""
    from transformers import AutoModelForCausalLM, Trainer

    fresh_accelerate()
    args = arguments(folder, deepspeed=deepspeed_config(3))
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(pretrained), args, eval_dataset=Sentences(7, seed=6))
    loss: float = trainer.evaluate()["eval_loss"]
    trainer.accelerator.free_memory(trainer.model_wrapped)
    return loss


def refuses(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resize(rank: int, world: int, tied: str, untied: str, folder: str) -> list[dict[str, Any]]:
    """Embeddings that grow before the engine is made, and a step afterwards."""
    stand_in()
    from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, Trainer

    results: list[dict[str, Any]] = []
    for path in (tied, untied):
        fresh_accelerate()
        args = arguments(folder, deepspeed=deepspeed_config(3, optimizer=False, scheduler=False), max_steps=2)
        torch.manual_seed(7 + rank)
        model = AutoModelForCausalLM.from_pretrained(path)
        before = whole(model)
        model.resize_token_embeddings(80)
        trainer = Trainer(model, args, train_dataset=Sentences(22))
        result: dict[str, Any] = {"before": before, "tied": model.lm_head.weight is model.model.embed_tokens.weight}
        trainer.train()
        result |= {"after": whole(model), "losses": losses_of(trainer), "size": model.config.vocab_size}
        trainer.accelerator.free_memory(trainer.model_wrapped)
        results.append(result)
    fresh_accelerate()
    args = arguments(folder, deepspeed=deepspeed_config(3), max_steps=2)
    model = LlamaForSequenceClassification.from_pretrained(tied, num_labels=3)  # a head that the files lack
    results.append({"head": whole(model)["score.weight"], "embed": whole(model)["model.embed_tokens.weight"], "args": args.max_steps})
    return results


class PeakMemory:
    """The most anonymous memory of this process inside the block, above that at its beginning. Bytes."""

    def __enter__(self) -> PeakMemory:
        self.start = self.most = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self.most - self.start

    def _watch(self) -> None:
        while not self._ends.is_set():
            self.most = max(self.most, self._now())
            time.sleep(0.002)

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon in /proc/self/status")


def big_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=8,
        tie_word_embeddings=False,
    )  # fmt: skip


def save_big(folder: Path) -> int:
    """Writes a larger model; returns its bytes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(big_config())
    model.save_pretrained(folder)
    return sum(p.nbytes for p in model.parameters())


def load_big(rank: int, world: int, folder: str) -> tuple[int, int]:
    """(most memory while it was loaded, bytes of the largest parameter)."""
    stand_in()
    from transformers import AutoModelForCausalLM

    told = zero3()
    AutoModelForCausalLM.from_config(model_config())  # what the first use of everything costs
    with PeakMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(folder)
    del told
    assert is_cut(model)
    return memory.grown, max(p.nbytes for p in model.parameters())
