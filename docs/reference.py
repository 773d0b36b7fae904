"""Pages that no notebook holds, each from where its facts live: commands from the typer app, recipes from the registry, a Run's fields
from its class and a kept Run, names from the modules, and the source itself."""
import inspect
import json
from dataclasses import MISSING, fields
from enum import Enum
from importlib import import_module
from shlex import join
from textwrap import dedent

from fastcore.docments import ann_parts

from convert import code, fence, table
from names import GROUPS, group_of
from showdoc import ParameterTable, type_name

GENERATED = [('Commands', 'commands.md', 'each with its options and an example'), ('Recipes, suites and ladders', 'recipes.md', 'what can be run by name, and every field'),
             ('Fields of a Run', 'run-fields.md', 'what one training leaves'),
             ('All names', 'names.md', 'every public function, class and constant, those that only fastbench itself uses among them')]  # behind the first page of the reference
SAID = dict(int='INTEGER', float='NUMBER', str='TEXT', Path='PATH', bool='')


# Commands

def registered():
    "name -> what typer knows of it"
    import fastbench.cli  # noqa: F401, adds the commands
    from fastbench.command.terminal import app
    def of(app, prefix=''): return {prefix + (o.name or o.callback.__name__.replace('_', '-')): o for o in app.registered_commands}
    groups = (of(o.typer_instance, f'{o.name} ') for o in app.registered_groups)
    return of(app) | {k: f for group in groups for k, f in group.items()}


def commands():
    "name -> function, as the `fastbench` command knows them"
    return {k: o.callback for k, o in registered().items()}


def anchor(command):
    "Where a command stands on the page of all"
    return 'fastbench-' + command.replace(' ', '-')


