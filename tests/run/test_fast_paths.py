"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils.config.options import check_train_options, train_parser
from utils.data.fast.loader import LoaderOptions
from utils.data.gpu.kept_batches import keep
from utils.data.gpu.placing import open_images
from utils.engine import batches
from utils.fast.async_checkpoint import BackgroundCheckpoints
from utils.fast.compile import CompileOptions, compile_model
from utils.fast.exchange import Exchange
from utils.fast.graph_step import GraphSteps
from utils.fast.prefetcher import Prefetcher
from utils.fast.train_step import FastSteps
from utils.fast.validation import FastValidation
from utils.loss import batched, criterion
from utils.run import fast_paths
from utils.run.fast_paths import REFERENCE
from utils.system import distributed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_compile(monkeypatch):
    for name in ("USE_COMPILE", "DIAGNOSE_COMPILE", "COMPILE_BACKEND", "COMPILE_MODE"):
        monkeypatch.delenv(name, raising=False)


def choose(*flags, device="cuda", **facts):
    opt = train_parser().parse_args(flags)
    vars(opt).update(facts)
    return fast_paths.choose(opt, torch.device(device))


@pytest.mark.parametrize("flags", [(), ("--loader-timeout", "5", "--workers", "2"), ("--amp", "off", "--multi-scale")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_flag_means_the_reference(flags, device, caplog):
    assert choose(*flags, device=device) is REFERENCE and not caplog.records
    assert REFERENCE.loader == {} and REFERENCE.batches is batches.plain
    assert REFERENCE.losses is criterion.losses_by_epoch and fast_paths.diagnosis() is None
    assert REFERENCE.steps("a trainer") == "a trainer" and REFERENCE.forward("a model") == "a model"


def test_choice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        REFERENCE.batches = None


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fast_step(device, caplog):
    caplog.set_level("INFO")
    paths = choose("--fast-step", "--sync-interval", "4", device=device)
    assert paths.steps.func is FastSteps and paths.steps.keywords == {"interval": 4}
    assert isinstance(paths.batches, Prefetcher) and paths.batches.targets_device is None and not paths.batches.floats
    assert paths.losses is criterion.losses_by_epoch and "losses every 4 steps" in caplog.text
    assert paths.checkpoints is BackgroundCheckpoints


def test_several_processes_exchange_gradients_without_a_wrapper():
    paths = choose("--fast", "--loader-timeout", "7", world_size=2)
    exchange = paths.steps.keywords["open_exchange"]
    assert paths.steps.func is GraphSteps and exchange.func is Exchange and exchange.keywords == {"timeout": 7}
    assert paths.data_parallel is distributed.without_wrapper
    assert choose("--fast-loss", world_size=2).data_parallel is distributed.data_parallel


def test_adam_on_several_processes_keeps_the_wrapper():
    paths = choose("--fast-step", "--adam", world_size=2)
    assert paths.data_parallel is distributed.data_parallel and paths.steps.keywords == {"interval": 10}


def test_fast_step_with_other_flags():
    paths = choose("--fast-step", "--fast-loss", "--multi-scale")
    assert paths.batches.targets_device == CPU and paths.batches.floats
    assert paths.losses.keywords == {"classes": batched.CLASSES}


def test_a_graph_needs_the_other_two(caplog):
    caplog.set_level("INFO")
    paths = choose("--cuda-graph")
    assert paths.steps.func is GraphSteps and paths.losses.keywords == {"classes": batched.CLASSES}
    assert "--cuda-graph needs --fast-loss" in caplog.text and "--cuda-graph needs --fast-step" in caplog.text


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [(("--multi-scale",), {}, "multi-scale"), (("--adam",), {}, "SGD has"),
     (("--sync-bn",), {"world_size": 2}, "sync-bn"), (("--device", "0,1"), {}, "several GPUs"),
     ((), {"device_name": "cpu"}, "no CUDA device")],
)  # fmt: skip
def test_a_graph_that_cannot_be_is_a_warning(flags, facts, reason, caplog):
    device = facts.pop("device_name", "cuda")
    paths = choose("--cuda-graph", *flags, device=device, **facts)
    assert paths.steps.func is FastSteps
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("--cuda-graph: ") and reason in warning


def test_fast_is_everything_that_can_run(caplog):
    caplog.set_level("INFO")
    assert choose("--fast").steps.func is GraphSteps
    for text in ("captured in a CUDA graph", "| fp16", "workers stay", "whole batch at once", "side stream"):
        assert text in caplog.text
    caplog.clear()
    paths = choose("--fast", device="cpu")
    assert paths.steps.func is FastSteps and paths.losses.keywords == {"classes": batched.CLASSES}
    assert isinstance(paths.evaluate, FastValidation) and paths.forward is REFERENCE.forward
    assert "there is no CUDA device" in caplog.text and "| off" in caplog.text
    assert all(record.levelname == "INFO" for record in caplog.records), "nobody asked for a graph by name"
    assert paths.loader["persistent_workers"] and paths.loader["worker_tensor"]


def test_trials_are_never_captured(caplog):
    for flag in ("--fast", "--cuda-graph"):
        opt = train_parser().parse_args([flag])
        opt.world_size = 2
        paths = fast_paths.for_trials(opt, torch.device("cuda"))
        assert paths.steps.func is FastSteps and paths.steps.keywords == {"interval": 10}
        assert paths.losses.keywords == {"classes": batched.CLASSES}
    assert not caplog.records


def test_an_interval_without_the_step_is_a_warning(caplog):
    assert choose("--sync-interval", "3") is REFERENCE and "has no effect without --fast-step" in caplog.text


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"world_size": 2}, None),
        ({"world_size": 2, "device": "0,1"}, None),
        ({"device": "0,1"}, "several GPUs"),
        ({"world_size": 2, "sync_bn": True}, "sync-bn"),
        ({"world_size": 2, "adam": True}, "wrapped"),
        ({}, None),
    ],
    ids=["processes", "named GPUs", "GPUs", "sync-bn", "adam", "one"],
)
def test_fused_kernels_are_for_a_bare_model(facts, reason, monkeypatch, caplog):
    monkeypatch.setattr(fast_paths, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(fast_paths, "load", lambda name: name)  # models.fused needs Triton
    caplog.set_level("INFO")
    opt = train_parser().parse_args(["--fast-step"])
    vars(opt).update(facts)
    (row,) = (path for path in fast_paths.table(opt, torch.device("cuda")) if path.seam == "forward")
    assert row.wanted == "--fast-step" and row.make(None) == "models.fused.network:fused_model"
    assert row.obstacle is None if reason is None else reason in row.obstacle


def test_compile(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("USE_COMPILE", "1")
    compile = choose("--fast-step", device="cuda").compile
    assert compile.func is compile_model and compile.keywords == {"options": CompileOptions("inductor", "default")}
    assert "torch.compile (inductor, default)" in caplog.text and "not fused" in caplog.text


@pytest.mark.parametrize("flag", ["--multi-scale", "--rect"])
def test_changing_sizes_are_not_compiled(flag, monkeypatch, caplog):
    monkeypatch.setenv("USE_COMPILE", "1")
    assert choose(flag) is REFERENCE and f"USE_COMPILE=1: no effect with {flag}" in caplog.text


@pytest.mark.parametrize("value", ["yes", "2"])
def test_the_environment_says_1_or_0(value, monkeypatch):
    monkeypatch.setenv("USE_COMPILE", "0")
    assert choose() is REFERENCE
    monkeypatch.setenv("USE_COMPILE", value)
    with pytest.raises(ValueError, match=f"USE_COMPILE={value}"):
        choose()


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_fast_loss_and_ota_last_choose_the_losses(caplog):
    caplog.set_level("INFO")
    paths = choose("--fast-loss", "--ota-last", "3", device="cpu")
    assert paths.batches is batches.plain
    assert paths.losses.func is criterion.losses_by_epoch
    assert paths.losses.keywords == {"classes": batched.CLASSES, "ota_last": 3}
    assert "seam" in caplog.text and "--fast-loss" in caplog.text and "--ota-last 3" in caplog.text


def test_on_a_gpu_the_fast_loss_gets_its_targets_on_the_host():
    images, targets = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 6)
    (batch,) = choose("--fast-loss").batches([(images, targets, ("a.jpg",), None)], torch.device("meta"))
    assert batch.images.device.type == "meta" and batch.targets.device.type == "cpu"


@pytest.mark.parametrize(("flags", "lacking", "is_tried"), [
    (["--cuda-graph"], None, True),
    (["--cuda-graph"], "a C compiler missing", False),
    (["--fast-step"], None, False),
])  # fmt: skip
def test_the_kernels_of_the_loss_are_tried_where_it_will_need_them(flags, lacking, is_tried, monkeypatch):
    asked = []
    monkeypatch.setattr(fast_paths, "why_no_kernels", lambda device: lacking)
    monkeypatch.setattr(fast_paths, "load", lambda name: lambda *given: asked.append((name, *given)))
    device = torch.device("cuda")
    (row,) = (path for path in fast_paths.table(train_parser().parse_args(flags), device) if path.seam == "ahead")
    row.make(None)
    assert asked == [("utils.fast.start:prepare", True, device, is_tried)]


def test_ota_last_has_to_be_positive():
    with pytest.raises(ValueError, match="--ota-last 0"):
        check_train_options(train_parser().parse_args(["--cfg", "c.yaml", "--ota-last", "0"]))


# ---- the loader ------------------------------------------------------------------------------------------------------


def test_fast_dataloader_is_both_loader_flags():
    both = choose("--fast-dataloader").loader
    assert both == choose("--persistent-workers", "--worker-tensor").loader
    assert both["persistent_workers"] and both["worker_tensor"] and both["timeout"] == 300 and both["seed"] is None


@pytest.mark.parametrize(
    "flags",
    [("--persistent-workers",), ("--worker-tensor",), ("--seed", "0"), ("--prefetch-factor", "4"),
     ("--micro-batch-size", "4"), ("--max-iter", "4")],
    ids=" ".join,
)  # fmt: skip
def test_each_loader_flag_alone(flags, caplog):
    caplog.set_level("INFO")
    name = flags[0].removeprefix("--").replace("-", "_").replace("max_iter", "max_batches")
    options = choose(*flags).loader
    LoaderOptions(**options)
    assert options.pop(name) == (int(flags[1]) if len(flags) > 1 else True)
    expected = {"persistent_workers": False, "worker_tensor": False, "micro_batch_size": 0, "prefetch_factor": None,
                "timeout": 300, "seed": None}  # fmt: skip
    assert options == {key: value for key, value in expected.items() if key != name}
    assert f"| {' '.join(flags)}" in caplog.text


# ---- images beside the model -----------------------------------------------------------------------------------------

STEP = ("--fast-step", "--fast-dataloader")


@pytest.fixture
def kernels(monkeypatch):
    reason = "Triton and a GPU are needed"
    monkeypatch.setattr(fast_paths, "why_no_kernels", lambda device: None if device.type == "cuda" else reason)


@pytest.fixture
def cores(monkeypatch):
    def simulate(count, processes=None):
        monkeypatch.setattr(fast_paths, "usable_cores", lambda: count)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return simulate


def said(caplog):
    """All messages, without the breaks of their lines."""
    return " ".join(" ".join(caplog.messages).split())


def test_images_on_the_gpu_are_asked_for(kernels, caplog):
    caplog.set_level("INFO")
    paths = choose("--cache-images", "gpu", *STEP, "--fast-val")
    store = paths.loader["compose"]
    LoaderOptions(**paths.loader)
    assert store.func is open_images and store.keywords == {"device": torch.device("cuda"), "is_asked": True}
    assert paths.kept.func is keep and paths.kept.keywords == {"device": torch.device("cuda"), "is_asked": True}
    assert "loader | images beside the model, if they fit (data/gpu) | --cache-images gpu" in said(caplog)
    assert choose("--cache-images", "gpu", *STEP).kept is None
    for other in (("--cache-images", "ram"), ("--cache-images", "disk"), ("--cache-images",), ()):
        assert "compose" not in choose(*other, *STEP).loader


@pytest.mark.parametrize(
    ("flags", "device", "reason"),
    [((), "cpu", "Triton and a GPU are needed"), (("--workers", "0"), "cuda", "there are no loader workers")],
)
def test_images_that_cannot_be_there_are_a_warning(flags, device, reason, kernels, caplog):
    assert "compose" not in choose("--cache-images", "gpu", *STEP, *flags, device=device).loader
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"--cache-images gpu: {reason}")


@pytest.mark.parametrize(
    ("count", "processes", "flags", "is_chosen"),
    [
        (16, None, (), False),
        (8, None, (), True),
        (64, 8, (), True),
        (128, 8, (), False),
        (8, None, ("--cache-images", "disk"), False),
        (8, None, ("--cache-images",), False),
    ],
)
def test_fast_looks_at_the_cores(count, processes, flags, is_chosen, kernels, cores, caplog):
    caplog.set_level("INFO")
    cores(count, processes)
    paths = choose("--fast", *flags)
    assert ("compose" in paths.loader) == is_chosen and paths.kept.keywords["is_asked"] is False
    if is_chosen:
        assert paths.loader["compose"].keywords["is_asked"] is False
        assert "| --fast, on 8 cores a GPU: if they are too few" in said(caplog)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_fast_takes_as_many_workers_as_there_are_cores(kernels, cores, caplog):
    caplog.set_level("INFO")
    for count, workers in ((4, 4), (16, 16), (64, 16)):
        cores(count)
        assert choose("--fast").loader["workers"] == workers and f"{workers} workers" in caplog.text
        assert "workers" not in choose("--fast", "--workers", "3").loader, "somebody knows better"
        assert "workers" not in choose("--fast", device="cpu").loader
