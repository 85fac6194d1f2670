"""Results of a comparison that are finished, kept in a directory so that none is measured twice."""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files.durable import write_durably
from .asked import Combination
from .results import Result


RECORDS = "results"  # folder of what is finished, inside the output directory
LONGEST = 80  # characters of a method's name in that of a file; the digest tells methods apart


class ResultRecords:
    """Finished results, each under a digest of all that it depends on. Failed ones are not kept.

    Args:
        output (`str` or `Path`, *optional*): directory of the comparison; nothing is kept without one.
        overwrite (`bool`): whether to make what is recorded again.
        depends_on (`dict`): what all results depend on.
    """

    def __init__(self, output: str | Path | None, overwrite: bool, depends_on: dict[str, Any]):
        self.directory = None if output is None else Path(output) / RECORDS
        self.overwrite, self.depends_on = overwrite, depends_on
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def get_or_make(
        self, combination: Combination, config: dict[str, Any] | str, make: Callable[[], Result]
    ) -> Result:
        """What is recorded, or made now and recorded."""
        if self.directory is None:
            return make()
        depends_on = json.dumps([config, self.depends_on], sort_keys=True, default=str)
        digest = hashlib.sha256(depends_on.encode()).hexdigest()[:12]
        words = [f"{combination.sparsity:g}", combination.saliency, combination.topup]
        words += [] if combination.value_bits is None else [f"{combination.value_bits}bits"]
        words = [re.sub(r"[^\w.-]", "_", word)[:LONGEST] for word in words]
        path = self.directory / ("-".join([*words, digest]) + ".json")
        if path.exists() and not self.overwrite:
            with suppress(ValueError, TypeError):  # what cannot be read, or was written otherwise, is made anew
                return Result(**json.loads(path.read_text(encoding="utf-8")))
        result = make()
        if result.error is None:
            write_durably(path, (json.dumps(asdict(result), indent=2) + "\n").encode())
        return result
