"""A/B comparison: verdicts by hand, sides, the report; a whole comparison with a fake training."""

import json
import subprocess
import sys

import pytest

from tests.tools.experiments import test_runner
from tests.tools.experiments.test_runner import CFG
from tools import ab_compare
from tools.ab_compare import NOT_HERE, TARGETS, Side, verdicts
from tools.experiments import runner
from utils.system.files import PROJECT_ROOT


def side(rate=100.0, maps=(0.5, 0.5, 0.5), gpu=0.9, main=0.2, gpu_memory=3.0):
    n = len(maps)
    return {"images_per_second": [rate] * n, "map50": list(maps), "gpu": [gpu] * n, "main_cpu": [main] * n,
            "gpu_memory": [gpu_memory] * n}  # fmt: skip


def judge(a, b):
    return {target: verdict for target, verdict, _ in verdicts(a, b)}


def test_all_targets_met():
    assert judge(side(), side(rate=401.0)) == dict.fromkeys(TARGETS, "met")


def test_all_targets_missed():
    slow = side(rate=399.0, maps=(0.45, 0.45, 0.45), gpu=0.8, main=0.4)
    assert judge(side(), slow) == dict.fromkeys(TARGETS, "missed")


def test_without_a_gpu_speed_is_not_judged():
    judged = verdicts(side(gpu=None, gpu_memory=None, main=1.9), side(500.0, gpu=None, gpu_memory=None, main=1.5))
    assert [verdict for _, verdict, _ in judged] == [NOT_HERE, "met", NOT_HERE, NOT_HERE]
    assert judged[0][2] == "no GPU; on this CPU B trains 5.00x as fast"
    assert "computes the model itself" in judged[3][2]


def test_gpu_without_nvml():
    judged = verdicts(side(), side(gpu=None))
    assert judged[2][1:] == (NOT_HERE, "install nvidia-ml-py")


@pytest.mark.parametrize(
    ("a", "b", "verdict", "found"),
    [
        ((0.5, 0.5), (0.505, 0.5), "met", "B - A = +0.0025, standard deviation of the pairs 0.0035"),
        ((0.5, 0.5), (0.53, 0.47), "undecided", "B - A = +0.0000"),  # equal on average, but by chance?
        ((0.5, 0.5), (0.52, 0.48), "undecided", "deviation of the pairs 0.0283"),
        ((0.5, 0.5), (0.47, 0.47), "missed", "B - A = -0.0300"),
        ((0.5, 0.5), (0.44, 0.52), "undecided", "B - A = -0.0200"),
        ((0.5,), (0.5,), "met", "one pair: spread unknown"),
        ((0.5,), (0.6,), "undecided", "one pair: spread unknown"),
        ((0.0, 0.001), (0.0, 0.0), "undecided", "A itself has learned nothing yet"),
    ],
)
def test_map_within_one_point(a, b, verdict, found):
    judged = verdicts(side(maps=a), side(maps=b))[1]
    assert judged[1] == verdict and found in judged[2]


def test_sides():
    parsed = Side.parse("B", "USE_COMPILE=1 --fast-loss --name 'a b'")
    assert parsed.flags == ["--fast-loss", "--name", "a b"] and parsed.environment == {"USE_COMPILE": "1"}
    assert parsed.describe() == "USE_COMPILE=1 --fast-loss --name a b"
    assert Side.parse("A", "").describe() == "no flag"


def test_a_side_of_a_single_flag():
    options = ab_compare.parse(["--args", "--notest", "--a", "", "--b", "--fast", "--repeats", "2"])
    assert (options.args, options.a, options.b, options.repeats) == ("--notest", "", "--fast", 2)
    assert ab_compare.parse(["--args=--notest", "--b=--fast"]).b == "--fast"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TRAIN", test_runner.FAKE)
    monkeypatch.setattr(runner, "POLL", 0.02)
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\n")
    return ["--hyp", str(tmp_path / "hyp.yaml")]


