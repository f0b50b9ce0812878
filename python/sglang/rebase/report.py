"""What changed between two versions of upstream, and where this engine stands on each change. Stateless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sglang.rebase import ours
from sglang.rebase.stands import KINDS, Standing, names_of, same_paths, stand_of
from sglang.rebase.upstream_names import FlagFacts, UpstreamNames, parameters_of

_WHAT_TO_DO = {
    "flag": "serve it (srt/server_args.py), or refuse it (srt/missing_flags.py)",
    "endpoint": "serve it (srt/entrypoints/http_routes.py), or refuse it (srt/entrypoints/missing_endpoints.py)",
    "field": "serve it (the struct of the request), or refuse it (srt/entrypoints/request_fields.py)",
    "metric": "measure it (srt/observability/metrics_collector.py), or give the reason (rebase/absences.py)",
    "member": "add it to the class of that name, or give the reason (rebase/absences.py)",
}


class Change(StrEnum):
    NEW = "new"
    CHANGED = "changed"
    GONE = "gone"


@dataclass(frozen=True)
class Finding:
    kind: str
    change: Change
    name: str
    standing: Standing
    # What a rebase has to know.
    note: str = ""
    # In none of this engine's tables, or served here and no longer as upstream has it.
    needs_decision: bool = False


def compare(old: UpstreamNames, new: UpstreamNames) -> list[Finding]:
    """What needs a decision comes first, then kinds in their order."""
    findings = [*_new(old, new), *_changed(old, new), *_gone(old, new)]
    return sorted(
        findings, key=lambda each: (not each.needs_decision, KINDS.index(each.kind), each.change, each.name)
    )


def _new(old: UpstreamNames, new: UpstreamNames) -> Iterator[Finding]:
    before = set(names_of(old))
    for kind, name in names_of(new):
        if (kind, name) not in before:
            stand = stand_of(kind, name)
            yield Finding(kind, Change.NEW, name, stand.standing, stand.note, stand.standing is Standing.UNKNOWN)


def _gone(old: UpstreamNames, new: UpstreamNames) -> Iterator[Finding]:
    after = set(names_of(new))
    for kind, name in names_of(old):
        if (kind, name) not in after:
            standing = stand_of(kind, name).standing
            note = "it may leave our table"
            if standing is Standing.SERVED:
                note = "still here: keep it for older clients, or drop it"
            elif standing is Standing.UNKNOWN:
                note = "it was in no table"
            yield Finding(kind, Change.GONE, name, standing, note)


def _changed(old: UpstreamNames, new: UpstreamNames) -> Iterator[Finding]:
    for flag, now in new.flags.items():
        if (facts := old.flags.get(flag)) is not None and (note := _flag_note(flag, facts, now)):
            yield Finding("flag", Change.CHANGED, flag, stand_of("flag", flag).standing, note)
    for path, methods in new.endpoints.items():
        # A list of names alone has no methods.
        if (before := old.endpoints.get(path)) and methods and before != methods:
            served = ours.our_endpoints().get(path)
            note = f"{', '.join(before)} -> {', '.join(methods)}"
            lacking = served is not None and bool(set(methods) - set(served) - {"HEAD"})
            yield Finding("endpoint", Change.CHANGED, path, stand_of("endpoint", path).standing, note, lacking)
    for owner, members in new.members.items():
        for name, text in members.items():
            if (was := old.members.get(owner, {}).get(name, text)) != text:
                standing = stand_of("member", f"{owner}.{name}").standing
                decide = standing is Standing.SERVED and _lacks_a_parameter(owner, name, text)
                yield Finding("member", Change.CHANGED, f"{owner}.{name}", standing, f"{was} -> {text}", decide)


def _flag_note(flag: str, before: FlagFacts, now: FlagFacts) -> str:
    """Empty where nothing changed that this engine could follow."""
    notes = []
    default, choices = ours.our_flags().get(flag, ("", ()))
    if before.default != now.default:
        notes.append(f"default {before.default or 'None'} -> {now.default or 'None'}")
        if flag in ours.our_flags():
            notes.append(f"ours is {default or 'None'}")
    if before.choices is not None and now.choices is not None:
        added = [each for each in now.choices if each not in before.choices]
        removed = [each for each in before.choices if each not in now.choices]
        notes += [f"{what}: {', '.join(values)}" for what, values in (("added", added), ("gone", removed)) if values]
        if choices and (lacking := [each for each in added if each not in choices]):
            notes.append(f"refused here with the list of our values: {', '.join(lacking)}")
    return "; ".join(notes)


def _lacks_a_parameter(owner: str, name: str, signature: str) -> bool:
    parameters = ours.our_members(owner)[name]
    return parameters is not None and any(each not in parameters for each in parameters_of(signature))


def as_text(old: UpstreamNames, new: UpstreamNames, findings: Sequence[Finding]) -> str:
    lines = [f"upstream {old.version} -> {new.version}"]
    for kind in KINDS:
        count = Counter(each.change for each in findings if each.kind == kind)
        lines.append(f"  {kind + 's':10} " + ", ".join(f"{count[change]} {change}" for change in Change))
    to_decide = [each for each in findings if each.needs_decision]
    lines.append(f"\nTo decide: {len(to_decide)}")
    for kind in KINDS:
        if of_kind := [each for each in to_decide if each.kind == kind]:
            lines.append(f"  {kind}s: {_WHAT_TO_DO[kind]}")
            lines += ["  " + _line(each) for each in of_kind]
    settled = [each for each in findings if not each.needs_decision]
    served = [each for each in settled if each.standing is Standing.SERVED]
    for title, members in (
        ("Served here; look whether it means the same", served),
        (
            "Refused or absent here; look whether the reason fits what is new",
            [each for each in settled if each not in served],
        ),
    ):
        lines += [f"\n{title}: {len(members)}", *map(_line, members)]
    lines.append(f"\n{len(same_paths(new))} files of this engine have the path of one of upstream's; see --files")
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    text = f"  {finding.kind:8} {finding.change:7} {finding.name} [{finding.standing}]"
    return f"{text} {finding.note}" if finding.note else text


def as_json(old: UpstreamNames, new: UpstreamNames, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "old": old.version,
        "new": new.version,
        "to_decide": sum(each.needs_decision for each in findings),
        "findings": [asdict(each) for each in findings],
        "same_paths": same_paths(new),
    }
