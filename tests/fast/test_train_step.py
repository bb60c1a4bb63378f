"""The step that does not wait, against the reference: losses, weights, statistics, averages, momentum, checkpoints."""

import pytest
import torch

from tests import small_run, step_cases
from tests.engine.test_trainer import squares
from tests.step_cases import assert_equal_runs, batches, new_trainer
from utils.engine.checkpoint import save
from utils.engine.checkpoint_reader import read_checkpoint
from utils.engine.trainer import freeze_layers
from utils.fast.train_step import FastSteps
from utils.plots.run import read_results


def pair(num_steps=24, interval=5, epochs=2, prepare=lambda trainer: None, sizes=(step_cases.BATCH,), **options):
    """(Run of FastSteps, Run of the reference) on equal batches."""
    batched = options.pop("batched", False)
    fast, slow = new_trainer(batched=batched, **options), new_trainer(**options)
    prepare(fast), prepare(slow)
    found = step_cases.run(FastSteps(fast, interval), batches(num_steps, sizes=sizes), epochs)
    return found, step_cases.run(slow, batches(num_steps, sizes=sizes, as_bytes=False), epochs)


@pytest.mark.parametrize("batched", [False, True], ids=["reference loss", "batched loss"])
def test_equals_the_reference_over_warm_up_and_accumulation(batched):
    """24 steps in two epochs, 12 of warm-up, accumulation from 1 to 4 batches: within rounding."""
    found, expected = pair(batched=batched)
    assert expected.trainer.accumulate == 4 and expected.trainer.ema.updates > 6
    assert_equal_runs(found, expected, rtol=2e-4, atol=2e-5)


def test_first_steps_agree_closely():
    found, expected = pair(num_steps=4, epochs=1)
    assert_equal_runs(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interval", [1, 7, 100])
def test_the_interval_changes_when_losses_are_known_but_not_what_they_are(interval):
    found, expected = pair(num_steps=9, interval=interval, epochs=1)
    torch.testing.assert_close(found.items, expected.items, rtol=1e-4, atol=1e-6)


def test_losses_come_in_blocks():
    steps = FastSteps(new_trainer(), 3)
    steps.begin_epoch()
    assert [len(steps.step(i, 0, batch)) for i, batch in enumerate(batches(7))] == [0, 0, 3, 0, 0, 3, 0]
    assert len(steps.late_items()) == 1


def test_every_epoch_begins_in_training_mode():
    steps = FastSteps(new_trainer())
    for epoch, batch in enumerate(batches(3)):
        steps.begin_epoch()
        assert all(module.training for module in steps.trainer.model.modules())
        steps.step(epoch, epoch, batch)
        list(steps.trainer.model.modules())[-epoch].eval()


def test_bf16_on_a_cpu():
    found, expected = pair(num_steps=8, epochs=1, precision="bf16")
    assert expected.trainer.low_precision is torch.bfloat16 and not expected.trainer.scaler.is_enabled()
    torch.testing.assert_close(found.items, expected.items, rtol=0.05, atol=0.01)
    assert all(p.dtype == torch.float32 for p in found.trainer.model.parameters())


def test_other_optimizers_make_their_own_steps(caplog):
    found, expected = pair(num_steps=8, epochs=1, adam=True)
    assert_equal_runs(found, expected, rtol=1e-3, atol=1e-4)
    assert "knows SGD only; Adam" in caplog.text


def test_frozen_layers_stay():
    found, expected = pair(num_steps=6, epochs=1, prepare=lambda trainer: freeze_layers(trainer.model, [2]))
    assert_equal_runs(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_an_unfinished_accumulation_are_dropped_with_the_epoch():
    """11 steps an epoch, 4 batches an optimiser step."""
    found, expected = pair(num_steps=22, num_warmup=0)
    assert expected.trainer.accumulate == 4
    assert_equal_runs(found, expected, rtol=2e-4, atol=2e-5)


def resumed(content, path, kind):
    """Six more steps from the checkpoint `content`, by `kind`."""
    save(content, path)
    trainer = new_trainer()
    stored = read_checkpoint(path)
    trainer.model.load_state_dict(stored.model.state)
    trainer.restore(stored, epochs=10, nc=step_cases.NUM_CLASSES)
    return step_cases.run(kind(trainer), batches(6, as_bytes=kind is FastSteps))


@pytest.mark.parametrize("first", [FastSteps, lambda trainer: trainer], ids=["fast first", "reference first"])
def test_each_path_continues_the_other(first, tmp_path):
    run = step_cases.run(first(new_trainer()), batches(6, as_bytes=first is FastSteps))
    content = run.trainer.checkpoint(0, 0.0, "")
    runs = [resumed(content, tmp_path / "last.pt", kind) for kind in (FastSteps, lambda trainer: trainer)]
    assert_equal_runs(*runs, rtol=1e-4, atol=1e-5)


def test_checkpoints_are_in_stock_order(tmp_path):
    """Tools that fuse a layer view its weights as a matrix, which channels-last weights do not allow."""
    trainer = new_trainer()
    FastSteps(trainer)
    weight = trainer.model.model[1].conv.weight
    assert not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    content = trainer.checkpoint(0, 0.0, "")
    for name in ("model", "ema"):
        assert all(value.is_contiguous() for value in content[name].state_dict().values())
    assert not trainer.model.model[1].conv.weight.is_contiguous(), "the model itself stays as it is"
    assert torch.equal(content["model"].model[1].conv.weight, weight.half())


def test_losses_that_stay_non_finite_stop_the_run(caplog):
    def infinite(maps, targets, images):
        loss, items = squares(maps, targets, images)
        return loss * float("inf"), items * float("nan")

    trainer = new_trainer()
    trainer.compute_loss = infinite
    with pytest.raises(ValueError, match="20 steps in a row, since iteration 0 .0_0.jpg"):
        step_cases.run(FastSteps(trainer, 10), batches(25))
    assert "iteration 0" in caplog.text and "9 more" in caplog.text


# ---- through train.py -----------------------------------------------------------------------------------------------


def whole_run(folder, *flags):
    """Numbers of results.txt and last checkpoint of two epochs of 10 steps."""
    run = small_run.run(folder, "--seed", "3", *flags, num_images=30)
    return read_results(run / "results.txt"), read_checkpoint(run / "weights" / "last_full.pt")


@pytest.fixture(scope="module")
def flags_off(tmp_path_factory):
    torch.set_num_threads(1)
    return whole_run(tmp_path_factory.mktemp("off"))


@pytest.mark.parametrize("flags", [("--fast-step", "--sync-interval", "3"), ("--fast",)], ids=" ".join)
def test_whole_runs_agree(flags, flags_off, tmp_path):
    (expected, reference), (found, fast) = flags_off, whole_run(tmp_path, *flags)
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-6)
    for kind in ("model", "ema"):
        for key, value in getattr(reference, kind).state.items():
            mine = getattr(fast, kind).state[key]
            torch.testing.assert_close(mine.float(), value.float(), rtol=5e-3, atol=1e-3, msg=f"{kind} {key}")
    assert fast.updates == reference.updates
    for key, entry in reference.optimizer["state"].items():
        mine = fast.optimizer["state"][key]["momentum_buffer"]
        torch.testing.assert_close(mine, entry["momentum_buffer"], rtol=5e-3, atol=1e-3)


def test_multi_scale_and_quad_run_with_the_fast_step(tmp_path):
    run = small_run.run(
        tmp_path, "--fast", "--multi-scale", "--quad", "--batch-size", "4", "--epochs", "1", num_images=8
    )
    assert len((run / "results.txt").read_text().splitlines()) == 1
