"""A training loop on accelerate, as its documentation writes it. Started by `accelerate launch --use_deepspeed`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

from tests.integrations.tiny import Sentences


def main(pretrained: str, folder: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Sentences(32), batch_size=2)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=16)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(folder, state_dict=state)
        stage = model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
        facts = {"losses": losses, "norms": norms, "rates": schedule.get_last_lr(), "world": accelerator.num_processes, "stage": stage}
        Path(folder, "result.json").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
