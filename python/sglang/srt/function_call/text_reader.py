"""Reads a text that comes in pieces. Owns the text that is not read yet; knows no format.

A format is a generator that calls the reader's methods with `yield from`. The generator stops at `yield` where the
text that has come does not decide, and goes on when more has come. Every decision depends on the text alone, and
therefore no result depends on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

_NO_SPACE = re.compile(r"\S")
# JSON outside of strings. Letters are those of true, false and null, and of what models write in their place.
_JSON_PLAIN = re.compile(r"[\s\w+\-.,:']+")
_JSON_STRING = re.compile(r'[^"\\]+')
_LITERAL = re.compile(r"[\w+\-.]*")


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        # The text from here on is kept, for `rewind`.
        self._mark: int | None = None
        self._ended = False
        # Word -> from where on it was searched for, and where it is; the end of the text if nowhere.
        self._found: dict[str, tuple[int, int]] = {}

    def push(self, text: str, final: bool) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = None if self._mark is None else 0
        self._ended = final
        self._found.clear()

    def set_mark(self) -> None:
        self._mark = self._at

    def drop_mark(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Go back to the mark, and drop it."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def more(self) -> Steps[bool]:
        """Whether there is text to read; False at the end."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def skip(self, num_chars: int) -> None:
        """Pass over characters that were looked at."""
        self._at += num_chars

    def skip_space(self) -> Steps[None]:
        while (yield from self.more()):
            found = _NO_SPACE.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if found:
                return

    def starts_with(self, word: str) -> Steps[bool]:
        while True:
            rest = self._text[self._at : self._at + len(word)]
            if len(rest) == len(word) or not word.startswith(rest) or self._ended:
                return rest == word
            yield

    def take(self, word: str) -> Steps[bool]:
        """Pass over the word, if it comes next."""
        found = yield from self.starts_with(word)
        if found:
            self._at += len(word)
        return found

    def starts_with_cut(self, word: str) -> Steps[bool]:
        """As `starts_with`. A word that is cut off by the end of the text counts too."""
        found = yield from self.starts_with(word)
        rest = self._text[self._at : self._at + len(word)]
        return found or (self._ended and rest != "" and word.startswith(rest))

    def take_cut(self, word: str) -> Steps[bool]:
        """Pass over the word, or what is left of it at the end of the text."""
        found = yield from self.starts_with_cut(word)
        if found:
            self._at = min(self._at + len(word), len(self._text))
        return found

    def take_while(self, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
        """The longest next text of which the pattern matches each character, up to max_chars."""
        taken = ""
        while len(taken) < max_chars and (yield from self.more()):
            found = pattern.match(self._text, self._at, self._at + max_chars - len(taken))
            if not found or not found[0]:
                break
            taken += found[0]
            self._at = found.end()
            if self._at < len(self._text):
                break
        return taken

    def until(self, words: Sequence[str], out: Callable[[str], None], shortest_cut: int | None = None) -> Steps[str]:
        """Pass the text before the first of the words to `out`. Returns that word, which is not passed over; empty at
        the end. shortest_cut: so many characters of a word that is cut off by the end are not text; None: all are."""
        while True:
            places = [(self._next_place(word), word) for word in words]
            at, word = min(places, key=lambda place: place[0], default=(len(self._text), ""))
            if at < len(self._text):
                self._pass_to(at, out)
                return word
            held = possible_start(self._text[self._at :], words)
            if self._ended and (shortest_cut is None or held < shortest_cut):
                held = 0
            self._pass_to(len(self._text) - held, out)
            if self._ended:
                self._at = len(self._text)
                return ""
            yield

    def _next_place(self, word: str) -> int:
        """Where the word is next. It may be far where another is near: it is not searched for again until then."""
        begin, place = self._found.get(word, (0, -1))
        if not begin <= self._at <= place:
            found = self._text.find(word, self._at)
            place = found if found >= 0 else len(self._text)
            self._found[word] = (self._at, place)
        return place

    def _pass_to(self, end: int, out: Callable[[str], None]) -> None:
        if end > self._at:
            out(self._text[self._at : end])
            self._at = end

    def json_container(self, out: Callable[[str], None], stops: Sequence[str] = ()) -> Steps[bool]:
        """Pass the JSON object or array that comes next to `out`, as it comes. Returns whether it is complete: it
        ends early at the end of the text, at a character that JSON does not have there, and at one of the stops
        outside of a string. Commas, colons and the kinds of brackets are not checked."""
        depth = 0
        while (yield from self.more()):
            char = self._text[self._at]
            for stop in stops:
                if (yield from self.starts_with(stop)):
                    return False
            if char in "{[":
                depth += 1
                self._pass_to(self._at + 1, out)
            elif char in "}]":
                depth -= 1
                self._pass_to(self._at + 1, out)
                if depth == 0:
                    return True
            elif char == '"':
                if not (yield from self._json_string(out)):
                    return False
            elif found := _JSON_PLAIN.match(self._text, self._at):
                self._pass_to(found.end(), out)
            else:
                return False
        return False

    def json_value(self, out: Callable[[str], None], stops: Sequence[str] = ()) -> Steps[bool]:
        """As `json_container`, for a value of any kind."""
        char = yield from self.peek()
        if char in ("{", "["):
            return (yield from self.json_container(out, stops))
        if char == '"':
            return (yield from self._json_string(out))
        literal = yield from self.take_while(_LITERAL, 1 << 10)
        out(literal)
        return bool(literal)

    def _json_string(self, out: Callable[[str], None]) -> Steps[bool]:
        self._pass_to(self._at + 1, out)
        while (yield from self.more()):
            char = self._text[self._at]
            if char == '"':
                self._pass_to(self._at + 1, out)
                return True
            if char == "\\":
                if self._at + 1 == len(self._text) and not self._ended:
                    yield
                    continue
                self._pass_to(min(self._at + 2, len(self._text)), out)
            elif found := _JSON_STRING.match(self._text, self._at):
                self._pass_to(found.end(), out)
        return False


def possible_start(text: str, words: Sequence[str]) -> int:
    """The length of the longest end of the text with which one of the words begins."""
    longest = max(map(len, words), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(word.startswith(end) for word in words):
            return size
    return 0
