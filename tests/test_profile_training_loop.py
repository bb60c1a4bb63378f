"""The profiler: its instruments, what it makes of variants and results, and one row of a real run."""

import json
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml

from tests import profile_training_loop as profile
from tests import profiling, small_run
from tests.rank_cases import run_ranks

CPU = torch.device("cpu")


def test_timeline_adds_up():
    timeline = profiling.Timeline(CPU)
    timeline.mark("ignored")
    timeline.is_on = True
    clock = iter([1.0, 1.5, 1.75, 3.75, 4.0])
    with mock.patch("time.perf_counter", lambda: next(clock)):
        timeline.mark("data")
        timeline.around(lambda: None, "forward", "loss")()
        timeline.mark("data")
        timeline.mark("other")
    device, host = timeline.milliseconds(num_steps=2)
    assert device == host == {"data": 375, "forward": 125, "loss": 1000}


def test_a_failing_call_ends_its_phase():
    timeline = profiling.Timeline(CPU)
    timeline.is_on = True
    with pytest.raises(ZeroDivisionError):
        timeline.around(lambda: 1 / 0, "loss")()
    assert [name for name, _, _ in timeline.cuts] == ["loss", "other"]


def test_resident_source_repeats_a_copy():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    loader = [(images, torch.ones(1, 6), ("a",), None), (images + 1, torch.ones(1, 6), ("b",), None)]
    source = profiling.Source(loader, CPU, profiling.Timeline(CPU))
    assert [batch[2] for batch in source] == [("a",), ("b",)] and not hasattr(source, "copy_stream")
    source.resident = True
    images.fill_(9)
    batches = list(source)
    assert len(source) == len(batches) == 2 and all(batch[2] == ("a",) and not batch[0].any() for batch in batches)


def test_usage_counts_the_main_process():
    usage = profiling.Usage(CPU)
    usage.start()
    until = time.perf_counter() + 0.05  # not processor time: that runs faster than the clock with several threads
    while time.perf_counter() < until:
        pass
    found = usage.stop()
    assert found["seconds"] >= 0.05 and found["main_cores"] > 0
    assert found["worker_cores"] >= 0 and found["gpu"] is None


def test_variants():
    assert profile.split_variant("off") == ([], {})
    flags, environment = profile.split_variant("--fast-loss --seed 7 USE_COMPILE=1")
    assert (flags, environment) == (["--fast-loss", "--seed", "7"], {"USE_COMPILE": "1"})


def row(variant, rate, **more):
    usage = {"rate": rate, "steps": 10, "seconds": 2.0, "gpu": None, "main_cores": 0.5, "worker_cores": 3.0}
    phases = {"device_ms": {"data": 1.5, "forward": 40.0}, "host_ms": {}}
    stages = {"end to end": usage, "resident": usage | {"rate": 2 * rate}, "phases": phases}
    return {"job": "tiny64", "img": 320, "batch": 64, "variant": variant, "cards": 1} | stages | more


def test_table_and_files(tmp_path):
    failed = {"job": "tiny64", "img": 320, "batch": 64, "variant": "--x", "cards": 1, "error": "it | broke"}
    rows = [row("off", 90.0), failed, row("--fast", 4600.0, memory_gb=12.34)]  # fmt: skip
    files = profile.write(rows, SimpleNamespace(device="cpu"), tmp_path)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0].startswith("CPU, wall clock")
    assert lines[2].endswith("| ms/step | data | forward |")
    assert lines[4] == "| tiny64, batch 64 | `off` | 1 | 90 | - | 10 | 180 | - | 0.50 | 3.0 | - | 200.0 | 1.5 | 40.0 |"
    assert lines[5] == "| tiny64, batch 64 | `--x` | 1 | it / broke |"
    assert "4,600" in lines[6] and "12.3" in lines[6]
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    assert (tmp_path / "phases.png").stat().st_size > 1000
    assert profile.in_one_line(rows[1]).endswith("FAILED: it | broke")


def test_only_files_that_were_written_are_named(tmp_path):
    (tmp_path / "phases.png").touch()  # of an earlier run
    failed = {"job": "tiny64", "img": 320, "batch": 64, "variant": "off", "cards": 1, "error": "not done after 60 s"}
    assert profile.write([failed], SimpleNamespace(device="cpu"), tmp_path) == ["results.json", "table.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.md"]


