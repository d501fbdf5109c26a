"""What is said of an episode that failed: the error with the author's own frames, without ours."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from scenarios.errors import ScenarioError

OURS = {
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("act", "blame", "dealing", "episode", "seat", "table", "numeric")
}
MAX_REASON = 6_000  # characters; the end of a traceback is the part that helps


def told(error: BaseException) -> str:
    """The error and its causes as `Type: message`, then the frames outside this package's machinery, outermost first."""
    report = traceback.TracebackException.from_exception(error)
    summary = "".join(report.format_exception_only()).strip()
    frames = _without_ours(report, depth=0)
    detail = "".join(frames.format()).strip()
    return (summary if detail == summary else f"{summary}\n{detail[-MAX_REASON:]}")[: 2 * MAX_REASON]


def place(trace: TracebackType | None) -> str:
    """Where the author's code was, as `file:line in function`; "" if it is nowhere in the trace."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename not in OURS]
    return f"{frames[0].filename}:{frames[0].lineno} in {frames[0].name}" if frames else ""


def author() -> str:
    """Where the author's code is at this moment, as `file:line`: the innermost frame that is not ours."""
    frame = sys._getframe()
    while frame.f_code.co_filename in OURS and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def left(exit: SystemExit) -> Exception:
    """In place of an exit, which would end the host and every other episode: an error of the same frames."""
    error = ScenarioError(
        f"{exit!r}: exit() and sys.exit() end nothing but this episode; return the scores, or raise Forfeit or another error"
    )
    return error.with_traceback(exit.__traceback__)


def _without_ours(report: traceback.TracebackException, depth: int) -> traceback.TracebackException:
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if frame.filename not in OURS])
    for cause in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if cause is not None and depth < 8:
            _without_ours(cause, depth + 1)
    return report
