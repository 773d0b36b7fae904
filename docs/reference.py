"""Pages that no notebook holds, each from where its facts live.

Commands come from the typer app, recipes from the registry, a Run's fields from its class and a kept Run, names from
the modules, and the source is the files themselves.
"""
import inspect
import json
from dataclasses import MISSING, fields
from enum import Enum
from importlib import import_module
from shlex import join, split
from textwrap import dedent
from typing import get_args

from fastcore.docments import ann_parts, empty

from convert import code, fence, table
from names import GROUPS, group_of
from showdoc import ParameterTable, type_name

GENERATED = [('Commands', 'commands.md', 'each with its options and an example'),
             ('Recipes, suites and ladders', 'recipes.md', 'what can be run by name, and every field'),
             ('Fields of a Run', 'run-fields.md', 'what one training leaves'),
             ('All names', 'names.md', 'every public function, class and constant, '
                                       'those that only fastbench itself uses among them')]
SAID = dict(int='INTEGER', float='NUMBER', str='TEXT', Path='PATH')


def page(title, about, *parts): return '\n\n'.join(filter(None, [f'# {title}', f'> {about}', *parts])) + '\n'


# Commands

def registered():
    "name -> what typer knows of it"
    import fastbench.cli  # noqa: F401, adds the commands
    from fastbench.command.terminal import app
    groups = [('', app), *((f'{o.name} ', o.typer_instance) for o in app.registered_groups)]
    def name(o): return o.name or o.callback.__name__.replace('_', '-')
    return {before + name(o): o for before, group in groups for o in group.registered_commands}


def commands():
    "name -> function, as the `fastbench` command knows them"
    return {k: o.callback for k, o in registered().items()}


def anchor(command):
    "Where a command stands on the page of all"
    return 'fastbench-' + command.replace(' ', '-')


def options(func):
    "A dict for each parameter"
    res = []
    for k, p in inspect.signature(func, eval_str=True).parameters.items():
        kind, more = ann_parts(p.annotation)
        info = next((o for o in more if hasattr(o, 'help')), None)
        if not info: continue
        while args := [o for o in get_args(kind) if o is not type(None)]: kind = args[0]
        choices = [o.value for o in getattr(kind, '__members__', {}).values()]
        names = [o for o in (info.default, *(info.param_decls or ())) if isinstance(o, str) and o.startswith('-')]
        default = p.default.value if isinstance(p.default, Enum) else p.default
        if default in (None, empty, False) or info.show_default is False: default = ''
        if isinstance(info.show_default, str): default = info.show_default
        value = '|'.join(choices) or SAID.get(type_name(kind), '')
        if info.min is not None and info.max is None: value += f' from {info.min}'
        about = info.help + (f' Environment: `{info.envvar}`.' if info.envvar else '')
        names = names or ['--' + k.replace('_', '-')]
        made = dict(names=names, value=info.metavar or value, default=default, about=about)
        if type(info).__name__ == 'ArgumentInfo':
            if choices: made['about'] += f" One of {', '.join(map(code, choices))}."
            if default != '': made['about'] += f' Default: {code(default)}.'
            name = info.metavar or k.upper()
            made |= dict(argument=name, usage=name if p.default is empty else f'[{name}]')
        res.append(made)
    return res


EXIT_CODES = """Exit codes: 0 went well, 1 a gate was not passed (`--fail-above`), 2 a mistake in what was asked, \
3 the Runs are not comparable, 4 what is needed is not there (data, memory, a network) or a training failed, \
70 an error of fastbench itself (with its traceback), 130 interrupted, 141 the reader of the output went away."""


def command_part(name, command, book):
    rows, text = options(command.callback), inspect.getdoc(command.callback)
    args, opts = [o for o in rows if 'argument' in o], [o for o in rows if 'argument' not in o]
    usage = ' '.join(['fastbench', name, *(o['usage'] for o in args), '[OPTIONS]'])
    cells = ((', '.join(map(code, o['names'])), code(o['value']), code(o['default']), o['about']) for o in opts)
    return [f'## `fastbench {name}` {{#{anchor(name)} .symbol}}', fence(usage, 'sh'), text,
            fence(dedent(command.epilog.split(':\n')[1]), 'sh'),
            table(['Argument', 'What'], *((code(o['argument']), o['about']) for o in args)),
            table(['Option', 'Value', 'Default', 'What'], *cells),
            book and f"Shown at work: [{book.title}]({book.page.split('/')[-1]})."]


def commands_page(names):
    "Every command with every option"
    from fastbench.command.terminal import app
    every = registered()
    found = ((names.obj(m, n), b) for (m, n), b in names.public.items() if m.startswith('command.'))
    books = {o: b for o, b in found if inspect.isfunction(o)}
    listed = ((f'[`fastbench {k}`](#{anchor(k)})', inspect.getdoc(o.callback).split('\n')[0]) for k, o in every.items())
    return page('Commands', app.info.help, fence('fastbench [--version] [--help] COMMAND [ARGUMENTS] [OPTIONS]', 'sh'),
        EXIT_CODES, table(['Command', 'What'], *listed),
        *(o for k, command in every.items() for o in command_part(k, command, books.get(command.callback))))


