"""Write what documents take from elsewhere: docs/flags.md from the flags' rows, docs/speed_up.png from measured rates.

    python tools/make_docs.py     # again after a change of flags or figures

The rates stand in docs/measurements.md, in the table below "Against stock". It also prints the README's table of them.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.doctor import COCO_IMAGES
from tools.experiments.markdown import table
from utils.config.flags import DETECT_FLAGS, EXPORT_FLAGS, MACHINE, STAYS, TEST_FLAGS, TRAIN_FLAGS
from utils.plots.style import FAINT, INK, PALETTE, new_figure, save_figure
from utils.run import entry
from utils.system.files import PROJECT_ROOT, atomic_write

DOCS = PROJECT_ROOT / "docs"
PROGRAMS = {"train.py": TRAIN_FLAGS, "test.py": TEST_FLAGS, "detect.py": DETECT_FLAGS, "export.py": EXPORT_FLAGS}
RESUME = {STAYS: "taken, and kept", MACHINE: "taken, for this start"}
FLAGS_PAGE = """# All flags

Written by `python tools/make_docs.py` from the rows of `utils/config/flags.py`, of which the command lines are made
too; `--help` says the same. A flag may be shortened as long as only one fits. *off* marks a switch.

On `--resume`: *taken, and kept*: a value that is typed again holds from then on. *taken, for this start*: how this
machine does it, which changes speed and rounding only; such a switch has a `--no-` form as well (`--no-fast`), which
turns it off. Otherwise the value of the run holds.
"""


class Rates(NamedTuple):
    """Images a second of one job."""

    job: str
    stock: float
    fast: float

    @property
    def gain(self):
        gain = self.fast / self.stock
        return f"{gain:.0f}x" if gain >= 10 else f"{gain:.1f}x"


def flags_page() -> str:
    """The text of docs/flags.md."""
    parts = [FLAGS_PAGE]
    for program, flags in PROGRAMS.items():
        parts.append(f"## {program}\n")
        for group in dict.fromkeys(flag.group for flag in flags.values()):
            parts += [f"### {program}, {group.partition(' (')[0]}\n"] if group else []
            parts.append(_flag_table([flag for flag in flags.values() if flag.group == group], program == "train.py"))
    return "\n".join(parts)


def _flag_table(flags, is_training):
    header = ["flag", "default", "what it does", *["on `--resume`"] * is_training]
    rows = [
        [_spelled(flag), _default(flag), (flag.help or "").replace("%%", "%").replace("<", r"\<"),
         *[RESUME.get(flag.resume)] * is_training]
        for flag in flags
    ]  # fmt: skip
    return table(header, rows) + "\n"


def _spelled(flag):
    value = flag.metavar or (f"{{{','.join(flag.choices)}}}" if flag.choices else "N" if flag.type else "")
    return ", ".join(f"`{name}`" for name in flag.names.split()) + (f" `{value}`" if value else "")


def _default(flag):
    if flag.default is False:
        return "off"
    value = " ".join(map(str, flag.default)) if isinstance(flag.default, list) else flag.default
    return None if value in (None, "") else f"`{value}`"


def measured_rates(path: Path = DOCS / "measurements.md") -> list[Rates]:
    """The rows of the table below "Against stock". Raises ValueError where a row has no two rates."""
    text = path.read_text(encoding="utf-8").partition("### Against stock\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    try:
        rates = [Rates(job, *(float(cell.replace(",", "")) for cell in cells[:2])) for job, *cells in rows[2:]]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: below 'Against stock' a row has no two rates ({error})") from None
    if not rates:
        raise ValueError(f"{path}: there is no table below 'Against stock'")
    return rates


def hours(rate: float) -> str:
    """What 100 epochs of COCO take at `rate` images a second, in words; training steps only."""
    seconds = 100 * COCO_IMAGES / rate
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def rates_table(rates: list[Rates]) -> str:
    """As README.md has it."""
    rows = [
        [row.job, f"{row.stock:,.0f} img/s, {hours(row.stock)}", f"{row.fast:,.0f} img/s, {hours(row.fast)}", row.gain]
        for row in rates
    ]
    return table(["job", "stock", "`--fast`", "gain"], rows)


def draw_rates(rates: list[Rates], path: Path = DOCS / "speed_up.png") -> Path:
    """Bars of the hours that 100 epochs take; the title says what the first job gains."""
    figure, (ax,) = new_figure(size=(10, 1.2 + 0.75 * len(rates)))
    longest = max(100 * COCO_IMAGES / row.stock / 3600 for row in rates)
    for place, row in enumerate(rates):
        _draw_bar(ax, place - 0.19, row.stock, FAINT, "stock", longest)
        _draw_bar(ax, place + 0.19, row.fast, PALETTE[0], "--fast", longest, f"   {row.gain}")
    ax.set_yticks(range(len(rates)), [row.job for row in rates], fontsize=10)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.25 * longest)
    ax.set_xlabel("hours of training, OTA loss, one H200 (calculated from measured rates)", fontsize=9)
    first = rates[0]
    title = f"100 epochs of COCO, {first.job}: {hours(first.fast)} instead of {hours(first.stock)}"
    figure.suptitle(title, fontsize=13, color=INK)
    return save_figure(figure, path)


def _draw_bar(ax, place, rate, colour, name, longest, gain=""):
    length = 100 * COCO_IMAGES / rate / 3600
    ax.barh(place, length, 0.36, color=colour)
    words = f"{name}: {hours(rate)}, {rate:,.0f} img/s{gain}"
    ax.text(length + longest / 150, place, words, va="center", fontsize=9, color=INK)


def main(opt):
    rates = measured_rates()
    draw_rates(rates)
    with atomic_write(DOCS / "flags.md", "w") as file:
        file.write(flags_page())
    print(rates_table(rates))


if __name__ == "__main__":
    entry.run(main, argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
              .parse_args())  # fmt: skip
