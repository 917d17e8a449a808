"""python3 summary.py FILE...: mean goodput before and after the change of the path, by transport, in Mbit/s;
seconds from the change to the switch; bytes that arrived, and that were skipped."""

import json
import sys
from statistics import median


def rate(samples, start, end):
    """Over the samples of that time, Mbit/s; None if it was over by then."""
    inside = [sample for sample in samples if start <= sample[0] <= end]
    if len(inside) < 2 or inside[-1][0] - inside[0][0] < (end - start) / 2:
        return None
    (first, had), (last, has) = inside[0], inside[-1]
    return (has - had) * 8 / 1e6 / (last - first)


def show(values):
    values = [value for value in values if value is not None]
    if not values:
        return "–"
    text = f"{median(values):.2f}"
    return text if len(values) == 1 else f"{text} ({min(values):.2f}–{max(values):.2f})"


rows = [row for name in sys.argv[1:] for row in json.load(open(name))]
for transport in dict.fromkeys(row["transport"] for row in rows):
    runs = [row for row in rows if row["transport"] == transport and row["ok"]]
    at = runs[0]["changes"][0]
    span = lambda start, end: show([rate(r["samples"], at + start, at + end) for r in runs])
    print(
        f"{transport}: {len(runs)} runs; before {span(-15, 0)}; 0 to 5 s behind it {span(0, 5)}; 5 to 10 s {span(5, 10)}; "
        f"10 to 25 s {span(10, 25)}; switch after {show([s - at for r in runs for s in r.get('switches', [])])} s; "
        f"seconds {show([r['fct_s'] for r in runs])}; MB {show([r['bytes'] / 1e6 for r in runs])}; "
        f"skipped {show([r['skipped'] / 1e3 if 'skipped' in r else None for r in runs])} kB"
    )
