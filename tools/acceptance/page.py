"""The page of an acceptance run: one self-contained HTML file in light and dark mode."""

from collections.abc import Mapping, Sequence
from html import escape

WORDS = {"pass": "&#10003; pass", "fail": "&#10007; FAIL", "skip": "&#8211; skipped", "note": "&#183; figure"}
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d0d4da, #3a4048);
  --dim: light-dark(#5a626c, #9aa4b0);
  --fail: light-dark(#a33c00, #ff9d5c); --pass: light-dark(#0b5394, #7db8f0);
  --bar: light-dark(#e8ecf1, #2b3138); }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#fff, #16191d); color: light-dark(#1b1f24, #e6e9ed); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; display: inline; margin: 0; }
details { border-top: 1px solid var(--line); padding: .6rem 0; } summary { cursor: pointer; }
summary p { margin: .1rem 0 0 1rem; color: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; margin-top: .6rem; }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top;
  border-top: 1px solid var(--line); }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 500; }
.verdict { white-space: nowrap; } .pass { color: var(--pass); }
.fail { color: var(--fail); font-weight: 700; }
.skip, .note, .dim { color: var(--dim); }
.bar { display: grid; grid-template-columns: 14rem 1fr 6rem; gap: .6rem; align-items: center;
  margin: .2rem 0; }
.bar i { display: block; height: .9rem; background: var(--pass); min-width: 1px; }
.bar span:nth-child(2) { background: var(--bar); } .bar b { font-weight: 400; text-align: right; }
"""


def page(results: Sequence[Mapping]) -> str:
    """Return the HTML page of the stages' results; failed stages are expanded."""
    counts = {word: sum(r["verdict"] == word for r in results) for word in ("pass", "fail", "skip")}
    modes = sorted({result["mode"] for result in results})
    seconds = sum(result.get("seconds", 0) for result in results)
    title = "Lockstep: acceptance of this machine"
    if modes == ["rehearse"]:
        title = "Lockstep: rehearsal of the acceptance on a CPU"
    head = (
        f"<p>{counts['pass']} of {len(results)} stages passed, {counts['fail']} failed, "
        f"{counts['skip']} skipped. Mode {escape(', '.join(modes))}; {seconds / 60:.1f} minutes.</p>"
    )
    body = "".join(_stage(result) for result in results)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{head}{body}</html>\n"
    )


def _stage(result: Mapping) -> str:
    rows, timeline = result["rows"], result.get("timeline", {})
    opened = " open" if result["verdict"] == "fail" or timeline else ""
    failed = sum(row["verdict"] == "fail" for row in rows)
    count = f"{len(rows)} rows" + (f", {failed} failed" if failed else "")
    table = "".join(map(_row, sorted(rows, key=lambda row: row["verdict"] != "fail")))
    return (
        f"<details{opened}><summary>{_verdict(result['verdict'])} <h2>{escape(result['name'])}</h2> "
        f'<span class="dim">{count}, {result.get("seconds", 0):.0f} s{_origin(result)}</span>'
        f"<p>{escape(result['text'])}</p></summary>{_timeline(timeline)}"
        '<div class="scroll"><table><tr><th>verdict<th>what<th>value<th>limit<th>remark</tr>'
        f"{table}</table></div></details>"
    )


def _origin(result: Mapping) -> str:
    """Return mode, time and revision of a stage, which other calls than the last may have run."""
    parts = [result["mode"], result.get("at", ""), result.get("revision", "")[:10]]
    return "".join(f"; {escape(part)}" for part in parts if part)


def _row(row: Mapping) -> str:
    value, limit, text = (escape(row.get(name, "")) for name in ("value", "limit", "text"))
    return (
        f'<tr><td>{_verdict(row["verdict"])}<td>{escape(row["name"])}<td class="number">{value}'
        f'<td class="number">{limit}<td>{text}</tr>'
    )


def _verdict(word: str) -> str:
    return f'<span class="verdict {word}">{WORDS[word]}</span>'


def _timeline(seconds: Mapping[str, float]) -> str:
    """Return one bar per part; its length is proportional to the seconds."""
    longest = max(seconds.values(), default=0.0)
    return "".join(
        f'<div class="bar"><span>{escape(name)}</span><span><i style="width:{100 * value / longest:.1f}%">'
        f"</i></span><b>{value:.3g} s</b></div>"
        for name, value in seconds.items()
    )
