"""The detokenizer process: token ids in, text out. Owns the text state of every running request, and nothing else.

It never sees prompts (only their last ids), never talks to the scheduler, and passes on every message that is not
text. The text that it sends is final: no character, stop string or special token is withdrawn later.

    ids -> IncrementalDecoder -> whole characters -> StopMatcher -> text that can no longer become a stop string
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import zmq

from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DetokenizeReq,
    FinishReason,
    StrOutput,
    TokenOutput,
    ToTokenizer,
    bytes_to_ids,
    decode_to_detokenizer,
    encode,
)
from sglang.srt.utils.child_process import ChildArgs, open_pull, open_push, run_child

Decode = Callable[[Sequence[int], bool], str]
"""(ids, skip_special_tokens) -> text, without any clean-up of spaces, which would not be incremental."""

# The character that decoders write for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Decodes a growing list of ids in pieces whose concatenation is the decode of the whole list.

    It keeps a window of the last ids, and counts how many characters of the window's text are sent:

        ids     ... | k  k+1  k+2 | k+3 k+4        text of the window: "lo wor" + "ld\ufffd"
                    ^ window        ^ new                               out ^     new ^   held back: may become "é"

    Only characters at the end of the window can change, and only while they are replacement marks, which stand for a
    character whose last bytes are still to come. A window that has grown too long is cut down to its last ids. They
    stay as context, because some tokenizers drop the space before a text's first word. Each id therefore costs a
    decode of a bounded window, and the total cost is linear.
    """

    MAX_WINDOW = 24
    CONTEXT = 6
    # Coprime to the two, three or four bytes of a character, each of which may be a token, so that pieces end on
    # whole ones.
    PIECE = 5

    def __init__(self, decode: Decode, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._window = list(prompt_tail)
        context = decode(self._window, skip_special_tokens) if prompt_tail else ""
        if context.endswith(_REPLACEMENT):  # the prompt ends within a character, which is not part of the answer
            self._window, context = [], ""
        self._out = len(context)

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """The new whole characters. With final, also the text that was held back."""
        new = []
        for start in range(0, max(len(ids), 1), self.PIECE):
            self._window.extend(ids[start : start + self.PIECE])
            text = self._decode(self._window, self._skip)
            done = start + self.PIECE >= len(ids)
            stable = len(text) if final and done else len(text.rstrip(_REPLACEMENT))
            if stable > self._out:
                new.append(text[self._out : stable])
                self._out = stable
            if len(self._window) > self.MAX_WINDOW:
                new.append(self._cut(text, stable))
        return "".join(new)

    def _cut(self, text: str, stable: int) -> str:
        if stable == len(text):
            # Not from within a character: some decoders give up a whole run of bytes for one that is misplaced.
            for size in range(self.CONTEXT, self.CONTEXT + 4):
                context = self._decode(self._window[-size:], self._skip)
                if not context.startswith(_REPLACEMENT):
                    break
            self._window, self._out = self._window[-size:], len(context)
            return ""
        if len(self._window) < 2 * self.MAX_WINDOW:
            return ""
        # Such a long run of bytes is no text; it comes from a random or broken model. Everything before a border
        # between two tokens is final if decoding both sides apart gives the same. One of the last borders has this
        # property, because a character has at most four bytes.
        for at in range(len(self._window) - 1, len(self._window) - 6, -1):
            head = self._decode(self._window[:at], self._skip)
            if head + self._decode(self._window[at:], self._skip) == text:
                break
        else:
            at, head = len(self._window), text
        out = head[self._out :]
        self._window, self._out = self._window[at:], max(0, self._out - len(head))
        return out


class StopMatcher:
    """Finds stop strings in a text that comes in pieces, and holds back an end that may become one.

    Of the strings that match, the one whose match ends first wins, then the longest. The result does not depend on
    the pieces.
    """

    def __init__(self, stop: Sequence[str], no_stop_trim: bool = False) -> None:
        self._stop = stop
        self._keep = no_stop_trim
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, final: bool = False) -> str:
        """The text that can be sent. Sets `matched` and returns the last piece once a stop string is complete."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else at]
        split = len(text) if final else len(text) - self._possible_stop(text)
        self._held = text[split:]
        return text[:split]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0:
                if stop.startswith(text[at:]):
                    longest = max(longest, len(text) - at)
                    break
                at = text.find(stop[0], at + 1)
        return longest


class RequestText:
    """One request's text, from its ids."""

    def __init__(self, req: DetokenizeReq, decode: Decode) -> None:
        tail = bytes_to_ids(req.prompt_tail).tolist()
        self._decoder = IncrementalDecoder(decode, req.skip_special_tokens, tail)
        self._stops = StopMatcher(req.stop, req.no_stop_trim)
        self._has_stops = bool(req.stop)
        self._keep = req.no_stop_trim

    def process(self, output: TokenOutput) -> StrOutput:
        ids = bytes_to_ids(output.output_ids).tolist()
        reason = output.finish_reason
        # The id that ended the request is counted, but it is not part of the text.
        hidden = int(bool(ids) and reason is not None and reason.matched == ids[-1] and not self._keep)
        shown = ids[: len(ids) - hidden]
        text = ""
        # One by one, if stop strings are searched for: the answer ends, and is counted, at the token that completes
        # the string.
        pieces = [shown] if not self._has_stops else [[token] for token in shown] or [[]]
        for i, piece in enumerate(pieces):
            final = reason is not None and i == len(pieces) - 1
            text += self._stops.push(self._decoder.push(piece, final), final)
            if self._stops.matched is not None:
                ids = ids[: i + 1]
                reason = FinishReason(type="stop", matched=self._stops.matched)
                break
        cut = len(output.output_ids) // 4 - len(ids)
        return StrOutput(
            rid=output.rid,
            text=text,
            output_ids=output.output_ids[: 4 * len(ids)],
            finish_reason=reason,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens - cut,
            cached_tokens=output.cached_tokens,
            cached_tokens_details=output.cached_tokens_details,
            computed_tokens_details=output.computed_tokens_details,
            logprobs=output.logprobs[: len(ids)],
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
        )


