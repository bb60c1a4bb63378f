"""The compiled model: what runs compiled, that it changes nothing, and that failing costs nothing; and the report that
no model or loss breaks into several graphs."""

import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import train as program
from models.yolo import Model
from tests import heads_cases, small_run
from tests.tiny_model import tiny_model
from utils.config.hyp import load_hyp
from utils.config.options import train_parser
from utils.fast import compile as compiled
from utils.fast.compile import CompileOptions
from utils.loggers.results import NullReport, RunReport

SUCCESS = "Model compiled successfully"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No environment from outside, kernels kept below the test's folder, and nothing left in torch's caches."""
    for name in ("USE_COMPILE", "DIAGNOSE_COMPILE", "COMPILE_BACKEND", "COMPILE_MODE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE", "1"))
    torch.compiler.reset()
    counters.clear()
    yield
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    torch.compiler.reset()


def fails_in_forward(graph, inputs):
    raise RuntimeError("no kernel for this\nand more")


def fails_in_backward(graph, inputs):
    def forward(module, _):
        return module.forward

    def backward(module, _):
        raise RuntimeError("no kernel for the way back")

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)


def new_model():
    torch.manual_seed(0)
    return tiny_model()


def train(model, sizes=(4, 4, 3)):
    """Train on batches of `sizes`; returns gradients (summed over batches) and state."""
    for seed, size in enumerate(sizes):
        images = torch.rand(size, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
        sum(level.square().mean() for level in model(images)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()} | deepcopy(model.state_dict())


def assert_equal(result, expected, **tolerance):
    assert list(result) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def test_same_training_and_one_graph(caplog):
    model, seconds = new_model(), []
    with caplog.at_level("INFO"):
        compiled.compile_model(model, seconds.append, CompileOptions("aot_eager", "default"))
        assert SUCCESS not in caplog.messages and not seconds
        result = train(model)
    assert_equal(result, train(new_model()), rtol=1e-5, atol=1e-6)
    assert caplog.messages[0] == SUCCESS and caplog.messages[1].startswith("compiled in ")
    assert len(seconds) == 1 and seconds[0] > 0
    assert counters["stats"]["unique_graphs"] == 1, "the smaller last batch is not compiled"
    assert result["model.0.bn.num_batches_tracked"] == 4  # building the model is the first


def test_another_image_size_is_compiled_too(caplog):
    """--resize-schedule trains on larger images from some epoch on."""
    caplog.set_level("INFO")
    model, seconds = new_model(), []
    compiled.compile_model(model, seconds.append, CompileOptions("aot_eager", "default"))
    for size, batch in ((64, 4), (64, 2), (96, 4), (96, 4), (96, 1)):
        model(torch.rand(batch, 3, size, size))
    assert len(seconds) == caplog.messages.count(SUCCESS) == counters["stats"]["unique_graphs"] == 2


class TwoHeads(torch.nn.Module):
    """Predictions in a list for each head."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, n) for n in (2, 4))

    def forward(self, images):
        return [[layer(images)] for layer in self.layers]


def test_a_model_of_several_heads(caplog):
    caplog.set_level("INFO")
    model = TwoHeads()
    compiled.compile_model(model, lambda seconds: None, CompileOptions("eager", "default"))
    (first,), (second,) = model(torch.ones(5, 3))
    assert first.shape == (5, 2) and second.shape == (5, 4)
    assert SUCCESS in caplog.text and "failed" not in caplog.text


