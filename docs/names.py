"""What the site calls by name: public names, modules, commands, recipes, notebooks, files, each with its place.

Notebooks and modules say where a name is made, showdoc.py how it is shown.
"""
import inspect
import re
from functools import cached_property
from importlib import import_module
from posixpath import dirname, normpath, relpath

from fastcore.nbio import read_nb
from markdown.extensions.toc import slugify

from convert import default_exp, fence, linked, table
from showdoc import PROPERTIES, Documented, lookup, plain_function, public_names, type_name

RUNS, COMMANDS = 'Runs and statistics', 'Command line'
# Heading of the reference -> wings; what is new stands under runs
GROUPS = {'Learners': 'train distributed bench own all experiments recipe ladders rules data',
          'Measuring': 'measure loops', 'Callbacks': 'callback', 'Drawing batches': 'draw', 'Text': 'text',
          'Vision': 'vision', RUNS: '', COMMANDS: 'command cli', 'The machine': 'machine selftest'}
# What a text calls such an object -> whose methods it has
OWNERS = dict(learn='Learner BenchLearner Switches FastLoop HFLearner', run='Run')


def group_of(module): return next((k for k, wings in GROUPS.items() if module.split('.')[0] in wings.split()), RUNS)


class Book:
    "A notebook: its page, title and subtitle; the module that it writes, if any, and the page of its code"
    def __init__(self, path, root):
        self.path, self.nb, self.file = path, read_nb(path), path.relative_to(root).as_posix()
        self.module = default_exp(self.nb)
        if self.module:
            self.code, self.source = f"fastbench/{self.module.replace('.', '/')}.py", f'source/{self.module}.md'
            self.page = f'reference/{self.module}.md'
        else: self.page = path.relative_to(root/'nbs').with_name(re.sub(r'^\d+_', '', path.stem) + '.md').as_posix()
        title, *more = filter(str.strip, self.nb.cells[0].source.splitlines())
        self.title, self.subtitle = title.removeprefix('# '), ' '.join(o[2:] for o in more if o.startswith('> '))


