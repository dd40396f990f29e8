"""Bring what the docs say of the studies up to date with the committed results.

    make study-docs                         # after a run has ended and results.csv has its line
    python scripts/study_docs.py --check    # what is out of date; changes nothing

In README.md and docs/*.md, what stands between `<!-- study: WHAT -->` and `<!-- study: end -->` is made from
studies/results/*/results.csv, so are the plots that pages show (images/study-NAME-table1.svg, -curves1.svg, -gain.svg,
and study-pays.svg), each study's results.md, and gpu_logicmix/train/pays.json, by which `stats` and `fit` hint. WHAT is

    tables NAME             all tables of a study
    table NAME / TITLE      one of them
    progress NAME           how many of its runs are finished
    pairs NAME / TITLE      one of two methods in short: both, the gain, the gain at the chosen epoch
    gains NAME              the gain of LogicMix with each seed
    order NAME / TITLE      the methods by mAP, beside the paper's order
    points                  the gain of LogicMix in all settings of all studies
    rule                    what follows from them
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from gpu_logicmix.study.curves import curve_plot, read_curves
from gpu_logicmix.study.pays import Point, gain_line, gain_plot, gain_points
from gpu_logicmix.study.plan import distinct, read_study
from gpu_logicmix.study.plots import standalone_plot
from gpu_logicmix.study.results import Row, read_results
from gpu_logicmix.study.tables import Block, Entry, Table, by, markdown, markdown_table, safe, t_quantile, tables

ROOT = Path(__file__).resolve().parent.parent
DRAWN = ("demo", "demo-first")  # drawn pictures: shown in the plot, but the line is for photographs
_PART = re.compile(r"(<!-- study: (?!end)(.*?) -->\n).*?(<!-- study: end -->)", re.DOTALL)
_IMAGE = re.compile(r"images/(study-[\w.-]+\.svg)")


def all_results(root: Path = ROOT) -> dict[str, list[Row]]:
    """By study, in the order of their names."""
    return {file.parent.name: read_results(file) for file in sorted(root.glob("studies/results/*/results.csv"))}


def photographs(points: list[Point]) -> list[Point]:
    return [p for p in points if p.study not in DRAWN]


# ------------------------------------------------------------------------------------------------------------ the parts
def part(what: str, studies: dict[str, list[Row]]) -> str:
    """What stands under a mark."""
    kind, _, rest = what.partition(" ")
    name, _, title = rest.partition(" / ")
    if kind == "points":
        return points_table(gain_points(studies.items()))
    if kind == "rule":
        return rule_words(gain_points(studies.items()))
    rows = studies.get(name, [])
    named = {"progress": progress, "gains": gains_words, "order": order_table, "pairs": pairs_table}
    if kind in named:
        return named[kind](name, rows, title)
    found = [t for t in tables(rows) if kind == "tables" or t.title == title] if rows else []
    if kind not in ("table", "tables"):
        raise ValueError(f"study: {what}: must be tables, table, {', '.join(named)}, points or rule")
    if not found:
        return "No run of this table is finished yet.\n"
    return "\n".join(table_text(t, titled=kind == "tables") for t in found)


def table_text(table: Table, titled: bool) -> str:
    blocks = [text for block in table.blocks for text in (markdown_table(block), safe(block.remark))]
    return "\n\n".join([*([f"**{safe(table.title)}**"] if titled else []), *blocks]) + "\n"


def progress(name: str, rows: list[Row], _: str) -> str:
    runs = {plan.folder for plan in distinct(read_study(ROOT / "studies" / f"{name}.toml"))}
    done = runs & {row.run for row in rows}
    return f"{len(done)} of {len(runs)} runs are finished.\n"


def gains_words(name: str, rows: list[Row], _: str) -> str:
    """Seed by seed, and how often it is 5 points or more."""
    found = {(r.method, r.seed): r.mAP for r in rows if r.mAP is not None}
    seeds = sorted({seed for _, seed in found if all((m, seed) in found for m in ("plain training", "LogicMix"))})
    gains = [found["LogicMix", seed] - found["plain training", seed] for seed in seeds]
    if not gains:
        return "No pair of runs is finished yet.\n"
    each = ", ".join(f"{gain:+.1f} (seed {seed})" for gain, seed in zip(gains, seeds, strict=True))
    many = sum(gain >= 5 for gain in gains)
    return f"Gain of LogicMix at the end: {each}; 5 points or more with {many} of {len(gains)} seeds.\n"


def pairs_table(name: str, rows: list[Row], title: str) -> str:
    """A line for each known proportion. Differences are of runs with the same seed; ± is half of a 95 % interval."""
    table = next((t for t in tables(rows) if t.title == title), None)
    if table is None or len(table.blocks) not in (2, 4):
        return "Not enough runs are finished yet.\n"
    means = table.blocks[0]
    names = [line[0].text for line in means.rows]
    if len(table.blocks) == 4:
        ends, chosen = table.blocks[1].rows[0][1:], table.blocks[3].rows[0][1:]
        heads = table.blocks[1].heads[1:]
    else:  # no method has two seeds, so there are no intervals
        points = [p for p in gain_points([(name, rows)]) if p.table == title]
        heads = [f"{p.known:.0%} known" for p in points]
        ends = [Entry(f"{p.gain:+.1f}") for p in points]
        chosen = [Entry("–" if p.tuned is None else f"{p.tuned:+.1f}") for p in points]
    lines = [
        [Entry(known), means.rows[0][at], means.rows[1][at], ends[at - 1], chosen[at - 1]]
        for at, known in enumerate(heads, 1)
    ]
    return markdown_table(Block(["mAP (%)", *names, "gain", "gain, chosen epoch"], lines, "")) + "\n"


# The paper's table "Comparison of LogicMix to other Mixup-like methods", COCO.
PAPER = {
    "no mixing": (75.7, 82.0, 83.4),
    "Mixup": (62.8, 77.2, 82.1),
    "Wang et al.": (67.2, 79.5, 84.3),
    "Multi-label Mixup": (68.1, 79.0, 83.5),
    "Mixup-PME": (74.2, 81.6, 83.6),
    "LogicMix": (76.3, 83.5, 85.1),
}


def order_table(name: str, rows: list[Row], title: str) -> str:
    """Only proportions at which all methods have a run of the first seed."""
    lines = ["| known | here | the paper |", "|--:|---|---|"]
    for column, known in enumerate((0.1, 0.5, 0.9)):
        own = {r.method: r.mAP for r in rows if (r.table, r.known, r.seed) == (title, known, 0) and r.mAP is not None}
        if PAPER.keys() <= own.keys():
            here = sorted(PAPER, key=lambda method: -own[method])
            theirs = sorted(PAPER, key=lambda method: -PAPER[method][column])
            words = [", ".join(f"{m} {v:.1f}" for m, v in line) for line in (
                [(m, own[m]) for m in here], [(m, PAPER[m][column]) for m in theirs])]  # fmt: skip
            lines.append(f"| {known:.0%} | {words[0]} | {words[1]} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "Not all methods have been run yet.\n"


def points_table(points: list[Point]) -> str:
    names = ("study", "table", "known", "images", "positives per category", "pairs", "gain", "gain, chosen epoch")
    heads = f"| {' | '.join(names)} |\n|---|---|{'--:|' * 6}"
    lines = [
        f"| {p.study} | {safe(p.table)} | {p.known:.0%} | {p.images or 0:,} | {p.positives:.0f} | {len(p.gains)} | "
        f"{p.gain:+.1f} | {'–' if p.tuned is None else f'{p.tuned:+.1f}'} |"
        for p in sorted(points, key=lambda p: p.positives)
    ]
    return "\n".join([heads, *lines]) + "\n"


def rule_words(points: list[Point]) -> str:
    used = photographs(points)
    line = gain_line(used)
    limits = None if line is None else line.limits()
    if line is None or limits is None or line.noise is None:
        return f"{len(used)} settings with photographs do not tell yet from how many known positives on mixing pays.\n"
    half = t_quantile(line.count - 2) * (line.noise / line.spread) ** 0.5
    pairs, between = sum(len(p.gains) for p in used), f"{limits[0]:.0f} to {limits[1]:.0f}"
    return (
        f"Through {line.count} settings with photographs ({pairs} pairs of runs): ten times as many known positives "
        f"per category are {line.slope:+.1f} ± {half:.1f} points for LogicMix; the line crosses 0 at "
        f"**{line.crossing():.0f} known positives per category** (95 % interval {between}).\n"
    )


def hint(points: list[Point]) -> str:
    used = photographs(points)
    line = gain_line(used)
    limits = line.limits() if line else None
    low, high = limits or (None, None)
    found = {
        "settings": len(used),
        "pairs": sum(len(p.gains) for p in used),
        "low": None if low is None else round(low, 1),
        "high": None if high is None else round(high, 1),
    }
    return json.dumps(found, indent=1) + "\n"


# ------------------------------------------------------------------------------------------------------------ the files
def image(name: str, studies: dict[str, list[Row]], root: Path = ROOT) -> str | None:
    """The plot that a page calls images/NAME; None if there is nothing to plot yet."""
    if name == "study-pays.svg":
        points = gain_points(studies.items())
        return gain_plot(points, photographs(points))
    study, _, plot = name.removeprefix("study-").removesuffix(".svg").rpartition("-")
    rows = studies.get(study, [])
    if plot == "gain":
        points = gain_points([(study, rows)])
        return gain_plot(points) if gain_line(points) else None
    kind, number = plot.rstrip("0123456789"), int(re.sub(r"\D", "", plot))
    parts = list(by(rows, "table").values())
    if len(parts) < number:
        return None
    table = parts[number - 1]
    return (
        standalone_plot(table) if kind == "table" else curve_plot(table, read_curves(root / "studies/results" / study))
    )


def wanted(root: Path = ROOT) -> dict[Path, str]:
    """All files that depend on the results, as they should be."""
    studies = all_results(root)
    files = {root / "studies/results" / name / "results.md": markdown(rows) for name, rows in studies.items()}
    files[root / "gpu_logicmix/train/pays.json"] = hint(gain_points(studies.items()))
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = _PART.sub(lambda m: f"{m[1]}\n{part(m[2], studies)}\n{m[3]}", text)
        if new != text or _PART.search(text):
            files[page] = new
        for name in _IMAGE.findall(text):
            if (content := image(name, studies, root)) is not None:
                files[root / "docs" / "images" / name] = content
    return files


def main(arguments: list[str], root: Path = ROOT) -> int:
    check = "--check" in arguments
    stale = {p: t for p, t in wanted(root).items() if not p.exists() or p.read_text(encoding="utf-8") != t}
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(root)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
