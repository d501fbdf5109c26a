"""The one console command, `opentinker`."""

import signal
import sys
from pathlib import Path

if (
    sys.argv[:1] == ["-m"] or Path(sys.argv[0]).name == "opentinker"
):  # we are the program, and a second of imports follows
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C meanwhile ends it without a traceback; `main` takes it back
