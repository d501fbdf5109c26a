"""Play histories: `python tests/sim/run.py SEEDS` with SEEDS = N (that many, from 0) or A..B (both included)."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
for place in (ROOT, Path(__file__).parent):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from sim_world import Failure, play  # noqa: E402


def seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


def main(arguments: list[str]) -> int:
    wanted = seeds(arguments[0] if arguments else "500")
    digests = "--digests" in arguments
    did: Counter[str] = Counter()
    failed, virtual, began = [], 0.0, time.monotonic()
    for seed in wanted:
        try:
            ran = play(seed)
        except Failure as failure:
            failed.append(seed)
            print(failure, flush=True)
            if "--all" not in arguments:
                break
            continue
        did += ran.did
        virtual += ran.virtual
        if digests:
            print(seed, ran.digest)
    if not digests:
        for name, count in sorted(did.items()):
            print(f"{count:9d}  {name}")
        seconds = time.monotonic() - began
        print(
            f"{len(wanted)} seeds, {len(failed)} failed {failed[:20]}, {seconds:.1f} s, {virtual:.0f} virtual seconds"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
