"""The cost of one long text for other clients: the worst `/health` beside it, and the next turn of a long
conversation.

    python benchmark/bench_long_prompts.py [--rounds N] [--tree DIR]

The server is real, with the embedded model (a context of 32,768 tokens, so that the long prompts end with status
400). A thread of its own asks `/health` again and again while one request is answered. --tree: another checkout whose
server is measured instead, for a number before a change.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from common import print_table, write_json

# Bytes of the text; the smaller one has to be tokenised before its length is known.
SIZES = {"520 KB": 520 << 10, "10 MB": 10 * 10**6}
CONVERSATION_TURNS, TURN_CHARACTERS = 40, 2500
WORDS = [
    "the",
    "library",
    "opens",
    "at",
    "nine",
    "Grüße",
    "你好",
    "def f(x):",
    "\n\n",
    "  ",
    "morning",
    "1234",
    "émigré",
]


class Server:
    def __init__(self, tree: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        path = os.pathsep.join([str(tree / "python"), str(tree / "sgl-kernel" / "python")])
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "embedded", "--log-level", "error"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], env={**os.environ, "PYTHONPATH": path}, cwd=tree
        )
        while self.process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not start")

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, float]:
        """(status, seconds)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        start = time.perf_counter()
        connection.request(method, path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        connection.close()
        return reply.status, time.perf_counter() - start

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def text(size_bytes: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    words = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size_bytes // 3))
    return words.encode()[:size_bytes].decode(errors="ignore")


def worst_health(server: Server, path: str, body: bytes) -> tuple[float, float, int]:
    """Seconds of the slowest /health beside one request, seconds of the request, its status."""
    done = threading.Event()
    worst = [0.0]

    def poll() -> None:
        while not done.is_set():
            worst[0] = max(worst[0], server.ask("GET", "/health")[1])
            time.sleep(0.001)

    thread = threading.Thread(target=poll)
    thread.start()
    time.sleep(0.05)
    status, seconds = server.ask("POST", path, body)
    done.set()
    thread.join()
    return worst[0], seconds, status


def beside(server: Server, rounds: int) -> list[dict[str, object]]:
    rows = []
    for size, size_bytes in SIZES.items():
        prompt = text(size_bytes, 1)
        conversation = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        for path, body in (
            ("/v1/chat/completions", conversation),
            ("/v1/completions", {"prompt": prompt, "max_tokens": 1}),
            ("/tokenize", {"prompt": prompt}),
        ):
            found = [worst_health(server, path, msgspec.json.encode(body)) for _ in range(rounds)]
            rows.append(
                {
                    "text": size,
                    "endpoint": path,
                    "status": found[0][2],
                    "worst /health, ms": max(worst for worst, _, _ in found) * 1e3,
                    "the request, ms": float(np.median([seconds for _, seconds, _ in found])) * 1e3,
                    "rounds": rounds,
                }
            )
    return rows


def next_turn(rounds: int) -> list[dict[str, object]]:
    """In process: tokenising a conversation's next turn, with and without the ids of the turns before it."""
    from sglang.srt.configs.embedded_model import ensure_embedded_model
    from sglang.srt.managers.text_encoder import TextEncoder
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(str(ensure_embedded_model()))
    samples: dict[str, list[float]] = {"anew": [], "with reuse": []}
    size = 0
    for i in range(rounds):
        messages = [
            {"role": ("user", "assistant")[turn % 2], "content": text(TURN_CHARACTERS, 1000 * i + turn)}
            for turn in range(CONVERSATION_TURNS + 1)
        ]
        earlier, whole = (
            tokenizer.apply_chat_template(messages[:turns], tokenize=False, add_generation_prompt=True)
            for turns in (CONVERSATION_TURNS - 1, CONVERSATION_TURNS + 1)
        )
        size = len(whole)
        for name, encoder in (("anew", None), ("with reuse", TextEncoder(tokenizer))):
            if encoder is None:
                encoder = TextEncoder(tokenizer)
            else:
                encoder.encode(earlier, add_special_tokens=False, namespace="")
            start = time.perf_counter()
            encoder.encode(whole, add_special_tokens=False, namespace="")
            samples[name].append(time.perf_counter() - start)
    return [
        {
            "a turn of a conversation": name,
            "characters": size,
            "ms": float(np.median(seconds)) * 1e3,
            "rounds": rounds,
        }
        for name, seconds in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    server = Server(args.tree.resolve())
    try:
        rows = beside(server, args.rounds)
    finally:
        server.stop()
    print_table("Beside one long text", rows)
    turns = []
    if args.tree == parser.get_default("tree"):
        turns = next_turn(args.rounds)
        print_table("Tokenising the next turn", turns)
    write_json("long_prompts", {"rounds": args.rounds, "tree": str(args.tree)}, rows + turns)


if __name__ == "__main__":
    main()
