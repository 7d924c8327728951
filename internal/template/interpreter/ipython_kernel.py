"""The Python kernel: ipykernel, whose results are told in the forms that E2B's clients know."""
import sys

import chart  # noqa: F401 found beside this file
import display

# Code of the user imports from where it runs, and nothing from here.
sys.path[0] = ""

from ipykernel.kernelapp import IPKernelApp  # noqa: E402
from traitlets.config import Config  # noqa: E402

config = Config()
config.InteractiveShell.colors = "nocolor"
config.Session.packer = "display.pack"
config.HistoryManager.enabled = False
config.PlainTextFormatter.max_seq_length = 0  # whole lists, not their first thousand

app = IPKernelApp.instance(config=config)
app.initialize()
display.install(app.shell)
app.start()
