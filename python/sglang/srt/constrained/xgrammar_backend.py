"""xgrammar, behind what this engine needs of it: from a request's grammar to what matches an answer's tokens.

Owns a vocabulary in xgrammar's form. xgrammar is imported at the first use, because that takes a second. It compiles
without Python's lock. Knows no request, process or limit.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.constrained.json_schema_checks import check_schema
from sglang.srt.sampling.sampling_params import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# Its name in the server's private directory, where the process that checks grammars leaves it for the scheduler.
VOCABULARY_FILE = "vocabulary.json"

# xgrammar puts the time and a place in its source in front of what it has to say.
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")

# The characters of a string that has a minimum or a maximum length, as xgrammar 0.2.8 writes them: it allows control
# characters, which JSON does not. No value of a schema is written so: its quotation marks have three backslashes. (A
# rule that has escapes too is not the plain set of characters that xgrammar can count fast: a token then takes some
# hundred times as long.)
_BOUNDED_CHARACTERS = r"[^\"\\\r\n]"
_JSON_CHARACTERS = r"[^\0-\x1f\"\\]"

# Of a grammar as xgrammar writes it: texts and classes of characters, and the characters of both.
_TEXT_OR_CLASS = re.compile(r'"((?:\\.|[^"\\])*)"|\[((?:\\.|[^\]\\])*)\]')
_CHARACTER = re.compile(r"\\u[0-9a-f]{4}|\\.|[^\\]", re.DOTALL)
_HALF_A_PAIR = re.compile(r"\\ud[89a-f][0-9a-f]{2}")


class GrammarError(Exception):
    """A grammar that cannot be used. The message is a sentence for the client."""


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def make_vocabulary(tokenizer: Any, vocab_size: int) -> str:
    """The tokens of a transformers tokenizer as `GrammarCompiler` takes them. vocab_size: of the model, whose ids
    beyond the tokenizer's are never allowed. Raises GrammarError for a tokenizer that xgrammar does not read."""
    import xgrammar

    try:
        # Which tokens end an answer is told for each request.
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    except Exception as error:
        raise GrammarError(f"this model's tokenizer serves no structured output: {_reason(error)}") from None
    return info.serialize_json()


class GrammarCompiler:
    def __init__(self, vocabulary: str, max_whitespace: int | None = None) -> None:
        """vocabulary: see `make_vocabulary`. max_whitespace: the most characters of white space between the parts of
        a JSON value; None: any number."""
        import xgrammar

        info = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
        # No cache: the callers remember what they need, within limits of their own.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._max_whitespace = max_whitespace

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """Raises GrammarError."""
        try:
            return self._compile(spec)
        except Exception as error:  # several kinds, of RuntimeError and ValueError
            raise GrammarError(f"{spec.kind} is not usable: {_reason(error)}") from None

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if spec.kind == "json_schema":
            return self._compiler.compile_grammar(self._schema_grammar(spec.source))
        if spec.kind == "regex":
            return self._compiler.compile_regex(spec.source)
        if spec.kind == "ebnf":
            return self._compiler.compile_grammar(spec.source)
        assert spec.kind == "structural_tag", spec.kind
        return self._compiler.compile_structural_tag(self._with_schemas(_structural_tag(spec.source)))

    def _schema_grammar(self, source: str) -> xgrammar.Grammar:
        import xgrammar

        grammar, mended = self._schema_rules(source)
        return grammar if mended is None else xgrammar.Grammar.from_ebnf(mended)

    def _schema_rules(self, source: str) -> tuple[xgrammar.Grammar, str | None]:
        """xgrammar's own grammar of a schema, and the rules in its place where it allows what is no JSON."""
        import xgrammar

        check_schema(source)
        grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=self._max_whitespace)
        rules = str(grammar)
        mended = rules.replace(_BOUNDED_CHARACTERS, _JSON_CHARACTERS)
        return grammar, None if mended == rules else mended

    def _with_schemas(self, part: Any) -> Any:
        """A structural tag, or a part of one, in which a schema allows what it allows as an answer of its own."""
        if isinstance(part, list):
            return [self._with_schemas(each) for each in part]
        if not isinstance(part, dict):
            return part
        if part.get("type") != "json_schema" or "json_schema" not in part:
            return {key: self._with_schemas(value) for key, value in part.items()}
        source = msgspec.json.encode(part["json_schema"]).decode()
        if part.get("style", "json") != "json" or part.get("any_order") or part.get("excludes"):
            check_schema(source)
            return part
        _, mended = self._schema_rules(source)
        if mended is not None:
            return {"type": "grammar", "grammar": mended}
        own = part.get("max_whitespace_cnt")
        return part | {"max_whitespace_cnt": self._max_whitespace if own is None else own}


def check_characters(compiled: xgrammar.CompiledGrammar) -> None:
    """Raises GrammarError where it demands half of a surrogate pair, which would be answered as U+FFFD. A class may
    have some beside others, and exclude them."""
    rules = str(compiled.grammar)
    if _HALF_A_PAIR.search(rules) is None:
        return
    for text, of_class in _TEXT_OR_CLASS.findall(rules):
        characters = _CHARACTER.findall(text or of_class)
        halves = [each for each in characters if _HALF_A_PAIR.fullmatch(each)]
        if halves and (text or len(halves) == sum(each != "-" for each in characters)):
            raise GrammarError(
                f"the grammar has {halves[0]}, half of a surrogate pair, which is no character: write the whole "
                "character, or its code as \\u{1F600} in a regex and \\U0001F600 in EBNF"
            )


def _structural_tag(source: str) -> Any:
    """xgrammar's own form, or the older one of OpenAI-compatible servers: `structures` and `triggers`."""
    import xgrammar

    tag = msgspec.json.decode(source)
    if not (isinstance(tag, dict) and "structures" in tag):
        return tag
    structures, triggers = tag["structures"], tag["triggers"]
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("structures and triggers are lists")
    structures = [
        xgrammar.StructuralTagItem(begin=each["begin"], schema=each["schema"], end=each["end"]) for each in structures
    ]
    return xgrammar.StructuralTag.from_legacy_structural_tag(structures, triggers).model_dump()


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    found = " ".join(_PLACE.sub("", str(error)).split())[:500]
    return found or "xgrammar gives no reason; numbers may have 64 bits at most"