def test_evaluation_copies_and_files_are_plain():
    model = new_model()
    compiled.compile_model(model, lambda seconds: None, CompileOptions("eager", "default"))
    images = torch.rand(2, 3, 64, 64)
    model.eval()(images)
    with torch.no_grad():
        model.train()(images)
    assert counters["stats"]["unique_graphs"] == 0
    model(images)
    assert counters["stats"]["unique_graphs"] == 1
    assert deepcopy(model)._compiled_call_impl is None
    assert list(model.state_dict()) == list(new_model().state_dict())


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(fails_in_forward, "no kernel for this"), (fails_in_backward, "no kernel for the way back"),
     ("nonsense", "nonsense")],
    ids=["forward", "backward", "start"],
)  # fmt: skip
def test_failure_is_a_warning_and_changes_nothing(backend, reason, caplog):
    model, seconds = new_model(), []
    compiled.compile_model(model, seconds.append, CompileOptions(backend, "default"))
    assert_equal(train(model), train(new_model()), rtol=0, atol=0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "runs as without it" in warning and reason in warning and "\n" not in warning
    assert SUCCESS not in caplog.messages


def test_an_error_of_the_model_itself_is_not_swallowed():
    model = new_model()
    compiled.compile_model(model, lambda seconds: None, CompileOptions("eager", "default"))
    with pytest.raises(RuntimeError, match="channels"):
        model(torch.rand(2, 4, 64, 64))


def test_data_parallel_is_left_alone(caplog):
    model = new_model()
    compiled.compile_model(torch.nn.DataParallel(model), lambda seconds: None, CompileOptions("aot_eager", "default"))
    assert model._compiled_call_impl is None and "torchrun" in caplog.text


# ---- the environment -----------------------------------------------------------------------------------------------


def test_options_from_environment(monkeypatch):
    assert compiled.options_from_environment() == CompileOptions("inductor", "default")
    monkeypatch.setenv("COMPILE_BACKEND", "eager")
    monkeypatch.setenv("COMPILE_MODE", "max-autotune-no-cudagraphs")
    assert compiled.options_from_environment() == CompileOptions("eager", "max-autotune-no-cudagraphs")
    monkeypatch.setenv("COMPILE_MODE", "fastest")
    with pytest.raises(ValueError, match="COMPILE_MODE=fastest.*max-autotune"):
        compiled.options_from_environment()


def test_kernels_outlive_the_run(monkeypatch, tmp_path, caplog):
    compiled.use_lasting_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "yolov7fast" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    compiled.use_lasting_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiled.use_lasting_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and "not kept" in caplog.text


# ---- whole runs ----------------------------------------------------------------------------------------------------


def results(folder):
    """results.txt without the epoch and memory columns."""
    return np.array([[float(word) for word in line.split()[2:]] for line in (folder / "results.txt").open()])


def test_runs_compiled_and_after_a_failure(tmp_path, monkeypatch, caplog):
    small_run.make_data(tmp_path, num_images=5)  # batches of 3 and 2
    flags = "--epochs", "1"
    plain = results(small_run.run(tmp_path, *flags))
    monkeypatch.setenv("USE_COMPILE", "1")
    monkeypatch.setenv("COMPILE_BACKEND", "eager")
    with caplog.at_level("INFO"):
        compiled_run = small_run.run(tmp_path, *flags)
    assert caplog.messages.count(SUCCESS) == 1
    np.testing.assert_allclose(results(compiled_run), plain, rtol=2e-3, atol=1e-4)
    monkeypatch.setenv("COMPILE_BACKEND", "nonsense")
    failed = small_run.run(tmp_path, *flags)
    np.testing.assert_array_equal(results(failed), plain)
    assert "compiling failed" in caplog.text


def test_compile_time_is_not_the_epochs(tmp_path):
    report = RunReport(tmp_path, 1, ["a"], images=False, tensorboard=False)
    batches = report.epoch(0, range(2), 2)
    began, bar_began = report.clock.started, batches.start_t
    report.exclude(3.5)
    assert report.clock.started == began + 3.5 and batches.start_t == bar_began + 3.5
    NullReport().exclude(3.5)


@pytest.mark.gpu
def test_inductor_on_a_gpu(caplog):
    model, plain = new_model().cuda(), new_model().cuda()
    compiled.compile_model(model, lambda seconds: None, CompileOptions("inductor", "default"))
    images = torch.rand(4, 3, 64, 64, device="cuda")
    with caplog.at_level("INFO"), torch.autocast("cuda"):
        outputs, expected = model(images), plain(images)
    assert SUCCESS in caplog.messages
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.float(), other.float(), rtol=2e-2, atol=2e-2)
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=2e-2, atol=2e-2)


