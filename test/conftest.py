"""Tests compute next to nothing, several processes of them at a time: more threads in each would only wait for each
other. Before torch is imported; servers that tests start have it from here, too."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
