"""What the site calls by name: public names, modules, commands, recipes, notebooks, files, each with its place.

The notebooks say where a name is made, `showdoc` how it is shown.
"""
import ast
import re
from functools import cached_property
from importlib import import_module
from posixpath import dirname, normpath, relpath

from fastcore.nbio import read_nb

from convert import cell, default_exp, fence, linked
from showdoc import Documented, lookup, public_names, type_name

GROUPS = dict(learners='Learners', measure='Measuring', callbacks='Callbacks', draw='Drawing batches', text='Text', vision='Vision', runs='Runs and statistics', cli='Command line',
              machine='The machine')
WINGS = dict(train='learners', distributed='learners', bench='learners', own='learners', all='learners', experiments='learners', recipe='learners', ladders='learners', rules='learners', data='learners', measure='measure', loops='measure', callback='callbacks', draw='draw',
             text='text', vision='vision', command='cli', cli='cli', machine='machine', selftest='machine')


def group_of(module):
    "Under which heading of the reference a module stands; what is new stands under runs"
    return WINGS.get(module.split('.')[0], 'runs')


def head(nb):
    "Title and subtitle of a notebook"
    lines = [o for o in nb.cells[0].source.splitlines() if o.strip()]
    sub = [o[2:] for o in lines[1:] if o.startswith('> ')]
    return lines[0].removeprefix('# ').strip(), ' '.join(sub).strip()


class Book:
    "A notebook, its page, and what it makes public"
    def __init__(self, path, page, root):
        self.path, self.page, self.nb = path, page, read_nb(path)
        self.file = path.relative_to(root).as_posix()
        self.module = default_exp(self.nb)
        self.title, self.subtitle = head(self.nb)


