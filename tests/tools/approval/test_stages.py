"""Approvals: the order of the stages, what an approval is bound to, what it needs; the tool with made-up checks."""

import json
import subprocess
import sys

import pytest

from tools import ab_compare, approve
from tools.approval import checks as approval_checks
from tools.approval import report, stages
from tools.approval import setup as approval_setup
from tools.approval.setup import Failed, NotMeasured, Setup
from tools.approval.stages import STAGES, Approvals, ApprovalStage, content_hash, fingerprint
from tools.experiments import runner


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a file for each stage, three stages, and its Approvals."""
    for number in (1, 2, 3):
        (tmp_path / f"part{number}.py").write_text(f"x = {number}\n")
    three = {number: ApprovalStage(number, f"part {number}", (f"part{number}*.py",)) for number in (1, 2, 3)}
    monkeypatch.setattr(stages, "STAGES", three)
    return Approvals(tmp_path / "approvals.json", tmp_path / "reports", tmp_path)


def write_report(project, number, *statuses):
    folder = project.folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"date": "2026-01-01 10:00", "findings": [{"status": status} for status in statuses or ("passed",)],
               "files": fingerprint(stages.STAGES[number], project.root)}  # fmt: skip
    (folder / "report.json").write_text(json.dumps(content))


def approve_in_order(project, *numbers):
    for number in numbers:
        write_report(project, number)
        project.approve(number, "Ann", "abc", "fine")


def test_stages_in_order(project):
    project.check_may_run(1)
    with pytest.raises(ValueError, match=r"stage 2 \(part 2\) does not run before stage 1 .* stage 1: not run"):
        project.check_may_run(2)
    write_report(project, 1)
    with pytest.raises(ValueError, match="1 passed; waits for approval"):
        project.check_may_run(2)
    approve_in_order(project, 1)
    project.check_may_run(2)
    with pytest.raises(ValueError, match="stage 3 .* before stage 2"):
        project.check_may_run(3)
    with pytest.raises(ValueError, match="stage 3 .* before stage 2"):
        project.approve(3, "Ann", "abc")


def test_an_approval_ends_when_a_file_changes(project):
    approve_in_order(project, 1, 2)
    again = Approvals(project.path, project.reports, project.root)  # as the next command sees it
    assert again.holds(1) and again.holds(2)
    assert again.describe(1).startswith("approved by Ann on ") and again.describe(1).endswith("commit abc: fine")
    (project.root / "part1.py").write_text("x = 0\n")
    assert not again.holds(1) and again.holds(2)
    assert "no longer holds, changed: part1.py" in again.describe(1)
    with pytest.raises(ValueError, match="stage 3 .* before stage 1"):
        again.check_may_run(3)
    with pytest.raises(ValueError, match=r"was run with other files \(part1.py\); run it again"):
        again.approve(1, "Ann", "abc")
    (project.root / "part1.py").write_text("x = 1\n")
    assert again.holds(1)
    (project.root / "part1_new.py").write_text("")
    assert again.changes(1) == ["part1_new.py"]


@pytest.mark.parametrize("statuses", [["not made"], ["not measured"], ["passed", "failed"], ["passed", "splendid"]])
def test_failures_need_a_reason(project, statuses):
    write_report(project, 1, *statuses)
    for arguments in ({}, {"note": "x"}, {"despite_failures": True}, {"note": " ", "despite_failures": True}):
        with pytest.raises(ValueError, match=f"stage 1: .*1 {statuses[-1]}; see .*report.md"):
            project.approve(1, "Ann", "abc", **arguments)
    project.approve(1, "Ann", "abc", "known", despite_failures=True)
    assert project.holds(1) and project.entries[1]["result"].endswith(f"1 {statuses[-1]}")


def test_nothing_is_approved_unseen(project):
    with pytest.raises(ValueError, match="stage 1 has not been run: approve.py run 1"):
        project.approve(1, "Ann", "abc")


GOOD = {"files": {}, "by": "Ann", "date": "2026-01-01", "commit": "abc"}
DAMAGED = [
    "[", "null", "[]", '{"one": {}}', '{"1": null}', '{"1": {}}', '{"7": {}}', '{"01": {}}',
    json.dumps({"1": GOOD})[:-1] + ', "1": {}}',  # twice
    *(json.dumps({"1": {key: value for key, value in GOOD.items() if key != gone}}) for gone in GOOD),
    *(json.dumps({"1": GOOD | {key: value}}) for key in GOOD for value in (None, 3, True, [])),
    json.dumps({"1": GOOD | {"files": {"train.py": 3}}}), json.dumps({"1": GOOD | {"note": 3}}),
    json.dumps({"1": GOOD | {"by": ""}}), json.dumps({"1": GOOD | {"by": " - "}}),
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_approvals_that_a_person_has_edited(text, project):
    project.path.write_text(text)
    with pytest.raises(ValueError, match="approvals.json is no file of approvals .*; move it away to begin anew"):
        Approvals(project.path, project.reports, project.root)


REPORT = {"date": "2026-01-01", "findings": [{"status": "passed"}], "files": {}}


@pytest.mark.parametrize(
    "content",
    [
        None, [], 3, {}, *({key: REPORT[key] for key in REPORT if key != gone} for gone in REPORT),
        REPORT | {"findings": {}}, REPORT | {"findings": [3]}, REPORT | {"findings": [{}]},
        REPORT | {"findings": [{"status": None}]}, REPORT | {"files": []}, REPORT | {"files": {"a": 1}},
        REPORT | {"stage": 2},
    ],
)  # fmt: skip
def test_reports_that_a_person_has_edited(content, project):
    write_report(project, 1)
    path = project.folder(1) / "report.json"
    path.write_text(json.dumps(content))
    assert "report.json is no report of stage 1" in project.describe(1), "the status of the others is told all the same"
    with pytest.raises(ValueError, match=r"report.json is no report of stage 1 .*; approve.py run 1"):
        project.approve(1, "Ann", "abc")
    path.unlink()
    path.mkdir()
    assert "cannot be read" in project.describe(1)


@pytest.mark.parametrize("by", ["", " ", "\t\n", "\u200b", "--", "..."])
def test_an_approval_has_a_name(by, project, tool):
    write_report(project, 1)
    with pytest.raises(ValueError, match="--by '.*' names nobody; give the name of who has looked at the report"):
        project.approve(1, by, "abc")
    with pytest.raises(ValueError, match="names nobody"):
        tool("approve", "1", f"--by={by}")
    project.approve(1, " Ann ", "abc")
    assert project.entries[1]["by"] == "Ann"


def test_hashes_are_those_of_git(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("a = 1\n")
    git = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True)
    assert content_hash(path) == git.stdout.strip()


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    """A stage about no file would stay approved whatever changes."""
    (tmp_path / "part1.py").write_text("")
    stage = ApprovalStage(4, "micro-batch collation", ("part1.py", "gone/**/*.py"))
    with pytest.raises(ValueError, match=r"stage 4 \(micro-batch collation\): no file .* matches gone/\*\*/\*.py"):
        fingerprint(stage, tmp_path)
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "x.py").write_text("")
    assert fingerprint(stage, tmp_path).keys() == {"part1.py", "gone/deep/x.py"}


def test_every_pattern_of_the_project_matches_files():
    for number, stage in STAGES.items():
        assert fingerprint(stage), f"stage {number}"
    assert set(approval_checks.CHECKS) == set(STAGES)
    assert set(ab_compare.TARGETS) <= set(approval_checks.CHECKS[6])


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [
        (1, "utils/config/options.py utils/run/fast_paths.py", "utils/loss/criterion.py"),
        (2, "utils/datasets.py utils/data/labels/scan.py", "utils/loss/criterion.py"),
        (3, "utils/system/memory.py utils/data/mosaic.py utils/data/transforms.py utils/data/images/reading.py "
         "utils/ops/polygons.py utils/data/fast/shm_batches.py", "utils/loss/criterion.py"),
        (4, "utils/system/memory.py utils/data/mosaic.py utils/data/images/reading.py utils/data/fast/shm_batches.py",
         "train.py"),
        (5, "utils/fast/compile.py models/yolo.py", "utils/datasets.py"),
        (6, "train.py utils/loss/criterion.py models/yolo.py", "tools/experiments/trials.py utils/plots/run.py "
         "utils/loggers/results.py"),
    ],
)  # fmt: skip
def test_what_a_stage_is_about(number, inside, outside):
    files = fingerprint(STAGES[number]).keys()
    assert set(inside.split()) <= files and not set(outside.split()) & files


# ---- the tool --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tools/approve.py with checks that do next to nothing; call it with words."""

    def passes(setup):
        setup.measured["a run"] = {"img/s": 10.0, "GPU": None}
        setup.curves["a run"] = [{"epoch": 0, runner.LOSS: 1.0}, {"epoch": 1, runner.LOSS: 0.5}]
        return "as it should be"

    def fails(setup):
        raise Failed("nothing | works")

    def breaks(setup):
        return 1 / 0

    def cannot(setup):
        raise NotMeasured("no GPU")

    checks = {
        1: {"good": passes, "absent": cannot},
        2: {"good": passes, "bad": fails, "broken": breaks},
        3: {"x": cannot},
    }
    monkeypatch.setattr(approval_checks, "CHECKS", checks)
    monkeypatch.setattr(Setup, "prepare", lambda setup: None)
    place = ["--approvals", str(tmp_path / "approvals.json"), "--out", str(tmp_path / "out")]
    return lambda *words: approve.perform(approve.parse([*place, *words]))


