"""Turn what the benchmarks measured into a Markdown table and an SVG bar chart for each question.

    python benchmarks/report.py                      # results/*.json -> results/*.md and results/*.svg

The same JSON gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import common

# Column of a table by the key of a sample, in this order, shown where a contestant has it.
COLUMNS = {
    "gb_per_s": "GB/s",
    "work_s": "without imports, s",
    "load_s": "load, s",
    "imports_s": "imports, s",
    "until_loaded_s": "until loaded, s",
    "peak_rss_above_interpreter_mib": "peak RSS above the interpreter, MiB",
    "anonymous_mib": "private memory, MiB",
    "rss_mib": "RSS, MiB",
    "disk_read_gb": "read from disk, GB",
    "disk_read_of_source": "read from disk / source",
}
WIDTH, LABEL, BAR, GAP, TOP = 860, 280, 18, 8, 46  # of a chart, in px
OURS, THEIRS, LINE = "#1f6feb", "#9aa4b1", "#24292f"


# --- Markdown ---


def markdown(name: str, report: Mapping[str, Any]) -> str:
    """The tables of a report, its limits, and under which conditions it was measured."""
    parts = [f"# {report['question']}", f"![{report['question']}]({name}.svg)"]
    for table in report["tables"]:
        parts += [f"## {table['title']}", "\n".join(_rows(table)), *([f"*{table['note']}*"] if table["note"] else [])]
    if report.get("figures"):
        parts += ["## Against the limits set", "\n".join(_figures(report["figures"]))]
    return "\n\n".join([*parts, "## Conditions", "\n".join(_conditions(report))]) + "\n"


def _rows(table: Mapping[str, Any]) -> Iterator[str]:
    keys = [key for key in COLUMNS if any(key in row for row in table["rows"])]
    head = ["contestant", "median, s", "min to max, s", f"x {table['baseline']}", *(COLUMNS[key] for key in keys)]
    yield _line(head)
    yield _line(["---", *["---:"] * (len(head) - 1)])
    for row in table["rows"]:
        seconds, ratio = row["seconds"], row["ratio"]
        cells = [row["name"], number(seconds["median"]), f"{number(seconds['min'])} to {number(seconds['max'])}"]
        cells.append(number(ratio["median"]))
        yield _line([*cells, *(number(row[key]["median"]) if key in row else "" for key in keys)])


def _figures(figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _line(["figure", "measured", "limit", "held"])
    yield _line(["---", "---:", "---:", "---"])
    for each in figures:
        value = each["value"]
        text = number(value) if not isinstance(value, Mapping) else (
            f"{number(value['median'])} ({number(value['min'])} to {number(value['max'])})"
        )  # fmt: skip
        sign = "at most" if each["at_most"] else "at least"
        yield _line([each["what"], text, f"{sign} {each['limit']:g}", "yes" if each["held"] else "**no**"])


def _conditions(report: Mapping[str, Any]) -> Iterator[str]:
    host = report["host"]
    yield f"- {report['date']}; `{report['command']}`"
    yield (
        f"- {report.get('device', 'CPU')}; {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB, Linux "
        f"{host['kernel']}, {host['file_system']}; load average at the end {host['load_average_at_end']}"
    )
    yield "- " + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    for key in ("checkpoint", "rank", "ranks"):
        if key in report:
            yield f"- {key}: " + ", ".join(f"{what} {_plain(value)}" for what, value in report[key].items())
    yield f"- {report['rounds']} rounds, the contestants in turns; ratios are paired within a round, their median shown"
    yield f"- verified: {report['verified']}"
    if "memory" in report:
        yield f"- memory: {report['memory']}"
    rows = [row for table in report["tables"] for row in table["rows"]]
    if any(row.get(flag) is False for row in rows for flag in ("cold_confirmed", "warm_confirmed")):
        yield "- **mincore did not confirm for every turn that its files were cold or warm as meant**"
    for name, reason in report.get("left_out", {}).items():
        yield f"- left out: {name}: {reason}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    least = (100, 10, 1)  # from where on no, one, two decimals are shown
    for decimals, bound in enumerate(least):
        if abs(value) >= bound:
            return f"{value:,.{decimals}f}"
    return f"{round(value, 4):.3g}"


# --- SVG ---


def chart(report: Mapping[str, Any]) -> str:
    """Horizontal bars of the medians, a line from min to max, one panel for each table."""
    body, y = [], 30
    body.append(_text(16, y, report["question"], 16, weight="bold"))
    for table in report["tables"]:
        y += TOP
        body.append(_text(16, y - 10, f"{table['title']} (seconds, shorter is better)", 13))
        most = max(row["seconds"]["max"] for row in table["rows"])
        scale = (WIDTH - LABEL - 110) / most if most else 0.0
        for row in table["rows"]:
            body += _bar(row, y, scale)
            y += BAR + GAP
    host = report["host"]
    y += 18
    machine = f"{report.get('device', 'CPU')}, {host['cpu']}, {host['cores']} cores"
    body.append(_text(16, y, f"{report['date'][:10]}, {machine}; {report['rounds']} rounds", 11))
    height = y + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>"]) + "\n"


def _bar(row: Mapping[str, Any], y: int, scale: float) -> list[str]:
    seconds = row["seconds"]
    end, low, high = (LABEL + seconds[key] * scale for key in ("median", "min", "max"))
    middle = y + BAR / 2
    mine = row["name"].startswith(("ours", "shardconv"))
    ends = f'x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}"'
    return [
        _text(LABEL - 8, y + BAR - 5, row["name"], 12, anchor="end", weight="bold" if mine else "normal"),
        f'<rect x="{LABEL}" y="{y}" width="{end - LABEL:.1f}" height="{BAR}" fill="{OURS if mine else THEIRS}"/>',
        f'<line {ends} stroke="{LINE}" stroke-width="1.5"/>',
        _text(max(end, high) + 6, y + BAR - 5, number(seconds["median"]), 12),
    ]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{LINE}">{escape(text)}</text>'
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=common.RESULTS, metavar="DIR")
    args = parser.parse_args()
    for path in sorted(args.results.glob("*.json")):
        report = json.loads(path.read_text())
        path.with_suffix(".md").write_text(markdown(path.stem, report))
        path.with_suffix(".svg").write_text(chart(report))
        print(f"{path.stem}.md, {path.stem}.svg")


if __name__ == "__main__":
    main()
