"""Tables of reports."""

import statistics


def table(header, rows):
    """A markdown table: `header` and every row are lists of cells; a cell that is None stays empty."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def show(value, form):
    """`value` in the format `form`, for instance {:.2f}; None was not measured."""
    return "not measured" if value is None else form.format(value)


def spread(values, form):
    """Median in the format `form`, with the lowest and highest of several values; "not measured" without any."""
    found, text = known(values), show(median(values), form)
    return text if len(found) < 2 else f"{text} ({form.format(min(found))} to {form.format(max(found))})"


def median(values):
    """Median of what was measured; None when nothing was."""
    return statistics.median(known(values)) if known(values) else None


def known(values):
    """What was measured of `values`: those that are not None."""
    return [value for value in values if value is not None]
