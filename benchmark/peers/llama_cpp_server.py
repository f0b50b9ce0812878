"""llama-cpp-python behind as much of OpenAI's completions as the comparison asks for. Runs in the peer's environment.

    python llama_cpp_server.py MODEL.gguf PORT THREADS CONTEXT CACHE_BYTES

One request at a time, as llama-cpp-python computes. States of prompts are kept in its own `LlamaRAMCache`.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llama_cpp import GGML_TYPE_F32, Llama, LlamaRAMCache


class Engine:
    def __init__(self, model: str, threads: int, context: int, cache_bytes: int) -> None:
        self.llama = Llama(
            model,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=GGML_TYPE_F32,
            type_v=GGML_TYPE_F32,
            verbose=False,
        )
        self.cache = LlamaRAMCache(cache_bytes)
        self.lock = threading.Lock()

    def tokens(self, prompt: list[int], num_tokens: int) -> Any:
        """Yields num_tokens tokens, greedy, whatever they are."""
        own = Llama.longest_token_prefix(self.llama.input_ids[: self.llama.n_tokens].tolist(), prompt)
        try:
            state = self.cache[tuple(prompt)]
            if Llama.longest_token_prefix(state.input_ids[: state.n_tokens].tolist(), prompt) > own:
                self.llama.load_state(state)
        except KeyError:
            pass
        for at, token in enumerate(self.llama.generate(prompt, temp=0.0), 1):
            yield token
            if at == num_tokens:
                # Behind the last token, so that no token waits for it.
                self.cache[tuple(prompt)] = self.llama.save_state()
                return


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with self.engine.lock:
            for count, token in enumerate(self.engine.tokens(body["prompt"], body["max_tokens"]), 1):
                text = self.engine.llama.detokenize([token]).decode(errors="replace")
                event = {"choices": [{"text": text}], "usage": {"completion_tokens": count}}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def main() -> None:
    model, port, threads, context, cache_bytes = sys.argv[1], *map(int, sys.argv[2:])
    Handler.engine = Engine(model, threads, context, cache_bytes)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
