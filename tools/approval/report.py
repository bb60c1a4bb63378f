"""The report of a stage: report.json, report.md and report.png."""

import json

from tools.approval.setup import NOT_MADE
from tools.experiments.markdown import table
from tools.experiments.runner import LOSS
from utils.plots.style import PALETTE, new_figure, save_figure, set_title, whole_numbers
from utils.system.files import atomic_write

COLOURS = {"passed": PALETTE[2], "failed": PALETTE[4], "not measured": PALETTE[7], NOT_MADE: PALETTE[7]}


def write_report(folder, content):
    """report.json and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "report.json", "w") as file:
        json.dump(content, file, indent=1)
    with atomic_write(folder / "report.md", "w") as file:
        file.write(report_text(content))


def report_text(content):
    """report.md from the content of report.json."""
    statuses = {finding["status"] for finding in content["findings"]}
    unfinished = "not complete" if NOT_MADE in statuses and "failed" not in statuses else "failed"
    verdict = "passed" if content["passed"] else unfinished
    lines = [f"# Stage {content['stage']}, {content['title']}: {verdict}", ""]
    lines += [f"- {name}: {value}" for name, value in content["machine"].items()]
    lines += [f"- runs: `{content['arguments']}`", f"- time: {content['seconds']:.0f} s", ""]
    rows = [
        (found["name"], f"**{found['status']}**", found["detail"].replace("|", "/").replace("\n", " "),
         f"{found['seconds']:.1f}") for found in content["findings"]
    ]  # fmt: skip
    lines.append(table(("check", "result", "what was found", "s"), rows))
    measured = content["measured"]
    if columns := list(dict.fromkeys(name for row in measured.values() for name in row)):
        rows = [
            (label, *(None if row.get(name) is None else f"{row[name]:.3g}" for name in columns))
            for label, row in measured.items()
        ]
        lines += ["", table(("measured", *columns), rows)]
        if not any(row.get("GPU") is not None for row in measured.values()):
            lines += ["", "GPU utilisation: not measured on this machine."]
    lines += [""] if NOT_MADE in statuses else ["", "![report](report.png)", ""]
    return "\n".join([*lines, f"An approval is about: {', '.join(content['files']) or 'none yet'}", ""])


def plot(setup, path):
    """Time of each check, what was measured, and the training losses, side by side."""
    columns = list(dict.fromkeys(name for row in setup.measured.values() for name in row if row[name] is not None))
    panels = 1 + len(columns) + bool(setup.curves)
    height = max(3, 0.3 * max(len(setup.findings), len(setup.measured)) + 1)
    figure, axes = new_figure(-(-panels // 3), min(panels, 3), size=(18, height * -(-panels // 3)), used=panels)
    _bars(axes[0], "seconds (green: passed, red: failed, grey: not measured)",
          {found.name: found.seconds for found in setup.findings},
          [COLOURS[found.status] for found in setup.findings])  # fmt: skip
    for ax, column in zip(axes[1:], columns, strict=False):
        rows = {label: row[column] for label, row in setup.measured.items() if row.get(column) is not None}
        _bars(ax, column, rows, PALETTE[0])
    if setup.curves:
        _draw_curves(axes[1 + len(columns)], setup.curves)
    return save_figure(figure, path)


def _bars(ax, title, values, colour):
    """A bar for each of `values` {name: number}, the first on top."""
    ax.barh(range(len(values)), list(values.values()), color=colour)
    set_title(ax, title)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()


def _draw_curves(ax, curves):
    for index, (label, rows) in enumerate(curves.items()):
        ax.plot([row["epoch"] for row in rows], [row[LOSS] for row in rows], marker="o", markersize=3,
                color=PALETTE[index % len(PALETTE)], label=label)  # fmt: skip
    set_title(ax, "training loss")
    ax.set_xlabel("epoch", fontsize=8)
    whole_numbers(ax.xaxis)
    if len(curves) <= 10:
        ax.legend(frameon=False, fontsize=7)
