"""Takes the README's pictures from a real run: `python bench/capture.py` writes `docs/run.svg` (the live view) and `docs/run-end.svg`.

The run gets a pseudo-terminal; what it writes there goes through a terminal emulator, so that the pictures show what a person sees.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI, TerminalTheme
from rich.text import Text

COLUMNS, LINES = 100, 32
ROUND = re.compile(r"round (\d+)/(\d+)")
PLAYING = re.compile(r"rollout .* ([1-9]\d*)/(\d+) episodes")
NAMED = {"brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's names for what rich calls otherwise
THEME = TerminalTheme(
    (13, 17, 23),
    (222, 226, 230),
    list(MONOKAI.ansi_colors._colors[:8]),
    [(139, 148, 158), *MONOKAI.ansi_colors._colors[9:]],
)
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<!-- made by bench/capture.py from a real run -->
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Terminal(pyte.HistoryScreen):  # type: ignore[misc]  # pyte has no types
    """A screen that keeps what scrolled away, and shows dim text (which pyte does not know) as bright black."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, LINES, history=10_000)

    def select_graphic_rendition(self, *attrs: int, **rest: Any) -> None:
        dim = [90 if attr == 2 and attrs[max(0, at - 1)] not in (38, 48) else attr for at, attr in enumerate(attrs)]
        super().select_graphic_rendition(*dim, **rest)

    def visible(self) -> list[Text]:
        """The lines on the screen."""
        return [_line(self.buffer[row]) for row in range(self.lines)]

    def everything(self) -> list[Text]:
        """What scrolled away, and the lines on the screen."""
        return [_line(row) for row in self.history.top] + self.visible()


def _line(cells: Mapping[int, Any]) -> Text:
    line = Text()
    for column in range(COLUMNS):
        cell = cells[column]
        colours = (_colour(cell.fg), _colour(cell.bg))
        line.append(cell.data, Style(color=colours[0], bgcolor=colours[1], bold=cell.bold, italic=cell.italics))
    line.rstrip()
    return line


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return NAMED.get(name) or re.sub("^bright(?=[a-z])", "bright_", name)


def watch(command: list[str], place: Path) -> tuple[list[Text], list[Text]]:
    """Run the command in a terminal of its own; returns the live view at two thirds of its rounds, and everything it left there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    terminal = Terminal()
    stream = pyte.ByteStream(terminal)
    live: list[Text] = []
    chosen = False
    while data := _read(ours):
        stream.feed(data)
        shown = "\n".join(terminal.display)
        if not chosen and (found := ROUND.search(shown)) and 3 * int(found[1]) >= 2 * int(found[2]):
            live = terminal.visible()
            chosen = PLAYING.search(shown) is not None and " left" in shown
    if code := process.wait():
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}:\n" + "\n".join(terminal.display))
    return live, terminal.everything()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end was closed: the command is over
        return b""


def trimmed(lines: Iterable[Text]) -> list[Text]:
    """Without the empty lines at both ends."""
    found = list(lines)
    while found and not found[0].plain.strip():
        del found[0]
    while found and not found[-1].plain.strip():
        del found[-1]
    return found


def svg(lines: list[Text], title: str) -> str:
    """The lines as a picture of a terminal; it fetches nothing from anywhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(*lines, sep="\n", highlight=False, no_wrap=True, overflow="crop")
    return console.export_svg(title=title, theme=THEME, code_format=FRAME, unique_id="run", font_aspect_ratio=0.61)


def report(lines: list[Text]) -> list[Text]:
    """What was printed after the live view: from the line that says how it ended."""
    ended = [at for at, line in enumerate(lines) if re.match(r"\S+ after \d+:\d\d", line.plain)]
    return lines[ended[-1] :] if ended else lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scenario", default="guess")
    options.add_argument("--rounds", type=int, default=0, help="default: what the scenario says")
    options.add_argument("--out", type=Path, default=Path("docs/run.svg"), help="the live view")
    options.add_argument("--end", type=Path, default=Path("docs/run-end.svg"), help="how it ends")
    given = options.parse_args()
    title = f"opentinker run {given.scenario}" + (f" --rounds {given.rounds}" if given.rounds else "")
    command = [sys.executable, "-m", "coordinator.cli.main", *title.split()[1:]]
    with tempfile.TemporaryDirectory() as place:
        live, everything = watch(command, Path(place))
    for path, lines in ((given.out, trimmed(live)), (given.end, trimmed(report(everything)))):
        path.write_text(svg(lines, title), encoding="utf-8")
        print(f"{path}: {len(lines)} lines")


if __name__ == "__main__":
    main()
