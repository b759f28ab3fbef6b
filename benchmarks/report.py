"""`python -m benchmarks.report`: put the results of the last full runs into docs/benchmarks.md, tables and plots.

What stands between the markers `<!-- part -->` and `<!-- end of part -->` is replaced; the words around them are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._measure import Figure, Ratio, Result, Spread, Table

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
_MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Spread) -> str:
    if values.least == values.most:
        return f"**{number(values.median)}**"
    return f"**{number(values.median)}** ({number(values.least)} to {number(values.most)})"


def wanted(measured: Ratio | Figure) -> str:
    """Its goal in words, or nothing."""
    if isinstance(measured, Figure):
        return "" if measured.goal is None else f"≤ {measured.goal:.3g}"
    target = measured.target
    return "" if target.goal is None else f"{'≥' if target.bound == 'at least' else '≤'} {target.goal:g}"


def verdict(measured: Ratio | Figure) -> str:
    return "" if measured.met is None else f"{wanted(measured)}: {'met' if measured.met else 'missed'}"


def text(result: Result) -> str:
    """The tables of a part as Markdown."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    judged = wanted if result.quick else verdict  # small loads show that it works, and no more
    ours = f", idemconsumer {result.versions['idemconsumer']}" if result.versions else ""
    yield f"Run {result.when}, {result.machine}{ours}{', small loads' if result.quick else ''}."
    for table in result.tables:
        yield f"\n### {table.title}\n"
        if table.facts:
            yield "; ".join(f"{name}: {value}" for name, value in table.facts.items()) + ".\n"
        yield "| | median (least to most) | | target |\n|---|---|---|---|"
        for figure in table.figures:
            yield f"| {figure.name} | {spread(figure.values)} | {figure.unit} | {judged(figure)} |"
        if table.ratios:
            yield "\n| of | to | ratio: median (least to most) | target |\n|---|---|---|---|"
        for ratio in table.ratios:
            yield f"| {ratio.target.of} | {ratio.target.to} | {spread(ratio.values)} | {judged(ratio)} |"


def plot(path: Path, title: str, bars: Sequence[tuple[str, Spread]], *, ratios: bool = False) -> None:
    """Bars with the least and the most of all rounds. The file is the same for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "idemconsumer"
    from matplotlib import pyplot

    names = [name for name, _ in reversed(bars)]
    spreads = [values for _, values in reversed(bars)]
    medians = [values.median for values in spreads]
    errors = [[values.median - values.least for values in spreads], [values.most - values.median for values in spreads]]
    drawing: Any
    axes: Any
    drawing, axes = pyplot.subplots(figsize=(7.5, 0.9 + 0.38 * len(bars)), layout="constrained")
    colours = ["#3b6ea5" if ratios or _ours(name) else "#b7b7b7" for name in names]
    axes.barh(names, medians, xerr=errors, color=colours, error_kw={"lw": 1})
    for place, median in enumerate(medians):
        axes.annotate(number(median), (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if ratios:
        axes.axvline(1.0, color="#444444", lw=1)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(path, metadata={"Date": None})
    pyplot.close(drawing)


def _ours(name: str) -> bool:
    return name.startswith(("idemconsumer", "group", "ours"))


def section(result: Result) -> str:
    """What stands between a part's markers."""
    images = DOCS / "images"
    images.mkdir(exist_ok=True)
    pictures = []
    for place, table in enumerate(result.tables):
        if table.plot:
            name, title = f"bench_{result.part}{place or ''}.svg", f"{table.title}, {table.figures[0].unit}"
            plot(images / name, title, [(figure.name, figure.values) for figure in table.figures])
            pictures.append(f"![{table.title}](images/{name})\n")
    if result.plot:
        name = f"bench_{result.part}.svg"
        ratios = [(table.title, ratio.values) for table in result.tables for ratio in table.ratios]
        plot(images / name, result.plot, ratios, ratios=True)
        pictures.append(f"![{result.plot}](images/{name})\n")
    return "\n".join([*pictures, text(result), ""])


def summary(results: Iterable[Result]) -> str:
    """The rates of idemconsumer beside those of others, in one table."""
    lines = ["| | idemconsumer | others |\n|---|---|---|"]
    for table in (table for result in results for table in result.tables):
        rates = [figure for figure in table.figures if figure.unit.endswith("/s")]
        if len(rates) > 1 and rates[0].name == "idemconsumer":
            others = "; ".join(f"{each.name} {number(each.values.median)}" for each in rates[1:])
            lines.append(f"| {table.title}, {rates[0].unit} | **{number(rates[0].values.median)}** | {others} |")
    return "\n".join([*lines, ""])


def targets(results: Iterable[Result]) -> str:
    """Everything that has a goal, in one table."""
    lines = ["| | | wanted | seen | |\n|---|---|---|---|---|"]
    for table in (table for result in results for table in result.tables):
        for ratio in table.ratios:
            what = f"{ratio.target.of} to {ratio.target.to}"
            lines += _line(table, what, ratio)
        for figure in table.figures:
            lines += _line(table, f"{figure.name}, {figure.unit}", figure)
    return "\n".join([*lines, ""])


def _line(table: Table, what: str, measured: Ratio | Figure) -> list[str]:
    if measured.met is None:
        return []
    said = "met" if measured.met else "**missed**"
    return [f"| {table.title} | {what} | {wanted(measured)} | {number(measured.values.median)} | {said} |"]


def main() -> None:
    page = DOCS / "benchmarks.md"
    words = page.read_text("utf-8")
    files = {path.stem: path for path in (HERE / "results").glob("*.json")}
    results = {
        part: msgspec.json.decode(files[part].read_bytes(), type=Result)
        for _, part, _ in _MARKED.findall(words)
        if part in files
    }

    def filled(found: re.Match[str]) -> str:
        part, of_all = found[2], {"summary": summary, "targets": targets}
        if part in of_all:
            return found[1] + of_all[part](results.values()) + found[3]
        return found[1] + (section(results[part]) if part in results else "Not measured yet.\n") + found[3]

    page.write_text(_MARKED.sub(filled, words), "utf-8")


if __name__ == "__main__":
    main()
