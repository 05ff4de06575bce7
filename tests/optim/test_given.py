"""What is refused and why, groups that are added, schedules after a resume, how owners are chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.engine.versus_torch import STAGES, Where, check, difference, fresh, one_mesh, whole_weights
from tests.optim.reference import CountingAdam, Net, lion, loss_of
from tests.ranks import run_ranks
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.ops.lion import FusedLion as Lion
from zeroengine.optim.build import named_groups, optimizer_factory, param_groups
from zeroengine.optim.kinds import is_elementwise, steps_apart
from zeroengine.optim.lamb import Lamb
from zeroengine.optim.muon import MuonWithAdamW, split_groups


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("LBFGS", {}, "closure"),
        ("SparseAdam", {}, "sparse gradients"),
        ("Adam", {"bias_correction": False, "torch_adam": True}, "always corrects"),
        ("Adam", {"lrr": 1.0}, "did you mean `lr`"),
        ("SGD", {"lr": 0.1, "betas": [0.9, 0.99]}, "optimizer.params.betas is not a parameter of SGD"),
        ("Lion", {"use_triton": True}, "use_triton"),
        ("Muon", {"ns_method": "qr"}, "ns_method"),
        ("Muon", {"per_head_muon": True}, "per_head_muon"),
        ("Adafactor", {"relative_step": True}, "relative_step"),
    ],
)
def test_refused_by_name_with_the_reason(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        optimizer_factory(name, params, nn.Linear(2, 2))


@pytest.mark.parametrize("values", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
@pytest.mark.parametrize("cls", [Lion, Lamb])
def test_values_out_of_range(cls: Any, values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, ConfigError), match="|".join(values)):
        cls([nn.Parameter(torch.ones(2))], **values)


def test_names_mean_what_deepspeed_means_by_the_modes() -> None:
    model = nn.Linear(2, 2)
    for name, mode, cls in [
        ("Adam", True, torch.optim.AdamW), ("Adam", False, torch.optim.Adam), ("AdamW", True, torch.optim.AdamW),
        ("AdamW", False, torch.optim.Adam),
    ]:  # fmt: skip
        options = {"lr": 0.1, "adam_w_mode": mode, "weight_decay": 0.5, "bias_correction": True}
        moved = []
        for more in ({"torch_adam": True}, {}):  # torch's class, and ours in its place
            mine = copy.deepcopy(model)
            optimizer = optimizer_factory(name, {**options, **more}, mine)(param_groups(mine, None))
            assert not more or type(optimizer) is cls
            for p in mine.parameters():
                p.grad = torch.full_like(p, 0.01)
            optimizer.step()
            moved.append(torch.cat([p.detach().flatten() for p in mine.parameters()]))
        assert torch.allclose(*moved, atol=1e-6), name


def test_which_classes_may_see_parts_and_be_stepped_in_rounds() -> None:
    class Subclass(torch.optim.AdamW):
        pass

    assert is_elementwise(torch.optim.AdamW, {}) and is_elementwise(Lion, {})
    assert not any(is_elementwise(c, {}) for c in (torch.optim.Adafactor, torch.optim.Muon, Lamb, CountingAdam, Subclass))
    assert is_elementwise(MuonWithAdamW, {"use_muon": False}) and not is_elementwise(MuonWithAdamW, {"use_muon": True})
    assert steps_apart(torch.optim.Adafactor) and steps_apart(Lamb) and not steps_apart(CountingAdam)


def test_muon_takes_matrices_and_keeps_options_of_groups() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(3, 2), "embedded": nn.Linear(2, 2), "fc": nn.Linear(2, 4)})
    model["lm_head"] = nn.Linear(2, 3)
    model["fc"].bias.use_muon = False
    matrices, rest = split_groups(model, [{"params": list(model.parameters()), "weight_decay": 0.3, "name": "all"}])
    assert [id(p) for p in matrices["params"]] == [id(model["fc"].weight)] and matrices["use_muon"] is True
    assert len(rest["params"]) == 6 and rest["weight_decay"] == matrices["weight_decay"] == 0.3
    optimizer = MuonWithAdamW([matrices, rest], lr=0.5, adam_lr=0.25, betas=(0.8, 0.9), momentum=0.7)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[0]["momentum"] == 0.7 and "betas" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9) and "momentum" not in optimizer.param_groups[1]
    model["fc"].weight.use_muon = False
    assert [g["use_muon"] for g in split_groups(model, [{"params": list(model.parameters())}])] == [False]
    with pytest.raises(ValueError, match="matrices"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])


def test_names_in_groups() -> None:
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    first, second = named_groups({"params": [("p", p)], "name": "n"}, {"params": q, "lr": 1.0})
    assert first["params"][0] is p and first["name"] == "n" and second["params"][0] is q
    with pytest.raises(ConfigError, match="group 1 holds a str"):
        named_groups({"params": [p]}, {"params": ["q"]})
    with pytest.raises(ConfigError, match="no 'params'"):
        named_groups({"lr": 1.0})


def test_lion_in_float64() -> None:
    start = torch.randn(3, 4, dtype=torch.float64)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine, theirs = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2).step, lion([q], 0.1, (0.9, 0.99), 0.2)
    for i in range(4):
        p.grad = q.grad = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        mine()
        theirs()
    assert torch.allclose(p, q, rtol=1e-14, atol=1e-14)


ZERO = {"train_micro_batch_size_per_gpu": 1}


def _objects(rank: int, ranks: int) -> list[str]:
    """Optimizers that are refused as objects leave the model as it was; one with a matrix optimizer over a part."""
    mesh, faults = one_mesh(), []
    model = fresh(Net)
    used = torch.optim.AdamW(model.parameters())
    loss_of(model, Where(0, 0, 0, 1)).backward()
    used.step()
    model.zero_grad()
    for optimizer, told in ((used, "has state"), (torch.optim.LBFGS(model.parameters()), "closure"), (lambda g: 3, "int")):
        try:
            config = {**ZERO, "zero_optimization": {"stage": 3}}
            zeroengine.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)  # type: ignore[arg-type]
            faults.append(f"{told}: not refused")
        except ConfigError as error:
            if told not in str(error):
                faults.append(f"'{told}' is not in: {error}")
    for stage in STAGES:
        model = fresh(Net)
        own = torch.optim.Muon([model.up.weight, model.down.weight])  # type: ignore[list-item]
        config = {**ZERO, "zero_optimization": {"stage": stage, "bucket_size": 24}}
        engine = zeroengine.initialize(model=model, optimizer=own, config=config, mesh=mesh)[0]
        before = whole_weights(engine)
        engine.backward(loss_of(engine, Where(0, 0, rank, ranks)))
        engine.step()
        changed = {n for n, w in whole_weights(engine).items() if not torch.equal(w, before[n])}
        if changed != {"up.weight", "down.weight"}:
            faults.append(f"stage {stage}: {changed} changed")
        if engine.optimizer.optimizer is not own:
            faults.append("the user's object is not in use")
        engine.destroy()
    return faults


@pytest.mark.ranks
def test_optimizer_objects() -> None:
    check(_objects)


SECTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "eps": 1e-3},
    "Adafactor": {"lr": 0.02},
}


def _added(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for name, params in SECTIONS.items():
        model = fresh(Net)
        reference = getattr(torch.optim, name)(list(model.down.parameters()), **params)  # type: ignore[union-attr]
        for step in range(3):
            if step == 1:
                reference.add_param_group({"params": [model.up.weight, model.norm.bias], "lr": 0.05})  # type: ignore[union-attr]
            for r in range(ranks):
                (loss_of(model, Where(step, 0, r, ranks)) / ranks).backward()
            reference.step()
            model.zero_grad()
        expected = {n: p.detach() for n, p in model.named_parameters()}
        for stage in STAGES:
            model = fresh(Net)
            model.spare.requires_grad_(False)  # type: ignore[union-attr]
            config = {
                **ZERO, "optimizer": {"type": name, "params": params}, "zero_optimization": {"stage": stage, "bucket_size": 24},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_max_lr": None}},
            }  # fmt: skip
            given = list(model.down.parameters())  # type: ignore[union-attr]
            engine = zeroengine.initialize(model=model, model_parameters=given, config=config, mesh=mesh)[0]
            for step in range(3):
                if step == 1:
                    engine.optimizer.add_param_group(
                        {"params": [("up", model.up.weight), ("bias", model.norm.bias)], "lr": 0.05}  # type: ignore[union-attr]
                    )
                engine.backward(loss_of(engine, Where(step, 0, rank, ranks)))
                engine.step()
            if engine.get_lr() != [params["lr"], 0.05]:
                faults.append(f"{name} stage {stage}: rates {engine.get_lr()}")
            worst, who = difference(whole_weights(engine), expected)
            if not worst <= 2e-6:
                faults.append(f"{name} stage {stage}: weights differ by {worst:.2e} in {who}")
            for p, told in ((model.up.weight, "already"), (model.spare.weight, "frozen")):  # type: ignore[union-attr]
                try:
                    engine.optimizer.add_param_group({"params": [p.requires_grad_()]})  # type: ignore[operator]
                    faults.append(f"{name} stage {stage}: {told} was taken")
                except ConfigError as error:
                    if told not in str(error):
                        faults.append(f"'{told}' is not in: {error}")
            model.spare.requires_grad_(False)  # type: ignore[union-attr]
            engine.destroy()
    return faults


@pytest.mark.ranks
def test_groups_added_to_a_running_engine() -> None:
    check(_added)


def _schedules(rank: int, ranks: int, folder: str) -> list[str]:
    """torch's schedules continue after a resume with the rates of a run that was never interrupted (and so do ours)."""
    mesh, faults = one_mesh(), []
    ways: dict[str, Any] = {
        "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    }

    def make(how: Any) -> Any:
        config = {**ZERO, "optimizer": {"type": "AdamW", "params": SECTIONS["AdamW"]}, "zero_optimization": {"stage": 2}}
        if isinstance(how, dict):
            config["scheduler"] = {"type": "OneCycle", "params": how}
            return zeroengine.initialize(model=fresh(Net), config=config, mesh=mesh)[0]
        return zeroengine.initialize(model=fresh(Net), lr_scheduler=how, config=config, mesh=mesh)[0]

    def rates(engine: Any) -> list[Any]:
        used = []
        for step in range(3):
            used.append((engine.get_lr(), engine.optimizer.param_groups[0]["betas"]))
            engine.backward(loss_of(engine, Where(step, 0, rank, ranks)))
            engine.step()
        return used

    for name, how in ways.items():
        engine = make(how)
        rates(engine)
        engine.save_checkpoint(f"{folder}/{name}")
        expected = rates(engine)
        engine.destroy()
        for with_state in (True, False):
            engine = make(how)
            group = engine.optimizer.param_groups[0]
            engine.load_checkpoint(f"{folder}/{name}", load_optimizer_states=with_state)
            got = rates(engine)
            if [r for r, _ in got] != [r for r, _ in expected] or (with_state and got != expected):
                faults.append(f"{name} with state {with_state}: {got}, not {expected}")
            if engine.optimizer.param_groups[0] is not group or engine.lr_scheduler.optimizer.param_groups[0] is not group:
                faults.append(f"{name}: another group dict after the resume")
            engine.destroy()
    return faults


def _other_options(rank: int, ranks: int, folder: str) -> list[str]:
    mesh, faults = one_mesh(), []
    for optimizer in ("AdamW", "SGD"):
        for stage, params in ((1, {"lr": 0.01}), (3, {"lr": 0.01, "amsgrad" if optimizer == "AdamW" else "momentum": True})):
            config = {**ZERO, "optimizer": {"type": optimizer, "params": params}, "zero_optimization": {"stage": stage}}
            engine = zeroengine.initialize(model=fresh(Net), config=config, mesh=mesh)[0]
            if stage == 1:
                engine.backward(loss_of(engine, Where(0, 0, rank, ranks)))
                engine.step()
                engine.save_checkpoint(f"{folder}/{optimizer}")
            else:
                try:
                    engine.load_checkpoint(f"{folder}/{optimizer}")
                    faults.append(f"{optimizer}: loaded without a word")
                except CheckpointError as error:
                    if "load_optimizer_states=False" not in str(error):
                        faults.append(str(error))
            engine.destroy()
    return faults


@pytest.mark.ranks
def test_schedules_and_options_over_a_resume(tmp_path: Path) -> None:
    for job in (_schedules, _other_options):
        faults = [f for found in run_ranks(job, 2, str(tmp_path), timeout=150) for f in found]
        assert not faults, "\n" + "\n".join(faults)
