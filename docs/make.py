"""The documentation site: `python docs/make.py` writes `site/`, from the notebooks, the modules and the Markdown files of this repository.

Markdown is generated into `build/docs/` and rendered there by Zensical; a build that fails leaves the old `site/` as it was.
`python3 bootstrap.py docs` installs what this needs.
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
from convert import FRONT, Pictures, default_exp, linked, markdown_file, notebook, plain  # noqa: E402
from names import GROUPS, Book, Names, group_of  # noqa: E402

OLDEST = 3, 11
SECTIONS = dict(tutorials='Tutorials', explanations='Explanations')
MORE = [('CHANGELOG.md', 'changelog.md'), ('CONTRIBUTING.md', 'reference/contributing.md'), ('docs/architecture.md', 'reference/architecture.md')]


class CannotBuild(Exception): "Why there is no site, in one line"


def check():
    "Is what the site needs here?"
    if sys.version_info < OLDEST: raise CannotBuild('Zensical, which renders the pages, needs Python %d.%d or newer; this is %d.%d' % (*OLDEST, *sys.version_info[:2]))
    if not find_spec('zensical'): raise CannotBuild("Zensical is not installed: python3 bootstrap.py docs installs it, or the extra does: pip install -e '.[docs]'")


def stem(path): return re.sub(r'^\d+[a-z]?_', '', path.stem)


def books_of(root):
    "All notebooks with their pages"
    from fastcore.nbio import read_nb
    res = []
    for path in sorted((root/'nbs').rglob('*.ipynb')):
        inside = path.relative_to(root/'nbs')
        if any(o.startswith(('.', '_')) for o in inside.parts): continue
        if inside.parts[0] in SECTIONS and len(inside.parts) == 2: page = f'{inside.parts[0]}/{stem(path)}.md'
        elif inside.name == 'index.ipynb' and len(inside.parts) == 1: page = 'index.md'
        else: page = f"reference/{default_exp(read_nb(path)) or stem(path)}.md"
        res.append(Book(path, page, root))
    return res


class Site:
    "Pages as Markdown: `texts` for Zensical, `twins` for readers of Markdown"
    def __init__(self, root=ROOT):
        import reference
        self.root, self.books, self.pictures = root, books_of(root), (Pictures(), Pictures())
        self.scripts = {o.relative_to(root).as_posix(): f'source/{o.relative_to(root).as_posix()[:-3]}.md' for o in sorted((root/'benchmarks').glob('*.py'))}
        self.names = Names(self.books, root, {**dict(MORE), **self.scripts}, reference.commands(), reference.recipe_names())
        self.texts, self.twins, self.about = {}, {}, {}
        self.notebooks()
        self.generated()

    def add(self, page, text, twin=None, about=''):
        self.texts[page], self.twins[page] = unescaped(text), plain(twin or text)
        self.about[page] = about or next((o[2:] for o in FRONT.sub('', text).splitlines() if o.startswith('> ')), '')

    def notebooks(self):
        for b in self.books:
            text, twin = notebook(b.path, b.page, self.names, self.pictures)
            if b.module: text, twin = (after_title(t, self.where(b)) for t in (text, twin))
            self.add(b.page, text, twin, b.subtitle)
            if b.module:
                file = f"fastbench/{b.module.replace('.', '/')}.py"
                self.source(file, f'source/{b.module}.md', (b.title, self.names.link(f'source/{b.module}.md', b.page)))

    def where(self, b):
        source = self.names.link(b.page, f'source/{b.module}.md')
        return f'`fastbench.{b.module}` · [source]({source}) · notebook `{b.file}`' + '\n{.where}'

    def source(self, file, page, back=None):
        from reference import source_page
        text = (self.root/file).read_text(encoding='utf-8')
        self.add(page, source_page(file, text, back), about='source')

    def generated(self):
        import reference
        for file, page in MORE:
            text = (self.root/file).read_text(encoding='utf-8')
            self.add(page, *(markdown_file(text, page, self.names, dirname(file), twin) for twin in (False, True)), about=paragraph(text))
        for file, page in self.scripts.items(): self.source(file, page)
        for page, text in (('reference/commands.md', reference.commands_page(self.names)), ('reference/recipes.md', reference.recipes_page()),
                           ('reference/run-fields.md', reference.run_page(self.root)), ('reference/index.md', reference.start_page(self.names)), ('reference/names.md', reference.names_page(self.names))):
            self.add(page, *(linked(text, page, self.names, twin=twin) for twin in (False, True)))
        self.texts['reference/names.md'] = '---\nsearch:\n  exclude: true\n---\n\n' + self.texts['reference/names.md']  # else each name is found twice
        for part, title, mine in self.sections:
            self.add(f'{part}/index.md', f'# {title}\n\n' + '\n'.join(f'- [{b.title}]({b.page.split("/")[-1]}): {b.subtitle}' for b in mine) + '\n', about=f'All {part}')

    # Navigation

    @property
    def sections(self):
        "(folder, title, notebooks) of those that have a notebook"
        return [(part, title, mine) for part, title in SECTIONS.items() if (mine := [b for b in self.books if b.page.startswith(f'{part}/')])]

    def groups(self):
        "Heading of the reference -> [(title, page)]"
        res = {t: [(b.title, b.page) for b in self.books if b.page.startswith('reference/') and group_of(b.module or stem(b.path)) == g] for g, t in GROUPS.items()}
        return res | {'How fastbench is made': [('Architecture', 'reference/architecture.md'), ('Contributing', 'reference/contributing.md')]}

    @property
    def nav(self):
        "For Zensical"
        from reference import GENERATED
        def items(pairs): return [{t.replace('`', ''): p} for t, p in pairs]  # it is no Markdown there
        parts = [{title: [f'{part}/index.md', *items((b.title, b.page) for b in mine)]} for part, title, mine in self.sections]
        groups = [{t: items(pairs)} for t, pairs in self.groups().items()]
        return [{'Home': 'index.md'}, *parts, {'Reference': ['reference/index.md', *items((t, f'reference/{p}') for t, p, _ in GENERATED), *groups]}, {'Changelog': 'changelog.md'}]

    @property
    def llms(self):
        "llms.txt: every page as Markdown, with what it is about"
        def line(title, page): return f'- [{title}]({page})' + (f': {one_line(self.about[page])}' if self.about.get(page) else '')
        home = next(b for b in self.books if b.page == 'index.md')
        head = f'# {home.title}\n\n> {home.subtitle}\n\nEach page is here as Markdown, beside its HTML under the same name.'
        parts = [(title, [line(*o) for o in pairs]) for title, pairs in listed(self.nav)]
        told = {o for _, pairs in listed(self.nav) for _, o in pairs}
        parts.append(('Optional', [f'- [{FRONT.sub("", self.texts[p]).splitlines()[0][2:]}]({p})' for p in sorted(self.texts) if p not in told]))
        return '\n\n'.join([head, *(f'## {title}\n\n' + '\n'.join(lines) for title, lines in parts)]) + '\n'


def listed(nav):
    "(heading, [(title, page)]) of what a navigation holds"
    for title, inside in (pair for o in nav for pair in o.items()):
        pairs = [(title, o) if isinstance(o, str) else next(iter(o.items())) for o in ([inside] if isinstance(inside, str) else inside)]
        yield title, [o for o in pairs if isinstance(o[1], str)]
        yield from listed({t: o} for t, o in pairs if not isinstance(o, str))


def one_line(text): return re.sub(r'\[([^\]]+)\]\([^)]+\)', r'\1', ' '.join(text.split()))


def paragraph(text):
    "The first paragraph of prose"
    return next((' '.join(o.split()) for o in text.split('\n\n') if not o.startswith(('#', '```', '|', '<', '-'))), '')


def after_title(text, line):
    "`line` after title and subtitle"
    head = re.match(r'# [^\n]*\n+(?:> [^\n]*\n)*', text)
    at = head.end() if head else 0
    return text[:at].rstrip() + f'\n\n{line}\n\n' + text[at:].lstrip('\n')


def unescaped(text):
    "Python-Markdown shows the backslash of a `a\\|b` in a table"
    return '\n'.join(re.sub(r'`[^`\n]+`', lambda m: m[0].replace('\\|', '|'), o) if o.startswith('|') else o for o in text.split('\n'))


def write(folder, files):
    for name, data in files.items():
        path = folder/name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def settings(nav):
    "The whole configuration as TOML"
    return (HERE/'zensical.toml').read_text(encoding='utf-8').replace('[project]\n', f'[project]\ndocs_dir = "pages"\nsite_dir = "site"\nnav = {toml(nav)}\n', 1)


def toml(o):
    if isinstance(o, dict): return '{ ' + ', '.join(f'{json.dumps(k)} = {toml(v)}' for k, v in o.items()) + ' }'
    return '[' + ', '.join(map(toml, o)) + ']' if isinstance(o, list) else json.dumps(o, ensure_ascii=False)


def render(work):
    "Zensical over `work`"
    got = subprocess.run([sys.executable, '-m', 'zensical', 'build', '--clean', '--strict', '-f', str(work/'zensical.toml')], cwd=work, capture_output=True, text=True)
    said = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', got.stdout + got.stderr.split('Traceback')[0]).strip()
    if got.returncode: raise CannotBuild('Zensical failed:\n' + said[-6000:])
    return got.stdout


def make(out=ROOT/'site', work=ROOT/'build'/'docs', root=ROOT):
    "Write the site to `out`; returns its `Site`"
    check()
    from search import rank
    site = Site(root)
    shutil.rmtree(work, ignore_errors=True)
    write(work/'pages', {**site.texts, **site.pictures[False], **{f'theme/{o.name}': o.read_bytes() for o in (HERE/'theme').iterdir()}})
    write(work, {'zensical.toml': settings(site.nav)})
    render(work)
    rank(work/'site', site.names.users)
    write(work/'site', {**site.twins, **site.pictures[True], 'llms.txt': site.llms})
    from links import dead
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
