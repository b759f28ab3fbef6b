"""`make mutants`: takes each rule of the table out of the code, and looks whether its tests notice.

What was seen is kept in build/mutants.jsonl: a row is run again only when it, its file or its tests have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Final

from tests.mutants.lane import Lane, Run
from tests.mutants.table import Mutant, mutants, stale
from tests.support import ROOT
from tests.support.waiting import PATIENCE

_KEPT: Final = ROOT / "build" / "mutants.jsonl"
_KILLED: Final = frozenset({"killed", "timeout"})
# A loaded machine is no reason to say that a mutant hangs, and a test that waits in vain is to say for what.
_PATIENCE_SECONDS: Final = PATIENCE + 20.0
_PATIENCE_TIMES: Final = 5.0
_BASELINE_SECONDS: Final = 3600.0


class Kept:
    """What was seen before, by digest."""

    def __init__(self, forgotten: bool) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, dict[str, Any]] = {}
        _KEPT.parent.mkdir(exist_ok=True)
        if _KEPT.exists() and not forgotten:
            for line in _KEPT.read_text("utf-8").splitlines():
                entry = json.loads(line)
                self._seen[entry["digest"]] = entry

    def get(self, digest: str) -> dict[str, Any] | None:
        return self._seen.get(digest)

    def put(self, digest: str, **entry: Any) -> dict[str, Any]:
        with self._lock, _KEPT.open("a", encoding="utf-8") as file:
            self._seen[digest] = {"digest": digest, **entry}
            file.write(json.dumps(self._seen[digest], ensure_ascii=False) + "\n")
        return self._seen[digest]


class Progress:
    def __init__(self, whole: int) -> None:
        self._lock, self._began, self._done, self._whole = threading.Lock(), time.monotonic(), 0, whole

    def say(self, line: str, *, done: bool = False) -> None:
        with self._lock:
            self._done += done
            took = time.monotonic() - self._began
            print(f"{int(took) // 60:3}:{int(took) % 60:02} {self._done:3}/{self._whole} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("rules", nargs="*", help='only these, or these letters: ARGS="J3 K"')
    parser.add_argument("--list", action="store_true", help="the rows and what was seen of them")
    parser.add_argument("--lanes", type=int, default=2, help="how many at a time")
    parser.add_argument("--again", action="store_true", help="run what was run before, too")
    options = parser.parse_args()
    rows = [row for row in mutants() if not options.rules or _wanted(row.rule, options.rules)]
    if not rows:
        parser.error(f"no row is of {' '.join(options.rules)}")
    if old := [f"{row}: {why}" for row in rows for why in stale(row)]:
        print("These rows no longer apply:", *old, sep="\n  ")
        return 1
    kept = Kept(options.again)
    if options.list:
        for row in rows:
            seen = kept.get(_digest(row))
            print(f"{seen['outcome'] if seen else 'not run':9} {row}")
        return 0
    _run([row for row in rows if kept.get(_digest(row)) is None], kept, options.lanes)
    return _report(rows, kept)


def _wanted(rule: str, words: Iterable[str]) -> bool:
    return any(rule == word or (len(word) == 1 and rule.startswith(word)) for word in words)


def _digest(row: Mutant) -> str:
    """Of the row, and of the texts that it is about."""
    return _digest_of(repr(row), row.file, *_files(row.tests))


def _baseline_digest(test: str) -> str:
    return _digest_of(f"baseline {test}", *_files([test]))


def _files(tests: Iterable[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def _digest_of(words: str, *files: str) -> str:
    digest = hashlib.sha256(words.encode())
    for file in files:
        digest.update(_content(file))
    return digest.hexdigest()[:16]


@cache
def _content(file: str) -> bytes:
    """As it was when it was copied, whoever writes to it meanwhile."""
    return (ROOT / file).read_bytes()


def _run(rows: Sequence[Mutant], kept: Kept, most: int) -> None:
    if not rows:
        return
    progress = Progress(len(rows))
    count = min(most, len(rows))
    lanes = [Lane(number, count) for number in range(count)]
    try:
        for lane in lanes:
            lane.open()
        asked = sorted({test for row in rows for test in row.tests if kept.get(_baseline_digest(test)) is None})
        progress.say(f"{len(rows)} rows, {len(asked)} tests that are to pass without any mutant first")
        files = [[*tests] for _, tests in groupby(asked, key=lambda test: test.partition("::")[0])]
        _each(lanes, files, lambda lane, tests: _baseline(lane, tests, kept, progress))
        _each(lanes, rows, lambda lane, row: _try(lane, row, kept, progress))
    finally:
        for lane in lanes:
            lane.close()


def _each(lanes: Sequence[Lane], work: Iterable[Any], act: Any) -> None:
    """Each lane takes the next one as soon as it is free. The first error ends all."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for each in work:
        waiting.put(each)
    errors: list[BaseException] = []

    def take(lane: Lane) -> None:
        try:
            while not errors:
                act(lane, waiting.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _baseline(lane: Lane, tests: Sequence[str], kept: Kept, progress: Progress) -> None:
    """A test that always fails would kill every mutant, and one that is skipped none."""
    shared = lane.run(tests, seconds=_BASELINE_SECONDS, shared=True)
    alone = [test for test in tests if _verdict(shared, test) == "skipped"]
    own = lane.run(alone, seconds=_BASELINE_SECONDS, shared=False) if alone else shared
    progress.say(f"{shared.seconds + (own.seconds if alone else 0):9.1f} s {tests[0].partition('::')[0]}")
    for test in tests:
        run = own if test in alone else shared
        seconds = sum(each["seconds"] for each in _of(run, test))
        outcome = _verdict(run, test)
        if outcome == "passed":
            kept.put(_baseline_digest(test), test=test, outcome=outcome, seconds=seconds, shared=run is shared)
        else:
            progress.say(f"{outcome:9} {test}, without any mutant")


def _of(run: Run, test: str) -> list[dict[str, Any]]:
    """A name stands for all that is below it."""
    return [each for each in run.tests if each["test"] == test or each["test"].startswith((f"{test}::", f"{test}["))]


def _verdict(run: Run, test: str) -> str:
    found = {each["outcome"] for each in _of(run, test)}
    return next((outcome for outcome in ("failed", "skipped", "passed") if outcome in found), "not run")


def _try(lane: Lane, row: Mutant, kept: Kept, progress: Progress) -> None:
    bases = [kept.get(_baseline_digest(test)) for test in row.tests]
    if not all(bases):
        progress.say(f"no base   {row}", done=True)
        return
    known = [base for base in bases if base]
    limit = _PATIENCE_SECONDS + _PATIENCE_TIMES * sum(base["seconds"] for base in known)
    with lane.mutated(row):
        run = lane.run(row.tests, "-x", seconds=limit, shared=all(base["shared"] for base in known))
    failed = run.failed()
    if run.code is None:
        outcome, by = "timeout", ""
    elif run.code == 0:
        outcome, by = "survived", ""
    elif run.code == 1 and failed:
        outcome, by = "killed", f"{failed['test'].rpartition('::')[2]}: {failed['says']}"
    else:
        outcome, by = "broken", run.said[-2000:]
    kept.put(_digest(row), row=str(row), outcome=outcome, seconds=round(run.seconds, 1), by=by)
    progress.say(f"{outcome:9} {run.seconds:5.1f} s {row}{f' ({by[:100]})' if outcome == 'killed' else ''}", done=True)


def _report(rows: Sequence[Mutant], kept: Kept) -> int:
    seen = {row: kept.get(_digest(row)) or {"outcome": "no base"} for row in rows}
    counts = Counter(entry["outcome"] for entry in seen.values())
    print(f"\n{len(rows)} rows:", ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    wrong = 0
    for row, entry in seen.items():
        if entry["outcome"] in _KILLED and row.survives:
            print(f"  is noticed after all, take `survives` out: {row}")
        elif entry["outcome"] == "survived" and row.survives:
            print(f"  survives: {row}\n    {row.survives}")
        elif entry["outcome"] == "timeout":
            print(f"  hung, which counts as noticed: {row}")
            continue
        elif entry["outcome"] not in _KILLED:
            print(f"  {entry['outcome'].upper()}: {row}")
        else:
            continue
        wrong += not (entry["outcome"] == "survived" and row.survives)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
