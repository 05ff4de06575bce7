"""The stand-in for deepspeed by itself: its names, its version, and when it is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.standin.finder import StandInFinder, install
from zeroengine.integrations.standin.surface import NAMES, REFUSED_CALLS, REFUSED_MODULES, VERSION
from zeroengine.launcher.as_deepspeed import as_deepspeed

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def stand_in() -> Iterator[None]:
    """The stand-in, and the interpreter afterwards as if it had not been."""
    # Other tests of this process may have imported transformers, which the stand-in refuses to come after.
    concerned = [n for n in sys.modules if n.partition(".")[0] == "deepspeed" or n == "transformers.integrations.deepspeed"]
    before = {name: sys.modules.pop(name) for name in concerned}
    install()
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, StandInFinder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(before)


def python(code: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter whose path begins with `path`."""
    paths = os.pathsep.join(p for p in (path, str(ROOT)) if p)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": paths, **env}
    )


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_name_of_the_table_is_there(module: str, stand_in: None) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module]:
        assert getattr(found, name) is not None
    assert set(NAMES[module]) <= set(dir(found))


def test_submodules_are_attributes_and_zero_is_runtime_zero(stand_in: None) -> None:
    import deepspeed

    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.zero is importlib.import_module("deepspeed.runtime.zero")
    assert deepspeed.utils.safe_get_full_grad.__module__.startswith("zeroengine.")
    assert deepspeed.comm.get_world_size and deepspeed.comm.ProcessGroup  # torch.distributed's own


def test_the_distribution_has_the_version_that_programs_compare(stand_in: None) -> None:
    import deepspeed

    assert importlib.metadata.version("deepspeed") == VERSION == deepspeed.__version__
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.ops.adam") is not None


@pytest.mark.parametrize("path", sorted(REFUSED_CALLS))
def test_refused_calls_can_be_imported_and_say_why(path: str, stand_in: None) -> None:
    module, _, name = path.rpartition(".")
    with pytest.raises(ZeroEngineError, match=f"{path}: .{{20,}}"):
        getattr(importlib.import_module(module), name)(object())


@pytest.mark.parametrize("module", [*sorted(REFUSED_MODULES), "deepspeed.ops.op_builder.async_io", "deepspeed.no_such"])
def test_modules_that_are_not_here_say_why(module: str, stand_in: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.[\w.]+: .{20,}") as caught:
        importlib.import_module(module)
    assert caught.value.name and module.startswith(caught.value.name)


def test_a_name_that_is_not_there_is_an_attribute_error_that_names_it(stand_in: None) -> None:
    import deepspeed

    assert not hasattr(deepspeed, "no_such_name")
    with pytest.raises(AttributeError, match="deepspeed.no_such_name"):
        deepspeed.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        from deepspeed import other_name  # noqa: F401


def test_the_real_package_must_not_be_imported_before(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    done = python("import deepspeed\nimport zeroengine.integrations.deepspeed", str(tmp_path))
    assert done.returncode == 1 and "the real deepspeed is imported already" in done.stderr
    assert "at the top of the program" in done.stderr
    done = python("import zeroengine.integrations.deepspeed, deepspeed\nprint(deepspeed.__version__)", str(tmp_path))
    assert done.stdout.strip() == VERSION, done.stderr  # before it, ours wins


def test_transformers_must_not_have_settled_that_there_is_none() -> None:
    done = python("import transformers.integrations.deepspeed\nimport zeroengine.integrations.deepspeed")
    assert done.returncode == 1 and "transformers was imported before" in done.stderr and "--as-deepspeed" in done.stderr


def test_the_folder_for_the_path_does_the_same_and_reaches_children() -> None:
    code = (
        "import importlib.metadata, importlib.util, subprocess, sys\n"
        "assert importlib.util.find_spec('deepspeed') and importlib.metadata.version('deepspeed') == '0.19.8'\n"
        "from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME\n"
        "import deepspeed\n"
        "assert deepspeed.zero.Init.__module__ == 'zeroengine.zero.init', deepspeed.zero.Init\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, '-c', 'import deepspeed; print(deepspeed.initialize.__module__)'], check=True)\n"
    )
    done = python(code, as_deepspeed()["PYTHONPATH"].split(os.pathsep)[0])
    assert done.stdout.strip() == "zeroengine.integrations.standin.calls", done.stderr


def test_pipelines_take_deepspeeds_arguments(stand_in: None) -> None:
    """In DeepSpeed's order and with its defaults; grids of ranks have its numbers."""
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe import ProcessTopology
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    import zeroengine.pipe
    from zeroengine.errors import ConfigError

    layers = [LayerSpec(torch.nn.Linear, 2, 2), LayerSpec(torch.nn.Tanh)]
    loss = torch.nn.functional.mse_loss

    class Mine(PipelineModule):
        def __init__(self) -> None:
            super().__init__(
                layers, 1, None, loss, seed_layers=True, base_seed=5, activation_checkpoint_interval=1,
                checkpointable_layers=["Linear"], dynamic_shape=True,
            )  # fmt: skip

    model = Mine()
    assert isinstance(model, zeroengine.pipe.PipelineModule) and model.loss_fn is loss and model.num_pipeline_stages() == 1
    torch.manual_seed(5)
    assert torch.equal(model.layers["0"].weight, torch.nn.Linear(2, 2).weight)
    torch.manual_seed(7)
    drawn = torch.nn.Linear(2, 2).weight
    torch.manual_seed(7)
    assert torch.equal(PipelineModule(layers, topology=PipeDataParallelTopology(1, 1)).layers["0"].weight, drawn)
    for arguments, reason in (
        ({}, "needs num_stages or a topology"),
        ({"topology": PipeModelDataParallelTopology(1, 2, 1)}, "mesh.tp"),
        ({"topology": ProcessTopology(["data", "pipe"], [1, 1])}, "`pipe` is the outermost"),
        ({"num_stages": 1, "seed_layers": True, "seed_fn": print}, "seed_fn"),
    ):
        with pytest.raises(ConfigError, match=reason):
            PipelineModule(layers, **arguments)
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert grid.world_size() == 8 and grid.get_rank(pipe=1, data=0, model=1) == 5 and grid.get_coord(6) == (1, 1, 0)
    assert (grid.get_dim("model"), grid.get_dim("other")) == (2, 0)
    assert grid.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.filter_match(pipe=0, model=1) == [1, 3] and grid.get_axis_list("data", 1) == [2, 3, 6, 7]
