"""The smoke test itself: its verdicts, and what it asks of a run."""

import sys

import pytest

from tests import small_run
from tools import smoke
from tools.approval.setup import Failed, NotMeasured
from tools.experiments import runner
from tools.experiments.runner import LOSS, FinishedRun


def test_a_line_for_each_step_and_a_status(tmp_path, monkeypatch, capsys):
    def fails(self, *kind):
        raise Failed("the loss is lost")

    def is_skipped(self, *kind):
        raise NotMeasured("needs a GPU")

    for name in ("images", "two_epochs", "test", "resume"):
        monkeypatch.setattr(smoke.Smoke, name, lambda self: "as it should be")
    monkeypatch.setattr(smoke.Smoke, "overfit", fails)
    monkeypatch.setattr(smoke.Smoke, "amp", is_skipped)
    monkeypatch.setattr(sys, "argv", ["smoke.py", "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert smoke.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["PASS"] * 4 + ["FAIL"] + ["SKIP"] * 2
    assert lines[0].startswith("PASS  draw 100 images") and lines[4].endswith("the loss is lost")
    monkeypatch.setattr(smoke.Smoke, "overfit", lambda self: "")
    assert smoke.main() == 0


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (("failed", "no such file", [0.5]), "no such file"),
        (("completed", "", [0.5]), "results.csv has 1 epochs"),
        (("completed", "", [0.5, float("nan")]), "not a number"),
    ],
)
def test_a_run_that_is_not_right(run, fault, tmp_path):
    status, message, losses = run
    rows = [{"epoch": float(epoch), LOSS: loss} for epoch, loss in enumerate(losses)]
    with pytest.raises(Failed, match=fault):
        smoke.Smoke(tmp_path, 64, "cpu").rows(FinishedRun(tmp_path, status, message, rows=rows), 2)


def test_kill_and_resume_of_a_small_run(tmp_path, monkeypatch):
    """With the smallest model in place of yolov7-tiny."""
    small = small_run.arguments(tmp_path, "--hyp", str(tmp_path / "hyp.yaml"))
    steps = smoke.Smoke(tmp_path / "runs", 64, "cpu")

    def train(name, epochs, *flags, on_epoch=None):
        words = [*small[: small.index("--project")], "--epochs", str(epochs), *flags]
        return runner.run_training(words, steps.out / name, on_epoch, 300, {"OMP_NUM_THREADS": "1"})

    monkeypatch.setattr(steps, "train", train)
    assert steps.two_epochs().startswith("loss ")
    found = steps.resume()  # epochs of this model are so short that the second may be over, too
    assert found.startswith("killed after epoch") and found.endswith("results.txt is the same")