def test_a_row_that_fails_says_why(tmp_path):
    options = SimpleNamespace(out=tmp_path, steps=1, seconds=5, workers=0, device="cpu", timeout=60)
    chosen = {"cfg": "none.yaml", "hyp": "none.yaml", "img": 64, "batch": 4, "num_images": 8}
    found = profile.run_child("tiny64", chosen, "off", tmp_path / "none.yaml", tmp_path, options)
    assert "none.yaml" in found["error"] and found["variant"] == "off"
    found = profile.run_child("tiny64", chosen, "--nonsense", tmp_path / "none.yaml", tmp_path, options)
    assert "--nonsense" in found["error"]


def test_one_row_of_a_real_run(tmp_path):
    small_run.make_data(tmp_path, num_images=8)
    hyp = tmp_path / "hyp.yaml"
    hyp.write_text(yaml.safe_dump(small_run.HYP))
    options = SimpleNamespace(
        child=str(tmp_path / "result.json"), data=str(tmp_path / "data.yaml"), cfg=str(small_run.make_cfg(tmp_path)),
        hyp=str(hyp), img=64, batch=4, workers=0, device="cpu", steps=3, seconds=50, flags=["--fast-loss"],
    )  # fmt: skip
    results = profile.measure(options)
    assert [results[name]["steps"] for name in ("warm-up", "end to end", "phases", "resident")] == [3] * 4
    assert results["end to end"]["images"] == 12 and results["end to end"]["rate"] > 0
    phases = results["phases"]["device_ms"]
    assert all(phases[name] > 0 for name in ("data", "copy", "forward", "loss", "backward", "optimiser", "read-back"))
    assert sum(phases.values()) == pytest.approx(1e3 * results["phases"]["seconds"] / 3, rel=0.3)


def test_results_of_several_processes_become_one_row():
    of_ranks = [{name: {"rate": rate, "images": 5, "worker_cores": 2.0, "main_cores": main, "gpu": gpu, "steps": 3}
                 for name in ("end to end", "resident")} | {"memory_gb": 1.0}
                for rate, main, gpu in ((10.0, 0.2, 90), (11.0, 0.4, 80))]  # fmt: skip
    found = profile.merged(of_ranks)
    assert found["end to end"] == {
        "rate": 21,
        "images": 10,
        "worker_cores": 4,
        "main_cores": 0.4,
        "gpu": 85,
        "steps": 3,
    }
    rows = [row("--fast", 10.0), row("off", 4.0), row("--fast", 21.0, cards=2)]
    profile.add_scaling(rows)
    assert rows[2]["scaling"] == pytest.approx(1.05)
    assert "| `--fast` | 2 | 21 | 1.05 |" in profile.table(rows) and ", 2 cards:" in profile.in_one_line(rows[2])


def profile_of_a_rank(folder, rank):
    hyp = folder / "hyp.yaml"
    hyp.write_text(yaml.safe_dump(small_run.HYP))
    options = SimpleNamespace(
        child=str(folder / "result.json"), data=str(folder / "data.yaml"), cfg=str(folder / "cfg.yaml"), hyp=str(hyp),
        img=64, batch=2, workers=0, device="cpu", steps=3, seconds=1e-6, flags=["--fast-step"],
    )  # fmt: skip
    results = profile.measure(options)
    assert [results[name]["steps"] for name in ("warm-up", "end to end", "phases", "resident")] == [3] * 4
    assert results["end to end"]["images"] == 6


def test_two_processes_end_after_the_same_step(tmp_path):
    small_run.make_data(tmp_path, num_images=8)
    small_run.make_cfg(tmp_path)
    for ended in run_ranks(partial(profile_of_a_rank, tmp_path), tmp_path):
        assert ended.status == 0, ended.text


def test_a_composed_batch_is_resident_as_finished_images():
    class Composed:
        def on_device(self, room):
            return room(2, (2, 4, 4, 3)).fill_(7).permute(0, 3, 1, 2)

    source = profiling.Source([(Composed(), torch.zeros(1, 6), ("a.jpg",), None)] * 3, CPU, profiling.Timeline(CPU))
    next(iter(source))
    source.resident = True
    for images, *_ in source:
        there = images.on_device(lambda number, shape: torch.empty(shape, dtype=torch.uint8))
        assert len(images) == 2 and there.shape == (2, 3, 4, 4) and bool((there == 7).all())
        assert there.is_contiguous(memory_format=torch.channels_last)