def test_a_comparison_alternates_and_reports(fake, tmp_path, monkeypatch):
    calls, training = [], runner.training
    monkeypatch.setattr(runner, "training", lambda *a: calls.append(a) or training(*a))
    a, b = Side.parse("A", ""), Side.parse("B", "X=1 --fast-loss")
    runs = ab_compare.compare(fake, a, b, tmp_path / "ab", repeats=2, seed=5)
    assert [call[1].name for call in calls] == ["A1", "B1", "B2", "A2"]
    assert [call[0][-2:] for call in calls] == [["--seed", "5"], ["--seed", "5"], ["--seed", "6"], ["--seed", "6"]]
    assert [call[4] for call in calls] == [{}, {"X": "1"}, {"X": "1"}, {}]
    drawn, save_figure = [], ab_compare.save_figure
    monkeypatch.setattr(
        ab_compare, "save_figure", lambda figure, path: drawn.append(figure) or save_figure(figure, path)
    )
    ab_compare.write(tmp_path / "ab", runs, a, b, fake)
    text = (tmp_path / "ab" / "report.md").read_text()
    assert "| mAP@.5, last epoch | 0.3000 (0.3000 to 0.3000) | 0.3000 (0.3000 to 0.3000) | 1.00 |" in text
    assert "- mAP@.5 within 1 % (0.01): **met**" in text and "| 2 | 0.3000 | 0.3000 | +0.0000 |" in text
    assert "| img/s, training part | not measured | not measured | not measured |" in text
    content = json.loads((tmp_path / "ab" / "ab.json").read_text())
    assert content["measures"]["A"]["epoch_seconds"] == [0.5, 0.5] and len(content["verdicts"]) == 4
    assert (tmp_path / "ab" / "ab.png").stat().st_size > 20_000
    (figure,) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A: no flag", "B: X=1 --fast-loss"]
    titles = [ax.get_title() for ax in figure.axes]
    assert "epoch, s" in titles and "img/s, training part" not in titles, "no panel for what nobody measured"


@pytest.fixture
def pretended(monkeypatch):
    """Trainings without processes; [(folder, device, folders of those that run beside it)]. A takes longer than B."""
    log, at_work = [], []

    def training(arguments, folder, *rest):
        at_work.append(folder.name)
        log.append((folder.name, arguments[-1], at_work[:-1]))
        for _ in range(3 if folder.name.startswith("A") else 1):
            yield None
        at_work.remove(folder.name)
        return runner.FinishedRun(folder, "completed", rows=[{"epoch": 0, runner.MAP50: 0.5, runner.LOSS: 1.0}])

    monkeypatch.setattr(runner, "training", training)
    monkeypatch.setattr(runner, "POLL", 0.0)
    return log


def test_pairs_on_several_devices(pretended, tmp_path, monkeypatch, capsys):
    """Both runs of a pair have the same device, one after another; the report says what the rates are."""
    ab_compare.main(side_of(tmp_path, "", "--adam", "--epochs 1 --workers 0", "--repeats", "3", "--devices", "cpu,cpu"))
    assert max(len(beside) for *_, beside in pretended) == 1
    assert all({folder[1] for folder in beside}.isdisjoint(name[1]) for name, _, beside in pretended)
    fact = "rates: measured side by side, 2 runs at a time on cpu,cpu"
    assert fact in capsys.readouterr().out and f"- {fact}" in (tmp_path / "ab" / "report.md").read_text()


def test_the_runs_of_a_pair_side_by_side(pretended, tmp_path):
    """They change devices from pair to pair, and the quicker one waits for the other."""
    a, b = Side.parse("A", ""), Side.parse("B", "--adam")
    runs = ab_compare.compare(["--epochs", "1"], a, b, tmp_path, 2, 0, None, ["0", "1"], side_by_side=True)
    assert pretended == [("A1", "0", []), ("B1", "1", ["A1"]), ("A2", "1", []), ("B2", "0", ["A2"])]
    assert [run.folder.name for side in runs.values() for run in side] == ["A1", "A2", "B1", "B2"]


def test_runs_one_after_another_share_nothing():
    assert ab_compare.sharing([None], False, 3) == {} == ab_compare.sharing(["0", "1"], False, 1)


def test_a_failed_run_ends_the_comparison(fake, tmp_path):
    with pytest.raises(
        ValueError, match=r"B \(--batch-size 0\) failed: --batch-size 0 is too small.*; see .*output.log"
    ):
        ab_compare.compare(fake, Side.parse("A", ""), Side.parse("B", "--batch-size 0"), tmp_path / "ab", 1)


