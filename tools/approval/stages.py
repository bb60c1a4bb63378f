"""Who approved which stage of the fast paths, and whether that still holds: a small file, checked against the code.

Six stages, one after another. An approval names the content of every file that its stage is about; when one of them
changes, the stage has to be run and approved again. Content counts, not commits, so this also works in a tree with
uncommitted changes.
"""

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from utils.system.files import PROJECT_ROOT, atomic_write, read_json, shown

LOADER = ("utils/datasets.py", "utils/data/**/*.py", "utils/system/**/*.py", "utils/ops/**/*.py")
RUN = ("train.py", "test.py", "models/**/*.py", "utils/**/*.py")
# What approvals.json and report.json have to hold; the words are for messages.
APPROVAL = {"files": dict, "by": str, "date": str, "commit": str, "note": str}
REPORT = {"files": dict, "date": str, "findings": list}
WORDS = {dict: "a mapping", str: "text", list: "a list"}
# What looks at runs and changes nothing of what a run does.
ONLY_LOOKS = ("utils/loggers/", "utils/plots/")


@dataclass(frozen=True)
class ApprovalStage:
    """`files` are glob patterns below the project: what the stage is about."""

    number: int
    title: str
    files: tuple


STAGES = {
    stage.number: stage
    for stage in (
        ApprovalStage(1, "CLI flags", ("utils/config/**/*.py", "utils/run/**/*.py")),
        ApprovalStage(2, "dataloader parameters", LOADER),
        ApprovalStage(3, "worker tensors", LOADER),
        ApprovalStage(4, "micro-batch collation", LOADER),
        ApprovalStage(5, "torch.compile", ("utils/fast/compile*.py", "models/**/*.py")),
        ApprovalStage(6, "integration", RUN),
    )
}


def fingerprint(stage, root=PROJECT_ROOT):
    """{path: content hash} of the files of a stage; the hashes are those of `git hash-object`."""
    names = set()
    for pattern in stage.files:
        found = {path.relative_to(root).as_posix() for path in Path(root).glob(pattern)}
        if not found:  # a stage about no file would stay approved for ever
            raise ValueError(f"stage {stage.number} ({stage.title}): no file of the project matches {pattern}")
        names |= {name for name in found if not name.startswith(ONLY_LOOKS)}
    return {name: content_hash(Path(root) / name) for name in sorted(names)}


