"""Writes README.md from nbs/index.ipynb, its stored outputs included: `python docs/readme.py`.

nbdev's own `nbdev-readme` needs Quarto, which no package registry has. `--check` writes nothing and fails when README.md
or a picture of docs/images is not what the notebook makes.
"""
import re
import sys
from os.path import normpath
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [o for o in [str(ROOT/'docs')] if o not in sys.path]
from convert import Pictures, notebook

HEAD = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit the notebook. -->\n\n'


class Images(Pictures):
    "Pictures of the README, where they lie in the repository"
    def add(self, page, kind, data):
        self[name := f'docs/images/index-{len(self)+1}.{kind}'] = data
        return name


class Files:
    "In place of the site's names: links of a notebook in nbs/ as they read from the folder above it, and no others"
    def place(self, target, page): return None if re.match(r'[a-z]+:|#|/', target) else normpath('nbs/' + target).replace('\\', '/')
    def resolve(self, *args): return None
    def of_cell(self, *args): return []
    def source_of(self, *args): return ''


def main(check=False, root=ROOT):
    "Write README.md and its pictures, or name what differs; returns the exit code"
    images = Images()
    text = notebook(root/'nbs'/'index.ipynb', '', Files(), (Images(), images))[1]
    want = {'README.md': (HEAD + text).encode(), **images}
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