class Names:
    "Every name and its place"
    def __init__(self, books, root, files=(), commands=(), recipes=()):
        self.root, self.books, self.commands, self.recipes = root, books, set(commands), set(recipes)
        self.by_path = {b.path: b for b in books}
        self.files = {b.file: b.page for b in books} | dict(files)  # file of the repository -> page
        self.public, self.cells, self.reexports = {}, {}, []  # (module, name) -> Book; (path, cell id) -> names
        for b in books:
            if b.module: self._collect(b)
        self.short = {}
        for (module, name) in self.public: self.short.setdefault(name, []).append(module)

    def _collect(self, b):
        known = getattr(import_module(f'fastbench.{b.module}'), '__all__', [])
        for cell in b.nb.cells:
            if cell.cell_type != 'code' or not (cell.has_directive('export') or cell.has_directive('exports')): continue
            if b.module == 'all':
                self.reexports = known
                continue
            source = '\n'.join(o for o in cell.source.splitlines() if not re.match(r'\s*#\|', o))
            found = [o for o in public_names(source, known) if (b.module, o) not in self.public and not self.stands_in(b.module, o)]
            self.cells[b.path, cell.id] = found
            self.public |= {(b.module, o): b for o in found}
            self.files[f"fastbench/{b.module.replace('.', '/')}.py"] = f'source/{b.module}.md'

    def stands_in(self, module, name):
        "Is it a method that takes the place of another (of an event of fastai), and says no more than that one?"
        owner, _, method = name.rpartition('.')
        o = self.obj(module, owner) if owner else None
        if not isinstance(o, type) or not (method.startswith(('before_', 'after_')) or any(method in vars(c) for c in o.__mro__[1:])): return False
        m = vars(o).get(method)
        return not (getattr(getattr(m, 'fget', None) or getattr(m, '__func__', m), '__doc__', None) or '').strip()

    @cached_property
    def lines(self): return {m: public_names((self.root/f"fastbench/{m.replace('.', '/')}.py").read_text(encoding='utf-8'), {n.split('.')[0] for k, n in self.public if k == m}) for m in {m for m, _ in self.public}}

    def of_cell(self, path, cell):
        "(module, name) of what an exported cell makes public"
        b = self.by_path[path]
        if b.module == 'all' and '_all_' in cell.source: return [('all', None)]
        return [(b.module, o) for o in self.cells.get((path, cell.id), [])]

    def source_of(self, path, cell, page):
        "A link to the code of an exported cell"
        module = self.by_path[path].module
        lines = (self.root/f"fastbench/{module.replace('.', '/')}.py").read_text(encoding='utf-8').splitlines()
        at = next((i for i, o in enumerate(lines, 2) if o.startswith('# %% ') and o.endswith(f'#{cell.id}')), 1)
        return f"Nothing public; [the code]({self.link(page, f'source/{module}.md', line_anchor(at))})."

    def obj(self, module, name):
        "What stands behind a public name"
        return lookup(f'fastbench.{module}', name)

    def about(self, module, name):
        "The first line of what is said of it"
        o = self.obj(module, name)
        if not (callable(o) or isinstance(o, (property, cached_property, classmethod, staticmethod))): return ''
        return Documented(o, name).docs.split('\n')[0]

    def home_of(self, name):
        "(module, name) of a name of `fastbench.all`"
        mod = getattr(getattr(import_module('fastbench.all'), name), '__module__', '').removeprefix('fastbench.')
        return (mod, name) if (mod, name) in self.public else next(((m, name) for m in self.short.get(name, ()) if group_of(m) != 'cli'), None)

    @cached_property
    def users(self):
        "Name -> where it is shown, of all that `from fastbench.all import *` brings, fastai's Learner with its new methods among them"
        homes = {o: self.home_of(o) for o in self.reexports}
        return {o: f"{self.public[h].page.removesuffix('.md')}.html#{o}" for o, h in homes.items() if h} | dict(Learner='')

    # Places

    def link(self, page, to, anchor=''):
        "A link to page `to` as it reads on `page`"
        return (relpath(to, dirname(page) or '.') if to != page else '' if anchor else to.split('/')[-1]) + (f'#{anchor}' if anchor else '')

    def place(self, target, page):
        "Where a link of a notebook leads on the site; None for what is left as it is"
        if re.match(r'[a-z]+:|#|/', target): return None
        path, _, anchor = target.partition('#')
        book = next((b for b in self.books if b.page == page), None)
        here = dirname(book.file) if book else 'nbs'
        file = normpath(f'{here}/{path}')
        if file not in self.files: return None
        return self.link(page, self.files[file], slug(anchor) if anchor and not any(n == anchor for _, n in self.public) else anchor)

    def resolve(self, code, page, skip=None):
        "Where the name in backticks leads, or None"
        if code in self.files: return self.link(page, self.files[code]) if self.files[code] != page else None
        m = re.match(r'fastbench ([a-z-]+)\b', code)
        if m and m[1] in self.commands: return self.link(page, 'reference/commands.md', f'fastbench-{m[1]}')
        if '-' in code and code in self.recipes: return self.link(page, 'reference/recipes.md', code)
        m = re.fullmatch(r'(fastbench\.)?([A-Za-z_][\w.]*)(\(.*\))?', code)
        if not m: return None
        if m[1] and f"fastbench/{m[2].replace('.', '/')}.py" in self.files:
            to = next((b.page for b in self.books if b.module == m[2]), None)
            return self.link(page, to) if to and to != page else None
        found = self.found(m[2], page, bool(m[3]))
        if not found or found == skip: return None
        b = self.public[found]
        return self.link(page, b.page, found[1])

    def found(self, name, page='', called=True):
        "(module, name) of what a text calls by name, or None"
        if name.split('.')[0] in ('learn', 'learner', 'dls', 'run', 'runs'):
            owners = dict(learn=('Learner', 'BenchLearner', 'Switches', 'FastLoop', 'HFLearner'), learner=('Learner',), run=('Run',)).get(name.split('.')[0], ())
            return next(((m, f'{o}.{rest}') for o in owners for rest in [name.split('.', 1)[-1]] if '.' in name for m in self.short.get(f'{o}.{rest}', ())), None) or (
                self._single(name, page, called) if '.' not in name else None)
        full = name.rpartition('.')
        if (full[0], full[2]) in self.public: return full[0], full[2]
        return self._single(name, page, called)

    def _single(self, name, page, called):
        homes = self.short.get(name, [])
        if not homes: return None
        here = [m for m in homes if self.public[m, name].page == page]
        if here: return here[0], name
        if name in self.reexports: return self.home_of(name)
        plain = re.fullmatch('[a-z]+', name)  # a word like any other
        homes = [m for m in homes if group_of(m) != 'cli']
        return (homes[0], name) if len(homes) == 1 and (called or not plain) else None

    # Shown

    def shown(self, found, page, twin):
        "A public name on its page: heading, source, signature, one line, table"
        module, name = found
        if name is None: return self._list(page)
        o = self.obj(module, name)
        noted = getattr(o, '__metadata__', None)  # of `Annotated`: an option that several commands share
        plain = noted or not callable(o) and not isinstance(o, (property, cached_property, classmethod, staticmethod))
        head = f"{'###' if '.' not in name else '####'} `{name}`" + (f" {{#{name} .symbol{' .constant' if plain else ''}}}")
        source = f"[source]({self.link(page, f'source/{module}.md', line_anchor(self.lines[module].get(name, 1)))})" + '{.source}'
        if plain: body = fence(f'{name} = {constant(o)}', 'python') + (f"\n\n{noted[0].help}" if noted else '')
        elif module.startswith('command.') and (cmd := name.strip('_').replace('_', '-')) in self.commands:
            body = f"{Documented(o, name).docs}\n\nIts arguments and options: [`fastbench {cmd}`]({self.link(page, 'reference/commands.md', f'fastbench-{cmd}'.replace(' ', '-'))})."
        elif '.' in name and getattr(o, '__qualname__', name) != name and getattr(o, '__name__', '') in self.short:
            body = f'`{o.__name__}` as a method.'
        else: body = str(Documented(o, name))
        return f'{head}\n\n{source}\n\n{linked(body, page, self, skip=found, twin=twin)}'

    def _list(self, page):
        rows = [(self.home_of(o), o) for o in sorted(self.reexports, key=str.lower)]
        return '\n'.join(['| Name | What |', '| --- | --- |'] + [f'| [`{o}`]({self.link(page, self.public[h].page, o)}) | {cell(linked(self.about(*h), page, self))} |' for h, o in rows if h])


def constant(o):
    "A constant as one would type it; how a long one begins; of an object its type"
    if hasattr(o, '__metadata__'): return f'Annotated[{type_name(o.__origin__)}, {type(o.__metadata__[0]).__name__}]'
    text = repr(o)
    if ' at 0x' in text or text[:1] == '<': return f'{type(o).__name__}(...)' if not isinstance(o, (dict, list, tuple, set)) else f'{type(o).__name__} of {len(o)}'
    return text if len(text) < 400 else text[:300].rsplit(', ', 1)[0] + ', ...'


def slug(text):
    "The anchor of a heading, as Python-Markdown makes it"
    from markdown.extensions.toc import slugify
    return slugify(text.replace('-', ' '), '-')


def line_anchor(n): return f'__codelineno-0-{n}'