class DetokenizerManager:
    """Turns messages into messages. It owns no sockets, so that a test needs none."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._requests: dict[str, RequestText] = {}

    def handle(self, message: object) -> ToTokenizer | None:
        if isinstance(message, BatchTokenIDOutput):
            return self._handle_batch(message)
        if isinstance(message, DetokenizeReq):
            self._requests[message.rid] = RequestText(message, self._decode)
            return None
        return message  # type: ignore[return-value]

    def _handle_batch(self, batch: BatchTokenIDOutput) -> BatchStrOutput | None:
        outputs = []
        for output in batch.outputs:
            request = self._requests.get(output.rid)
            if request is not None:
                result = request.process(output)
            elif output.finish_reason is not None and output.finish_reason.type == "abort":
                result = RequestText(DetokenizeReq(rid=output.rid), self._decode).process(output)
            else:  # it ended at a stop string, and the scheduler does not know that yet
                continue
            if result.finish_reason is not None:
                self._requests.pop(output.rid, None)
            outputs.append(result)
        return BatchStrOutput(outputs=outputs) if outputs else None


def load_decode(path: str) -> Decode:
    """path: a tokenizer.json, which needs no heavy import, or a tokenizer's directory or hub name."""
    if path.endswith(".json"):
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(path)
        return lambda ids, skip: fast.decode(ids, skip_special_tokens=skip)

    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    slow = get_tokenizer(path)
    return lambda ids, skip: slow.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def start(args: ChildArgs, on_exit: ExitStack) -> Callable[[], None]:
    context = zmq.Context()
    receive = open_pull(context, args.ipc["detokenizer_in"])
    send = open_push(context, args.ipc["tokenizer_in"])
    manager = DetokenizerManager(load_decode(args.extra["tokenizer"]))

    def serve() -> None:
        while True:
            answer = manager.handle(decode_to_detokenizer(receive.recv()))
            if answer is not None:
                send.send(encode(answer))

    return serve


if __name__ == "__main__":
    run_child(start)
