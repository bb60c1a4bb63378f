"""The style of all plots: figures without a display, colours, unobtrusive frames and grids.

Everything draws through matplotlib's object interface (Figure, never pyplot): no display, no global state, safe in a
thread. matplotlib is imported when the first plot is drawn.
"""

import warnings
from io import BytesIO
from pathlib import Path

from utils.plots.fonts import use_fonts
from utils.system.files import atomic_write

# Okabe and Ito's colours, told apart by colour-blind readers too; class k has colour k modulo 8
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#999999")
INK, FAINT = "#303030", "#B0B0B0"


def class_colour(class_id):
    """The colour of a class, in every plot and image."""
    return PALETTE[int(class_id) % len(PALETTE)]


def new_figure(rows=1, columns=1, size=(8, 6), used=None):
    """A figure of `size` inches and its axes [rows * columns], or the first `used` of them; quiet frames and grids."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
    for ax in axes[used:] if used else ():
        ax.remove()
    return figure, axes[:used]


def save_figure(figure, path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    use_fonts(figure)
    content = _drawn(figure, format=path.suffix[1:])  # it takes longest: a kill leaves no temporary file
    with atomic_write(path) as file:
        file.write(content)
    return path


def _drawn(figure, **options):
    """The bytes of a figure. Its layout leaves nothing to be cut off; where names are too long for it, it grows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied")
        try:
            figure.get_layout_engine().execute(figure)
        except UserWarning:
            options["bbox_inches"] = "tight"
    figure.set_layout_engine(None)  # or it would be laid out twice more
    content = BytesIO()
    figure.savefig(content, **options)
    return content.getvalue()


def set_title(ax, text):
    ax.set_title(text, fontsize=10, color=INK)


def whole_numbers(axis):
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