def content_hash(path):
    content = Path(path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def changed_files(before, now):
    """Paths that are new, gone, or of another content, sorted."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


class Approvals:
    """The approvals in the JSON file `path`, for the project in `root`; reports of the stages lie in `reports`."""

    def __init__(self, path, reports, root=PROJECT_ROOT):
        self.path, self.reports, self.root = Path(path), Path(reports), Path(root)
        self.entries = self._read()

    def _read(self):
        if not self.path.exists():
            return {}
        try:
            entries = read_json(self.path)
            if not isinstance(entries, dict):
                raise ValueError("it has to be a mapping of stages")
            for number, entry in entries.items():
                if number not in map(str, STAGES):
                    raise ValueError(f"{shown(number)} is no stage")
                _check_record({"note": ""} | entry if isinstance(entry, dict) else entry, APPROVAL, f"stage {number}")
                if not _names_somebody(entry["by"]):
                    raise ValueError(f"stage {number}: by {shown(entry['by'])} names nobody")
            return {int(number): entry for number, entry in entries.items()}
        except ValueError as error:
            raise ValueError(f"{self.path} is no file of approvals ({error}); move it away to begin anew") from error

    def report(self, number):
        """What the last run of a stage wrote (report.json); None when it has not been run.

        Raises ValueError when somebody else has written it.
        """
        path = self.folder(number) / "report.json"
        if not path.exists():
            return None
        try:
            report = read_json(path)
            _check_record(report, REPORT, "it")
            for index, finding in enumerate(report["findings"]):
                _check_record(finding, {"status": str}, f"findings[{index}]")
            if report.get("stage", number) != number:
                raise ValueError(f"it is that of stage {shown(report['stage'])}")
            return report
        except ValueError as error:
            raise ValueError(f"{path} is no report of stage {number} ({error}); approve.py run {number}") from error

    def folder(self, number):
        return self.reports / f"stage_{number}"

    def holds(self, number):
        """Whether a stage is approved and its files are still what they were."""
        return number in self.entries and not self.changes(number)

    def changes(self, number):
        """Files that changed since the approval of a stage."""
        return changed_files(self.entries[number]["files"], fingerprint(STAGES[number], self.root))

    def describe(self, number):
        """Where a stage stands; a report that cannot be used is told instead."""
        try:
            return self._describe(number)
        except ValueError as error:
            return str(error)

    def _describe(self, number):
        if self.holds(number):
            entry = self.entries[number]
            note = f": {entry['note']}" if entry.get("note") else ""
            return f"approved by {entry['by']} on {entry['date']}, commit {entry['commit']}{note}"
        report = self.report(number)
        is_current = report and report["files"] == fingerprint(STAGES[number], self.root)
        if number in self.entries:
            words = (
                f"approval of {self.entries[number]['date']} no longer holds, changed: {_listing(self.changes(number))}"
            )
            return words + (f"; run again: {_outcome(report)}" if is_current else "")
        if report is None:
            return "not run"
        if not is_current:
            return f"run before its files changed ({_outcome(report)}); run it again"
        return f"run on {report['date']}: {_outcome(report)}; waits for approval"

    def check_may_run(self, number):
        """Raise ValueError unless every stage in front of this one is approved and unchanged."""
        for earlier in range(1, number):
            if not self.holds(earlier):
                raise ValueError(
                    f"stage {number} ({STAGES[number].title}) does not run before stage {earlier} "
                    f"({STAGES[earlier].title}) is approved; stage {earlier}: {self.describe(earlier)}"
                )

    def approve(self, number, by, commit, note="", despite_failures=False):
        """Approve a stage on the strength of its report. Raises ValueError when there is nothing to rely on."""
        if not _names_somebody(by):
            raise ValueError(f"--by {shown(by)} names nobody; give the name of who has looked at the report")
        self.check_may_run(number)
        report = self.report(number)
        if report is None:
            raise ValueError(f"stage {number} has not been run: approve.py run {number}")
        now = fingerprint(STAGES[number], self.root)
        if report["files"] != now:
            changed = _listing(changed_files(report["files"], now))
            raise ValueError(f"stage {number} was run with other files ({changed}); run it again")
        if not has_passed(report["findings"]) and not (despite_failures and note.strip()):
            raise ValueError(
                f"stage {number}: {_outcome(report)}; see {self.folder(number) / 'report.md'}. "
                "--despite-failures with a --note that says why approves it nevertheless"
            )
        self.entries[number] = {
            "title": STAGES[number].title, "by": by.strip(), "date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit,
            "note": note, "result": _outcome(report), "files": now,
        }  # fmt: skip
        with atomic_write(self.path, "w") as file:
            json.dump({str(key): entry for key, entry in sorted(self.entries.items())}, file, indent=1)


def has_passed(findings):
    """Whether every check was made, nothing failed, and something was found; `findings` are those of a report."""
    statuses = {finding["status"] for finding in findings}
    return "passed" in statuses and statuses <= {"passed", "not measured"}


def _names_somebody(text):
    return any(letter.isalnum() for letter in text)


def _check_record(record, kinds, where):
    """Raise ValueError unless `record` is a mapping with the keys of `kinds`, each of its kind: {key: type}."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} has to be a mapping, not {shown(record)}")
    for key, kind in kinds.items():
        if not isinstance(record.get(key), kind):
            found = shown(record[key]) if key in record else "nothing"
            raise ValueError(f"{where}: {key} has to be {WORDS[kind]}, found {found}")
    for name, content in record.get("files", {}).items():
        if not isinstance(content, str):
            raise ValueError(f"{where}: files: {shown(name)} has to be text, found {shown(content)}")


def _outcome(report):
    counts = Counter(finding["status"] for finding in report["findings"])
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "no checks"


def _listing(paths):
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