# Recipes

def clock(x): return '' if x is None else f'{x:,.4g} s' if x < 10000 else f'{x:,.0f} s'


def share(x): return f'{x:.2%}' if x else ''


def sentence(text): return text[:1].upper() + text[1:] + ('' if text.endswith(('.', '!')) or not text else '.')


def settings(values):
    "Fields as they are set, long values left out"
    return ', '.join(f'`{k}={text if len(text := repr(v)) < 40 else "..."}`' for k, v in values.items())


def named(name, about, command): return f'### `{name}` {{#{name} .symbol}}', sentence(about), fence(command, 'sh')


def recipe_names():
    from fastbench.ladders import ladders
    from fastbench.recipe import recipes, suites
    return {*recipes(), *suites(), *ladders()}


def suite_row(name, recipes, variants):
    each = (', '.join(f'`{k}={v!r}`' for k, v in o.items()) for o in variants if o)
    return f'<a id="{name}"></a>{code(name)}', ', '.join(f'[`{o}`](#{o})' for o in recipes), '; '.join(each)


def recipe_part(name, r, published):
    said = {o.name: v for o in fields(r) if o.name not in ('name', 'about') and (v := getattr(r, o.name)) != o.default}
    kind = type(r).__name__
    def row(machine, precision, seconds, bs='', accuracy=None, **_):
        return machine, precision, bs or '', clock(seconds), share(accuracy)
    return [*named(name, r.about, f'fastbench run {name}'), f'[`{kind}`](#fields-{kind}): {settings(said)}',
            table(['Published on', 'Precision', 'Batch', 'Fit', 'Accuracy'], *(row(**o) for o in published))]


def ladder_part(name, ladder):
    timed = any(o.seconds for o in ladder.rungs)
    rows = ((f'<a id="{name}-{o.name}"></a>{code(o.name)}', o.about[:1].upper() + o.about[1:], settings(o.changes),
             clock(o.seconds), share(o.accuracy if timed else 0)) for o in ladder.rungs)
    return [*named(name, ladder.about, f'fastbench ladder {name}'),
            table(['Rung', 'What was changed', 'Fields', 'Published', 'Accuracy'], *rows)]


def fields_part(kind, own):
    def default(o): return code(repr(o.default)) if o.default is not MISSING else ''
    def row(o, about, rule): return code(o.name), default(o), sentence(about), rule[1], code(example(kind, o))
    rows, name = (row(o, **o.metadata) for o in own), kind.__name__
    head = 'All trainings' if name == 'Recipe' else code(name)
    return [f'### {head} {{#fields-{name}}}', sentence(inspect.getdoc(kind)),
            table(['Field', 'Default', 'What', 'May be', 'Example'], *rows)]


def recipes_page():
    "Every recipe, suite and ladder with what their authors measured"
    from fastbench import recipe as R
    from fastbench.ladders import ladders
    rungs = {f'{l.name}-{o.name}' for l in ladders().values() for o in l.rungs}
    suites = (suite_row(k, v, R._variants.get(k, ())) for k, v in R.suites().items() if k not in ladders())
    return page('Recipes, suites and ladders', 'What can be run by name, with every setting that is not the default, '
        'and the figures that its authors published',
        "A published figure is of its author's machine and software. It is here to be set beside a Run, not to be "
        'reached: `fastbench run` prints it below what was measured.',
        '## Suites', 'A suite is a list of recipes. Each is trained in a process of its own, one after another.',
        fence('fastbench run quick', 'sh'), table(['Suite', 'Recipes', 'Each with'], *suites),
        '## Recipes', *(o for k, r in R.recipes().items() if k not in rungs for o in recipe_part(k, r, R.published(k))),
        '## Ladders',
        'A ladder is a recipe and named changes, each on top of those before. Every rung is trained to the target.',
        *(o for k, l in ladders().items() for o in ladder_part(k, l)),
        '## Fields', 'Any field of a recipe is changed by `--set FIELD=VALUE`, which may be repeated:',
        fence('fastbench run digits-xresnet18 --set size=64 --set bs=32', 'sh'),
        'A recipe has the fields of all trainings and those of its kind.',
        *(o for kind, own in own_fields().items() for o in fields_part(kind, own)))


# Values for fields that no registered recipe sets, or sets to something long
SUCH_AS = """lr=0.001 seed=1 workers=4 batches=100 memory=4GB 'knots=((0, .2), (.4, 1), (1, 0))' tf32=True
    keep_memory=True onednn=True valid=0.1 text_col=review label_col=stars max_tokens=8192 bptt=70 prefetch=4
    decoder=pillow resize=160 encode=png progressive=0.5 pretrained=True bs=32 epochs=5 opt=muon schedule=flat
    label_smoothing=0.1 precision=bf16 channels_last=True loop=lean fast_images=True fast_augment=True"""
