"""Writes README.md from nbs/index.ipynb, its stored outputs included: `python docs/readme.py`.

nbdev's own `nbdev-readme` needs Quarto, which no package registry has. `--check` writes nothing and fails when
README.md or a picture of docs/images is not what the notebook makes.
"""
import re
import sys
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
from convert import Pictures, notebook

HEAD = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit the notebook. -->\n\n'


class Images(Pictures):
    "Pictures of the README, where they lie in the repository"
    def add(self, page, kind, data):
        self[name := f'docs/images/index-{len(self)+1}.{kind}'] = data
        return name


class Files:
    "In place of the site's names: links of a notebook in nbs/ as they read from the folder above it, and no others"
    def place(self, target, page): return None if re.match('[a-z]+:|#|/', target) else normpath('nbs/' + target)
    def resolve(self, *args): return None
    def of_cell(self, *args): return []
    def source_of(self, *args): return ''


def main(check=False, root=ROOT):
    "Write README.md and its pictures, or name what differs; returns the exit code"
    images = Images()
    text = notebook(root/'nbs'/'index.ipynb', '', Files(), (Images(), images))[1]
    want = {'README.md': (HEAD + text).encode(), **images}
    paths = [root/'README.md', *(root/'docs'/'images').glob('index-*.png')]
    there = {o.relative_to(root).as_posix(): o.read_bytes() for o in paths if o.exists()}
    stale = [o for o in {**want, **there} if want.get(o) != there.get(o)]
    if check:
        found = ', '.join(stale)
        if stale: print(f'not what nbs/index.ipynb makes: {found}. Run: python docs/readme.py', file=sys.stderr)
        return int(bool(stale))
    for o in stale:
        (root/o).parent.mkdir(parents=True, exist_ok=True)
        if o in want: (root/o).write_bytes(want[o])
        else: (root/o).unlink()
    return 0


if __name__ == '__main__': sys.exit(main('--check' in sys.argv[1:]))