class Names:
    "Every name and its place"
    def __init__(self, books, root, files, commands, recipes):
        self.books, self.commands, self.recipes = books, commands, recipes
        self.pages, self.modules = {b.page: b for b in books}, {b.module: b for b in books if b.module}
        sources = {b.code: b.source for b in self.modules.values()}
        self.files = {b.file: b.page for b in books} | sources | files  # file of the repository -> page
        self.public, self.short, self.reexports = {}, {}, []  # (module, name) -> Book; name -> modules
        self.lines, self.cells, self.begin = {}, {}, {}  # module -> name -> line; cell id -> names, first line
        for b in self.modules.values(): self.collect(b, (root/b.code).read_text(encoding='utf-8'))

    def collect(self, b, source):
        known = getattr(import_module(f'fastbench.{b.module}'), '__all__', [])
        if b.module == 'all':
            self.reexports = known
            return
        self.lines[b.module] = public_names(source, known)
        begin = {o.split('#')[-1]: i for i, o in enumerate(source.splitlines(), 2) if o.startswith('# %% ')}
        self.begin |= {(b.page, k): i for k, i in begin.items()}
        exported = {c.id for c in b.nb.cells if c.has_directive('export')}
        for name, line in self.lines[b.module].items():
            cell = max((o for o in begin if begin[o] <= line), key=begin.get)
            if cell not in exported or self.stands_in(b.module, name): continue
            self.cells.setdefault((b.page, cell), []).append((b.module, name))
            self.short.setdefault(name, []).append(b.module)
            self.public[b.module, name] = b

    def stands_in(self, module, name):
        "Is it a method that takes the place of another (of an event of fastai), and says no more than that one?"
        owner, _, method = name.rpartition('.')
        owner = owner and self.obj(module, owner)
        if not inspect.isclass(owner) or plain_function(self.obj(module, name)).__doc__: return False
        return method.startswith(('before_', 'after_')) or any(hasattr(o, method) for o in owner.__bases__)

    def of_cell(self, cell, page):
        "(module, name) of what an exported cell makes public"
        if '_all_' in cell.source and self.pages[page].module == 'all': return [('all', None)]
        return self.cells.get((page, cell.id), [])

    def source_of(self, cell, page):
        to = self.code(page, self.pages[page].module, self.begin.get((page, cell.id), 1))
        return f'Nothing public; [the code]({to}).'

    def code(self, page, module, line): return self.link(page, self.modules[module].source, f'__codelineno-0-{line}')

    def obj(self, module, name):
        "What stands behind a public name"
        return lookup(f'fastbench.{module}', name)

    def about(self, module, name):
        "The first line of what is said of it"
        o = self.obj(module, name)
        return Documented(o, name).docs.split('\n')[0] if has_docs(o) else ''

    def home_of(self, name):
        "(module, name) of a name of `fastbench.all`"
        module = getattr(getattr(import_module('fastbench.all'), name), '__module__', '').removeprefix('fastbench.')
        return (module, name) if (module, name) in self.public else next(self.homes(name), None)

    def homes(self, name): return ((o, name) for o in self.short.get(name, ()) if group_of(o) != COMMANDS)

    @cached_property
    def users(self):
        "Name -> where it is shown, of all that `from fastbench.all import *` brings, fastai's Learner among them"
        homes = ((o, self.home_of(o)) for o in self.reexports)
        return {o: f"{self.public[h].page.removesuffix('.md')}.html#{o}" for o, h in homes if h} | dict(Learner='')

    # Places

    def link(self, page, to, anchor=''):
        "A link to page `to` as it reads on `page`"
        path = relpath(to, dirname(page) or '.') if to != page else '' if anchor else to.split('/')[-1]
        return path + (f'#{anchor}' if anchor else '')

    def place(self, target, page):
        "Where a link of a notebook leads on the site; None for what is left as it is"
        if re.match(r'[a-z]+:|#|/', target): return None
        path, _, anchor = target.partition('#')
        here = dirname(self.pages[page].file) if page in self.pages else 'nbs'
        to = self.files.get(normpath(f'{here}/{path}'))
        return to and self.link(page, to, anchor if anchor in self.short else slugify(anchor.replace('-', ' '), '-'))

    def resolve(self, code, page, skip=None):
        "Where the name in backticks leads, or None"
        if code in self.files: return self.link(page, self.files[code])
        m = re.match(r'fastbench ([a-z-]+)\b', code)
        if m and m[1] in self.commands: return self.link(page, 'reference/commands.md', f'fastbench-{m[1]}')
        if '-' in code and code in self.recipes: return self.link(page, 'reference/recipes.md', code)
        m = re.fullmatch(r'(fastbench\.)?([A-Za-z_][\w.]*)(\(.*\))?', code)
        if not m: return None
        if m[1] and m[2] in self.modules:
            to = self.modules[m[2]].page
            return self.link(page, to) if to != page else None
        found = self.found(m[2], page, bool(m[3]))
        return self.link(page, self.public[found].page, found[1]) if found and found != skip else None

    def found(self, name, page='', called=True):
        "(module, name) of what a text calls by name, or None"
        first, _, rest = name.partition('.')
        if rest and first in OWNERS:
            methods = (f'{o}.{rest}' for o in OWNERS[first].split())
            return next(((m, o) for o in methods for m in self.short.get(o, ())), None)
        module, _, last = name.rpartition('.')
        if (module, last) in self.public: return module, last
        here = next(((m, name) for m in self.short.get(name, ()) if self.public[m, name].page == page), None)
        if here: return here
        if name in self.reexports: return self.home_of(name)
        homes = [*self.homes(name)]
        word = not called and re.fullmatch('[a-z]+', name)  # like any other
        return homes[0] if len(homes) == 1 and not word else None

    # Shown

    def shown(self, found, page):
        "A public name on its page: heading, source, signature, one line, table"
        module, name = found
        if name is None: return self.list(page)
        o = self.obj(module, name)
        called = getattr(o, '__qualname__', name)
        shared = getattr(o, '__metadata__', None)  # of `Annotated`: an option that several commands share
        constant = shared or not has_docs(o)
        command = name.strip('_').replace('_', '-')
        if constant: body = fence(f'{name} = {value(o)}', 'python') + (f"\n\n{shared[0].help}" if shared else '')
        elif module.startswith('command.') and command in self.commands:
            to = self.link(page, 'reference/commands.md', f'fastbench-{command}')
            body = f'{Documented(o, name).docs}\n\nIts arguments and options: [`fastbench {command}`]({to}).'
        elif called != name and called in self.short: body = f'`{called}` as a method.'
        else: body = str(Documented(o, name))
        head = f"{'####' if '.' in name else '###'} `{name}` {{#{name} .symbol{' .constant' if constant else ''}}}"
        source = f'[source]({self.code(page, module, self.lines[module][name])}){{.source}}'
        return f'{head}\n\n{source}\n\n{linked(body, page, self, skip=found)}'

    def list(self, page):
        "The names of `fastbench.all`"
        homes = ((o, self.home_of(o)) for o in sorted(self.reexports, key=str.lower))
        def row(o, h): return f'[`{o}`]({self.link(page, self.public[h].page, o)})', linked(self.about(*h), page, self)
        return table(['Name', 'What'], *(row(o, h) for o, h in homes if h))


def has_docs(o):
    "Is it a function, a class or a method, not a constant?"
    return callable(o) or isinstance(o, (*PROPERTIES, classmethod, staticmethod))


def value(o):
    "A constant as one would type it; how a long one begins; of an object its type"
    if hasattr(o, '__metadata__'): return f'Annotated[{type_name(o.__origin__)}, {type(o.__metadata__[0]).__name__}]'
    text, kind = repr(o), type(o).__name__
    if ' at 0x' in text: return f'{kind} of {len(o)}' if hasattr(o, '__len__') else f'{kind}(...)'
    return text if len(text) < 400 else text[:300].rpartition(', ')[0] + ', ...'