@pytest.mark.parametrize("line", ["--out x run 1", "run 1 --out x", "run --out x 1"])
def test_places_before_or_after_the_command(line):
    options = approve.parse(line.split())
    assert (options.out, options.stage) == ("x", 1) and options.approvals.endswith("approvals.json")


def test_the_checks_are_given_the_file_that_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.yaml").write_text("")
    options = approve.parse(["run", "1", "--data", "mine.yaml"])
    approve.check_run_options(options)
    assert options.data == str(tmp_path / "deep" / "mine.yaml")


def test_run_and_approve(tool, tmp_path, capsys):
    with pytest.raises(ValueError, match="stage 2 .* does not run before stage 1"):
        tool("run", "2")
    assert tool("run", "1") == 0
    folder = tmp_path / "out" / "stage_1"
    text = (folder / "report.md").read_text()
    assert "# Stage 1, CLI flags: passed" in text and "| good | **passed** | as it should be |" in text
    assert "| absent | **not measured** | no GPU |" in text and "| a run | 10 |  |" in text
    assert "GPU utilisation: not measured on this machine" in text
    assert (folder / "report.png").stat().st_size > 5000
    assert tool("approve", "1", "--by", "Ann") == 0
    assert tool("run", "2") == 1
    assert "| bad | **failed** | nothing / works |" in (tmp_path / "out" / "stage_2" / "report.md").read_text()
    with pytest.raises(ValueError, match="1 passed, 2 failed; see"):
        tool("approve", "2", "--by", "Ann")
    capsys.readouterr()
    assert tool("status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "approved by Ann" in lines[0] and "1 passed, 2 failed" in lines[1] and lines[2].endswith("not run")


def test_a_stage_that_found_nothing_has_not_passed(tool, monkeypatch):
    monkeypatch.setattr(report, "plot", lambda setup, path: None)
    for number in ("1", "2"):
        tool("run", number)
        tool("approve", number, "--by", "Ann", "--note", "x", "--despite-failures")
    assert tool("run", "3") == 1


def test_a_stage_that_is_interrupted_keeps_what_it_found(tool, tmp_path, monkeypatch):
    def interrupted(setup):
        raise KeyboardInterrupt

    checks = {"good": approval_checks.CHECKS[1]["good"], "endless": interrupted, "last": interrupted}
    monkeypatch.setattr(approval_checks, "CHECKS", {1: checks})
    with pytest.raises(KeyboardInterrupt):
        tool("run", "1")
    text = (tmp_path / "out" / "stage_1" / "report.md").read_text()
    assert "CLI flags: not complete" in text and "| good | **passed** |" in text and "| last | **not made** |" in text
    with pytest.raises(ValueError, match="1 passed, 2 not made; see"):
        tool("approve", "1", "--by", "Ann")


def test_combinations():
    chosen = approval_checks.combinations(on_gpu=False, everything=False)
    assert len(chosen) == 16 + 1 + 2 and chosen[0] == ("no flag", [], {})
    assert ("--fast-dataloader --fast-loss", ["--fast-dataloader", "--fast-loss"], {}) in chosen
    assert [name for name, *_ in chosen[-2:]] == [
        "USE_COMPILE=1",
        "USE_COMPILE=1 --fast-dataloader --fast-loss --fast-step",
    ]
    assert len(approval_checks.combinations(on_gpu=True, everything=False)) == 24 + 1 + 2
    assert len(approval_checks.combinations(on_gpu=True, everything=True)) == 24 * 2 + 1


def test_results_that_agree():
    def run(*losses):
        rows = [{"epoch": k, runner.LOSS: loss, "seconds": k} for k, loss in enumerate(losses)]
        return runner.FinishedRun(None, "completed", rows=rows)

    assert approval_setup.same_results(run(1.0, 2.0), run(1.0, 2.0), 0) == "every number of results.csv is equal"
    assert "within 1.0000%" in approval_setup.same_results(run(1.0, 2.0), run(1.01, 2.0), 0.02)
    with pytest.raises(Failed, match="differs by 10.00%, allowed is 5.00%"):
        approval_setup.same_results(run(1.0, 2.0), run(1.0, 2.2), 0.05)


def test_memory_that_grows():
    setup = Setup(None, comparison={"memory": [[1.0] * 20, [1.0] * 20]})
    assert "+0.0%" in approval_checks.memory_does_not_grow(setup)
    setup.comparison = {"memory": [[1 + 0.05 * k for k in range(20)]]}
    with pytest.raises(Failed, match="memory grew by"):
        approval_checks.memory_does_not_grow(setup)
    setup.comparison = {"memory": [[1.0] * 7, [0.0] * 20]}
    with pytest.raises(NotMeasured, match="over too soon to tell; give more --epochs"):
        approval_checks.memory_does_not_grow(setup)


def test_further_options_of_every_run(tmp_path):
    options = approve.parse(["run", "6", "--args", "--cache-images --adam", "--img", "96"])
    setup = Setup(tmp_path, "data.yaml", more=approve.further_words(options.args))
    assert setup.arguments(1, "--fast")[-3:] == ["--cache-images", "--adam", "--fast"] and options.img == 96
    with pytest.raises(ValueError, match="--args: train.py does not understand this: .*--nonsense"):
        approve.perform(approve.parse(["run", "1", "--args", "--nonsense", "--out", str(tmp_path)]))


@pytest.mark.parametrize(
    ("text", "fault"),
    [("--help", "--help cannot be given"), ("--resume", "--resume is what the stages"), ('"x', "No closing quotation"),
     ("--epochs 9", "--epochs is what"), ("--batch 3", "--batch-size is what"), ("--evolve 2", "--evolve is what"),
     ("--resize-schedule x", "--resize-schedule 'x' is not understood"), ("--patience 2 --notest", "drop --notest")],
)  # fmt: skip
def test_options_that_are_not_for_the_runs(text, fault, capsys):
    with pytest.raises(ValueError, match=f"--args.*{fault}"):
        approve.further_words(text)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--img 0", "--img 0 is too small"),
        ("--batch-size -1", "--batch-size -1 is too small"),
        ("--workers -1", "--workers -1 is too small"),
        ("--epochs 0", "--epochs 0 is too small"),
        ("--subset -1", "--subset -1 is too small"),
        ("--repeats 0", "--repeats 0 is too small"),
        ("--data none.yaml", "none.yaml does not exist"),
        ("--cfg none.yaml", "none.yaml does not exist"),
        ("--hyp none.yaml", "none.yaml does not exist"),
        ("--device gpu", "--device 'gpu' is unknown"),
        ("--args=--subset-seed=-1", "--args: --subset-seed -1 is too small"),
        ("--out /dev/null/x", "/dev/null is a file.*choose another --out"),
    ],
)
def test_a_wrong_command_is_refused_before_any_check(words, message, tool, tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "prepare", lambda setup: pytest.fail("runs"))
    with pytest.raises(ValueError, match=message):
        tool("run", "1", *words.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("places", [[None], ["cpu", "0", "0"]])
def test_runs_of_stage_6_side_by_side(places, tmp_path, monkeypatch):
    """Runs come back in their order; only those that had the machine to themselves tell of its speed."""
    at_work, most, devices = [], [], []

    def train(arguments, folder, *rest):
        at_work.append(folder)
        devices.append(arguments[arguments.index("--device") + 1])
        for _ in range(1 if "--fast" in arguments else 3):
            most.append(len(at_work))
            yield None
        at_work.remove(folder)
        return runner.FinishedRun(folder, "completed", rows=[{"epoch": 0, runner.LOSS: 1.0}])

    monkeypatch.setattr(runner, "training", train)
    monkeypatch.setattr(runner, "POLL", 0.0)
    setup, is_alone = Setup(tmp_path, "data.yaml", device="7", places=places), len(places) == 1
    variants = [("no flag", [], {}), ("fast", ["--fast"], {}), ("compiled", [], {"USE_COMPILE": "1"})]
    runs = setup.train_all(variants, epochs=1)
    assert [run.folder.name for run in runs] == ["no_flag", "fast", "compiled"]
    assert max(most) == len(places) and devices == (["7"] * 3 if is_alone else places)
    assert list(setup.measured) == (["no flag", "fast", "compiled"] if is_alone else [])
    with pytest.raises(Failed, match="rows are missing"):
        setup.train_all(variants, epochs=2)


def test_where_stage_6_trains():
    def places(*words):
        return approve.choose_places(approve.parse(["run", "6", "--workers", "0", *words]))

    assert places() == ("", [""]) and places("--device", "cpu", "--at-once", "2") == ("cpu", ["cpu", "cpu"])
    assert places("--devices", "cpu,cpu") == ("cpu", ["cpu", "cpu"])
    for more in (["--device", "cpu"], ["--at-once", "2"]):
        with pytest.raises(ValueError, match="drop --device and --at-once"):
            places("--devices", "cpu", *more)


def test_a_run_that_fails_ends_those_beside_it(tmp_path, monkeypatch):
    """Those that have begun, with their workers, and those that would come next."""
    monkeypatch.setattr(runner, "TRAIN", [sys.executable, "tests/fake_train.py"])
    hyp = tmp_path / "hyp.yaml"
    hyp.write_text("lr0: 0.1\n")
    setup, before = Setup(tmp_path, "data.yaml", hyp=str(hyp), workers=1, places=[None] * 2), approval_setup.children()
    monkeypatch.setenv("FAKE_SECONDS", "60")
    variants = [("bad", ["--batch-size", "0"], {}), *((f"slow {k}", [], {}) for k in range(5))]
    with pytest.raises(Failed, match="batch-size 0 is too small"):
        setup.train_all(variants, epochs=1)
    assert approval_setup.children() == before
    assert not (tmp_path / "runs" / "slow_4").exists()
