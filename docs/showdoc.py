"""How a name is documented: its signature, its docstring and a table of its parameters.

The comments beside parameters (docments) are the documentation of fastbench, and nbdev's own `show_doc` makes no table
of them. `ShowDocs` shows names in `nbdev-docs` as the site does.
"""
import ast
import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from textwrap import fill, indent

from fastcore.docments import ann_parts, docments, empty

from convert import code, default_exp, fence, table

STARS = {inspect.Parameter.VAR_KEYWORD: '**', inspect.Parameter.VAR_POSITIONAL: '*'}
PROPERTIES = property, cached_property


# Types, defaults, signatures

def type_name(anno):
    "An annotation without modules; '' for none"
    anno = ann_parts(anno)[0]
    if anno in (empty, type(None)): return ''  # docments takes the type of a default
    text = anno if isinstance(anno, str) else inspect.formatannotation(anno)
    text = re.sub(r'(?:\w+\.)+(?=\w)', '', text.replace("'", ''))
    return re.sub(r'Optional\[(.*)\]$', r'\1|None', text).replace(' | ', '|')


def default_name(value):
    "A default as one types it; '' for none"
    if value is empty: return ''
    if isinstance(value, Enum): value = value.value
    plain = type(value).__module__ in ('builtins', 'pathlib') or isinstance(value, (str, tuple))
    text = getattr(value, '__name__', None) or (repr(value) if plain else f'{type(value).__name__}()')
    return text if len(text) < 60 else '...'


def made_anew(kind):
    "Field -> default, of the fields of a dataclass whose default is made anew for each instance"
    own = fields(kind) if is_dataclass(kind) else ()
    return {o.name: o.default_factory() for o in own if o.default_factory is not MISSING}


def plain_function(o):
    "The function behind a property or a class method"
    o = o.fget if isinstance(o, property) else o.func if isinstance(o, cached_property) else o
    return getattr(o, '__func__', o)


def documented(o):
    "What holds the parameters of a class: itself, if a dataclass, or its `__init__`; None if that is another class's"
    return o if is_dataclass(o) else vars(o).get('__init__')


def given(params):
    "Parameters that a call gives: without `self`"
    return [*params.items()][next(iter(params), '') in ('self', 'cls'):]


class Typed(str):
    "A default in a signature: without quotes around it"
    __repr__ = str.__str__


def signature(name, obj):
    "How `name` is called, in lines of up to 90 letters; types are in the table"
    if isinstance(obj, PROPERTIES): return name
    try: sig = inspect.signature(plain_function(obj))
    except (TypeError, ValueError): return name  # written in C, or a class method of `@patch`
    if inspect.isclass(obj):
        name = f'class {name}'
        if documented(obj) is None: return name
    anew = made_anew(obj)
    def typed(k, o): return o if o is empty else Typed(default_name(anew.get(k, o)))
    params = [p.replace(annotation=empty, default=typed(k, p.default)) for k, p in given(sig.parameters)]
    text = str(sig.replace(parameters=params, return_annotation=empty))
    if len(name + text) <= 90: return name + text
    lines = fill(text[1:-1], 86, break_long_words=False)
    return f"{name}(\n{indent(lines, ' '*4)})"


# Parameters

def one_line(text): return ' '.join((text or '').split())


def source(func):
    "'' for what is written in C or, as methods of a dataclass, made by Python"
    try: return inspect.getsource(func)
    except (OSError, TypeError): return ''


def ending(func):
    "The comment at the end of a signature"
    m = re.search(r'^[^#\n]*?\)[ \t]*(?:->[^#:\n]*)?:[ \t]*(?:#[ \t]*(.*))?', source(func), re.M)
    return m and m[1] or ''


def parts(text, names):
    "What the comment at the end of a signature says: name -> what; functions behind `as for`; the rest, of the result"
    told, likes, rest = {}, [], []
    for o in filter(None, text.split('; ')):
        m, like = re.match(r'(\w+): (.+)', o), re.match(r'[Aa]s for `([\w.]+)`$', o)
        if like: likes.append(like[1])
        elif m and m[1] in names: told[m[1]] = m[2]
        else: rest.append(o)
    return told, likes, '; '.join(rest)


def overridden(func):
    "The methods that a method takes the place of; the dataclasses that a dataclass extends"
    if is_dataclass(func): return [o for o in func.__mro__[1:] if is_dataclass(o)]
    owner, _, name = getattr(func, '__qualname__', '').rpartition('.')
    owner = getattr(inspect.getmodule(func), owner, None)
    found = (plain_function(vars(o)[name]) for o in getattr(owner, '__mro__', ())[1:] if name in vars(o))
    return [o for o in found if source(o)]


