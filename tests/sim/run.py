"""Play histories: `python tests/sim/run.py SEEDS` with SEEDS = N (that many, from 0) or A..B (both included); `--all`: go on after a
failure, `--digests`: print the digest of each. `python tests/sim/run.py core STEPS [SEED]`: histories of the core alone, from this seed."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
for place in (ROOT, ROOT / "tests" / "coordinator" / "core", Path(__file__).parent):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from core_world import World  # noqa: E402
from sim_core import looked_at_when_changed  # noqa: E402
from sim_world import Failure, play  # noqa: E402

MANY = 100_000  # steps of the core between two lines about how far it is
SOME = 500  # histories of the whole system


def seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


def core(wanted: int, seed: int) -> int:
    """Steps of the core alone: at least so many, in histories from this seed on."""
    done, said, failed = 0, 0, 0
    did: Counter[str] = Counter()
    began = time.process_time()
    while done < wanted:
        world = World(seed, digesting=False, lagging=seed % 2 == 1)
        try:
            with looked_at_when_changed():
                world.play()
        except Exception:  # whatever it is, the history shows it again
            failed += 1
            print(
                f"core seed {seed}:\n{traceback.format_exc()}\nplay it again: make sim SEEDS='core 1 {seed}'",
                flush=True,
            )
        done, seed = done + world.steps, seed + 1
        did += world.did + world.core.counts
        if done - said >= MANY or done >= wanted:
            said = done
            spent = time.process_time() - began
            print(
                f"{done} steps, next seed {seed}, {failed} failed, {spent:.0f} s, {spent / done * 1e6:.0f} us a step",
                flush=True,
            )
    for name, count in sorted(did.items()):
        print(f"{count:9d}  {name}")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["core"]:
        return core(int(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 0)
    wanted = seeds(arguments[0] if arguments else "500")
    digests = "--digests" in arguments
    did: Counter[str] = Counter()
    failed, virtual, began = [], 0.0, time.process_time()
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
        if (seed - wanted.start + 1) % SOME == 0 and not digests:
            print(f"up to seed {seed}: {len(failed)} failed, {time.process_time() - began:.0f} s of a core", flush=True)
        if digests:
            print(seed, ran.digest)
    if not digests:
        for name, count in sorted(did.items()):
            print(f"{count:9d}  {name}")
        seconds = time.process_time() - began
        print(
            f"{len(wanted)} seeds, {len(failed)} failed {failed[:20]}, {seconds:.1f} s of a core, {virtual:.0f} virtual seconds"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
