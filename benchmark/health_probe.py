"""Asks a server for /health every PERIOD_S until its stdin ends, then prints the seconds of each answer as JSON.

A process of its own, so that its asker's work delays no question. Imports nothing that takes long.

    python benchmark/health_probe.py PORT
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

PERIOD_S = 0.01


def main() -> None:
    end = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.readline()
        end.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=300)
    samples: list[float] = []
    while not end.is_set():
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took = time.perf_counter() - start
        samples.append(took)
        if len(samples) == 1:
            print("asking", flush=True)
        end.wait(max(PERIOD_S - took, 0))
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
