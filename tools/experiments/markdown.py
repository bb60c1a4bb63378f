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
    known = [value for value in values if value is not None]
    text = show(median(values), form)
    return text if len(known) < 2 else f"{text} ({form.format(min(known))} to {form.format(max(known))})"


def median(values):
    """Median of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
