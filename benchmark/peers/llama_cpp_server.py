"""llama-cpp-python behind as much of OpenAI's completions as the comparison asks for. Runs in the peer's environment.

    python llama_cpp_server.py MODEL.gguf PORT THREADS CONTEXT CACHE_BYTES

One request at a time, as llama-cpp-python computes. States of prompts are kept in its own `LlamaRAMCache`, and saved
and restored by its own calls. Beside the KV, these copy a batch's logits (100 MB of this model), for every user of
the library: that is part of a hit's time, and does not count as memory.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llama_cpp import GGML_TYPE_F32, Llama, LlamaRAMCache


class CountingLlama(Llama):
    """Counts the tokens that it computes."""

    num_computed = 0

    def eval(self, tokens: Any) -> None:
        self.num_computed += len(tokens)
        super().eval(tokens)


class Engine:
    def __init__(self, model: str, threads: int, context: int, cache_bytes: int) -> None:
        self.llama = CountingLlama(
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
        # Of the prompt that was asked last, tokens that were not computed; known with its first token.
        self.num_cached = 0

    def tokens(self, prompt: list[int], num_tokens: int) -> Any:
        """Yields num_tokens tokens, greedy, whatever they are."""
        own = Llama.longest_token_prefix(self._context(), prompt)
        try:
            state = self.cache[tuple(prompt)]
            if Llama.longest_token_prefix(state.input_ids[: state.n_tokens].tolist(), prompt) > own:
                self.llama.load_state(state)
        except KeyError:
            pass
        before = self.llama.num_computed
        for at, token in enumerate(self.llama.generate(prompt, temp=0.0), 1):
            if at == 1:
                self.num_cached = len(prompt) - (self.llama.num_computed - before)
            yield token
            if at == num_tokens:
                # Behind the last token, so that no token waits for it.
                self._keep_state()
                return

    def _context(self) -> list[int]:
        """The tokens whose KV the model has now."""
        return self.llama.input_ids[: self.llama.n_tokens].tolist()

    def _keep_state(self) -> None:
        """Keep the present state in place of those that it continues: a document has one state, and not one per
        question about it. A state can be cut, so that the next question finds the document in this one. llama.cpp's
        own server takes a state out of its cache when it continues it, too. What shares less than half of its tokens
        with the present one is about something else, and stays."""
        tokens = tuple(self._context())
        for known in list(self.cache.cache_state):
            if 2 * Llama.longest_token_prefix(known, tokens) >= len(known):
                del self.cache.cache_state[known]
        self.cache[tokens] = self.llama.save_state()


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
        prompt = body["prompt"]
        with self.engine.lock:
            for count, token in enumerate(self.engine.tokens(prompt, body["max_tokens"]), 1):
                text = self.engine.llama.detokenize([token]).decode(errors="replace")
                usage = {
                    "completion_tokens": count,
                    "prompt_tokens": len(prompt),
                    "prompt_tokens_details": {"cached_tokens": self.engine.num_cached},
                }
                event = {"choices": [{"text": text}], "usage": usage}
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