def side_of(tmp_path, a="", b="--fast", base="--epochs 2", *words, more=(), model=CFG):
    """Command line of a comparison in `tmp_path`."""
    line = ["--args", f"{model} {base}", "--a", a, "--b", b, "--out", str(tmp_path / "ab")]
    return ab_compare.parse([*line, *words, *more])


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"base": "--evolve 1"}, "--args: --evolve cannot be given here: a search is many trainings"),
        ({"a": "--resume x/last.pt"}, "--a: --resume cannot be given here"),
        ({"b": "--device cpu", "more": ["--devices", "cpu"]}, "--device cannot be given together with --devices"),
        ({"b": "--name x"}, "--b: --name cannot be given here: the tool says where its runs lie"),
        ({"base": "--epochs 2 --seed 3"}, "--args: --seed cannot be given here: use the --seed of the comparison"),
        ({"base": "", "b": "--epochs 2"}, "--a trains with --epochs 300 and --b with 2"),
        ({"b": "--max-iter 5"}, "--a trains with --max-iter 0 and --b with 5; .* give --max-iter in --args"),
        ({"b": "--subset-size 5"}, "--a trains with --subset-size 0 and --b with 5"),
        ({"b": "--epochs 2"}, "--b: --epochs stands in --args as well; give it to --a and --b"),
        ({"base": "--epochs 2 --batch-size 8", "a": "--batch 4"}, "--a: --batch-size stands in --args as well"),
        ({"base": "--epochs 2 --epochs 3"}, "--args: --epochs stands there twice"),
        ({"b": "--fast --no-fast"}, "--b: --fast stands there twice"),
        ({"base": "--epochs '2"}, "--args .*No closing quotation"),
        ({"a": 'X=1 --hyp "x'}, "--a .*No closing quotation"),
        ({"base": "--nonsense"}, "--args: train.py does not understand this: .*--nonsense"),
        ({"b": "--nonsense"}, "--b: train.py does not understand this: .*--nonsense"),
        ({"b": "--batch-size 0"}, "--b: --batch-size 0 is too small"),
        ({"b": "--resize-schedule 0:64,2:96"}, "--b: --resize-schedule .*: 2:96 is never reached in 2 epochs"),
        ({"b": "--hyp none.yaml"}, "--b: none.yaml does not exist"),
        ({"b": "--weights none.pt"}, "--b: --weights none.pt does not exist"),
        ({"model": ""}, "--a: give --cfg .* or --weights"),
        ({"b": "--device gpu"}, "--b: --device 'gpu' is unknown"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_before_anything_runs(sides, message, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "training", lambda *a, **k: pytest.fail("runs"))
    with pytest.raises(ValueError, match=message):
        ab_compare.main(side_of(tmp_path, **sides))
    assert not (tmp_path / "ab").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats 0 is too small"),
        (["--timeout", "0"], "--timeout 0.0 is too small: it has to be above 0"),
        (["--seed", "-1"], "--seed -1 is too small"),
        (["--seed", str(2**63 - 1)], "--seed of the last pair 9223372036854775809 is too large"),
        (["--side-by-side"], "--side-by-side needs two --devices, such as --devices 0,1"),
        (["--side-by-side", "--devices", "cpu,cpu,cpu"], "--side-by-side needs two --devices"),
        (["--devices", "x"], "'x' is no device"),
        (["--out", "/dev/null/x"], "/dev/null is a file.*choose another --out"),
    ],
)
def test_numbers_and_folders_of_the_comparison_itself(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "training", lambda *a, **k: pytest.fail("runs"))
    with pytest.raises(ValueError, match=message):
        ab_compare.main(side_of(tmp_path, "", "--fast", "--epochs 2", *words))


def test_without_a_seed_the_sides_may_have_one(tmp_path):
    base, side = [*CFG.split(), "--epochs", "2", "--seed", "3"], Side.parse("B", "--fast")
    ab_compare.check_sides(base, Side.parse("A", "X=1"), side, has_seed=False)


def test_two_comparisons_into_one_folder_are_refused(tmp_path, monkeypatch):
    (tmp_path / "ab").mkdir()
    code = "import sys, time; from utils.system.folder_lock import own; own(sys.argv[1], ''); print(1, flush=True)"
    words = [sys.executable, "-c", f"{code}; time.sleep(600)", str(tmp_path / "ab")]
    with subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"is in use: process {other.pid} .* or choose another --out"):
            ab_compare.main(side_of(tmp_path))
        other.kill()
