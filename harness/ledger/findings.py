"""What `harness ledger verify` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from harness.ledger.events import Event


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        kind: `damage`, `torn`, `no_newline`, `too_new`, `duplicate_id`, `repeated`, `missing_event`, `wrong_link`,
            `no_creation`, `fork`, `run_collision`, `bad_number`, `bad_path`, `missing_file`, `changed_file`,
            `not_here`, `edited_page`, `stale_report`, `lost_run`, `lost_event`, `rewritten`, `behind`, `bad_base`.
        severity: `error` means that the ledger does not verify; `note` does not.
        message: self-contained sentence.
        line: 1-based line in the ledger; None when the finding is about several or none.
        offset: byte at which that line begins.
        run: the run concerned.
    """

    kind: str
    severity: str
    message: str
    line: int | None = None
    offset: int | None = None
    run: str | None = None


class Placed(NamedTuple):
    """An event, where its line stands, and whether its data name a committed file."""

    event: Event
    line: int
    offset: int
    naming: bool
