"""The offline agent: proposes the files of `kernel_candidates/` in the order of its catalog. Deterministic."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.brief import Brief, Proposal
from harness.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """One file of the catalog; `note` says what is expected of it."""

    file: str
    note: str = ""


class CatalogAgent:
    """Proposes each file of `entries` once, skipping those whose bytes the run has judged already."""

    name = "catalog"

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = tuple(entries)

    @classmethod
    def load(cls, folder: Path, device: str, only: Sequence[str] = ()) -> CatalogAgent:
        """The catalog of `folder` for a device kind, `cpu` or `cuda`; `only` picks files by stem.

        Raises UsageError where the catalog cannot be read or `only` names a file that is not in it.
        """
        path = folder / "catalog.toml"
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
            entries = [Entry(item["file"], item.get("note", "")) for item in raw.get(device, [])]
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"cannot read the catalog {path}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"cannot read the catalog {path}: each file is a table headed [[{device}]] with a line file = ..."
            ) from error
        if gone := [entry.file for entry in entries if not (folder / entry.file).is_file()]:
            raise UsageError(f"the catalog {path} names {gone[0]}, which is no file in {folder}")
        stems = {Path(entry.file).stem: entry for entry in entries}
        unknown = [name for name in only if name not in stems]
        if unknown:
            elsewhere = [kind for kind, items in raw.items() if unknown[0] in {Path(i["file"]).stem for i in items}]
            known = f"it is for {elsewhere[0]}; for {device} there are" if elsewhere else "it has"
            raise UsageError(f"the catalog has no {unknown[0]!r} for {device}; {known} {', '.join(stems)}")
        return cls(folder, [stems[name] for name in only] if only else entries)

    def propose(self, brief: Brief) -> Proposal | None:
        judged = {attempt.file_sha256 for attempt in brief.attempts}
        for entry in self.entries:
            source = (self.folder / entry.file).read_bytes()
            if hashlib.sha256(source).hexdigest() not in judged:
                return Proposal(Path(entry.file).stem, source, self.name, note=entry.note)
        return None
