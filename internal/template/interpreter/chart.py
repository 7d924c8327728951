"""What a matplotlib figure shows, as data in the form of E2B's `chart` results.

Imported where nobody has asked for matplotlib yet, so it imports nothing of it before it is
given a figure.
"""
import math
import re

POINT_LIMIT = 200_000  # a figure with more has no data

_UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")
_DEFAULT_LABEL = re.compile(r"_(?:child|container)(\d+)\Z")


def of_figure(figure):
    """The chart of a figure; None if nothing is drawn on it. Dates are still dates."""
    axes = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    drawn = [ax for ax in axes if ax.has_data()]
    if not drawn or _points(drawn) > POINT_LIMIT:
        return None
    if len(axes) == 1:
        return of_axes(drawn[0])
    return {"type": "superchart", "title": figure.get_suptitle() or None, "elements": [of_axes(ax) for ax in drawn]}


def _points(axes):
    return sum(
        sum(len(line.get_xdata()) for line in ax.lines)
        + sum(len(c.get_offsets()) for c in ax.collections)
        + len(ax.patches)
        for ax in axes
    )


def of_axes(ax):
    """The chart of one pair of axes. A mixture of kinds is `unknown`."""
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import PathPatch, Wedge

    lines = [line for line in ax.lines if line.get_transform() is ax.transData or not _parallel(line)]
    notable = [line for line in lines if not _parallel(line)]
    scatters = [c for c in ax.collections if isinstance(c, PathCollection)]
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    in_bars = {id(patch) for container in bars for patch in container}
    patches = [p for p in ax.patches if id(p) not in in_bars]
    wedges = [p for p in patches if isinstance(p, Wedge)]
    frames = [p for p in patches if isinstance(p, PathPatch)]

    title = {"title": ax.get_title() or None}
    unknown = {"type": "unknown", **title, "elements": []}
    if ax.images or len(patches) > max(len(wedges), len(frames)):
        return unknown
    if wedges:
        if bars or scatters or notable:
            return unknown
        return {"type": "pie", **title, "elements": [
            {"label": w.get_label(), "angle": _round(abs(w.theta2 - w.theta1)), "radius": w.r} for w in wedges
        ]}
    if not bars and not scatters and (boxes := _boxes(ax, frames)):
        elements, upright = boxes
        return {"type": "box_and_whisker", **title, **_labels(ax, upright), "elements": elements}
    if frames:
        return unknown
    if bars:
        if scatters or notable:
            return unknown
        upright = all(c.orientation != "horizontal" for c in bars)
        return {"type": "bar", **title, **_labels(ax, upright), "elements": [e for c in bars for e in _bars(ax, c)]}
    if scatters and not notable:
        elements = [
            {"label": _label(c, "Group"), "points": [[_date(ax.xaxis, x), _date(ax.yaxis, y)] for x, y in c.get_offsets().tolist()]}
            for c in scatters
        ]
        return {"type": "scatter", **title, **_labels(ax), **_scale(ax.xaxis, "x"), **_scale(ax.yaxis, "y"), "elements": elements}
    if lines and not scatters:
        elements = [
            {"label": _label(line, "Line"), "points": [[x, y] for x, y in zip(_values(line.get_xdata()), _values(line.get_ydata()))]}
            for line in lines
        ]
        return {"type": "line", **title, **_labels(ax), **_scale(ax.xaxis, "x"), **_scale(ax.yaxis, "y"), "elements": elements}
    return unknown