SUCH_AS = dict(o.split('=', 1) for o in split(SUCH_AS))
ELSE = dict(cache='whole')  # where no registered recipe of the kind does
# Without which they have no effect
WITH = dict(memory='bs=largest', knots='schedule=linear', max_tokens='loader=budget', decoder='loader=threads',
            resize='cache=array', encode='cache=array', pad='augment=batch', cutout='augment=batch')
WITH['loader=whole'] = 'cache=array'


def own_fields():
    "Class -> the fields that come with it: of every recipe, of the kinds, and of what several kinds share"
    from fastbench.recipe import kinds
    every = dict.fromkeys(c for k in kinds().values() for c in reversed(k.__mro__) if inspect.get_annotations(c))
    return {c: found for c in every if (found := [o for o in fields(c) if o.name in inspect.get_annotations(c)])}


def example(cls, o):
    "A value for a field as one types it: the first that a registered recipe of this kind gives it; '' for no setting"
    from fastbench.recipe import recipes
    if o.name in ('name', 'about', 'function'): return ''
    given = (v for r in recipes().values() if isinstance(r, cls) and (v := getattr(r, o.name)) != o.default)
    told = f'{o.name}={SUCH_AS[o.name] if o.name in SUCH_AS else next(given, ELSE.get(o.name))}'
    ahead = WITH.get(o.name) or WITH.get(told)
    return join([*(['--set', ahead] if ahead else []), '--set', told])


# A Run

def run_page(root):
    "Every field of a Run, with what a kept one holds"
    from fastbench.runs.record import SCHEMA, STATUSES, Run
    kept = max(o for o in (root/'benchmarks'/'results').glob('*.json') if not o.name.startswith('selftest-'))
    example = json.loads(kept.read_text(encoding='utf-8'))
    profile, _ = example.pop('profile'), example.pop('recipe')
    def values(o): return table(['Field', 'Value'], *((code(k), code(v)) for k, v in leaves(o)))
    about = ((code(name), code(kind), what) for name, kind, _, what in ParameterTable(Run).rows)
    return page('Fields of a Run', f'What one training leaves: a JSON object, schema {SCHEMA}, one file a Run',
        'What was not measured is missing, never zero. Raw values of every step are in `profile`; tables and '
        'statistics are computed when they are read, by [`Run`](runs.record.md#Run).',
        table(['Field', 'Type', 'What'], *about),
        '## Statuses', table(['`status`', 'Meaning'], *((code(k), v) for k, v in STATUSES.items())),
        '## One of them, field by field', f'From `benchmarks/results/{kept.name}`, as it was kept. Lists are cut, '
        'and other Runs may hold more or less: what a machine cannot say is left out.', values(example),
        '## Its profile',
        'Columns of raw values, a number a step; [`from_dict`](measure.phases.md#from_dict) reads it.', values(profile))


def leaves(o, prefix=''):
    "(path, JSON) of everything in nested dicts, lists cut"
    for k, v in o.items():
        text = json.dumps(v, ensure_ascii=False)
        if isinstance(v, dict) and v and prefix != 'environment.versions.': yield from leaves(v, f'{prefix}{k}.')
        else: yield prefix + k, text if len(text) <= 90 else text[:86] + ' ...'


# Names, source

def start_page(names):
    "The names that a user needs, as the notebook of `fastbench.all` groups them"
    groups, parts = import_module('fastbench.all')._needed, []
    for title, needed in groups.items():
        rows = ((code(o), names.about(*found)) for o in needed if (found := names.found(o)))
        parts += [f'## {title}', table(['Name', 'What'], *rows)]
    n = sum(map(len, groups.values()))
    return page('Reference', f'The {n} names that most notebooks need, and where everything else is',
        fence('from fastbench.all import *', 'python'),
        '`learn` is a Learner of fastai, or one that [`learn.bench()`](train.convert.md#Learner.bench) gives.', *parts,
        '## Everything else', '\n'.join(f'- [{title}]({page}): {what}' for title, page, what in GENERATED))


UNSEARCHED = '---\nsearch:\n  exclude: true\n'  # else each name is found twice


def names_page(names):
    "Every public name, by room"
    parts = []
    for group in GROUPS:
        parts.append(f'## {group}')
        for b in names.books:
            file = b.page.split('/')[-1]
            rows = [(f'[`{n}`]({file}#{n})', names.about(m, n)) for (m, n), book in names.public.items() if book is b]
            if not rows or group_of(b.module) != group: continue
            parts += [f'### [{b.title}]({file})', f'`fastbench.{b.module}`', table(['Name', 'What'], *rows)]
    about = 'Every public function, class, method and constant, and the page that shows it'
    return f'{UNSEARCHED}---\n\n' + page('All names', about, *parts)


def source_page(file, text, back=''):
    "A file of the repository, line by line"
    head = f'{UNSEARCHED}hide: [navigation, toc]\n---\n\n# {file}{back}\n\n'
    return head + fence(text, '{.python linenums="1"}') + '\n'


def pages(names, root):
    "Page -> its text"
    made = dict(commands=commands_page(names), recipes=recipes_page(), index=start_page(names), names=names_page(names))
    return {f'reference/{k}.md': v for k, v in (made | {'run-fields': run_page(root)}).items()}
