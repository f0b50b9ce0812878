"""Where this engine stands on each of upstream's names: one function per kind, and what is ours alone. Stateless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sglang.rebase import ours
from sglang.rebase.absences import absent_member, absent_metric
from sglang.rebase.reader import METRIC_PREFIX
from sglang.rebase.upstream_names import UpstreamNames
from sglang.srt.entrypoints.missing_endpoints import missing_endpoint
from sglang.srt.entrypoints.request_fields import NOTHING_TO_DO
from sglang.srt.missing_flags import missing_flag

KINDS = ("flag", "endpoint", "field", "metric", "member")


class Standing(StrEnum):
    SERVED = "served"
    # A request or a start with it ends with a sentence.
    REFUSED = "refused"
    # Accepted, because it changes nothing here.
    NO_EFFECT = "no effect"
    # Of a metric or a member, which are read and not asked for: not there, for a known reason.
    ABSENT = "absent"
    # In no table: a person has to decide.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Stand:
    standing: Standing
    # The sentence of a refusal, or the reason of an absence.
    note: str = ""


def stand_of(kind: str, name: str) -> Stand:
    """name: of a field or a member with its class, as in ChatCompletionRequest.user."""
    return _STANDS[kind](name)


def _flag(name: str) -> Stand:
    return Stand(Standing.SERVED) if name in ours.our_flags() else _refused(missing_flag(name))


def _endpoint(path: str) -> Stand:
    return Stand(Standing.SERVED) if path in ours.our_endpoints() else _refused(missing_endpoint(path))


def _refused(sentence: str | None) -> Stand:
    return Stand(Standing.REFUSED, sentence) if sentence else Stand(Standing.UNKNOWN)


def _field(name: str) -> Stand:
    kind, _, field = name.partition(".")
    struct, refused = ours.REQUESTS[kind]
    if field in refused:
        return Stand(Standing.REFUSED, "a value that asks for something gets status 400")
    if field in NOTHING_TO_DO:
        return Stand(Standing.NO_EFFECT)
    return Stand(Standing.SERVED if field in struct.__struct_fields__ else Standing.UNKNOWN)


def _metric(name: str) -> Stand:
    return Stand(Standing.SERVED) if _bare(name) in _our_bare_metrics() else _absent(absent_metric(name))


def _bare(metric: str) -> str:
    """Counters are named with and without their suffix."""
    return metric.removeprefix(METRIC_PREFIX).removesuffix("_total")


def _our_bare_metrics() -> set[str]:
    return {_bare(name) for name in ours.our_metrics()}


def _member(name: str) -> Stand:
    interface, _, member = name.partition(".")
    if interface in ours.INTERFACES and member in ours.our_members(interface):
        return Stand(Standing.SERVED)
    return _absent(absent_member(interface, member))


def _absent(reason: str | None) -> Stand:
    return Stand(Standing.ABSENT, reason) if reason else Stand(Standing.UNKNOWN)


_STANDS = {"flag": _flag, "endpoint": _endpoint, "field": _field, "metric": _metric, "member": _member}


def names_of(names: UpstreamNames) -> Iterator[tuple[str, str]]:
    """Kind and name, of all."""
    yield from (("flag", flag) for flag in names.flags)
    yield from (("endpoint", path) for path in names.endpoints)
    yield from (("field", f"{kind}.{field}") for kind, fields in names.fields.items() for field in fields)
    yield from (("metric", metric) for metric in names.metrics)
    yield from (("member", f"{owner}.{each}") for owner, members in names.members.items() for each in members)


def ours_alone(names: UpstreamNames) -> Iterator[tuple[str, str]]:
    """Kind and name of what this engine has and upstream does not."""
    yield from (("flag", flag) for flag in ours.our_flags() if flag not in names.flags)
    yield from (("endpoint", path) for path in ours.our_endpoints() if path not in names.endpoints)
    for kind, (struct, _) in ours.REQUESTS.items():
        theirs = names.fields.get(kind, ())
        yield from (("field", f"{kind}.{name}") for name in struct.__struct_fields__ if name not in theirs)
    metrics = {_bare(metric) for metric in names.metrics}
    yield from (("metric", METRIC_PREFIX + name) for name in ours.our_metrics() if _bare(name) not in metrics)


def same_paths(names: UpstreamNames) -> list[str]:
    """Files of this engine with the path of one of upstream's."""
    return sorted(set(ours.our_files()) & set(names.files))


def table(names: UpstreamNames) -> dict[str, dict[str, list[str]]]:
    """Kind -> standing -> names. A test holds the one of the version that this engine stands on."""
    found: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for kind, name in names_of(names):
        found[kind].setdefault(str(stand_of(kind, name).standing), []).append(name)
    for kind, name in ours_alone(names):
        found[kind].setdefault("ours alone", []).append(name)
    shown = {kind: {standing: sorted(each) for standing, each in sorted(found[kind].items())} for kind in KINDS}
    return {**shown, "file": {"same path": same_paths(names)}}