def _parallel(line):
    """Whether a line only leads across: two points, on a parallel to an axis."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == 2 and len(y) == 2 and bool(x[0] == x[1] or y[0] == y[1])


def _label(artist, kind):
    label = artist.get_label()
    default = _DEFAULT_LABEL.match(label)
    return f"{kind} {default[1]}" if default else label


def _labels(ax, upright=True):
    """Labels and units. Categories are on x, also where the chart lies on its side."""
    x, y = (ax.get_xlabel(), ax.get_ylabel()) if upright else (ax.get_ylabel(), ax.get_xlabel())
    return {"x_label": x or None, "y_label": y or None, "x_unit": _unit(x), "y_unit": _unit(y)}


def _unit(label):
    found = _UNIT.search(label)
    return (found[1] or found[2]) if found else None


def _converter(axis):
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def _of_dates(axis):
    from matplotlib import dates

    return isinstance(_converter(axis), (dates.DateConverter, dates.ConciseDateConverter, dates._SwitchableDateConverter))


def _date(axis, value):
    """A coordinate as what it stands for."""
    if value is not None and math.isfinite(value) and _of_dates(axis):
        from matplotlib import dates

        return dates.num2date(value)
    return value


def _values(data):
    """What was plotted, not the numbers that matplotlib made of it."""
    import numpy

    data = numpy.ma.asanyarray(data)
    if data.dtype.kind == "M":
        # In whole seconds where nothing is finer.
        seconds = data.astype("datetime64[s]")
        return (seconds if (seconds == data).all() else data.astype("datetime64[us]")).astype(str).tolist()
    return data.tolist()


def _scale(axis, prefix):
    ticks, labels = [float(t) for t in axis.get_majorticklocs()], [t.get_text() for t in axis.get_ticklabels()]
    if _of_dates(axis):
        scale = "datetime"
    elif axis.get_scale() != "linear":
        scale = axis.get_scale()
    elif ticks and ticks == list(range(len(ticks))) and all(str(i) != label for i, label in enumerate(labels)):
        scale = "categorical"
    else:
        scale = "linear"
    return {
        f"{prefix}_ticks": [_date(axis, t) for t in ticks],
        f"{prefix}_tick_labels": labels,
        f"{prefix}_scale": scale,
    }


def _category(axis, position):
    """The name of the place on an axis: its tick's where ticks have names, else its number."""
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import FixedLocator

    if isinstance(axis.get_major_locator(), (StrCategoryLocator, FixedLocator)):
        ticks = axis.get_majorticklocs()
        if len(ticks):
            nearest = min(range(len(ticks)), key=lambda i: abs(ticks[i] - position))
            return axis.get_ticklabels()[nearest].get_text()
    value = _date(axis, position)
    return f"{value:g}" if isinstance(value, float) else value.isoformat()


def _bars(ax, container):
    upright = container.orientation != "horizontal"
    for bar in container:
        if upright:
            name, value = _category(ax.xaxis, bar.get_x() + bar.get_width() / 2), bar.get_height()
        else:
            name, value = _category(ax.yaxis, bar.get_y() + bar.get_height() / 2), bar.get_width()
        yield {"label": name, "group": _label(container, "Group"), "value": float(value)}


def _boxes(ax, frames):
    """The boxes of a box plot and whether they stand upright; None if this is none. A box is a
    patch or a closed line; whiskers, caps and medians are lines of two points."""
    outlines = [f.get_path().vertices.tolist() for f in frames]
    rest = []
    for line in ax.lines:
        points = line.get_xydata().tolist()
        if not frames and len(points) in (5, 11) and points[0] == points[-1]:
            outlines.append(points)
        else:
            rest.append((line, points))
    # What has no data, or data that are no numbers, has an outline nowhere.
    outlines = [o for o in outlines if all(math.isfinite(v) for point in o for v in point)]
    if not outlines:
        return None
    for upright in (True, False):
        axis = ax.xaxis if upright else ax.yaxis
        elements = [_box(axis, _turn(outline, upright), [(l, _turn(p, upright)) for l, p in rest]) for outline in outlines]
        if all(elements):
            return elements, upright
    return None


def _turn(points, upright):
    return points if upright else [[y, x] for x, y in points]


def _box(axis, outline, lines):
    left, right = min(x for x, _ in outline), max(x for x, _ in outline)
    # The corners: the notch of a notched box may reach beyond them.
    low, high = sorted((outline[0][1], outline[5 if len(outline) > 10 else 2][1]))
    middle = (left + right) / 2

    def same(a, b):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)

    bottom = top = None
    medians, outliers = [], []
    for line, points in lines:
        if line.get_linestyle() in ("None", "none", "", " "):
            outliers += [y for x, y in points if same(x, middle) and not low <= y <= high]
        elif len(points) == 2:
            (x0, y0), (x1, y1) = points
            if same(x0, x1) and same(x0, middle):
                if same(max(y0, y1), low) and bottom is None:
                    bottom = min(y0, y1)
                elif same(min(y0, y1), high) and top is None:
                    top = max(y0, y1)
            elif same(y0, y1) and same((x0 + x1) / 2, middle) and low <= y0 <= high:
                # A cap may lie on the box's edge; the median is at least as wide.
                medians.append((abs(x1 - x0), not (same(y0, low) or same(y0, high)), y0))
    if not medians or bottom is None and top is None:
        return None
    inside = [m for m in medians if m[1]] or medians
    median = max(inside, key=lambda m: m[0])[2]
    return {
        "label": _category(axis, middle),
        "min": low if bottom is None else bottom,
        "first_quartile": low,
        "median": median,
        "third_quartile": high,
        "max": high if top is None else top,
        "outliers": outliers,
    }


def _round(angle):
    """Wedges are computed in single precision."""
    return float(f"{angle:.6g}")
