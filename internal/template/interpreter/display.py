"""Forms of Python values beyond IPython's: tables as data, figures as charts, plain containers as
JSON, images that are shown or saved."""
import base64
import datetime
import decimal
import json
import math
import os
import sys

import chart
from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.display import display
from jupyter_client.jsonutil import json_clean, json_default
from jupyter_client.session import json_packer
from traitlets import ObjectName, Unicode

CELL_LIMIT = 1_000_000  # a larger table has no data
DEPTH_LIMIT = 100


def plain(value, depth=0):
    """The value in the terms of JSON. What has no such form becomes text."""
    if depth > DEPTH_LIMIT:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, (str, bool)):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, (numpy.datetime64, numpy.timedelta64)):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(plain(k, depth + 1)): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, depth + 1) for v in value]
    if numpy is not None and isinstance(value, numpy.ndarray):
        return plain(value.tolist(), depth + 1)
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        if value is pandas.NaT or value is pandas.NA:
            return None
        if isinstance(value, pandas.Timedelta):
            return value.isoformat()
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)


def table(frame):
    """The columns of a DataFrame, each a list."""
    return {
        name if isinstance(name, str) else str(plain(name)): [plain(v) for v in frame.iloc[:, i].tolist()]
        for i, name in enumerate(frame.columns)
    }


class DataFormatter(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)

    def __call__(self, value):
        # Who has a DataFrame has imported pandas.
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, getattr(pandas, "DataFrame", ())):
            return super().__call__(value)
        try:
            return table(value) if value.size <= CELL_LIMIT else None
        except Exception:  # a table is shown, whatever is in its cells
            return None


class ChartFormatter(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, value):
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(value, getattr(figure, "Figure", ())):
            return super().__call__(value)
        try:
            return plain(chart.of_figure(value))
        except Exception:  # a figure is shown, whatever is drawn on it
            return None


class ContainerFormatter(JSONFormatter):
    def __call__(self, value):
        if type(value) not in (list, dict):
            return super().__call__(value)
        try:
            return json.loads(json.dumps(plain(value))), {"expanded": True}
        except Exception:  # nor is a list lost for what is in it
            return None


def pack(message):
    """Encodes a message of the kernel. Half a surrogate pair, which UTF-8 does not have, is a question
    mark, where the message would be lost with all that is in it."""
    try:
        return json_packer(message)
    except UnicodeEncodeError:
        return json.dumps(json_clean(message), default=json_default, ensure_ascii=False).encode("utf-8", "replace")


def show_images():
    """Has Pillow show images here: there is no screen."""
    try:
        from PIL import Image
    except ImportError:
        return
    save = Image.Image.save

    def save_and_display(image, fp, format=None, **options):
        save(image, fp, format, **options)
        if isinstance(fp, (str, os.PathLike)):
            display(image)

    Image.Image.save = save_and_display
    Image.Image.show = lambda image, *_, **__: display(image)


def install(shell):
    """Gives an IPython shell these forms."""
    formatters = shell.display_formatter.formatters
    for kind in (DataFormatter, ChartFormatter, ContainerFormatter):
        formatter = kind(parent=shell.display_formatter)
        formatters[formatter.format_type] = formatter
    show_images()
