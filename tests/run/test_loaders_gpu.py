"""Whole runs with --cache-images gpu, the CPU as the card: the same results as without, and nothing left."""

import logging
import multiprocessing
import threading
from functools import partial

import pytest
import torch

import train
from tests import small_run, triton_cases
from tests.data.gpu import store_cases
from tests.rank_cases import run_ranks
from tests.test_train import results_of
from utils.data.gpu import kept_batches, placing
from utils.data.gpu.kept_batches import KeptBatches
from utils.run import auto_batch, fast_paths

FLAGS = ("--fast-step", "--fast-loss", "--worker-tensor", "--fast-val", "--workers", "2", "--seed", "3")
MANY = 10**12


def simulated_card(monkeypatch):
    """Call it with the bytes that the card and the host have; a run then takes the CPU for a card."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for name in ("why_no_images", "why_not_kept"):
        monkeypatch.setattr(fast_paths, name, lambda *_: None)
    monkeypatch.setattr(auto_batch, "step_cost", lambda run, build_model: (0, 1e-4))
    monkeypatch.setattr(kept_batches, "room_unasked", lambda device: (0, "simulated"))

    def simulate(on_card=MANY, on_host=MANY, refusal=None):
        asked = store_cases.simulate(monkeypatch, on_card, on_host, refusal)
        for name in ("room_on_card", "room_on_host"):
            monkeypatch.setattr(kept_batches, name, getattr(placing, name))
        return asked

    return simulate


@pytest.fixture
def card(monkeypatch):
    return simulated_card(monkeypatch)


@pytest.fixture
def stores(monkeypatch):
    """(size of the images, the ImageStore or None) of all that a run opens."""
    opened, open_images = [], placing.open_images

    def watched(dataset, *args, **options):
        late = open_images(dataset, *args, **options)
        opened.append((dataset.img_size, dataset.image_store))
        return late

    monkeypatch.setattr(placing, "open_images", watched)
    return opened


def runs_alike(folder, *flags, changed=("--cache-images", "gpu"), **options):
    folders = [small_run.run(folder, *FLAGS, *flags, *more, **options) for more in ((), changed)]
    plain, other = map(results_of, folders)
    assert plain == other
    return folders[1]


@pytest.mark.parametrize("room", [(MANY, MANY), (MANY, 0), (0, MANY), (0, 0)], ids=str)
def test_results_are_the_same_wherever_images_lie(room, card, stores, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    card(*room)
    runs_alike(tmp_path)
    ((size, store),) = stores
    assert size == 64 and (store is None) == (not any(room))
    assert ("in RAM, as with --cache-images ram" in caplog.text) == (store is None)
    assert any(text.startswith("val: batches:") and " stay " in text for text in caplog.messages) == any(room)


@pytest.mark.parametrize(
    "flags",
    [("--subset-size", "4"), ("--max-iter", "1", "--epochs", "3"), ("--image-weights",), ("--rect",), ("--quad",),
     ("--multi-scale",), ("--overfit", "--batch-size", "2")],
    ids=" ".join,
)  # fmt: skip
def test_with_other_flags(flags, card, stores, tmp_path):
    card(0 if "--quad" in flags else MANY)
    runs_alike(tmp_path, *flags)
    assert len(stores) == 1


def test_a_new_size_is_a_new_store(card, stores, tmp_path, monkeypatch):
    """The old one is gone before the new one comes."""
    card(0)
    fill, alive = placing.Filler.decode, []
    monkeypatch.setattr(
        placing.Filler, "decode", lambda *args: alive.append([len(s.pixels) > 0 for _, s in stores]) or fill(*args)
    )
    runs_alike(tmp_path, "--resize-schedule", "0:32,1:64")
    assert [size for size, _ in stores] == [32, 64] and alive == [[], [False]]


def test_a_run_that_is_resumed_opens_its_own(card, stores, tmp_path):
    card()
    line = ("--cache-images", "gpu", "--epochs", "3")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = results_of(small_run.run(tmp_path / "a", *FLAGS, *line))
    stopped = small_run.arguments(tmp_path / "b", *FLAGS, *line)
    finish = train.finish_epoch

    def stop(epoch, *args):
        finish(epoch, *args)
        if epoch == 0:
            args[-1].wait()  # the checkpoint is written by a thread
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "finish_epoch", stop)
        small_run.run_line(stopped)
    last = tmp_path / "b/runs/run/weights/last.pt"
    run = small_run.run_line(["--resume", str(last)])
    assert results_of(run) == whole and len(stores) == 3


def test_validation_is_decoded_once(card, tmp_path, monkeypatch):
    card()
    seen, open_loaders = [], train.open_loaders
    monkeypatch.setattr(train, "open_loaders", lambda *args: seen.append(open_loaders(*args)) or seen[-1])
    small_run.run(tmp_path, *FLAGS, "--cache-images", "gpu", "--epochs", "3")
    val = seen[0].val
    assert isinstance(val, KeptBatches) and val.loader is None and val.dataset.imgs == [None] * 6


def test_on_a_cpu_it_is_ram_and_said(tmp_path, caplog):
    run = small_run.run(tmp_path, *FLAGS, "--cache-images", "gpu", "--epochs", "1")
    assert results_of(run)
    (warning,) = [record.message for record in caplog.records if "--cache-images" in record.message]
    assert warning.startswith("--cache-images gpu: Triton and a GPU are needed, so they are in RAM (loader: not images")


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RuntimeError("CUDA error: unspecified launch failure\nmore"), 2, "failure; the GPU failed, train.py --resume"),
        (ValueError("a.jpg: cannot be opened (No such file)"), 2, "error: a.jpg: cannot be opened"),
        (KeyboardInterrupt(), 130, "interrupted; train.py --resume"),
    ],
)
def test_what_ends_a_run_while_it_reads_is_a_sentence(error, status, words, card, tmp_path, monkeypatch, capsys):
    card(0)
    drawing = multiprocessing.active_children()  # of runs before, which this process may have made

    def fail(*_):
        raise error

    monkeypatch.setattr("utils.data.gpu.filling.load_scanned", fail)
    line = small_run.arguments(tmp_path, *FLAGS, "--cache-images", "gpu")
    assert small_run.program("train", line) == status
    assert words in capsys.readouterr().err and not (tmp_path / "runs").exists()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]
    assert not threads and set(multiprocessing.active_children()) <= set(drawing)


@pytest.mark.parametrize("room", [(MANY, MANY), (0, MANY), (0, 0)], ids=str)
def test_an_image_that_is_gone_when_it_is_read_is_named(room, card, tmp_path, monkeypatch, capsys):
    """As when a disk goes between the scan of the labels and the reading."""
    card(*room)
    line = small_run.arguments(tmp_path, *FLAGS, "--cache-images", "gpu")
    read = placing.open_store

    def remove(*args, **options):
        (tmp_path / "images/train/03.png").unlink()
        return read(*args, **options)

    monkeypatch.setattr(placing, "open_store", remove)
    assert small_run.program("train", line) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert said.endswith("images/train/03.png: cannot be opened (No such file or directory)")
    assert not (tmp_path / "runs").exists()


def test_a_card_that_is_full_in_training_names_the_images(card, tmp_path, monkeypatch, capsys):
    card()

    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr("utils.fast.train_step.FastSteps.step", full)
    assert small_run.program("train", small_run.arguments(tmp_path, *FLAGS, "--cache-images", "gpu")) == 2
    assert "a smaller --img-size, or --amp fp16, or --cache-images ram (CUDA out of" in capsys.readouterr().err


@pytest.mark.slow
@triton_cases.needs_triton
def test_runs_whose_batches_are_composed():
    triton_cases.run("tests/run/composed_run_cases.py", timeout=580)


def train_both_ways(line, rank):
    with pytest.MonkeyPatch.context() as patch, small_run.drawing(pictures=False), small_run.group_kept():
        asked = simulated_card(patch)(0)
        for name, more in (("files", ()), ("gpu", ("--cache-images", "gpu"))):
            train.main(train.train_parser().parse_args([*line, "--name", name, *more]))
    _, small, _, large = asked.locked  # first and third: the batches of its share of the validation, of both runs
    assert large == 4 * small == 10 * 3 * 64**2


def test_two_processes_share_the_images(tmp_path):
    """One copy in the host's memory for both, also after the size has changed."""
    flags = ("--batch-size", "4", "--seed", "3", "--resize-schedule", "0:32,1:64", "--workers", "1", "--fast")
    line = small_run.arguments(tmp_path, *flags, num_images=10)
    ended = run_ranks(partial(train_both_ways, line), tmp_path)
    assert [end.status for end in ended] == [0, 0], ended[0].text + ended[1].text
    plain, other = (results_of(tmp_path / "runs" / name) for name in ("files", "gpu"))
    assert plain == other


def train_on_unlike_machines(line, rank):
    with pytest.MonkeyPatch.context() as patch, small_run.drawing(pictures=False):
        simulated_card(patch)()
        if rank:
            patch.setattr(fast_paths, "why_no_images", lambda *_: "a compiler is missing")
        train.main(train.train_parser().parse_args(line))


def test_a_process_without_a_compiler_does_not_make_the_others_wait(tmp_path):
    line = small_run.arguments(tmp_path, "--batch-size", "4", "--workers", "1", "--fast", "--cache-images", "gpu")
    ended = run_ranks(partial(train_on_unlike_machines, line), tmp_path, timeout=60)
    assert [end.status for end in ended] == [0, 0], ended[0].text + ended[1].text
