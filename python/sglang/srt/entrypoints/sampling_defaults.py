"""The sampling parameters that a model's generation_config.json recommends to chats. Reads that file; owns nothing.

A value that no request could send is left out with a warning: else each request that leaves the field out would fail.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.request_fields import SamplingFields, convert, sampling_params
from sglang.srt.utils.errors import RequestError

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILE = "generation_config.json"

logger = logging.getLogger(__name__)


def read_sampling_defaults(model_dir: Path, source: str) -> dict[str, float]:
    """By the names of a request's fields. source: as --sampling-defaults takes it."""
    if source != "model":
        return {}
    found: dict[str, float] = {}
    unusable = []
    for name, value in _read(model_dir).items():
        try:
            fields = convert({name: value}, SamplingFields, {})
            sampling_params(fields)
        except RequestError as error:
            unusable.append(f"{name} ({error.message})")
        else:
            found[name] = getattr(fields, name)
    if unusable:
        logger.warning("%s of the model is not used for %s", _FILE, ", ".join(unusable))
    # A top_k of the whole vocabulary is OpenAI's, too.
    if shown := [f"{name} {value:g}" for name, value in found.items() if (name, value) != ("top_k", -1)]:
        logger.info(
            "chats that leave them out get the model's %s; --sampling-defaults openai leaves these out",
            ", ".join(shown),
        )
    return found


def _read(model_dir: Path) -> dict[str, Any]:
    """Empty for a file that is no JSON object: the scheduler, which reads it for the ends of answers, refuses it."""
    try:
        values = json.loads((model_dir / _FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    given = {name: values[name] for name in NAMES if values.get(name) is not None}
    # transformers means the whole vocabulary.
    if given.get("top_k") == 0:
        given["top_k"] = -1
    return given