# ---- DIAGNOSE_COMPILE=1 ----------------------------------------------------------------------------------------------


def layers_of(cfg):
    return {row[2] for section in ("backbone", "head") for row in cfg[section]}


def small_cfg_with_layers_of(family, folder):
    """A small network of those kinds of layers."""
    cfg = yaml.safe_load(small_run.make_cfg(folder, auxiliary="w6" in family).read_text())
    cfg["backbone"] += [[-1, 1, "SPPCSPC", [32]], [-1, 1, "RepConv", [32, 3, 1]], [-1, 1, "SP", [5]],
                        [-1, 1, "nn.Upsample", [None, 2, "nearest"]], [-1, 1, "MP", []],
                        [[-1, 6], 1, "Concat", [1]]]  # fmt: skip
    if "w6" in family:
        cfg["backbone"][0] = [-1, 1, "ReOrg", []]
    else:
        cfg["head"][-1][0] = [2, 3, 10]
    for name in family.split():
        assert layers_of(yaml.safe_load(Path(f"cfg/training/{name}.yaml").read_text())) <= layers_of(cfg)
    return cfg


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="Dynamo of torch 2.4 cuts the losses in pieces")
@pytest.mark.parametrize(
    ("family", "hyp", "losses"),
    [("yolov7-tiny yolov7", "p5", ["BatchedLoss", "BatchedLossOTA"]), ("yolov7-w6", "p6", ["BatchedLossAuxOTA"])],
)
def test_no_graph_breaks(family, hyp, losses, tmp_path):
    model = Model(small_cfg_with_layers_of(family, tmp_path), nc=80)
    lines = compiled.explain(model, load_hyp(f"data/hyp.scratch.{hyp}.yaml"), 80, 63).splitlines()
    torch.compiler.reset()
    names = ["model, images [2, 3, 64, 64]", *losses]
    assert lines[0] == "DYNAMO EXPLANATION REPORT"
    assert lines[3:-2] == [f"{name}: graph count 1, break count 0" for name in names]
    assert lines[-1] == f"total: graph count {len(names)}, break count 0"


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="Dynamo of torch 2.4 cuts the losses in pieces")
def test_several_heads():
    lines = compiled.explain(heads_cases.small_model(), load_hyp("data/hyp.scratch.tiny.yaml"), 3, 64).splitlines()
    names = [line.split(":")[0] for line in lines[3:-2]]
    assert names == ["model, images [2, 3, 64, 64]", "BatchedLoss, 2 heads", "BatchedLossOTA, 2 heads"]
    assert lines[-1] == "total: graph count 3, break count 0"


def test_breaks_come_with_their_reason():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    text = compiled.report([("it", compiled._explain(broken, (torch.zeros(2),)))])
    assert "it: graph count 2, break count 1" in text and "total: graph count 2, break count 1" in text
    assert "    1. " in text and "test_compile.py:" in text


def test_reasons_without_a_place():
    found = SimpleNamespace(
        graph_count=2, graph_break_count=1, break_reasons=[SimpleNamespace(reason="so\n so", user_stack=[])]
    )
    assert "    1. so so\n" in compiled.report([("it", found)])


def test_a_run_ends_with_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DIAGNOSE_COMPILE", "1")
    seen = []
    monkeypatch.setattr(compiled, "explain", lambda *arguments: seen.append(arguments) or "THE REPORT")
    line = small_run.arguments(tmp_path)
    with mock.patch("sys.argv", ["train.py", *line]):
        program.main(train_parser().parse_args(line))
    ((model, hyp, nc, image_size),) = seen
    assert isinstance(model, Model) and hyp["box"] == small_run.HYP["box"] and (nc, image_size) == (2, 64)
    assert "THE REPORT" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
