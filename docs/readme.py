"""Writes README.md from nbs/index.ipynb, its stored outputs included: `python docs/readme.py`.

nbdev's own `nbdev-readme` needs Quarto, which no package registry has. `--check` writes nothing and fails when README.md
or a picture of docs/images is not what the notebook makes.
"""
import base64
import re
import sys
from os.path import normpath
from pathlib import Path

from fastcore.nbio import read_nb

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = 'hide export exports exporti default_exp'.split()
ANSI = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')


def code(text, lang=''):
    "`text` as a fenced block, the fence longer than any inside"
    fence = '`'*max(3, 1+max(map(len, re.findall('`+', text)), default=0))
    return f'{fence}{lang}\n{text.rstrip()}\n{fence}'


def relink(text):
    "Links of a notebook in nbs/ as they read from the folder above it"
    def one(m): return m[0] if re.match(r'[a-z]+:|#|/', m[2]) else m[1] + normpath('nbs/'+m[2]).replace('\\', '/') + m[3]
    return re.sub(r'(\]\()([^)\s]+)(\))', one, text)


def shown(out, alt, images):
    "One stored output as markdown; a picture goes into `images` and is linked"
    data = out.get('data', {})
    if out.output_type == 'stream': return code(ANSI.sub('', ''.join(out.text))) if out.name == 'stdout' else ''
    if 'image/png' in data:
        name = f'docs/images/index-{len(images)+1}.png'
        images[name] = base64.b64decode(''.join(data['image/png']))
        return f'![{alt}]({name})'
    if 'text/markdown' in data: return relink(''.join(data['text/markdown']).strip())
    return code(ANSI.sub('', ''.join(data['text/plain']))) if 'text/plain' in data else ''


def render(nb):
    "README text and {path: bytes} of its pictures"
    parts, images = [], {}
    for cell in nb.cells:
        if cell.cell_type == 'markdown': parts.append(relink(cell.source.strip()))
        if cell.cell_type != 'code' or any(cell.has_directive(o) for o in HIDDEN): continue
        echo, alt = cell.directive('echo', 'true'), cell.directive('fig-alt', 'Output of the code above')
        source = '\n'.join(o for o in cell.source.splitlines() if not re.match(r'\s*#\s*\|', o)).strip()
        if source and str(echo).lower() != 'false': parts.append(code(source, 'python'))
        parts += [shown(o, alt, images) for o in cell.outputs]
    head = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit the notebook. -->'
    return '\n\n'.join([head] + [o for o in parts if o]) + '\n', images


def main(check=False, root=ROOT):
    "Write README.md and its pictures, or name what differs; returns the exit code"
    text, images = render(read_nb(root/'nbs'/'index.ipynb'))
    want = {'README.md': text.encode(), **images}
    there = [p.relative_to(root).as_posix() for p in (root/'docs'/'images').glob('index-*.png')]
    stale = [o for o in want if not (root/o).exists() or (root/o).read_bytes() != want[o]] + [o for o in there if o not in want]
    if check:
        if stale: print(f'not what nbs/index.ipynb makes: {", ".join(stale)}. Run: python docs/readme.py', file=sys.stderr)
        return int(bool(stale))
    for o in stale:
        (root/o).parent.mkdir(parents=True, exist_ok=True)
        (root/o).write_bytes(want[o]) if o in want else (root/o).unlink()
    return 0


if __name__ == '__main__': sys.exit(main('--check' in sys.argv[1:]))
