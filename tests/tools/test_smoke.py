"""The smoke test itself: its verdicts, and what it asks of a run."""

import sys

import pytest

from tools import smoke
from tools.approval.setup import Failed, NotMeasured
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


def test_only_a_folder_of_its_own_is_emptied(tmp_path, monkeypatch):
    out = tmp_path / "smoke"
    (out / "train").mkdir(parents=True)
    (out / "train" / "last.pt").write_text("")
    (out / "shapes.yaml").write_text("")
    (out / "test").symlink_to(tmp_path)
    smoke.clear(out)
    assert [path.name for path in out.iterdir()] == [".lock"] and tmp_path.is_dir()
    smoke.clear(out)
    for name in (".gitkeep", "shapes.yaml"):
        (out / name).write_text("")
        smoke.clear(out)
        assert sorted(path.name for path in out.iterdir()) == [".gitkeep", ".lock"]
    for stranger, entries in (("images", ("train", "test")), ("config", ("shapes.yaml", "mine.yaml"))):
        for entry in entries:
            (tmp_path / stranger / entry).mkdir(parents=True)
        with pytest.raises(ValueError, match="is no folder of an earlier smoke test, and would be emptied"):
            smoke.clear(tmp_path / stranger)
        assert all((tmp_path / stranger / entry).is_dir() for entry in entries)
    monkeypatch.chdir(out)
    for place in (out, tmp_path, smoke.PROJECT_ROOT, smoke.PROJECT_ROOT.parent):
        with pytest.raises(ValueError, match="would be emptied; choose another --out"):
            smoke.clear(place)