def options(func):
    "A dict a parameter: names, value, default, about, argument?"
    res = []
    for k, p in inspect.signature(func, eval_str=True).parameters.items():
        kind, more = ann_parts(p.annotation)
        info = next((o for o in more if hasattr(o, 'help')), None)
        if info is None: continue
        args = [o for o in getattr(kind, '__args__', ()) if o is not type(None)]
        if args and not isinstance(kind, type): kind = args[0]
        kind = args[0] if getattr(kind, '__origin__', None) is list or (args and kind is list) else getattr(kind, '__args__', [kind])[0]
        argument = type(info).__name__ == 'ArgumentInfo'
        names = [o for o in (info.default, *(info.param_decls or ())) if isinstance(o, str) and o.startswith('-')] or ['--' + k.replace('_', '-')]
        choices = '|'.join(o.value for o in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ''
        value = info.metavar or choices or SAID.get(type_name(kind), '')
        if info.min is not None and info.max is None and not info.metavar: value += f' from {info.min}'
        default = p.default.value if isinstance(p.default, Enum) else p.default
        default = info.show_default if isinstance(info.show_default, str) else '' if default in (None, inspect.Parameter.empty, False) or info.show_default is False else default
        res.append(dict(names=[info.metavar or k.upper()] if argument else names, value='' if argument else value, default=default, required=argument and p.default is inspect.Parameter.empty,
                        about=(info.help or '') + (f' Environment: `{info.envvar}`.' if info.envvar else '')))
        res[-1]['argument'], res[-1]['choices'] = argument, choices
    return res


def commands_page(names):
    "Every command with every option"
    from fastbench.command.terminal import app
    parts = ['# Commands', f'> {app.info.help}', fence('fastbench [--version] [--help] COMMAND [ARGUMENTS] [OPTIONS]', 'sh'),
             'Exit codes: 0 went well, 1 a gate was not passed (`--fail-above`), 2 a mistake in what was asked, 3 the Runs are not comparable, 4 what is needed is not there (data, memory, a network) '
             'or a training failed, 130 interrupted.']
    every = registered()
    parts.append(table(['Command', 'What'], *((f'[`fastbench {k}`](#{anchor(k)})', inspect.getdoc(o.callback).split('\n')[0]) for k, o in every.items())))
    for k, o in every.items():
        f, examples = o.callback, dedent(o.epilog.split(':\n')[1])
        rows = options(f)
        args = [o for o in rows if o['argument']]
        usage = ' '.join([f'fastbench {k}', *(o['names'][0] if o['required'] else f"[{o['names'][0]}]" for o in args), '[OPTIONS]'])
        parts += [f'## `fastbench {k}` {{#{anchor(k)} .symbol}}', fence(usage, 'sh'), inspect.getdoc(f), fence(examples, 'sh'),
                  table(['Argument', 'What'], *((code(o['names'][0]), o['about'] + (f" One of {', '.join(map(code, o['choices'].split('|')))}." if o['choices'] else '')
                                                 + (f" Default: {code(o['default'])}." if o['default'] != '' else '')) for o in args)),
                  table(['Option', 'Value', 'Default', 'What'], *((', '.join(map(code, o['names'])), code(o['value']), code(o['default']), o['about']) for o in rows if not o['argument']))]
        lives = next((m for m, n in names.public if m.startswith('command.') and names.obj(m, n) is f), None)
        if lives:
            book = next(b for b in names.books if b.module == lives)
            parts.append(f'Shown at work: [{book.title}]({book.page.split("/")[-1]}).')
    return '\n\n'.join(filter(None, parts)) + '\n'


# Recipes

def clock(x): return f'{x:,.4g} s' if x < 10000 else f'{x:,.0f} s'


def recipe_names():
    from fastbench.ladders import ladders
    from fastbench.recipe import recipes, suites
    return {*recipes(), *suites(), *ladders()}


def recipes_page():
    "Every recipe, suite and ladder with what their authors measured"
    from fastbench import recipe as R
    from fastbench.ladders import ladders
    rungs = {f'{l.name}-{o.name}' for l in ladders().values() for o in l.rungs}
    single = {k: v for k, v in R.recipes().items() if k not in rungs}
    parts = ['# Recipes, suites and ladders', '> What can be run by name, with every setting that is not the default, and the figures that its authors published',
             'A published figure is of its author\'s machine and software. It is here to be set beside a Run, not to be reached: `fastbench run` prints it below what was measured.']
    parts += ['## Suites', 'A suite is a list of recipes. Each is trained in a process of its own, one after another.', fence('fastbench run quick', 'sh'),
              table(['Suite', 'Recipes', 'Each with'], *((f'<a id="{k}"></a>{code(k)}', ', '.join(f'[`{o}`](#{o})' for o in v),
                                                           '; '.join(', '.join(f'`{a}={b!r}`' for a, b in o.items()) for o in R._variants.get(k, ()) if o)) for k, v in R.suites().items() if k not in ladders()))]
    parts.append('## Recipes')
    for k, r in single.items():
        said = {o.name: getattr(r, o.name) for o in fields(r) if o.name not in ('name', 'about') and getattr(r, o.name) != o.default}
        figures = R.published(k)
        parts += [f'### `{k}` {{#{k} .symbol}}', sentence(r.about), fence(f'fastbench run {k}', 'sh'), f'[`{type(r).__name__}`](#fields-{type(r).__name__}): ' + ', '.join(f'`{a}={brief(b)}`' for a, b in said.items()),
                  table(['Published on', 'Precision', 'Batch', 'Fit', 'Accuracy'], *((o['machine'], o['precision'], o.get('bs') or '', clock(o['seconds']), f"{o['accuracy']:.2%}" if o.get('accuracy') else '') for o in figures))]
    parts += ['## Ladders', 'A ladder is a recipe and named changes, each on top of those before. Every rung is trained to the target.']
    for k, l in ladders().items():
        some = [bool(o.seconds) for o in l.rungs]
        rows = [(f'<a id="{k}-{o.name}"></a>{code(o.name)}', o.about[:1].upper() + o.about[1:], ', '.join(f'`{a}={brief(b)}`' for a, b in o.changes.items()),
                 *((clock(o.seconds) if o.seconds else '', f'{o.accuracy:.2%}' if o.accuracy else '') if any(some) else ())) for o in l.rungs]
        parts += [f'### `{k}` {{#{k} .symbol}}', sentence(l.about), fence(f'fastbench ladder {k}', 'sh'), table(['Rung', 'What was changed', 'Fields', *(('Published', 'Accuracy') if any(some) else ())], *rows)]
    parts += ['## Fields', 'Any field of a recipe is changed by `--set FIELD=VALUE`, which may be repeated:', fence('fastbench run digits-xresnet18 --set size=64 --set bs=32', 'sh'),
              'A recipe has the fields of all trainings and those of its kind.']
    for cls, fs in own_fields().items():
        rows = [(code(o.name), code(repr(o.default)) if o.default is not MISSING else '', sentence(o.metadata['about']), o.metadata['rule'][1], code(example(cls, o))) for o in fs]
        parts += [f'### {"All trainings" if cls is R.Recipe else code(cls.__name__)} {{#fields-{cls.__name__}}}', sentence(inspect.getdoc(cls)), table(['Field', 'Default', 'What', 'May be', 'Example'], *rows)]
    return '\n\n'.join(filter(None, parts)) + '\n'


# Values for fields that no registered recipe sets, or sets to something long
SUCH_AS = dict(lr=1e-3, seed=1, workers=4, batches=100, memory='4GB', knots='((0, .2), (.4, 1), (1, 0))', tf32=True, keep_memory=True, onednn=True, valid=.1, text_col='review', label_col='stars', max_tokens=8192, bptt=70,
               prefetch=4, decoder='pillow', resize=160, encode='png', progressive=.5, pretrained=True, bs=32, epochs=5, opt='muon', schedule='flat', label_smoothing=.1, precision='bf16', channels_last=True, loop='lean', fast_images=True, fast_augment=True)

ELSE = dict(cache='whole')  # where no registered recipe of the kind does

WITH = {'memory': 'bs=largest', 'knots': 'schedule=linear', 'max_tokens': 'loader=budget', 'decoder': 'loader=threads', 'loader=whole': 'cache=array', 'resize': 'cache=array', 'encode': 'cache=array', 'pad': 'augment=batch',
        'cutout': 'augment=batch'}  # without which they have no effect


def own_fields():
    "Class -> the fields that come with it: of every recipe, of the kinds, and of what several kinds share"
    from fastbench.recipe import kinds
    every = dict.fromkeys(c for k in kinds().values() for c in reversed(k.__mro__) if '__annotations__' in vars(c))
    return {c: found for c in every if (found := [o for o in fields(c) if o.name in vars(c)['__annotations__']])}


def example(cls, o):
    "A value for a field as one types it: the first that a registered recipe of this kind gives it; '' for what is no setting"
    from fastbench.recipe import recipes
    if o.name in ('name', 'about', 'function'): return ''
    given = (getattr(r, o.name) for r in recipes().values() if isinstance(r, cls))
    told = f'{o.name}={SUCH_AS[o.name] if o.name in SUCH_AS else next((v for v in given if v != o.default), ELSE.get(o.name))}'
    ahead = WITH.get(o.name) or WITH.get(told)
    return join([*(['--set', ahead] if ahead else []), '--set', told])


def brief(o):
    text = repr(o)
    return text if len(text) < 40 else '...'


def sentence(text): return text[:1].upper() + text[1:] + ('' if text.endswith(('.', '!')) or not text else '.')


# A Run

def run_page(root):
    "Every field of a Run, with what a kept one holds"
    from fastbench.runs.record import SCHEMA, STATUSES, Run
    kept = sorted(o for o in (root/'benchmarks'/'results').glob('*.json') if not o.name.startswith('selftest-'))  # of trainings
    example = json.loads(kept[-1].read_text(encoding='utf-8')) if kept else {}
    rows = [(code(name), code(kind), what) for name, kind, _, what in ParameterTable(Run).rows]
    parts = ['# Fields of a Run', f'> What one training leaves: a JSON object, schema {SCHEMA}, one file a Run',
             'What was not measured is missing, never zero. Raw values of every step are in `profile`; tables and statistics are computed when they are read, by [`Run`](runs.record.md#Run).',
             table(['Field', 'Type', 'What'], *rows), '## Statuses', table(['`status`', 'Meaning'], *((code(k), v) for k, v in STATUSES.items()))]
    if example:
        parts += ['## One of them, field by field', f'From `benchmarks/results/{kept[-1].name}`, as it was kept. Lists are cut, and other Runs may hold more or less: what a machine cannot say is left out.',
                  table(['Field', 'Value'], *((code(k), code(v)) for k, v in leaves({k: v for k, v in example.items() if k not in ('recipe', 'profile')})))]
        parts += ['## Its profile', 'Columns of raw values, a number a step; [`from_dict`](measure.phases.md#from_dict) reads it.',
                  table(['Field', 'Value'], *((code(k), code(v)) for k, v in leaves(example.get('profile') or {})))]
    return '\n\n'.join(filter(None, parts)) + '\n'


def leaves(o, prefix=''):
    "(path, JSON) of everything in nested dicts, lists cut"
    for k, v in o.items():
        if isinstance(v, dict) and v and not prefix.startswith('environment.versions'): yield from leaves(v, f'{prefix}{k}.')
        else:
            text = json.dumps(v, ensure_ascii=False)
            yield prefix + k, text if len(text) <= 90 else text[:86] + ' ...'


# Names, source

def start_page(names):
    "The names that a user needs, as the notebook of `fastbench.all` groups them"
    groups = import_module('fastbench.all')._needed
    parts = ['# Reference', f'> The {sum(map(len, groups.values()))} names that most notebooks need, and where everything else is', fence('from fastbench.all import *', 'python'), '`learn` is a Learner of fastai, or one that [`learn.bench()`](train.convert.md#Learner.bench) gives.']
    for title, found in groups.items(): parts += [f'## {title}', table(['Name', 'What'], *((code(o), names.about(*f)) for o in found if (f := names.found(o))))]
    parts += ['## Everything else', '\n'.join(f'- [{title}]({page}): {what}' for title, page, what in GENERATED)]
    return '\n\n'.join(parts) + '\n'


def names_page(names):
    "Every public name, by room"
    parts = ['---\nsearch:\n  exclude: true\n---\n\n# All names', '> Every public function, class, method and constant, and the page that shows it']
    for g in GROUPS:
        parts.append(f'## {g}')
        for b in names.books:
            if not b.module or group_of(b.module) != g: continue
            rows = [(f'[`{n}`]({b.page.split("/")[-1]}#{n})', names.about(m, n)) for (m, n), book in names.public.items() if book is b]
            if rows: parts += [f'### [{b.title}]({b.page.split("/")[-1]})', f'`fastbench.{b.module}`', table(['Name', 'What'], *rows)]
    return '\n\n'.join(parts) + '\n'


def source_page(file, text, back=''):
    "A file of the repository, line by line"
    return f'---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# {file}{back}\n\n' + fence(text, '{.python linenums="1"}') + '\n'


def pages(names, root):
    "Page -> its text"
    made = dict(commands=commands_page(names), recipes=recipes_page(), index=start_page(names), names=names_page(names))
    return {f'reference/{k}.md': v for k, v in (made | {'run-fields': run_page(root)}).items()}
