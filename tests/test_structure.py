"The shape of the code: how long lines and cells are, and whose names it uses."
import ast
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


def test_the_first_line_of_a_module_stays_short():
    "A notebook's subtitle between quotes; what nbdev lists below it is wrapped by nbdev"
    first = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding='utf-8').split('\n')[0]) for p in (ROOT/'fastbench').rglob('*.py')}
    assert not {k: n for k, n in first.items() if n > 120}


def private_names(source):
    "Names of torch and fastai that begin with an underscore: imported, or reached through a module"
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.ImportFrom) and not n.level and n.module.split('.')[0] in ('torch', 'fastai', 'fasttransform', 'fastcore'):
            yield from (o.name for o in n.names if re.match('_[^_]', o.name))
            yield from (o for o in n.module.split('.') if re.match('_[^_]', o))
        if isinstance(n, ast.Attribute) and re.match('_[^_]', n.attr) and ast.unparse(n.value).split('.')[0] in ('torch', 'nn', 'F', 'fastai', 'Variable'): yield n.attr


def test_private_names_are_seen():
    assert [*private_names("from torch.x import _a\nfrom ._modidx import d\ntorch.y._b(1)\nself._c\nimport torch._dynamo")] == ['_a', '_b']


def test_names_of_torch_and_fastai_that_begin_with_an_underscore_are_in_compat():
    found = {p.relative_to(ROOT).as_posix(): [*private_names(p.read_text(encoding='utf-8'))] for p in (ROOT/'fastbench').rglob('*.py') if p.name not in ('compat.py', '_modidx.py')}
    assert not {k: v for k, v in found.items() if v}
