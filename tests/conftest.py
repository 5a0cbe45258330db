"""What every test runs under: one compute thread, and signals that can be sent to children."""

from __future__ import annotations

import os
import signal

# Tiny models and many child processes: more threads only wait for one another on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts pytest in the background lets it ignore Ctrl-C, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
