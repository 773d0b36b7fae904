"The shape of the code: how long lines and cells are. What is not there yet may only become less."
import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_LINES, LONG_CELLS, MEDIAN = 8, 1, 12  # today, all of the long ones in bench; the aim is none, none and 12


def exported_cells():
    for path in sorted((ROOT/'nbs').rglob('[0-9]*.ipynb')):
        for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
            source = ''.join(c['source'])
            if c['cell_type'] == 'code' and re.match(r'#\|\s*exporti?\b', source): yield path, source.split('\n')[1:]


def test_lines_and_cells_stay_short():
    cells = list(exported_cells())
    long = [(p, o) for p, lines in cells for o in lines if len(o) > 120]
    large = [(p, len(lines)) for p, lines in cells if len(lines) > 40]
    assert not [o for o in (*long, *large) if o[0].parent.name != 'bench']
    assert len(long) <= LONG_LINES and len(large) <= LONG_CELLS and statistics.median(len(lines) for _, lines in cells) <= MEDIAN, (len(long), large)
