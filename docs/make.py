"""The documentation site: `python docs/make.py` writes `site/`, from the repository's notebooks, modules and Markdown.

Markdown is generated into `build/docs/` and rendered there by Zensical. A build that fails leaves the old `site/` as it
was. `python3 bootstrap.py docs` installs what this needs.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from posixpath import dirname

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [o for o in (str(HERE), str(ROOT)) if o not in sys.path]
import reference
from convert import Pictures, for_site, linked, markdown_file, notebook, plain
from names import GROUPS, Book, Names, group_of
from search import rank

OLDEST = 3, 11
SECTIONS = dict(tutorials='Tutorials', explanations='Explanations')
MORE = {'CHANGELOG.md': 'changelog.md', 'CONTRIBUTING.md': 'reference/contributing.md',
        'docs/architecture.md': 'reference/architecture.md'}


class CannotBuild(Exception): "Why there is no site, in one line"


def check():
    "Is what the site needs here?"
    if sys.version_info < OLDEST: raise CannotBuild('Zensical, which renders it, needs Python %d.%d or newer' % OLDEST)
    if not find_spec('zensical'): raise CannotBuild('Zensical is not installed: python3 bootstrap.py docs installs it')


def books_of(root):
    "All notebooks with their pages"
    paths = sorted((root/'nbs').rglob('*.ipynb'))
    return [Book(o, root) for o in paths if not any(p[0] in '._' for p in o.relative_to(root).parts)]


class Site:
    "Pages as Markdown: `texts` for Zensical, `twins` for readers of Markdown"
    def __init__(self, root=ROOT):
        self.books, self.pictures = books_of(root), (Pictures(), Pictures())
        self.texts, self.twins, self.about = {}, {}, {}
        scripts = [o.relative_to(root).with_suffix('').as_posix() for o in sorted((root/'benchmarks').glob('*.py'))]
        codes = {f'{o}.py': f'source/{o}.md' for o in scripts}
        self.names = names = Names(self.books, root, MORE | codes, reference.commands(), reference.recipe_names())
        def read(file): return (root/file).read_text(encoding='utf-8')
        for b in self.books:
            texts = notebook(b.path, b.page, names, self.pictures)
            if b.module:
                source = f'`fastbench.{b.module}` · [source]({names.link(b.page, b.source)}) · notebook `{b.file}`'
                texts = after_title(texts[0], f'{source}\n{{.where}}'), after_title(texts[1], source)
                back = f'\n\nShown at work: [{b.title}]({names.link(b.source, b.page)}).'
                self.add(b.source, reference.source_page(b.code, read(b.code), back))
            self.texts[b.page], self.twins[b.page] = texts
            self.about[b.page] = b.subtitle
        for file, page in codes.items(): self.add(page, reference.source_page(file, read(file)))
        for file, page in MORE.items():
            text = read(file)
            self.add(page, markdown_file(text, page, names, dirname(file)), paragraph(text))
        for page, text in reference.pages(names, root).items(): self.add(page, linked(text, page, names))
        for part, title, mine in self.sections:
            lines = (f"- [{b.title}]({b.page.split('/')[-1]}): {b.subtitle}\n" for b in mine)
            self.add(f'{part}/index.md', f'# {title}\n\n' + ''.join(lines), f'All {part}')

    def add(self, page, text, about=''):
        self.texts[page], self.twins[page] = for_site(text), plain(text)
        self.about[page] = about or next((o[2:] for o in text.splitlines() if o.startswith('> ')), '')

    @property
    def sections(self):
        "(folder, title, notebooks) of those that have a notebook"
        mine = {part: [b for b in self.books if b.page.startswith(f'{part}/')] for part in SECTIONS}
        return [(part, title, mine[part]) for part, title in SECTIONS.items() if mine[part]]

    @property
    def nav(self):
        "For Zensical"
        def items(books): return [{b.title.replace('`', ''): b.page} for b in books]  # it is no Markdown there
        parts = [{title: [f'{part}/index.md', *items(mine)]} for part, title, mine in self.sections]
        groups = [{g: items(b for b in self.books if b.module and group_of(b.module) == g)} for g in GROUPS]
        made = [{'Architecture': 'reference/architecture.md'}, {'Contributing': 'reference/contributing.md'}]
        pages = [{title: f'reference/{page}'} for title, page, _ in reference.GENERATED]
        pages = ['reference/index.md', *pages, *groups, {'How fastbench is made': made}]
        return [{'Home': 'index.md'}, *parts, {'Reference': pages}, {'Changelog': 'changelog.md'}]

    @property
    def llms(self):
        "llms.txt: every page as Markdown, with what it is about"
        home, parts = next(b for b in self.books if b.page == 'index.md'), dict(listed(self.nav))
        told = {page for pairs in parts.values() for _, page in pairs}
        parts['Optional'] = [(self.twins[o].splitlines()[0][2:], o) for o in sorted(self.texts) if o not in told]
        said = 'Each page is here as Markdown, beside its HTML under the same name.'
        head = f'# {home.title}\n\n> {home.subtitle}\n\n{said}\n'
        def line(title, page):
            about = re.sub(r'\[([^\]]+)\]\([^)]+\)', r'\1', ' '.join(self.about[page].split()))
            return f'- [{title}]({page})' + (f': {about}' if about else '') + '\n'
        return '\n'.join([head, *(f'## {k}\n\n' + ''.join(line(*o) for o in pairs) for k, pairs in parts.items())])


def listed(nav):
    "(heading, [(title, page)]) of what a navigation holds"
    for title, inside in (pair for o in nav for pair in o.items()):
        found = [{title: o} if isinstance(o, str) else o for o in ([inside] if isinstance(inside, str) else inside)]
        pages = [o for o in found if isinstance(*o.values(), str)]
        yield title, [pair for o in pages for pair in o.items()]
        yield from listed(o for o in found if o not in pages)


def paragraph(text):
    "The first paragraph of prose"
    return next(o for o in text.split('\n\n') if not o.startswith(('#', '```', '|', '<', '-')))


def after_title(text, line):
    "`line` after title and subtitle"
    return re.sub(r'\A(# .*\n*(?:> .*\n)*)\n*', lambda m: f'{m[1].rstrip()}\n\n{line}\n\n', text)


def write(folder, files):
    for name, data in files.items():
        path = folder/name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def settings(nav):
    "The whole configuration as TOML"
    nav = json.dumps(nav, ensure_ascii=False, separators=(', ', ' = '))
    given = (HERE/'zensical.toml').read_text(encoding='utf-8')
    return given.replace('[project]\n', f'[project]\ndocs_dir = "pages"\nsite_dir = "site"\nnav = {nav}\n', 1)


def render(work):
    "Zensical over `work`"
    command = [sys.executable, '-m', 'zensical', 'build', '--clean', '--strict', '-f', str(work/'zensical.toml')]
    got = subprocess.run(command, cwd=work, capture_output=True, text=True)
    said = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', got.stdout + got.stderr.split('Traceback')[0]).strip()
    if got.returncode: raise CannotBuild('Zensical failed:\n' + said[-6000:])


def make(out=ROOT/'site', work=ROOT/'build'/'docs'):
    "Write the site to `out`; returns its `Site`"
    check()
    from links import dead
    site = Site()
    shutil.rmtree(work, ignore_errors=True)
    write(work/'pages', site.texts | site.pictures[False])
    shutil.copytree(HERE/'theme', work/'pages'/'theme')
    write(work, {'zensical.toml': settings(site.nav)})
    render(work)
    rank(work/'site', site.names.users)
    write(work/'site', site.twins | site.pictures[True] | {'llms.txt': site.llms})
    broken = dead(work/'site')
    if broken: raise CannotBuild(f'{len(broken)} dead links:\n' + '\n'.join(broken[:40]))
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(work/'site', out)
    return site


def main():
    os.environ.setdefault('MPLBACKEND', 'agg')
    try: site = make()
    except CannotBuild as e:
        print(f'docs: {e}', file=sys.stderr)
        return 4
    print(f"docs: {len(site.texts)} pages in {ROOT/'site'/'index.html'}")
    return 0


if __name__ == '__main__': sys.exit(main())
