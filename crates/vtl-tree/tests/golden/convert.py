#!/usr/bin/env python3
"""Writes the .names and .data of an ARFF file: convert.py IN.arff OUT (without an ending)."""
import csv, re, sys

attributes, rows, data = [], [], False
for line in open(sys.argv[1], encoding="latin-1"):
    line = line.strip()
    if not line or line.startswith("%"):
        continue
    if data:
        rows.append(next(csv.reader([line.replace("\t", "")], quotechar="'", skipinitialspace=True)))
    elif line.lower().startswith("@data"):
        data = True
    elif match := re.match(r"@attribute\s+('[^']*'|\S+)\s+(.*)", line, re.I):
        name, kind = match[1].strip("'"), match[2].strip()
        values = None
        if kind.startswith("{"):
            values = [v.strip() for v in next(csv.reader([kind[1 : kind.rindex("}")]], quotechar="'", skipinitialspace=True))]
        attributes.append((name, values))

escape = lambda text: re.sub(r"([,:|\\])|\.(?=\s|$)", lambda m: "\\" + m[0], text)
# The class is the last one, but for these.
place = next((i for i, (name, _) in enumerate(attributes) if name.lower() == "class"), len(attributes) - 1)
with open(sys.argv[2] + ".names", "w") as out:
    print(", ".join(map(escape, attributes[place][1])) + ".\n", file=out)
    for i, (name, values) in enumerate(attributes):
        if i != place:
            print(escape(name) + ": " + (", ".join(map(escape, values)) if values else "continuous") + ".", file=out)
with open(sys.argv[2] + ".data", "w") as out:
    for row in rows:
        row = [escape(field.strip()) for field in row]
        print(",".join(row[:place] + row[place + 1 :] + [row[place]]), file=out)
