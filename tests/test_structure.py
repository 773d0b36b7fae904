"The shape of the code: how long lines and cells are."
import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def exported_cells():
    for path in sorted((ROOT/'nbs').rglob('[0-9]*.ipynb')):
        for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
            source = ''.join(c['source'])
            if c['cell_type'] == 'code' and re.match(r'#\|\s*exporti?\b', source): yield path, source.split('\n')[1:]


def test_lines_and_cells_stay_short():
    cells = list(exported_cells())
    long = [(p, o) for p, lines in cells for o in lines if len(o) > 120]
    large = [(p, len(lines)) for p, lines in cells if len(lines) > 40]
    assert not long and not large, (long, large)
    assert statistics.median(len(lines) for _, lines in cells) <= 12