class ParameterTable:
    "The parameters of a function or class. What no comment beside one says is looked for elsewhere"
    def __init__(self, obj):
        target = documented(obj) if inspect.isclass(obj) else plain_function(obj)
        found = docments(target, full=True, args_kwargs=True)
        result, text = found.pop('return', None), ending(target)
        told, likes, rest = parts(text, found)
        split = told or likes
        about = {o.name: o.metadata.get('about') for o in fields(obj)} if is_dataclass(obj) else {}
        for k, v in found.items():
            if split and v.docment == text: v.docment = None  # it is taken for that of the last parameter
            for o in ann_parts(v.anno)[1]: about[k] = about.get(k) or getattr(o, 'help', None)
        said = {k: v.docment for k, v in found.items()}
        like = [docments(target.__globals__.get(o)) for o in likes]
        for place in (about, told, *like, *map(docments, overridden(target))):
            for k, v in place.items(): said[k] = said.get(k) or v
        anew = made_anew(obj)
        def row(k, v):
            return STARS.get(v.kind, '') + k, type_name(v.anno), default_name(anew.get(k, v.default)), one_line(said[k])
        self.rows = [row(*o) for o in given(found)]
        self.missing = [o[0] for o in self.rows if not o[3] and o[0][0] != '*']  # `**options` may stay without a word
        if result and not inspect.isclass(obj):
            end = '', type_name(result.anno), '', one_line(rest if split else result.docment or rest)
            if any(end): self.rows.append(end)

    def __str__(self):
        if not any(o[1] or o[3] for o in self.rows): return ''
        cells = ((code(o[0]) or '*returns*', code(o[1]), code(o[2]), o[3]) for o in self.rows)
        return table(['Name', 'Type', 'Default', 'What'], *cells)


# One name

class Documented:
    "A name with its signature, docstring and table"
    def __init__(self, obj, name): self.obj, self.name = obj, name

    @property
    def docs(self):
        "The docstring; '' for a class that only inherits one, or a dataclass that Python gave one"
        own = (vars(self.obj).get('__doc__') if inspect.isclass(self.obj) else plain_function(self.obj).__doc__) or ''
        return '' if own.startswith(f"{self.name.split('.')[-1]}(") else inspect.cleandoc(own)

    def __str__(self):
        what = ending(plain_function(self.obj)) if isinstance(self.obj, PROPERTIES) else None
        end = str(ParameterTable(self.obj)) if what is None else what and f'*Property:* {what}'
        return '\n\n'.join(filter(None, [fence(signature(self.name, self.obj), 'python'), self.docs, end]))


def first_line(o): return min(n.lineno for n in [o, *getattr(o, 'decorator_list', [])])


def patched(f):
    "The class that a function is made a method of by `@patch` or `@patch_to`"
    for d in f.decorator_list:
        kind = getattr(getattr(d, 'func', d), 'id', '')
        if kind == 'patch_to': return d.args[0].id
        if kind == 'patch': return f.args.args[0].annotation.id


def targets(o):
    for t in getattr(o, 'targets', None) or [o.target]: yield from (ast.unparse(e) for e in getattr(t, 'elts', [t]))


def public_names(source, known):
    "Name -> line, of what a source makes: names in `known`, methods with a docstring, and those added by `@patch`"
    res = {}
    for o in ast.parse(source).body:
        made, owner = {}, None
        if isinstance(o, ast.ClassDef):
            methods = (m for m in o.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m))
            made = {o.name: o} | {f'{o.name}.{m.name}': m for m in methods}
        elif isinstance(o, ast.FunctionDef):
            owner = patched(o)
            made = {f'{owner}.{o.name}' if owner else o.name: o}
        elif isinstance(o, (ast.Assign, ast.AnnAssign)): made = dict.fromkeys(targets(o), o)
        for name, at in made.items():
            words = name.split('.')
            if (owner or words[0] in known) and words[-1][0] != '_': res.setdefault(name, first_line(at))
    return res


def lookup(module, name):
    "What a name of a module stands for; properties and class methods as they are"
    o = import_module(module)
    for part in name.split('.'): o = inspect.getattr_static(o, part) if inspect.isclass(o) else getattr(o, part)
    return o


class ShowDocs:
    "nbdev processor: `show_doc(name)` becomes Markdown. nbdev's own runs cells, which breaks a lesson with state"
    def __init__(self, nb): self.module = default_exp(nb)

    def __call__(self, cell):
        m = re.search(r'^show_doc\(([\w.]+)\)', cell.source, re.M)
        if not m or cell.cell_type != 'code': return
        shown = Documented(lookup(f'fastbench.{self.module}', m[1]), m[1])
        cell.cell_type, cell.source = 'markdown', f'### {m[1]}\n\n{shown}'
        for k in ('outputs', 'execution_count', 'has_sd'): cell.pop(k, None)
