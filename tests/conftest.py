"""What every test shares. Markers and the per-test time limit are in pyproject.toml."""

import os
import signal

from hypothesis import settings

# No deadline: on busy cores any example can be slow. CI repeats the same examples, so that red means broken.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A shell that starts the tests in the background has them ignore Ctrl-C, and the processes they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)
